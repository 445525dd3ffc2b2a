"""The store of wide heads, of which a part is rotated, of values of another width, and of what else values need.

The kernel runs in Triton's interpreter where there is no GPU.  The oracle is float64, written out head by head.

Shapes: T tokens, Q query heads, K kv heads, D head dim, E value dim, P positions, X slots.
"""

from typing import NamedTuple

import pytest
import torch
from toolkit.kernels import DEVICE
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.split_cache import SplitLayout
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.ops.rope import HeadPrep, Rotation, ValuePrep, rotary_table

P, X, EPS = 50, 40, 1e-5


class Layer(NamedTuple):
    """rotated: values of a head that are turned."""

    Q: int
    K: int
    D: int
    E: int
    rotated: int
    normed: bool = False
    values: ValuePrep = ValuePrep()


LAYERS = {
    "Gemma 4 full": Layer(8, 1, 512, 512, 128, True, ValuePrep(normed=True, are_keys=True)),
    "Gemma 4 windowed": Layer(4, 2, 256, 256, 256, True, ValuePrep(normed=True)),
    "MiMo-V2-Flash": Layer(8, 2, 192, 128, 64, values=ValuePrep(scale=0.707)),
    "wider values": Layer(3, 3, 24, 40, 24, True, ValuePrep(True, 2.0)),
    "narrow": Layer(5, 1, 16, 16, 8, values=ValuePrep(scale=0.5, are_keys=True)),
}


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def expected(layer: Layer, rows_TC: Tensor, angles_T: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in float64.  angles_T: [T, D / 2]."""
    Q, K, D, E, _, normed, values = layer
    rows = rows_TC.double()
    qk = rows[:, : (Q + K) * D].view(-1, Q + K, D)
    v = qk[:, Q:] if values.are_keys else rows[:, (Q + K) * D :].view(-1, K, E)
    v = (rms(v) if values.normed else v) * values.scale
    if normed:
        qk = rms(qk) * weight.double()
    low, high = qk.chunk(2, -1)
    cos, sin = angles_T.double().cos()[:, None], angles_T.double().sin()[:, None]
    qk = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    return qk[:, :Q], qk[:, Q:], v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("T", [1, 5, 70])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=list(LAYERS))
@pytest.mark.parametrize("backend", [TorchBackend(), TritonBackend(6)], ids=["torch", "triton"])
def test_equals_the_definition(backend: Backend, layer: Layer, T: int, dtype: torch.dtype) -> None:
    """Keeps out: a half of a wide head that is not turned, values that are turned or not normed, read from keys that were
    changed, or stored with a key's stride; and a write beside a token's slot."""
    Q, K, D, E, rotated, normed, values = layer
    generator = torch.Generator().manual_seed(T)
    width = (Q + K) * D + (0 if values.are_keys else K * E)
    rows_TC = torch.randn(T, width + 8, generator=generator).to(DEVICE, dtype)[:, :width]  # of a longer row
    freq = torch.cat((1.0 / 100 ** (torch.arange(rotated // 2) / rotated), torch.zeros(D // 2 - rotated // 2)))
    positions_T = torch.randint(P, (T,), generator=generator).to(DEVICE)
    weight = (1 + 0.2 * torch.randn(Q + K, D, generator=generator)).to(DEVICE, dtype)
    prep = HeadPrep(Rotation(rotary_table(freq, P).to(DEVICE, dtype), positions_T), K, weight if normed else None, EPS, values)
    want = expected(layer, rows_TC, torch.outer(positions_T.cpu(), freq).to(DEVICE), weight)
    slots = max(X, T + 3)
    kept = torch.full((slots, K * (D + E)), torch.nan, dtype=dtype, device=DEVICE)
    slots_T = torch.randperm(slots, generator=generator)[:T].to(DEVICE)
    if D == E:
        view = MHAView(kept.view(slots, 2, K, D))
        got_TQD = backend.store(view, rows_TC.unflatten(1, (-1, D)), slots_T, prep)
    else:
        split = SplitLayout(K, D, E, dtype).view(0, {"kv": kept})
        got_TQD = backend.store_rows(split, rows_TC, slots_T, prep)
    got_k, got_v = kept[slots_T].split((K * D, K * E), 1)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    for got, wanted in zip((got_TQD, got_k.view(T, K, D), got_v.view(T, K, E)), want, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)
    assert int(kept.isfinite().all(1).sum()) == T and int(kept.isnan().all(1).sum()) == slots - T
