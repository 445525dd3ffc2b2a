"""The kernel that norms and rotates the queries of a layer that stores no keys and values.

Keeps out: a query head left out or rotated twice, a norm row of another head, and a write beyond the queries.

Shapes: T tokens, Q query heads, D head dim, P positions.
"""

import pytest
import torch
from toolkit.kernels import DEVICE

from specdec.attention.kernels.rope_store_triton import launch_rope
from specdec.ops.rope import HeadPrep, Rotation, rotary_table

P = 50


@pytest.mark.slow_cases(keep=6)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("T", "Q", "D"), [(1, 4, 16), (5, 6, 24), (70, 3, 80), (0, 4, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_equals_the_definition(T: int, Q: int, D: int, rotated: bool, normed: bool, dtype: torch.dtype) -> None:
    """Queries are a slice of a longer buffer, whose other rows must stay as they are."""
    generator = torch.Generator().manual_seed(T + Q)
    buffer = torch.randn(T + 2, Q, D, generator=generator).to(DEVICE, dtype)
    table = rotary_table(1.0 / 100 ** (torch.arange(0, D, 2) / D), P).to(DEVICE, dtype)
    positions_T = torch.randint(P, (T,), generator=generator).to(DEVICE)
    kept = torch.float32 if T == 5 else dtype  # a zero-centred norm's weight is wider than what it norms
    weight_QD = (1 + 0.2 * torch.randn(Q, D, generator=generator)).to(DEVICE, kept) if normed else None
    prep = HeadPrep(Rotation(table, positions_T) if rotated else None, 0, weight_QD, 1e-5)
    want_TQD, _ = prep.apply_(buffer[1 : T + 1].clone())
    before = buffer.clone()
    got_TQD = launch_rope(buffer[1 : T + 1], prep)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got_TQD, want_TQD, atol=tolerance, rtol=tolerance)
    assert got_TQD.data_ptr() == buffer[1 : T + 1].data_ptr()
    assert torch.equal(buffer[0], before[0]) and torch.equal(buffer[T + 1], before[T + 1])
