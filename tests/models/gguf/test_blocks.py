"""Blocks of every type are dequantised to what `gguf` makes of them, bit for bit, for any bytes."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from toolkit.checkpoints.gguf_files import random_blocks

from specdec.models.gguf.blocks import BLOCKS, KEPT, PIECE, dequantised
from specdec.ops.products.formats.quantised import unscaled


@pytest.mark.parametrize("type", BLOCKS)
def test_dense_values_are_those_of_gguf(type):
    """Keeps out: a nibble, a high bit or a scale of a sub-block taken from beside its place; sums in another order."""
    kind = gguf.GGMLQuantizationType[type]
    assert (BLOCKS[type].columns, BLOCKS[type].bytes) == gguf.GGML_QUANT_SIZES[kind]
    blocks = random_blocks(type, PIECE // BLOCKS[type].columns + 3, 0)  # more than one piece
    assert torch.equal(dequantised(type, torch.from_numpy(blocks)), torch.from_numpy(dequantize(blocks, kind)))


@pytest.mark.parametrize("type", KEPT)
def test_quantised_values_and_scales_give_the_dense_values(type):
    """Keeps out: a type that is kept quantised and would need a zero point, another group, or more bits than our kinds have."""
    kept, blocks = KEPT[type], torch.from_numpy(random_blocks(type, 100, 1))
    qvalues, scales = kept.parts(blocks)
    assert qvalues.dtype == torch.uint8 and qvalues.shape == (100, 32) and scales.shape == (100, 1)
    assert torch.equal(unscaled(kept.kind, qvalues) * scales.float(), dequantised(type, blocks))


def test_extremes_of_mxfp4():
    """Keeps out: exponents below 2, where ggml's half of a power of two is no ordinary number, read as another scale."""
    blocks = np.zeros((256, 17), np.uint8)
    blocks[:, 0], blocks[:, 1:] = np.arange(256), 0x7F
    wanted = torch.from_numpy(dequantize(blocks[:254], gguf.GGMLQuantizationType.MXFP4))
    assert torch.equal(dequantised("MXFP4", torch.from_numpy(blocks[:254])), wanted)
