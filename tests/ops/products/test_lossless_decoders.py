"""Decoders with lossless 12-bit weights on a GPU: every graph mode, as trees and chains, of both models."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.models import ragged_prompts, save_eagle3, save_target
from toolkit.parallel.gpus import in_turn
from torch import Tensor

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.config import GraphMode
from specdec.models.linear import Linear
from specdec.ops.products.lossless import LosslessWeight

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_HOPPER, reason="kernels for Hopper GPUs")]

CELLS: tuple[tuple[GraphMode, SpecConfig], ...] = (
    ("round", SpecConfig(5, 4, 16)), ("step", SpecConfig(5, 1, 6)), (False, SpecConfig(5, 4, 16)),
)  # fmt: skip
SIZES = dict(num_hidden_layers=3, hidden_size=1024, intermediate_size=2048, head_dim=64, vocab_size=96)
PROMPTS = ragged_prompts(40, 5, seed=11)
PARAMS = SamplingParams(max_tokens=24)


def load(pair: tuple[Path, Path], spec: SpecConfig, **settings: Any) -> SpecDecoder:
    options = {"dtype": "bfloat16", "max_seq_len": 128, "max_batch_size": 4, "smoke": False, **settings}
    return SpecDecoder.from_pretrained(*pair, spec, device="cuda", pack_weights=True, **options)


@pytest.mark.parametrize("options", [{}, {"quantize": "fp8"}, {"kv_cache_dtype": "fp8"}, {"prefix_caching": True}], ids=str)
def test_a_decoder_writes_the_target_s_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Keeps out: copies of a weight before it was filled, partials that nobody adds up, passes that read no copy; with the
    target in 8 bits, a head and an output layer without copies.  Every token is held to the target in float32.
    """
    target = save_target(tmp_path / "target", "llama", **SIZES)
    pair = target, save_eagle3(tmp_path / "head", target, intermediate_size=2048)
    read: dict[int, set[int]] = defaultdict(set)  # of each copy, by where it lies: numbers of rows
    launch = LosslessWeight._launch

    def noted(weight: LosslessWeight, x: Tensor, *more: Any) -> Tensor:
        read[weight.lossless.low_NJ.data_ptr()].add(len(x))
        return launch(weight, x, *more)

    monkeypatch.setattr(LosslessWeight, "_launch", noted)
    for mode, spec in CELLS:
        read.clear()
        with load(pair, spec, cuda_graphs=mode, **options) as decoder:
            assert decoder.head is not None
            matrices = [m for model in (decoder.model, decoder.head) for m in model.modules() if isinstance(m, Linear)]
            assert all((matrix.lossless is None) == (matrix.quantised is not None) for matrix in matrices)
            found = decoder.verify(PROMPTS, PARAMS)
            assert found.passed, (mode, spec, found.prompts)
            assert {m.lossless.weight.low_NJ.data_ptr() for m in matrices if m.lossless is not None} == set(read)
        assert max(map(max, read.values())) <= 64


@pytest.mark.ranks(2)
def test_two_ranks_pack_their_shares(tmp_path: Path) -> None:
    """Keeps out: copies of a whole matrix where a rank has a share of it, and partials where ranks exchange sums."""
    target = save_target(tmp_path / "target", "llama", **SIZES)
    pair = target, save_eagle3(tmp_path / "head", target, intermediate_size=2048)
    for mode, spec in CELLS:
        with in_turn(), load(pair, spec, cuda_graphs=mode, tensor_parallel_size=2) as decoder:
            assert decoder.verify(PROMPTS, PARAMS).passed, (mode, spec)
