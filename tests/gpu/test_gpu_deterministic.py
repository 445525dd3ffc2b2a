"""deterministic=True on a GPU: texts in bfloat16 that depend on nothing but the target, the prompt and the seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toolkit.checkpoints.gpt_oss import save_gpt_oss
from toolkit.checkpoints.mixtures import MixtureZoo
from toolkit.deepseek import DEEPSEEKS, SPARSES, DeepseekZoo, SparseZoo, save_sparse
from toolkit.models import Zoo, ragged_prompts
from toolkit.parallel.gpus import in_turn

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.shipped import draft_folder, prompts_file, target_folder

pytestmark = pytest.mark.gpu

SAMPLINGS = [
    SamplingParams(max_tokens=80, ignore_eos=True),
    SamplingParams(max_tokens=80, ignore_eos=True, temperature=0.9, top_p=0.9, seed=3),
]
WAYS: list[tuple[SpecConfig, dict[str, Any]]] = [
    (SpecConfig(5, 1, 6), {"max_batch_size": 8}),
    (SpecConfig(5, 4, 16), {"max_batch_size": 1, "cuda_graphs": "step", "prefill_chunk": 16}),
    (SpecConfig(3, 8, 32), {"max_batch_size": 5, "page_size": 7, "prefix_caching": True}),
    (SpecConfig(7, 10, 60), {"max_batch_size": 16, "cuda_graphs": False, "page_size": "sequence"}),
]


def texts(decoder: SpecDecoder, prompts: list[Any], **more: Any) -> list[list[list[int]]]:
    return [[out.token_ids for out in decoder.generate(prompts, sampling, **more)] for sampling in SAMPLINGS]


def test_the_shipped_pair_writes_one_text() -> None:
    """Keeps out: anything by which the batch, a tree, a chunk, a graph or a page moves a logit's last bit."""
    prompts = [json.loads(line)["prompt"] for line in prompts_file().read_text().splitlines()[:12]]

    def load(spec: SpecConfig, **settings: Any) -> SpecDecoder:
        options = {"device": "cuda", "dtype": "bfloat16", "max_seq_len": 256, "deterministic": True, **settings}
        return SpecDecoder.from_pretrained(target_folder(), draft_folder(), spec, **options)

    want = texts(load(SpecConfig(5, 4, 16), max_batch_size=1), prompts, speculate=False)
    assert texts(load(SpecConfig(5, 4, 16), max_batch_size=12), prompts, speculate=False) == want
    for spec, settings in WAYS:
        decoder = load(spec, **settings)
        for _ in range(2):  # the second run replays graphs of chunks, and finds kept prefixes
            assert texts(decoder, prompts) == want, (spec, settings)


@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", "qwen2", "qwen3", "diffllama", "v2-lite", "v3-no-q-lora", "v32", "glm-shared", "gpt-oss", "ernie"],
)
def test_families_write_one_text(zoo: Zoo, family: str, tmp_path: Path) -> None:
    """Keeps out: windows, sinks, biases, norms of heads, experts, routers in float32, latents and chosen keys that passes
    compute in other orders."""
    zoo = DeepseekZoo(tmp_path) if family in DEEPSEEKS else SparseZoo(tmp_path) if family in SPARSES else zoo
    if family == "ernie":
        zoo = MixtureZoo(tmp_path)
    if family == "gpt-oss":
        zoo = Zoo(tmp_path)
        save_gpt_oss(tmp_path / "made")[1].rename(tmp_path / family)
    if family in SPARSES:
        save_sparse(tmp_path / family, family, q_lora_rank=24)  # rows of matrices must be multiples of 8 numbers
    prompts = ragged_prompts(40, 6, seed=2)
    settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "deterministic": True, "page_size": 4}
    want = texts(zoo.decoder(family, "eagle3", SpecConfig(3, 1, 4), max_batch_size=1, **settings), prompts, speculate=False)
    for spec in (SpecConfig(3, 1, 4), SpecConfig(3, 2, 6)):
        assert texts(zoo.decoder(family, "eagle3", spec, max_batch_size=6, prefill_chunk=7, **settings), prompts) == want


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("family", "sharing"), [("llama", "auto"), ("v2-lite", "auto"), ("v2-lite", "experts"), ("minimax", "tensor")]
)
def test_two_ranks_write_one_text(zoo: Zoo, family: str, sharing: str, tmp_path: Path) -> None:
    """Keeps out: an exchange whose sum or norm depends on how many rows meet.  Other bits than one rank's are right."""
    zoo, prompts = DeepseekZoo(tmp_path) if family in DEEPSEEKS else zoo, ragged_prompts(40, 3, seed=2)
    zoo = MixtureZoo(tmp_path) if family == "minimax" else zoo
    settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "deterministic": True, "tensor_parallel_size": 2}
    settings["expert_parallel"] = sharing
    with (
        in_turn(),
        zoo.decoder(family, "eagle3", SpecConfig(3, 2, 6), max_batch_size=3, prefill_chunk=7, **settings) as decoder,
    ):
        alone = [texts(decoder, [prompt], speculate=False) for prompt in prompts]
        want = [sum(each, []) for each in zip(*alone, strict=True)]
        assert texts(decoder, prompts) == want
