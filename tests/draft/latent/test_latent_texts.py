"""EAGLE-3 heads with latent attention in an engine, on targets with ordinary heads and with latents of other sizes.

Keeps out: a head's latents stored beside their slots, read with the target's sizes, or scaled as the target's are.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from toolkit.deepseek import use_limits
from toolkit.driver import Driver
from toolkit.heads.kinds.latent_heads import LATENT_HEADS, LatentDrafter, parts_of
from toolkit.models import Zoo, ragged_prompts
from toolkit.oracles.drawn import TOLERANCE, draw, hold_best_siblings, row_errors, running_decoder
from toolkit.parallel.decoders import fill_with_nan, with_ranks

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.latent.limits import Limits

TEXTS = [  # target, head, shape, settings
    ("llama", "latent", (4, 1, 5), {"page_size": 1}),
    ("llama", "latent-two-layers", (4, 3, 13), {"page_size": 4, "prefix_caching": True, "prefill_chunk": 5}),
    ("v3", "latent", (3, 2, 7), {"page_size": 4, "prefix_caching": True}),
    ("v3", "latent-31", ("auto", 2, 6), {"page_size": 4, "prefill_chunk": 5}),
    ("v3-tied", "latent-no-q", (4, 1, 5), {"page_size": 5}),
    ("mistral", "latent-wide", ("auto", 1, 5), {"page_size": 4}),
    ("qwen3", "latent-no-q", (4, 4, 16), {"page_size": 16, "prefix_caching": True}),
    ("llama", "latent", (3, 2, 7), {"beyond_trained": "window", "page_size": 4}),
    ("llama", "latent", (3, 2, 7), {"kv_cache_dtype": "int8", "dtype": "float64"}),
    ("v3-tied", "latent-eighths", (3, 2, 7), {"draft_quantize": "int4"}),
]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("target", "head", "shape", "settings"), TEXTS, ids=str)
def test_text_is_the_target_s(zoo: Zoo, target: str, head: str, shape: Any, settings: dict[str, Any]) -> None:
    decoder = zoo.decoder(target, head, SpecConfig(*shape), max_batch_size=3, **settings)
    driver, prompts = Driver(decoder), ragged_prompts(40, 5)
    if "kv_cache_dtype" not in settings:
        for cache in (driver._workers.verifier.cache, *driver.drafter.caches):
            fill_with_nan(cache)
    if shape[0] == "auto":
        driver.script_levels(2, 0, 0, 3, 0, 1)
    for _ in range(1 + settings.get("prefix_caching", False)):  # the second time cached pages are found
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=16))
        if "kv_cache_dtype" in settings:
            plain = decoder.generate(prompts, SamplingParams(max_tokens=16), speculate=False)
            assert [out.token_ids for out in outputs] == [out.token_ids for out in plain]
        else:
            assert [out.token_ids for out in outputs] == [zoo.greedy(target, prompt, 16) for prompt in prompts]
    sampled = SamplingParams(max_tokens=8, temperature=1.1, top_k=12, seed=3)
    fast, plain = (decoder.generate(prompts[3:], sampled, speculate=on) for on in (True, False))
    assert [out.token_ids for out in fast] == [out.token_ids for out in plain]
    driver.assert_nothing_leaked()


PATHS = [  # target, head, shape, page size, batch, whether prompts are cached
    ("llama", "latent", (4, 4, 16), 1, 3, False),
    ("llama", "latent-no-q", (4, 1, 5), 16, 3, True),
    ("v3-tied", "latent-two-layers", (4, 3, 12), 4, 2, True),
    ("v3-tied", "latent-31", (5, 2, 12), 5, 3, False),
    ("v3-tied", "latent-wide", (5, 1, 6), 16, 2, False),
]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("target", "kind", "shape", "page_size", "batch", "is_known"), PATHS, ids=str)
def test_every_node_equals_its_own_path(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, target: str, kind: str, shape: tuple[int, int, int], page_size: int,
    batch: int, is_known: bool,
) -> None:  # fmt: skip
    """The sum of what the head alone says along each node's path: features, positions, rotation, scale, recycled states."""
    settings, spec = {"prefix_caching": True} if is_known else {}, SpecConfig(*shape)
    decoder, requests = running_decoder(zoo, target, kind, spec, page_size, batch, is_known=is_known, **settings)
    drawn, hf = draw(decoder, spec, batch, monkeypatch), copy.deepcopy(zoo.hf(target)).double()
    for row, request in enumerate(requests):
        alone = LatentDrafter(parts_of(kind), hf, request.prompt_ids + request.output.token_ids)
        assert max(row_errors(drawn, row, alone)) < TOLERANCE
        hold_best_siblings(drawn, row, alone, shape[1])


def test_long_prompts_are_expanded_alike(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a head whose long chunks, computed over expanded heads, leave other latents than short ones."""
    decoder = zoo.decoder("llama", "latent", SpecConfig(4, 3, 12), page_size=4, dtype="float64", prefill_chunk=16)
    assert decoder.head is not None
    prompts = [[(7 * i) % 40 for i in range(60)], [(3 * i) % 40 for i in range(45)]]
    found = []
    for above in (1000, 8):
        use_limits(decoder.head, Limits(expand_above=above, expanded_tokens=8))
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=20))
        found.append([(out.token_ids, out.stats.accepted_per_round) for out in outputs])
    assert found[0] == found[1]


@pytest.mark.slow_cases
@pytest.mark.parametrize("head", ["latent", "latent-no-q"])
def test_ranks_share_a_head(zoo: Zoo, head: str) -> None:
    """Keeps out: latents cut with the heads, sums that are not added up.  Unwritten slots hold NaN."""
    prompts, spec = ragged_prompts(40, 4)[2:], SpecConfig(3, 2, 6)

    def use(decoder: SpecDecoder) -> list[tuple[list[int], list[int]]]:
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=12))
        return [(out.token_ids, out.stats.accepted_per_round) for out in outputs]

    settings: dict[str, Any] = {"page_size": 4, "max_batch_size": 2, "dtype": "float32"}
    shared = with_ranks(zoo.target("llama"), zoo.head("llama", head), spec, 2, use, **settings)
    assert shared == use(zoo.decoder("llama", head, spec, **settings))
    assert [ids for ids, _ in shared] == [zoo.greedy("llama", prompt, 12) for prompt in prompts]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["round", "step", False], ids=str)
@pytest.mark.parametrize("target", ["llama", "v3"])
@pytest.mark.parametrize("head", sorted(LATENT_HEADS))
def test_captured_rounds(zoo: Zoo, target: str, head: str, graphs: Any) -> None:
    """Keeps out: a replay with the lengths or the tables of its capture, latents that a kernel has no tiles for."""
    settings: dict[str, Any] = {"device": "cuda", "cuda_graphs": graphs, "prefix_caching": True, "max_batch_size": 3}
    prompts, found = ragged_prompts(40, 6), []
    for shape in ((4, 1, 5), (4, 4, 16)):
        decoder = zoo.decoder(target, head, SpecConfig(*shape), page_size=4, **settings)
        on_cpu = zoo.decoder(target, head, SpecConfig(*shape), page_size=4, max_batch_size=3)
        for _ in range(2):
            outputs = decoder.generate(prompts, SamplingParams(max_tokens=24))
            assert [out.token_ids for out in outputs] == [zoo.greedy(target, prompt, 24) for prompt in prompts]
        same = on_cpu.generate(prompts, SamplingParams(max_tokens=24))
        found.append([sum(out.stats.accepted for out in each) for each in (outputs, same)])
    assert all(abs(gpu - cpu) <= 0.05 * cpu + 3 for gpu, cpu in found), found
