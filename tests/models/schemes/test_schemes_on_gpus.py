"""Targets in 8 and 4 bits on a GPU: every format in every graph mode, as trees and chains, in float32 and in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toolkit.models import ragged_prompts, save_eagle3
from toolkit.oracles.quantised import SCHEMES, save_quantised

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.config import GraphMode

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
TREE, CHAIN = SpecConfig(5, 4, 16), SpecConfig(5, 1, 6)
CELLS: tuple[tuple[GraphMode, SpecConfig], ...] = (("round", TREE), ("step", CHAIN), (False, TREE))
LARGE = dict(num_hidden_layers=3, hidden_size=1024, intermediate_size=2048, head_dim=64)  # for kernels of few rows
PROMPTS = ragged_prompts(40, 5, seed=11)
PARAMS = [
    SamplingParams(max_tokens=24), SamplingParams(max_tokens=9, temperature=0.8, seed=3), SamplingParams(max_tokens=16),
    SamplingParams(max_tokens=1), SamplingParams(max_tokens=20, temperature=1.0, seed=4),
]  # fmt: skip


def load(pair: tuple[Path, Path], spec: SpecConfig, device: str = DEVICE, **settings: Any) -> SpecDecoder:
    merged = {"dtype": "float32", "max_seq_len": 128, "max_batch_size": 4, "smoke": False, **settings}
    return SpecDecoder.from_pretrained(*pair, spec, device=device, **merged)


@pytest.mark.parametrize("name", list(SCHEMES))
def test_a_quantised_target_writes_one_text_everywhere(tmp_path: Path, name: str) -> None:
    """Keeps out: quantised values that a captured pass reads where they lay before; a kernel's shape that only some numbers of
    rows take.

    In bfloat16 the texts may part at near-ties alone.  Every token is held to the target in float32 there.
    """
    target, plain = save_quantised(tmp_path, SCHEMES[name], num_hidden_layers=3)
    pair = target, save_eagle3(tmp_path / "head", plain)
    with load(pair, TREE, "cpu", max_batch_size=1) as decoder:
        expected = [out.token_ids for out in decoder.generate(PROMPTS, PARAMS, speculate=False)]
    for mode, spec in CELLS:
        with load(pair, spec, cuda_graphs=mode) as decoder:
            for speculate in (True, True, False):  # the second time everything is replayed
                outputs = decoder.generate(PROMPTS, PARAMS, speculate=speculate)
                assert [out.token_ids for out in outputs] == expected, (mode, spec)
        with load(pair, spec, cuda_graphs=mode, dtype="bfloat16") as decoder:
            found = decoder.verify([prompt for prompt, one in zip(PROMPTS, PARAMS) if one.max_tokens > 1], PARAMS[0])
            assert found.passed, (mode, spec, found.prompts)


@pytest.mark.parametrize("options", [{"quantize": "fp8"}, {"quantize": "int4"}, {"quantize": "int4", "draft_quantize": "fp8"}])
def test_rounded_models_write_one_text_everywhere(tmp_path: Path, options: dict[str, Any]) -> None:
    """Keeps out: a quantised head whose levels no graph holds, and partials of a quantised product that nobody adds up."""
    _, plain = save_quantised(tmp_path, SCHEMES["fp8 channel"], **LARGE)
    pair = plain, save_eagle3(tmp_path / "head", plain)
    with load(pair, TREE, "cpu", max_batch_size=1, **options) as decoder:
        expected = [out.token_ids for out in decoder.generate(PROMPTS, PARAMS, speculate=False)]
    for mode, spec in CELLS:
        with load(pair, spec, cuda_graphs=mode, **options) as decoder:
            assert [out.token_ids for out in decoder.generate(PROMPTS, PARAMS)] == expected, (mode, spec)
        with load(pair, spec, cuda_graphs=mode, dtype="bfloat16", **options) as decoder:
            assert decoder.verify(PROMPTS, PARAMS[0]).passed, (mode, spec)
