"""BLOOM, MPT and Falcon write what transformers writes, token for token, in float32: plain, through chains and through trees.

Keeps out: a node whose distances are counted by its number or its slot; slopes that chunks of prompts, shared prefixes or
rounds miss; a table or a head that takes its target's biases.
"""

from pathlib import Path
from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.families import assert_greedy
from toolkit.models import ragged_prompts
from toolkit.own_attention.targets import oracle, save, save_head

from specdec import SamplingParams, SpecConfig, SpecDecoder

MAX_TOKENS = [24, 9, 16, 1, 20]
PROMPTS = ragged_prompts(40, len(MAX_TOKENS), seed=11)
SAMPLING = [SamplingParams(max_tokens=n) for n in MAX_TOKENS]
# name, draft, shape, page size
CASES: list[tuple[str, str, tuple[int, int, int], int]] = [
    ("bloom", "eagle3", (5, 4, 16), 5),
    ("mpt-storywriter", "eagle3", (4, 3, 14), 16),
    ("falcon-rw", "eagle3", (5, 4, 16), 1),
    ("bloom", "ngram", (4, 1, 5), 16),
    ("mpt", "ngram", (4, 3, 14), 1),
    ("falcon-rw", "eagle1", (5, 1, 6), 5),
    ("falcon-7b", "eagle3", (4, 3, 14), 16),
    ("falcon-40b", "eagle3", (4, 3, 14), 5),
]


def decoder_of(root: Path, name: str, draft: str, shape: tuple[int, int, int], **settings: Any) -> SpecDecoder:
    target = save(root / name, name)
    head = draft if draft == "ngram" else save_head(root / draft, target, draft)
    merged = dict(device="cpu", dtype="float32", max_seq_len=64, max_batch_size=3, prefill_chunk=7) | settings
    return SpecDecoder.from_pretrained(target, head, SpecConfig(*shape), **merged)


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("name", "draft", "shape", "page_size"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_generate_equals_transformers(
    tmp_path: Path, name: str, draft: str, shape: tuple[int, int, int], page_size: int
) -> None:
    """More prompts than places, in chunks, so that rows leave and enter in the middle of others' rounds."""
    with decoder_of(tmp_path, name, draft, shape, page_size=page_size) as decoder:
        hf = oracle(tmp_path / name)
        outputs = decoder.generate(PROMPTS, SAMPLING)
        for out, max_tokens in zip(outputs, MAX_TOKENS, strict=True):
            assert len(out.token_ids) == max_tokens
            assert_greedy(hf, out)
        assert sum(out.stats.drafted for out in outputs) > 0
        Driver(decoder).assert_nothing_leaked()
        plain = decoder.generate(PROMPTS, SAMPLING, speculate=False)
        assert [out.token_ids for out in plain] == [out.token_ids for out in outputs]


def test_kept_prefixes(tmp_path: Path) -> None:
    """Prompts that begin like an earlier one compute the rest alone, and count distances into the pages that they found."""
    with decoder_of(tmp_path, "mpt", "eagle3", (3, 3, 8), page_size=4, prefix_caching=True) as decoder:
        hf, start = oracle(tmp_path / "mpt"), max(PROMPTS, key=len)
        prompts = [[*start, token] for token in (3, 9, 17)]
        decoder.generate(prompts[0], SamplingParams(max_tokens=2))
        for out in decoder.generate(prompts, SamplingParams(max_tokens=12)):
            assert out.stats.cached_tokens >= len(start) // 4 * 4 - 4
            assert_greedy(hf, out)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon-rw"])
def test_in_graphs_on_a_gpu(tmp_path: Path, name: str) -> None:
    """Keeps out: a forward pass of ours that a CUDA graph can't record, and slopes that lie elsewhere at its replay."""
    with decoder_of(tmp_path, name, "eagle3", (4, 3, 14), page_size=16, device="cuda", cuda_graphs="round") as decoder:
        hf = oracle(tmp_path / name)
        for out in decoder.generate(PROMPTS, SAMPLING):
            assert_greedy(hf, out)
