"""Small models with recurrent layers as drafters: a copy of the target is always right, and texts stay the target's.

Keeps out: a state that misses a token or holds one twice, after prompts, chunks, kept states, rounds, pauses and moves of rows;
a branch of a tree that reads another branch's state.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from toolkit.driver import Driver
from toolkit.heads.kinds.small_models import HYBRIDS, AloneModel
from toolkit.models import Zoo, ragged_prompts
from toolkit.oracles.drawn import TOLERANCE, draw, hold_best_siblings, row_errors, running_decoder
from toolkit.parallel.decoders import fill_with_nan, with_ranks

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.cli.entry import main
from specdec.draft.model.recurrent import RecurrentModelWorker
from specdec.loading.plan import plan_memories
from specdec.options import EngineOptions

COPIES = [  # target, shape, settings
    ("qwen3_5_text", (4, 1, 5), {"page_size": 1, "prefill_chunk": 5}),
    ("qwen3_next", (5, 1, 6), {"page_size": 4, "prefix_caching": True, "prefill_chunk": 7}),
    ("lfm2", (3, 1, 4), {"page_size": 4}),
    ("granitemoehybrid", (4, 1, 5), {"page_size": 4, "prefix_caching": True}),
    ("nemotron_h", (3, 1, 4), {"page_size": 16}),
    ("falcon_h1", (4, 4, 24), {"page_size": 4, "prefix_caching": True, "prefill_chunk": 5}),
    ("kimi_linear", (3, 3, 12), {"page_size": 4}),
]


def from_nan(zoo: Zoo, target: str, drafter: str, shape: Any, **settings: Any) -> tuple[SpecDecoder, Driver]:
    """A decoder whose caches and states hold NaN where nothing was written."""
    decoder = zoo.decoder(target, drafter, SpecConfig(*shape), max_batch_size=3, **settings)
    driver = Driver(decoder)
    for cache in (driver._workers.verifier.cache, *driver.drafter.caches):
        fill_with_nan(cache)
    assert isinstance(driver.drafter, RecurrentModelWorker)
    for memory in driver.drafter.pool.buffers:
        for tensor in memory or ():
            tensor[:, 1:] = torch.nan
    return decoder, driver


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("target", "shape", "settings"), COPIES, ids=str)
def test_a_copy_of_the_target_is_always_right(zoo: Zoo, target: str, shape: Any, settings: dict[str, Any]) -> None:
    """Every draft of a chain is accepted, in each round.  Of a tree the first level is."""
    decoder, driver = from_nan(zoo, target, "model-copy", shape, **settings)
    prompts = ragged_prompts(40, 5)
    if settings.get("prefix_caching"):
        prompts = [[*range(40), *range(39, 0, -2), *prompt] for prompt in prompts]  # long enough for a state to be kept
    for _ in range(1 + settings.get("prefix_caching", False)):
        for prompt, out in zip(prompts, decoder.generate(prompts, SamplingParams(max_tokens=21)), strict=True):
            accepted = out.stats.accepted_per_round
            assert accepted == [shape[0]] * len(accepted) if shape[1] == 1 else min(accepted) >= 1, accepted
            assert out.token_ids == zoo.greedy(target, prompt, 21)
    if settings.get("prefix_caching"):
        assert out.stats.cached_tokens >= 64
    driver.assert_nothing_leaked()


TEXTS = [  # target, drafter, shape, settings
    ("llama", "hybrid-qwen3_5_text", (4, 1, 5), {"page_size": 1}),
    ("llama", "hybrid-lfm2", (4, 3, 13), {"page_size": 4, "prefix_caching": True, "prefill_chunk": 5}),
    ("mistral", "hybrid-nemotron_h", ("auto", 2, 6), {"page_size": 4}),
    ("lfm2", "model-near", (3, 3, 12), {"page_size": 4, "prefill_chunk": 9, "prefix_caching": True}),
    ("qwen3_next", "hybrid-granitemoehybrid", ("auto", 1, 5), {"page_size": 4, "prefix_caching": True}),
    ("lfm2", "hybrid-falcon_h1", (5, 2, 12), {"page_size": 5}),
]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("target", "drafter", "shape", "settings"), TEXTS, ids=str)
def test_text_is_the_target_s(zoo: Zoo, target: str, drafter: str, shape: Any, settings: dict[str, Any]) -> None:
    decoder, driver = from_nan(zoo, target, drafter, shape, **settings)
    if shape[0] == "auto":
        driver.script_levels(2, 0, 0, 3, 0, 1)
    prompts = [[*range(40), *range(39, 0, -2), *prompt] for prompt in ragged_prompts(40, 5)]
    for _ in range(1 + settings.get("prefix_caching", False)):  # the second time kept states are found
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=16))
        assert [out.token_ids for out in outputs] == [zoo.greedy(target, prompt, 16) for prompt in prompts]
    sampled = SamplingParams(max_tokens=8, temperature=1.1, top_k=12, seed=3)
    fast, plain = (decoder.generate(prompts[3:], sampled, speculate=on) for on in (True, False))
    assert [out.token_ids for out in fast] == [out.token_ids for out in plain]
    driver.assert_nothing_leaked()


@pytest.mark.slow_cases
@pytest.mark.parametrize("target", ["qwen3_5_text", "llama"])
def test_a_text_without_drafts_keeps_no_state_of_the_drafter(zoo: Zoo, target: str) -> None:
    """Keeps out: a state that a plain text has kept, of which the drafter's part was never written."""
    drafter = "model-copy" if target == "qwen3_5_text" else "hybrid-qwen3_5_text"
    settings: dict[str, Any] = {"page_size": 4, "prefix_caching": True, "prefill_chunk": 16}
    decoder, _ = from_nan(zoo, target, drafter, (4, 1, 5), **settings)
    alone, _ = from_nan(zoo, target, drafter, (4, 1, 5), **settings)
    prompt = [*range(40), *range(39, 0, -1), 7, 8]
    decoder.generate([prompt], SamplingParams(max_tokens=4), speculate=False)
    for _ in range(2):
        (out,), (same,) = (each.generate([prompt], SamplingParams(max_tokens=21)) for each in (decoder, alone))
        assert out.stats.accepted_per_round == same.stats.accepted_per_round
    assert out.stats.cached_tokens > 0


@pytest.mark.parametrize("shape", [("auto", 1, 5), ("auto", 3, 9)], ids=str)
def test_it_catches_up_after_pauses(zoo: Zoo, shape: Any) -> None:
    """Keeps out: tokens of paused rounds that no state holds, or that the state of a row without pauses holds twice."""
    decoder, driver = from_nan(zoo, "qwen3_5_text", "model-copy", shape, page_size=4)
    driver.script_levels(2, 0, 0, 0, 3, 0, 1, 0, 0, 2)
    for out in decoder.generate(ragged_prompts(40, 3), SamplingParams(max_tokens=30)):
        rounds = list(zip(out.stats.accepted_per_round, (2, 0, 0, 0, 3, 0, 1, 0, 0), strict=False))
        assert all(accepted == levels if shape[1] == 1 else accepted >= min(levels, 1) for accepted, levels in rounds)


PATHS = [  # target, drafter, shape, page size, batch
    ("llama", "hybrid-qwen3_5_text", (4, 4, 16), 1, 3),
    ("qwen3_5_text", "model-near", (4, 3, 12), 4, 2),
    ("llama", "hybrid-lfm2", (5, 2, 12), 5, 2),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("target", "kind", "shape", "page_size", "batch"), PATHS, ids=str)
def test_every_node_equals_its_own_path(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, target: str, kind: str, shape: tuple[int, int, int], page_size: int, batch: int
) -> None:
    """A node's score is the sum of what the model alone says along its path (transformers, float64, no cache)."""
    decoder, requests = running_decoder(zoo, target, kind, SpecConfig(*shape), page_size, batch)
    drawn = draw(decoder, SpecConfig(*shape), batch, monkeypatch)
    for row, request in enumerate(requests):
        alone = AloneModel(zoo, target, kind, request.prompt_ids + request.output.token_ids)
        assert max(row_errors(drawn, row, alone)) < TOLERANCE
        hold_best_siblings(drawn, row, alone, shape[1])


def test_ranks_share_a_model(zoo: Zoo) -> None:
    """Keeps out: states of all heads where a rank has some."""
    prompts, spec = ragged_prompts(40, 4)[2:], SpecConfig(3, 2, 6)

    def use(decoder: SpecDecoder) -> list[tuple[list[int], list[int]]]:
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=12))
        return [(out.token_ids, out.stats.accepted_per_round) for out in outputs]

    settings: dict[str, Any] = {"page_size": 4, "max_batch_size": 2, "dtype": "float32"}
    drafter = zoo.head("llama", "hybrid-qwen3_5_text")
    shared = with_ranks(zoo.target("llama"), drafter, spec, 2, use, **settings)
    assert shared == use(zoo.decoder("llama", "hybrid-qwen3_5_text", spec, **settings))


def test_joined_by_matches(zoo: Zoo) -> None:
    """Keeps out: an extend of more tokens than the drafter's own rounds emit, which nodes have no room for."""
    drafts = [str(zoo.head("qwen3_5_text", "model-copy")), "suffix"]
    decoder = SpecDecoder.from_pretrained(
        zoo.target("qwen3_5_text"), drafts, SpecConfig(3, 2, 11, max_depth=8), device="cpu", dtype="float32", max_seq_len=128,
        smoke=False, page_size=4,
    )  # fmt: skip
    prompts = [[1, 2, 3, 4, 5, 6] * 4, [7, 8, 9] * 5]
    for prompt, out in zip(prompts, decoder.generate(prompts, SamplingParams(max_tokens=24)), strict=True):
        assert out.token_ids == zoo.greedy("qwen3_5_text", prompt, 24)
        assert min(out.stats.accepted_per_round) >= 1


def test_what_is_said_of_it(zoo: Zoo, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: states that `plan` does not count, or counts for one model alone; a look that can't run such a model."""
    llama, hybrid = zoo.target("llama"), zoo.target("qwen3_5_text")
    draft = zoo.head("llama", "hybrid-qwen3_5_text")
    assert main(["inspect", str(draft), "--target", str(llama), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["head"]["layers with states"] == 3
    spec, options = SpecConfig(3, 2, 7), EngineOptions(max_seq_len=64, max_batch_size=2, device="cpu", dtype="float32")
    found = []
    for target, drafter in ((llama, draft), (hybrid, None), (hybrid, zoo.head("qwen3_5_text", "model-copy"))):
        (plan,) = plan_memories(target, drafter, spec if drafter else None, options, [1 << 34], lambda: (9, 0))
        found.append(plan.parts["states of recurrent layers"])
    assert 0 < found[1] < found[0] < found[2]
    decoder = zoo.decoder("qwen3_5_text", "model-copy", spec)
    assert decoder.head is not None
    seen = decoder.head.smoke(decoder.model, torch.arange(40))
    assert seen.first == 1.0 and not seen.complaint


def test_state_cache_is_for_either_model(zoo: Zoo) -> None:
    """Keeps out: memory for states that a drafter alone keeps, refused because its target has none."""
    settings: dict[str, Any] = {"prefix_caching": True, "state_cache": 1 << 20, "kv_cache_memory": 1 << 24}
    assert zoo.decoder("llama", "hybrid-lfm2", SpecConfig(3, 1, 4), **settings).settings.options.state_cache == 1 << 20
    with pytest.raises(ValueError, match="state_cache is for models with recurrent layers"):
        zoo.decoder("llama", "model-near", SpecConfig(3, 1, 4), **settings)


def test_a_window_is_refused(zoo: Zoo) -> None:
    with pytest.raises(ValueError, match="beyond_trained='window' .* states .* nearest setting that works"):
        zoo.decoder("llama", "hybrid-lfm2", SpecConfig(3, 1, 4), beyond_trained="window")


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["round", "step", False], ids=str)
@pytest.mark.parametrize("shape", [(4, 1, 5), (4, 4, 16)], ids=str)
@pytest.mark.parametrize("target", ["qwen3_5_text wide", "granitemoehybrid wide", "lfm2 wide"])
def test_captured_rounds(zoo: Zoo, target: str, shape: tuple[int, int, int], graphs: Any) -> None:
    """Keeps out: a replay with the states of its capture."""
    settings: dict[str, Any] = {"device": "cuda", "cuda_graphs": graphs, "prefix_caching": True, "max_batch_size": 3}
    decoder = zoo.decoder(target, "model-copy", SpecConfig(*shape), page_size=4, **settings)
    prompts = ragged_prompts(40, 6)
    for _ in range(2):
        for out in decoder.generate(prompts, SamplingParams(max_tokens=24)):
            accepted = out.stats.accepted_per_round
            assert accepted == [shape[0]] * len(accepted) if shape[1] == 1 else min(accepted) >= 1


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", sorted(HYBRIDS))
def test_texts_on_a_gpu(zoo: Zoo, drafter: str) -> None:
    """Keeps out: kernels that a rule lacks in a drafter's passes, and pauses in graphs."""
    decoder = zoo.decoder("llama", f"{drafter} wide", SpecConfig("auto", 3, 12), device="cuda", page_size=4, max_batch_size=3)
    Driver(decoder).script_levels(2, 0, 0, 3, 0, 1)
    prompts = ragged_prompts(40, 5)
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=24))
    assert [out.token_ids for out in outputs] == [zoo.greedy("llama", prompt, 24) for prompt in prompts]
