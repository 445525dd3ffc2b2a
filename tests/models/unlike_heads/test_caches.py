"""Caches of targets with unlike heads: kept pages, 8 bits, and any numbers and widths of heads.

Keeps out: an accepted path that is moved in one kind's layers alone, scales that
are taken for another kind's, and a kept page whose windowed layers are another text's.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import toolkit.unlike.targets  # noqa: F401 (its targets)
import torch
from toolkit.drafters import Substitute
from toolkit.driver import Driver
from toolkit.families import assert_greedy, eager
from toolkit.models import Zoo, ragged_prompts
from toolkit.oracles.texts import hold_text_after_shared_prefixes
from toolkit.unlike.targets import save_unlike

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.layout import UnlikeLayout
from specdec.attention.caches.quant_cache import QuantLayout
from specdec.attention.caches.split_cache import QuantSplitLayout
from specdec.attention.kinds import FULL
from specdec.models.config import HeadSizes, ModelConfig
from specdec.models.kv import cache_layout
from specdec.models.registry import choose_target

PROMPTS = [[5, 9, 2], [*range(1, 38), *range(30)], [4, 8] * 20]  # some longer than a ring


@pytest.mark.slow_cases
@pytest.mark.parametrize("target", ["gemma", "mimo", "gemma-small"])
def test_texts_after_shared_prefixes(zoo: Zoo, target: str) -> None:
    hold_text_after_shared_prefixes(zoo, target, (4, 4, 14))


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("target", "kept"),
    [
        ("mimo", "int8"),
        ("gemma", "int8"),
        ("mimo", "fp8"),
        ("gemma", "fp8"),
        ("gemma-small", "int8_keys"),
        ("gemma-mixture", "fp8"),
    ],
)
def test_8_bits(zoo: Zoo, target: str, kept: str) -> None:
    """Texts with drafts and without are the same, and what `verify` finds exact: each layer reads its own scales."""
    decoder = zoo.decoder(target, "eagle3", SpecConfig(3, 4, 12), page_size=4, kv_cache_dtype=kept)
    sampling = SamplingParams(max_tokens=16)
    drafted, plain = (decoder.generate(PROMPTS, sampling, speculate=speculate) for speculate in (True, False))
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    found = decoder.verify(PROMPTS, sampling)
    assert found.passed and found.count("EXACT") == len(PROMPTS)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("target", "kept", "shape", "page_size"),
    [
        ("gemma wide", "fp8", (4, 4, 14), 16), ("gemma wide", "int8", (5, 1, 6), 4),
        ("gemma-mixture wide", "fp8", (4, 3, 12), 1), ("gemma-small wide", "int8_keys", (4, 4, 14), 16),
    ],
)  # fmt: skip
def test_captured_rounds_in_8_bits(
    zoo: Zoo, target: str, kept: str, shape: tuple[int, int, int], page_size: int
) -> None:  # fmt: skip
    """Whole rounds in graphs write what is written without graphs and without drafts.

    Keeps out: scales that a graph holds from its warm-up, or that one kind's layers take from another kind's.
    """
    sampling, found = SamplingParams(max_tokens=24), list[list[list[int]]]()
    settings = dict(page_size=page_size, max_batch_size=3, device="cuda", kv_cache_dtype=kept, max_seq_len=128)
    for draft, graphs in (("eagle3", "round"), ("eagle3", False), (None, "round"), (None, False)):
        spec = SpecConfig(*shape) if draft else None
        with zoo.decoder(target, draft, spec, cuda_graphs=graphs, **settings) as decoder:
            found.append([out.token_ids for out in decoder.generate(PROMPTS, sampling)])
    assert all(texts == found[0] for texts in found)


@pytest.mark.parametrize("kept", ["fp8", "int8"])
def test_narrow_values_in_8_bits_are_those_of_whole_heads(kept: str) -> None:
    """A key and a value are rounded as in a cache of heads of their own width.  Keeps out: scales of values for keys."""
    N, K, D, E = 7, 3, 16, 10
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(N, K, D, generator=generator), 9 * torch.randn(N, K, E, generator=generator)
    cache, slots = KVCache(QuantSplitLayout(kept, K, D, E), (FULL,), 9), torch.tensor([8, 0, 3, 2, 5, 7, 1])
    cache.view(0).write_heads(slots, k, v)  # type: ignore[attr-defined]
    found = cache.view(0).read(slots, torch.float32)
    for at, (x, got) in enumerate(zip((k, v), found, strict=True)):
        whole = KVCache(QuantLayout(kept, K, x.shape[2]), (FULL,), 9).view(0)
        whole.write(slots, torch.stack((x, x), dim=1))  # type: ignore[attr-defined]
        assert torch.equal(got, whole.read(slots, torch.float32)[at]) and not torch.equal(got, x)
    rows = torch.cat((k.flatten(1), v.flatten(1)), dim=1)
    read = torch.cat([x.flatten(1) for x in found], dim=1)
    assert torch.equal(cache.view(0).as_stored(rows), read)  # type: ignore[attr-defined]


def layouts(seed: int) -> dict[str, Any]:
    """Heads of Gemma 4's two kinds of layers at random."""
    pick = random.Random(seed)
    heads = pick.choice((4, 6, 8, 12))
    divisors = [count for count in range(1, heads + 1) if heads % count == 0]
    windowed, full = (2 * pick.randint(4, 16) for _ in range(2))
    kv_windowed, kv_full = (pick.choice(divisors) for _ in range(2))
    shared = pick.choice((0, 2))
    return dict(
        num_attention_heads=heads, num_key_value_heads=kv_windowed, num_global_key_value_heads=kv_full, head_dim=windowed,
        global_head_dim=full, attention_k_eq_v=True, num_kv_shared_layers=shared, num_hidden_layers=4,
        hidden_size_per_layer_input=2 * shared,  # without which transformers 5.23 can't run layers that share keys
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=pick.randint(1, 9),
    )  # fmt: skip


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("seed", range(8))
def test_any_heads(tmp_path: Path, seed: int) -> None:
    """Eight layouts of heads at random, each with a random tree, page size and number of rows."""
    pick, sizes = random.Random(100 + seed), layouts(seed)
    folder = save_unlike(tmp_path / "target", "gemma", seed, **sizes)
    hf, prompts = eager(folder), ragged_prompts(40, 4, seed=seed)
    spec = SpecConfig(*pick.choice(((3, 2, 6), (4, 4, 14), (5, 1, 6), (5, 6, 24))))
    settings = dict(page_size=pick.choice((1, 3, 16)), max_batch_size=pick.randint(1, 4), max_seq_len=96)
    decoder = SpecDecoder.from_pretrained(folder, "ngram", spec, device="cpu", dtype="float32", smoke=False, **settings)  # type: ignore[arg-type]
    driver = Driver(decoder)
    driver.set_chunk(pick.choice((1, 5, 64)))
    driver.poison_free_slots(torch.nan, "target")
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=14))
    for out in outputs:
        assert_greedy(hf, out)
    texts = {tuple(out.prompt_token_ids): out.token_ids for out in outputs}
    driver.replace_drafter(Substitute(driver, spec, "oracle", 40, texts))
    for out in decoder.generate(prompts, SamplingParams(max_tokens=8)):
        assert out.token_ids == texts[tuple(out.prompt_token_ids)][:8] and out.stats.accepted > 2
    driver.assert_nothing_leaked()


def test_layers_of_equal_heads_share_a_buffer(zoo: Zoo) -> None:
    """Keeps out: a buffer for each layer, whose moves take a launch each; two formats where kinds differ in rope alone."""
    config = choose_target(zoo.target("gemma")).config
    layout = cache_layout(config, "auto", torch.float32)
    assert isinstance(layout, UnlikeLayout)
    assert [(each.name, each.shape, each.layers) for each in layout.buffers] == [
        ("kv 0", (2, 4, 16), (0, 2, 4)), ("kv 1", (2, 1, 24), (1, 3, 5))
    ]  # fmt: skip
    kind = config.layer_kinds[0]
    alike = ModelConfig("x", 8, 8, 2, 2, 1, 4, 9, 1e-5, layer_kinds=(kind, config.layer_kinds[1]))
    turned = HeadSizes(2, 1, 4, rope=config.rope)
    unlike = ModelConfig(
        "x", 8, 8, 2, 2, 1, 4, 9, 1e-5, layer_kinds=(kind, config.layer_kinds[1]), unlike_heads=((kind, turned),)
    )
    assert cache_layout(unlike, "auto", torch.float32) == cache_layout(alike, "auto", torch.float32)
