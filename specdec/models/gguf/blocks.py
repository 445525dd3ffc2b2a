"""The dense values that GGML's blocks stand for, type by type: 32 or 256 neighbouring columns of a row lie in one block of
bytes.

A block has a scale in float16, and where a type has sub-blocks, each of these has a whole number that multiplies it; some types
have minima besides, which are taken off.  Three types hold just what our own quantised values hold (`KEPT`), so that
these may stay in memory; the others are dequantised when they are loaded.  This module knows no file and no model.

Here and not by `gguf`'s own functions, because these take 2.3 to 3.3 times as long (benchmarks/products/README.md).  The
layouts are those of ggml-common.h (llama.cpp).  Products are taken in float32 in the order of ggml's own code, so that values
are equal to its own bit for bit.

Shapes: N blocks, b columns of a block, S sub-blocks of a block, s columns of a sub-block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.products.formats.experts import power_of_two
from specdec.ops.products.formats.quantised import OFFSETS, Kind, unscaled

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # the types without blocks
PIECE = 1 << 19  # values that are computed at once: their intermediate values stay in a processor's cache


class BlockType(NamedTuple):
    """columns: of a block.  bytes: of a block.  dense: from bytes [N, bytes] to float32 [N, b]."""

    columns: int
    bytes: int
    dense: Callable[[Tensor], Tensor]


class KeptType(NamedTuple):
    """A type whose blocks are 32 quantised values of our kinds and a scale.  parts: values uint8 [N, 32], scales [N, 1]."""

    kind: Kind
    bytes: int
    parts: Callable[[Tensor], tuple[Tensor, Tensor]]


def dense_values(rows: Tensor, type: str) -> Tensor:
    """The dense values of rows of bytes, uint8 [rows, bytes of a row], in the dtype of their type, float32 of blocks."""
    return rows.view(FLOATS[type]) if type in FLOATS else dequantised(type, rows.view(-1, BLOCKS[type].bytes))


def dequantised(type: str, blocks_NB: Tensor) -> Tensor:
    """The dense values of blocks of a type, float32 [N, b].  blocks_NB: uint8."""
    known = BLOCKS[type]
    out_Nb = torch.empty(len(blocks_NB), known.columns, dtype=torch.float32, device=blocks_NB.device)
    count = PIECE // known.columns
    for piece, out in zip(blocks_NB.split(count), out_Nb.split(count)):
        out.copy_(known.dense(piece))
    return out_Nb


def _half(bytes_N2: Tensor) -> Tensor:
    """Numbers in float16, two bytes each, as float32 [N, 1]."""
    return bytes_N2.contiguous().view(torch.float16).float()


def _nibbles(bytes_NJ: Tensor) -> Tensor:
    """[N, 2 J]: the low halves of the bytes, then the high ones."""
    return torch.cat((bytes_NJ & 15, bytes_NJ >> 4), dim=1)


def _bits(bytes_N4: Tensor) -> Tensor:
    """[N, 32]: the bits of four bytes, the lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bytes_N4.device)
    return (bytes_N4[:, :, None] >> shifts & 1).flatten(1)


# ---- blocks of 32 columns ----


def _q8_0_parts(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return blocks[:, 2:] ^ OFFSETS["int8"], blocks[:, :2].contiguous().view(torch.float16)


def _q4_0_parts(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _nibbles(blocks[:, 2:]), blocks[:, :2].contiguous().view(torch.float16)


def _mxfp4_parts(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _nibbles(blocks[:, 1:]), power_of_two(blocks[:, :1])


def _dequantise(kept: KeptType) -> Callable[[Tensor], Tensor]:
    def dense(blocks: Tensor) -> Tensor:
        qvalues, scales = kept.parts(blocks)
        return unscaled(kept.kind, qvalues) * scales.float()

    return dense


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).float() * _half(blocks[:, :2]) + _half(blocks[:, 2:4])


def _q5_0(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return (q.float() - 16) * _half(blocks[:, :2])


def _q5_1(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return q.float() * _half(blocks[:, :2]) + _half(blocks[:, 2:4])


# ---- blocks of 256 columns ----


def _scales_and_minima(bytes_N12: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of 6 bits each, [N, 8]: of the last four, the high two bits lie above the first four's."""
    first, second, last = bytes_N12[:, :4], bytes_N12[:, 4:8], bytes_N12[:, 8:]
    scales = torch.cat((first & 63, last & 15 | first >> 6 << 4), dim=1)
    return scales, torch.cat((second & 63, last >> 4 | second >> 6 << 4), dim=1)


def _with_minima(blocks: Tensor, q_NSs: Tensor) -> Tensor:
    """Q4_K and Q5_K: scale * q - minimum, for each sub-block of 32 columns."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scales, minima = _half(blocks[:, :2]) * scales, _half(blocks[:, 2:4]) * minima
    return (q_NSs.float() * scales[..., None] - minima[..., None]).flatten(1)


def _pairs(bytes_N128: Tensor) -> Tensor:
    """[N, 8, 32]: of each run of 32 bytes the low halves, then the high ones."""
    runs = bytes_N128.unflatten(1, (4, 32))
    return torch.stack((runs & 15, runs >> 4), dim=2).flatten(1, 2)


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, _pairs(blocks[:, 16:]))


def _q5_k(blocks: Tensor) -> Tensor:
    sub_block = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    high = blocks[:, 16:48, None].transpose(1, 2) >> sub_block & 1  # bit S of byte s
    return _with_minima(blocks, _pairs(blocks[:, 48:]) | high << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    low = blocks[:, :128].unflatten(1, (2, 64))
    low = torch.cat((low & 15, low >> 4), dim=2).unflatten(2, (4, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts & 3
    q_NSs = (low | high << 4).view(-1, 16, 16).float() - 32
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8)
    return (q_NSs * scales[..., None]).flatten(1)


KEPT = {
    "Q8_0": KeptType("int8", 34, _q8_0_parts),
    "Q4_0": KeptType("int4", 18, _q4_0_parts),
    "MXFP4": KeptType("e2m1", 17, _mxfp4_parts),
}
BLOCKS = {
    **{name: BlockType(32, kept.bytes, _dequantise(kept)) for name, kept in KEPT.items()},
    "Q4_1": BlockType(32, 20, _q4_1),
    "Q5_0": BlockType(32, 22, _q5_0),
    "Q5_1": BlockType(32, 24, _q5_1),
    "Q4_K": BlockType(256, 144, _q4_k),
    "Q5_K": BlockType(256, 176, _q5_k),
    "Q6_K": BlockType(256, 210, _q6_k),
}
