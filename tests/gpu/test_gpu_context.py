"""Two ranks on two GPUs that divide every sequence: they write what one writes, in captured rounds and chunks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from toolkit.deepseek import DeepseekZoo, SparseZoo
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts
from toolkit.parallel.gpus import in_turn

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.loading.pair import WantedPair
from specdec.loading.ranks import Ranks
from specdec.options import EngineOptions
from specdec.prompts.tokenizer import Tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2)]

TREE, CHAIN = SpecConfig(num_steps=3, topk=3, num_draft_tokens=8), SpecConfig(num_steps=3, topk=1, num_draft_tokens=4)
PROMPTS = [prompt * 2 for prompt in ragged_prompts(40, 3, seed=5)]
SAMPLINGS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=9, temperature=0.9, seed=3),
    SamplingParams(max_tokens=12),
]


def options_of(size: int) -> EngineOptions:
    return EngineOptions(
        device="cuda", dtype="float32", max_seq_len=120, max_batch_size=4, page_size=4, prefill_chunk=24, prefix_caching=True,
        tensor_parallel_size=size, decode_context_parallel_size=size,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _in_turn() -> Iterator[None]:
    with in_turn():
        yield


@pytest.fixture(scope="module")
def zoos(tmp_path_factory: pytest.TempPathFactory) -> dict[type[Zoo], Zoo]:
    return {zoo: zoo(tmp_path_factory.mktemp("zoo")) for zoo in (Zoo, DeepseekZoo, SparseZoo)}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Processes that every test of the module has load another pair."""
    found = Ranks(options_of(2))
    yield found
    found.close()


def decoder_of(target: Path, draft: Path, spec: SpecConfig, size: int, ranks: Ranks | None = None) -> SpecDecoder:
    wanted = WantedPair(target, draft, spec, options_of(size))
    model, head, settings, folder = (ranks or Ranks(options_of(1))).load(wanted)
    return SpecDecoder(model, head, settings, Tokenizer(folder), ranks)


@pytest.mark.parametrize("spec", [TREE, CHAIN], ids=["tree", "chain"])
@pytest.mark.parametrize(
    ("zoo", "name"),
    [(DeepseekZoo, "v3"), (Zoo, "llama-dim80-biases"), (Zoo, "mistral"), (SparseZoo, "v32")],
    ids=["latents", "heads", "window", "indexer"],
)
def test_ranks_write_what_one_writes(
    zoo: type[Zoo], name: str, spec: SpecConfig, zoos: dict[type[Zoo], Zoo], ranks: Ranks
) -> None:
    """Keeps out: an exchange that a captured round leaves out; a commit that only an eager round gets right; a window that a
    captured round keeps where it was; a choice of keys that ranks make differently."""
    pair = zoos[zoo].target(name), zoos[zoo].head(name, "eagle3")
    with decoder_of(*pair, spec, 1) as decoder:
        want = [out.token_ids for out in decoder.generate(PROMPTS, SAMPLINGS)]
    with decoder_of(*pair, spec, 2, ranks) as decoder:
        for _ in range(2):  # the second time replays what the first has captured, and begins after cached pages
            outs = decoder.generate(PROMPTS, SAMPLINGS)
            assert [out.token_ids for out in outs] == want
        assert Driver(decoder).num_graphs("round") > 0 and any(out.stats.cached_tokens for out in outs)
