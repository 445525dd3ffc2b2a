"""Whole engines whose caches are not paged (page_size="sequence"): the ids are those over pages, whatever the layers.

Keeps out: a page table of one entry that some builder takes for none; a prompt, a tree or a commit that crosses the 4,096th
slot of a page; a page shorter than a sequence with its look-ahead; a ring of pages where one page holds the sequence.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from toolkit.deepseek import DEEPSEEKS, SPARSES, DeepseekZoo, SparseZoo
from toolkit.driver import Driver
from toolkit.kernels import HAS_GPU, use_kernels_everywhere
from toolkit.models import Zoo, ragged_prompts

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.loading.memory import pool_plan

LONG = 4400
# Target, drafter and shape: chains and trees, windows of target and head, latents, selected keys, 8 bits
CASES: list[tuple[str, str, tuple[int, int, int], dict[str, Any]]] = [
    ("mistral", "eagle3-window", (6, 3, 20), {}),
    ("qwen2", "eagle1", (3, 8, 24), {}),
    ("v3-wide-latents", "eagle3", (4, 1, 5), {"kv_cache_dtype": "fp8_ds_mla"}),
    ("v32", "eagle3", (4, 2, 7), {}),
    ("llama", "eagle1", (3, 2, 7), {"kv_cache_dtype": "int8"}),
]


@pytest.fixture(scope="module")
def zoos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Zoo]:
    made = {"": Zoo(tmp_path_factory.mktemp("heads")), "latents": DeepseekZoo(tmp_path_factory.mktemp("latents"))}
    return {**made, "sparse": SparseZoo(tmp_path_factory.mktemp("sparse"))}


@pytest.mark.slow_cases
@pytest.mark.parametrize(("target", "head", "shape", "settings"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_ids_are_those_over_pages(
    zoos: dict[str, Zoo], target: str, head: str, shape: tuple[int, int, int], settings: dict[str, Any]
) -> None:
    """More requests than rows."""
    zoo = zoos["sparse" if target in SPARSES else "latents" if target in DEEPSEEKS else ""]
    prompts, texts = ragged_prompts(40, 6, seed=3), []
    sampling = [SamplingParams(max_tokens=n) for n in (20, 7, 24, 1, 13, 18)]
    for page_size in (5, "sequence"):
        decoder = zoo.decoder(target, head, SpecConfig(*shape), page_size=page_size, max_batch_size=3, **settings)
        outputs = decoder.generate(prompts, sampling)
        texts.append([(out.token_ids, out.stats.accepted_per_round) for out in outputs])
        Driver(decoder).assert_nothing_leaked()
    assert texts[0] == texts[1]
    resolved = decoder.settings
    assert resolved.pages_per_sequence == 1 and resolved.by_option()["page_size"] == resolved.page_size == 256
    assert Driver(decoder).pages_allocated == 3 + 1, "one of each row, and the dummy page"


def test_a_text_of_more_than_4096_tokens(zoo: Zoo, tmp_path: Path) -> None:
    folder = tmp_path / "long"
    shutil.copytree(zoo.target("mistral"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG}))
    prompts, texts = [[3 + 7 * i % 31 for i in range(4080)], [5, 6, 7] * 11], []
    for page_size in (16, "sequence"):
        settings: dict[str, Any] = dict(device="cpu", dtype="float64", page_size=page_size, max_batch_size=2, smoke=False)
        with SpecDecoder.from_pretrained(folder, "ngram", SpecConfig(4, 2, 7), **settings) as decoder:
            texts.append([out.token_ids for out in decoder.generate(prompts, SamplingParams(max_tokens=40))])
            assert decoder.settings.page_size > 4096 or page_size == 16
    assert texts[0] == texts[1] and len(texts[0][0]) == 40


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="the interpreter's turn; a GPU has tests/gpu")
def test_rounds_through_the_kernels(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ragged_prompts(40, 3, seed=1)[:2]
    use_kernels_everywhere(monkeypatch)
    decoder = zoo.decoder("llama", "eagle3", SpecConfig(2, 3, 9), page_size="sequence", max_batch_size=2)
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=5))
    assert [out.token_ids for out in outputs] == [zoo.greedy("llama", prompt, 24)[:5] for prompt in prompts]


def test_what_needs_pages_is_refused_with_a_page_size_that_works(zoo: Zoo) -> None:
    """Keeps out: a prefix cache that never keeps anything, and a page that ranks divide unevenly."""
    for settings in (dict(prefix_caching=True), dict(tensor_parallel_size=2, decode_context_parallel_size=2)):
        with pytest.raises(ValueError, match="page_size='sequence'; nearest setting that works: page_size=16"):
            zoo.decoder("llama", page_size="sequence", **settings)
    decoder = zoo.decoder("llama", page_size="sequence")
    with pytest.raises(ValueError, match="since a page holds 256 tokens; nearest setting that works: page_size=16"):
        pool_plan([decoder.model.config], decoder.settings, memory=1000)
