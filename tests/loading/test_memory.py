"""The KV pool's plan against what is allocated by it, and against what memory there is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toolkit.heads.block_zoo  # noqa: F401 (the zoo has its heads by name)
from toolkit.checkpoints.plans import plan_memory
from toolkit.driver import Driver
from toolkit.models import Zoo
from toolkit.mtp_layers.targets import MtpZoo
from toolkit.oracles.sharing import SharingZoo
from toolkit.pages import ring_passes_take

from specdec import SpecConfig
from specdec.loading.build import plan_pool
from specdec.loading.memory import KEPT_TOKENS, pool_plan, scratch_bytes, source_bytes
from specdec.models.config import EncoderConfig
from specdec.options import EngineOptions
from specdec.runner.prompts import MAX_BUCKET_STEP

SPEC, SIZES = SpecConfig(3, 2, 6), dict(page_size=4, max_batch_size=3, max_seq_len=160)
PAIRS = [
    (Zoo, "llama", "eagle1-two-layers"), (Zoo, "llama", "ngram"), (Zoo, "qwen2", "eagle1-window"),
    (Zoo, "mistral", "eagle3-window"), (Zoo, "llama", "dflash-mixed"), (MtpZoo, "v3", "mtp"), (MtpZoo, "v3-two", "mtp"),
    (MtpZoo, "mimo-two", "mtp"), (SharingZoo, "windows", "eagle3"), (SharingZoo, "half", "eagle1"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "target", "draft"), PAIRS, ids=str)
def test_a_plan_is_what_caches_take(
    kind: type[Zoo], target: str, draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps out: layers that store nothing counted as others, what a drafter keeps of tokens and pages forgotten, so that
    memory is left idle or runs out; a plan without a GPU that knows no rings."""
    ring_passes_take(8, monkeypatch)
    zoo = kind(tmp_path)
    decoder = zoo.decoder(target, draft, SPEC, **SIZES)
    pool, driver = plan_pool(decoder.model, decoder.head, decoder.settings), Driver(decoder)
    assert pool.bytes == sum(cache.bytes for cache in (driver.cache("target"), *driver.drafter.caches))
    if draft != "ngram":  # a few bytes of each token
        named: Any = draft if draft == "mtp" else zoo.head(target, draft)
        plan = plan_memory(zoo.target(target), named, SPEC, EngineOptions(dtype="float32", **SIZES), 10**9)  # type: ignore[arg-type]
        assert plan.parts["keys and values"] == pool.bytes


@pytest.mark.parametrize("more", ["nothing", "an encoder", "ranks"])
def test_pages_take_what_is_left(zoo: Zoo, more: str) -> None:
    """Keeps out: pages in memory that an encoder's texts, or the scratch of ranks that divide sequences, take too; a page that
    memory would have held."""
    decoder = zoo.decoder("qwen3", "eagle3", SPEC, **SIZES)
    assert decoder.head is not None
    config, settings = decoder.model.config, decoder.settings
    if more == "an encoder":
        config = replace(config, encoder=EncoderConfig(50, (0,), config.head_dim))
    if more == "ranks":
        settings = settings.with_options(tensor_parallel_size=4, decode_context_parallel_size=2, prefill_chunk=20)
    configs = [config, *decoder.head.needs.models]
    whole = pool_plan(configs, settings, 1e12)
    beside = source_bytes(config, settings) + scratch_bytes(config, settings)
    assert (beside > 0) == (more != "nothing")
    for pages in (2, 7, whole.num_pages[0] - 1):
        for less in (0, 1):
            plan = (
                pool_plan(configs, settings, beside + pages * sum(whole.page_bytes) - less) if pages > 2 or not less else None
            )
            assert plan is None or plan.num_pages == (pages - less,)


def test_a_context_parallel_pass_fits_its_scratch(zoo: Zoo) -> None:
    """Keeps out: a padded chunk of prompts, or a batch of trees, longer than the scratch in which its tokens lie."""
    settings = zoo.decoder("qwen3", "eagle3", SPEC, **SIZES).settings
    for chunk, batch in ((20, 3), (2000, 3), (20, 64)):
        sharded = settings.with_options(decode_context_parallel_size=2, prefill_chunk=chunk, max_batch_size=batch)
        assert sharded.scratch_room >= chunk + MAX_BUCKET_STEP and sharded.scratch_room >= (batch + 1) * SPEC.num_draft_tokens
    assert settings.scratch_room == 0


def test_a_host_keeps_no_more_tokens_than_a_gpu(zoo: Zoo) -> None:
    """Keeps out: slot numbers and lists of pages without a bound where a host has memory for many long prompts."""
    decoder = zoo.decoder("llama", **SIZES, prefix_caching=True)
    large = replace(decoder.settings.with_options(max_batch_size=512), max_seq_len=1 << 13)
    plan = pool_plan([decoder.model.config], large, 1e15)
    assert plan.num_pages[0] * large.page_tokens == KEPT_TOKENS
