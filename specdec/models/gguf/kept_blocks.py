"""Matrices of a GGUF file that stay in few bits, if asked: their blocks hold just what our own quantised values and scales
hold.

All other blocks, and matrices whose neighbours in a product are stored in another way, are dequantised at load, as all are by
default: on an H200 a plain step of the 8B shape takes 3.6 ms dequantised, and 7.5, 4.6 and 5.2 with Q8_0, Q4_0 and MXFP4,
which take a half or a quarter of the memory (benchmarks/products/README.md).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

import torch

from specdec.models.config import ModelConfig
from specdec.models.gguf.blocks import KEPT
from specdec.models.gguf.experts import EXPERTS
from specdec.models.gguf.file import GgufFile
from specdec.models.gguf.tensors import names_of
from specdec.models.schemes.rows import QuantisedRows
from specdec.models.schemes.rules import Quantization, Rule
from specdec.models.schemes.source import FLOAT32, Outline, TensorSource, take_bytes

METHOD, BLOCKS = "gguf", "blocks"  # the latter: the choice of `quantize`
GROUP_SIZE = 32  # columns of a block, which share a scale
_TOGETHER = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
_MATRICES = (*_TOGETHER, "o_proj", "down_proj", "lm_head")


@dataclass(frozen=True)
class GgmlBlocks:
    """A matrix as ggml's blocks of 32 columns, one tensor of bytes.  type: one of KEPT."""

    type: str
    packs: ClassVar[bool] = True
    in_act_order: ClassVar[bool] = False
    may_end: ClassVar[tuple[str, ...]] = ()

    def endings(self, source: TensorSource, name: str) -> tuple[str, ...]:
        return ("weight",)

    def has(self, source: TensorSource, name: str) -> bool:
        return f"{name}.weight" in source and source.dtype(f"{name}.weight") == "U8"

    def read(self, source: TensorSource, name: str, shape: tuple[int, int], device: torch.device) -> QuantisedRows | None:
        (N, K), kept = shape, KEPT[self.type]
        if K % GROUP_SIZE:
            raise source.refuse(f"{name}.weight", f"must have rows of whole blocks of {GROUP_SIZE} columns, got {K} columns")
        blocks = take_bytes(source, f"{name}.weight", (N, K // GROUP_SIZE * kept.bytes)).to(device)
        if not source.has_data:
            return None
        qvalues, scales = kept.parts(blocks.view(-1, kept.bytes))
        rows = QuantisedRows(kept.kind, qvalues.reshape(N, K), scales.reshape(N, K // GROUP_SIZE), None, GROUP_SIZE)
        source.landed(f"{name}.weight", rows.scales_PG)
        return rows

    def outline(self, source: TensorSource, name: str) -> Outline:
        (rows, row_bytes), kept = source.shape(f"{name}.weight"), KEPT[self.type]
        scale_bytes = FLOAT32 if kept.kind == "e2m1" else 2
        return Outline(kept.kind, rows, row_bytes // kept.bytes * GROUP_SIZE, GROUP_SIZE, scale_bytes)

    def group_size_of(self, columns: int) -> int:
        return GROUP_SIZE

    def describe(self) -> str:
        return f"{KEPT[self.type].kind}, a scale for each {GROUP_SIZE} columns ({self.type})"


def blocks_of(file: GgufFile, config: ModelConfig) -> Quantization | None:
    """How a model's matrices are stored if they stay in the file's blocks where a kernel of ours reads these; None: none are.

    config: the file's, as a target.
    """
    together: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name, other in names_of(file).items():
        place, _, part = other.removesuffix(".weight").rpartition(".")
        if other.endswith(".weight") and part in _MATRICES and EXPERTS not in other:
            together[f"{place}.{_TOGETHER.get(part, part)}"][other.removesuffix(".weight")] = file.tensors[name].type
    rules = []
    for types in together.values():
        if len(set(types.values())) == 1 and (found := next(iter(types.values()))) in KEPT:
            rules += [(Rule("exact", name), GgmlBlocks(found)) for name in types]
    own = config.quantization.formats if config.quantization else ()  # of gpt-oss's experts
    return Quantization(METHOD, (*rules, *own)) if rules else None
