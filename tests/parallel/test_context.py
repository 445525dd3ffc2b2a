"""Decode context parallelism: whole decoders whose ranks divide every sequence, and settings that are refused."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from toolkit.checkpoints.gpt_oss import save_gpt_oss
from toolkit.deepseek import DeepseekZoo, SparseZoo, use_limits
from toolkit.driver import Driver
from toolkit.families import NO_FEATURES, Families, save_family
from toolkit.models import HEADS, Zoo, ragged_prompts, save_eagle3, save_target
from toolkit.oracles.sharing import save_sharing
from toolkit.own_attention.targets import save as save_alibi
from toolkit.pages import ring_passes_take
from toolkit.parallel.decoders import with_ranks

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.latent.limits import Limits
from specdec.loading.memory import pool_plan, scratch_bytes
from specdec.loading.resolve import EngineSettings, resolve_settings
from specdec.models.config import ModelConfig
from specdec.models.registry import choose_target, refuse_ranks
from specdec.models.sharding import share_of
from specdec.options import EngineOptions
from specdec.parallel.shard import Shard

TREE, CHAIN = SpecConfig(num_steps=3, topk=3, num_draft_tokens=8), SpecConfig(num_steps=3, topk=1, num_draft_tokens=4)
SAMPLINGS = [SamplingParams(max_tokens=5), SamplingParams(max_tokens=6, temperature=0.9, seed=3)]
BOTH = {"decode_context_parallel_size": 2, "tensor_parallel_size": 2}


class Texts(NamedTuple):
    """What a decoder wrote for some prompts: ids, and how many draft tokens each round accepted.  found: kept prompt tokens."""

    ids: list[list[int]]
    accepted: list[list[int]]
    found: int


def texts(decoder: SpecDecoder) -> Texts:
    """Prompts twice, of which the second time each is longer, and begins as one that has run."""
    prompts = [prompt * 2 for prompt in ragged_prompts(40, 3, seed=5)[1:]]
    again = [prompt + [7, 3, 9] * 3 for prompt in prompts]
    outs = [out for each in (prompts, again) for out in decoder.generate(each, SAMPLINGS)]
    found = sum(out.stats.cached_tokens for out in outs)
    return Texts([out.token_ids for out in outs], [out.stats.accepted_per_round for out in outs], found)


@pytest.fixture(scope="module")
def zoos(tmp_path_factory: pytest.TempPathFactory) -> dict[type[Zoo], Zoo]:
    return {zoo: zoo(tmp_path_factory.mktemp("zoo")) for zoo in (Zoo, DeepseekZoo, SparseZoo)}


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("zoo", "name", "kind", "spec", "size", "context", "settings"), [
    (DeepseekZoo, "v3", "eagle3", TREE, 4, 2, {"context_interleave": 2, "prefill_chunk": 20}),
    (Zoo, "llama-dim80-biases", "eagle1", CHAIN, 2, 2, {"prefill_chunk": 20}),
    (SparseZoo, "v32", "eagle3", CHAIN, 2, 2, {"prefill_chunk": 20, "context_interleave": 2}),
    (Zoo, "qwen3", "eagle3", TREE, 4, 2, {"prefill_chunk": 20}),
    (SparseZoo, "v32", "eagle3", TREE, 4, 4, {"prefill_chunk": 20, "context_interleave": 2}),
])  # fmt: skip
def test_ranks_write_what_one_writes(
    zoo: type[Zoo], name: str, kind: str, spec: SpecConfig, size: int, context: int, settings: dict[str, Any],
    zoos: dict[type[Zoo], Zoo],
) -> None:  # fmt: skip
    """Prompts in chunks, with prefixes that are found, page sizes of their own.  Keeps out: keys and values of the wrong
    positions, chunks that do not see what another rank keeps, drafts accepted less often, unwritten memory that is read."""
    pair = zoos[zoo].target(name), zoos[zoo].head(name, kind)
    shared = {"prefix_caching": True, **settings}
    got = with_ranks(*pair, spec, size, texts, **shared, page_size=4, decode_context_parallel_size=context)
    want = with_ranks(*pair, spec, 1, texts, prefix_caching=True, page_size=4 * context)
    assert got == want and got.found > 0


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Targets with layers that read a span of keys, all with key/value heads that two of their ranks hold alike."""
    root = tmp_path_factory.mktemp("windowed")
    save_target(root / "mistral", "mistral"), save_target(root / "qwen2", "qwen2"), save_sharing(root / "shared", "windows")
    oss, _ = save_gpt_oss(root, num_key_value_heads=1, intermediate_size=128)
    return {"gpt-oss": oss, **{name: root / name for name in ("mistral", "qwen2", "shared")}}


@pytest.mark.slow_cases
@pytest.mark.parametrize(("name", "spec", "size", "settings"), [
    ("qwen2", TREE, 4, {"prefix_caching": True, "context_interleave": 2}),
    ("gpt-oss", TREE, 2, {}),
    ("gpt-oss", CHAIN, 2, {"prefix_caching": True, "kv_cache_dtype": "int8"}),
    ("shared", TREE, 4, {"prefix_caching": True}),
])  # fmt: skip
def test_ranks_divide_windows_and_rings(
    name: str, spec: SpecConfig, size: int, settings: dict[str, Any], windowed: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """Rings of few pages that wrap around, prompts in chunks, kept copies of rings, sinks, layers that share keys.  Keeps out:
    first keys of another rank's numbering, copies of a page that are as long as all ranks' parts, a scratch that is one
    group's and not the other's, sinks that every rank adds."""
    ring_passes_take(8, monkeypatch)
    draft = save_eagle3(tmp_path / "head", windowed[name])
    shared: dict[str, Any] = {"prefill_chunk": 8, **settings}
    got = with_ranks(windowed[name], draft, spec, size, texts, **shared, page_size=2, decode_context_parallel_size=2)
    shared.pop("context_interleave", None)
    want = with_ranks(windowed[name], draft, spec, 1, texts, **shared, page_size=4)
    assert got == want and (got.found > 0) == ("prefix_caching" in settings)


@pytest.mark.slow_cases
@pytest.mark.parametrize(("name", "spec", "size", "settings"), [
    ("llama4", CHAIN, 2, {"prefix_caching": True}),
    ("gemma3n", TREE, 2, {}),
])  # fmt: skip
def test_ranks_divide_texts_of_whole_models(
    name: str, spec: SpecConfig, size: int, settings: dict[str, Any], families: Families, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Targets through transformers' code, which every rank holds whole, beside a head of which each holds a share: windows,
    chunks, sinks, layers that read other layers' keys, and some rows alone.  Keeps out: sums over ranks of what none shares,
    heads that are merged once for each rank, ranks that choose each for itself."""
    ring_passes_take(8, monkeypatch)
    target = families.target(name)
    draft = HEADS["eagle1" if name in NO_FEATURES else "eagle3"](tmp_path / "head", target)
    shared: dict[str, Any] = {"prefill_chunk": 8, "backend": "transformers", **settings}
    got = with_ranks(target, draft, spec, size, texts, **shared, page_size=2, decode_context_parallel_size=size)
    want = with_ranks(target, draft, spec, 1, texts, **shared, page_size=2 * size)
    assert got == want and (got.found > 0) == ("prefix_caching" in settings)


def test_long_prompts_gather_latents(zoos: dict[type[Zoo], Zoo]) -> None:
    """Chunks whose latents are expanded, a few at a time.  Keeps out: keys of a rank that are counted for another one."""
    pair = zoos[DeepseekZoo].target("v3"), zoos[DeepseekZoo].head("v3", "eagle3")
    settings = {"prefill_chunk": 13, "page_size": 4}
    want = with_ranks(*pair, TREE, 1, texts, **settings)
    few = partial(use_limits, limits=Limits(expand_above=5, expanded_tokens=12))
    assert with_ranks(*pair, TREE, 2, texts, few, **settings, decode_context_parallel_size=2) == want


@pytest.mark.slow_cases
@pytest.mark.slow
@pytest.mark.parametrize("name", ["v32", "gpt-oss"])
def test_processes_write_what_one_writes(
    name: str, zoos: dict[type[Zoo], Zoo], windowed: dict[str, Path], tmp_path: Path
) -> None:
    """Over gloo.  Keeps out: an exchange that only threads can do; a target that only one process is allowed to load."""
    target = windowed[name] if name in windowed else zoos[SparseZoo].target(name)
    pair = target, save_eagle3(tmp_path / "head", target)
    settings: dict[str, Any] = {"device": "cpu", "max_seq_len": 80, "threads": 1}
    with SpecDecoder.from_pretrained(*pair, TREE, **settings) as decoder:
        want = texts(decoder)
    with SpecDecoder.from_pretrained(*pair, TREE, **settings, **BOTH) as decoder:
        assert texts(decoder) == want


# ---- sizes ----


def resolved(config: ModelConfig, **settings: Any) -> EngineSettings:
    return resolve_settings(EngineOptions(device="cpu", max_seq_len=80, **settings), TREE, config)


def test_a_rank_holds_a_part_of_each_sequence(zoos: dict[type[Zoo], Zoo]) -> None:
    """Keeps out: a pool that holds no more tokens than without; memory for the scratch that nobody counted."""
    config = choose_target(zoos[DeepseekZoo].target("v3")).config
    share, memory = share_of(config, Shard(0, 4)), 1e6
    sizes = {"tensor_parallel_size": 4, "max_batch_size": 999}
    alone, sharded = (resolved(config, **sizes, decode_context_parallel_size=size) for size in (1, 4))
    plan, of_four = pool_plan([share], alone, memory), pool_plan([share], sharded, memory + scratch_bytes(share, sharded))
    assert sharded.page_tokens == 4 * alone.page_tokens and of_four.num_pages == plan.num_pages
    assert of_four.page_bytes == plan.page_bytes


def test_a_drafter_keeps_whole_sequences(zoos: dict[type[Zoo], Zoo]) -> None:
    """Keeps out: a pool that takes more memory than was planned."""
    target, draft = zoos[DeepseekZoo].target("v3"), zoos[DeepseekZoo].head("v3", "eagle3")

    def bytes_of(decoder: SpecDecoder) -> tuple[int, int]:
        config = decoder.model.config
        assert decoder.head is not None
        plan = pool_plan([config, decoder.head.config.model], decoder.settings, 1e12)
        return sum(cache.bytes for cache in Driver(decoder).caches), plan.bytes + scratch_bytes(config, decoder.settings)

    got, planned = with_ranks(target, draft, TREE, 2, bytes_of, decode_context_parallel_size=2)
    assert got == planned


# ---- what is refused ----


@pytest.mark.parametrize(("zoo", "name", "settings", "problem"), [
    (Zoo, "qwen3", BOTH, "one process holds each key/value head .*, got 2; nearest .*: decode_context_parallel_size=1"),
    (Zoo, "qwen3", {**BOTH, "tensor_parallel_size": 1}, "one process holds .*got 2; nearest .*_size=1"),
    (Zoo, "qwen3", {"decode_context_parallel_size": 4, "tensor_parallel_size": 4}, "2 processes hold .*=2"),
    (DeepseekZoo, "v3", {"decode_context_parallel_size": 3, "tensor_parallel_size": 4}, "4 processes hold .*=2"),
    (DeepseekZoo, "v3", {"context_interleave": 8}, "got 8 with decode_context_parallel_size=1; .*: leave"),
    (DeepseekZoo, "v3", {**BOTH, "context_interleave": 6}, "must divide page_size=16, got 6; nearest .*: context_interleave=4"),
])  # fmt: skip
def test_settings_that_do_not_fit(
    zoo: type[Zoo], name: str, settings: dict[str, Any], problem: str, zoos: dict[type[Zoo], Zoo]
) -> None:
    """Keeps out: a setting that does nothing, and a nearest setting that does not work either."""
    config = choose_target(zoos[zoo].target(name)).config
    with pytest.raises(ValueError, match=problem):
        resolved(config, **settings)


def test_distances_need_whole_sequences(tmp_path: Path) -> None:
    """Keeps out: ALiBi's distances counted in what one rank keeps; ranks that hold a whole model for nothing."""
    config = choose_target(save_alibi(tmp_path / "bloom", "bloom-tied")).config
    with pytest.raises(ValueError, match="must be 1 for layers with ALiBi.* nearest .*: decode_context_parallel_size=1"):
        resolved(config, **BOTH)
    chosen = choose_target(save_family(tmp_path / "gemma2", "gemma2", 0), "transformers")
    with pytest.raises(ValueError, match="each process holds whole, got 4; .* or decode_context_parallel_size=4 too"):
        refuse_ranks(chosen, 4, 2)
    refuse_ranks(chosen, 4, 4)


def test_settings_are_refused_before_a_rank_starts(zoos: dict[type[Zoo], Zoo]) -> None:
    """Keeps out: processes that start, only to fail."""
    pair = zoos[Zoo].target("qwen3"), zoos[Zoo].head("qwen3", "eagle3")
    with (
        patch("specdec.loading.ranks.start", side_effect=AssertionError("started")),
        pytest.raises(ValueError, match="decode_context_parallel_size must divide"),
    ):
        SpecDecoder.from_pretrained(*pair, TREE, device="cpu", **BOTH)


def test_backends_that_read_whole_sequences_are_refused(zoos: dict[type[Zoo], Zoo]) -> None:
    """Keeps out: flash-attn over a cache of which it would read what another rank keeps."""
    from specdec.attention.capabilities import TABLE, faults
    from specdec.attention.capability import Feature
    from specdec.attention.needs import AttentionNeeds

    needs = AttentionNeeds(torch.device("cuda"), torch.bfloat16, (9, 0), features=frozenset({Feature.CONTEXT_PARALLEL}))
    refusing = {name for name, c in TABLE.items() if any("whole sequences" in fault.problem for fault in faults(c, needs))}
    assert refusing == set(TABLE) - {"torch", "triton"}
