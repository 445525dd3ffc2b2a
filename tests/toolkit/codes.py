"""Random weights of 8 and 4 bits, and the product with one in float64."""

import torch
from torch import Tensor

from specdec.ops.quantised.codes import Codes, Kind, codes_a_word, dequantise, pack
from toolkit.kernels import DEVICE

# kind, columns of a scale, whether there are zeros
FORMATS: tuple[tuple[Kind, int, bool], ...] = (
    ("e4m3", 0, False), ("e4m3", 128, False), ("int8", 0, False), ("int8", 32, True), ("int4", 128, False),
    ("int4", 32, True), ("int4", 0, False), ("e2m1", 32, False), ("e2m1", 16, False),
)  # fmt: skip


def random_weight(kind: Kind, group: int, zeros: bool, O: int, I: int) -> Codes:
    """Every code occurs, but for NaN; scales are within a factor of two of 1 / 16."""
    generator = torch.Generator().manual_seed(O + I)
    codes = torch.randint(0, 16 if codes_a_word(kind) == 4 else 256, (O, I), dtype=torch.uint8, generator=generator)
    if kind == "e4m3":
        codes[(codes & 127) == 127] = 126
    groups = -(-I // (group or I))
    scales = (1 + torch.rand(O, groups, generator=generator)) / (2000 if kind in ("e4m3", "int8") else 32)
    below = torch.randint(-8, 8, (O, groups), dtype=torch.int8, generator=generator) if zeros else None
    return Codes(kind, pack(kind, codes).to(DEVICE), scales.to(DEVICE), None if below is None else below.to(DEVICE), I, group)


def exact(x: Tensor, weight: Codes, gated: bool, bias: Tensor | None = None) -> Tensor:
    want = x.double() @ dequantise(weight, torch.float64).T + (0 if bias is None else bias.double())
    if not gated:
        return want
    gate, up = want.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())
