"""States that travel between ranks: packing keeps them, and merging gives attention over all ranks' keys."""

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.parallel.ranks import ThreadGroup, on_ranks
from torch import Tensor

from specdec.attention.context_parallel.all_to_all import all_to_all_states, merge_ranks, pack_states
from specdec.attention.context_parallel.all_to_all_triton import launch_merge, launch_pack
from specdec.attention.state import AttentionState

T, H, D, E = 5, 3, 4, 24


def partial_states(dtype: torch.dtype) -> tuple[list[AttentionState], Tensor, Tensor]:
    """For each rank a state of all heads, and the whole's output and lse.  Some queries see no key on some ranks, or on any."""
    dice = torch.Generator().manual_seed(3)
    keys = [torch.randn(T, D * H, 6, generator=dice, dtype=torch.float64).mul(4) for _ in range(D)]
    values = [torch.randn(T, D * H, 6, E, generator=dice, dtype=torch.float64) for _ in range(D)]
    keys[0][:2], keys[2][1:3] = -torch.inf, -torch.inf
    for each in keys:
        each[4] = -torch.inf

    def softmax(scores: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().where(lse[..., None] > -torch.inf, 0.0)
        return (weights[..., None] * of).sum(2), lse

    out, lse = softmax(torch.cat(keys, 2), torch.cat(values, 2))
    states = []
    for each in map(softmax, keys, values):
        o, s = each[0].to(dtype), each[1] if dtype == torch.float64 else each[1].float()
        o[s == -torch.inf] = torch.nan  # what a rank without a key left there must not matter
        states.append(AttentionState(o.to(DEVICE), s.to(DEVICE)))
    return states, out, lse


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_exchanged_states_are_attention_over_all_keys(dtype: torch.dtype) -> None:
    """Keeps out: NaN of a rank without a key; heads that get another rank's; an lse rounded to the outputs' type."""
    states, out_THE, lse_TH = partial_states(dtype)

    def on_rank(group: ThreadGroup) -> AttentionState:
        return all_to_all_states(states[group.rank], group)

    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3}[dtype]
    for rank, state in enumerate(on_ranks(D, on_rank)):
        own = slice(rank * H, (rank + 1) * H)
        torch.testing.assert_close(state.out_THD.double().cpu(), out_THE[:, own], atol=tolerance, rtol=0)
        torch.testing.assert_close(state.lse_TH.double().cpu(), lse_TH[:, own], atol=1e-5, rtol=1e-6)


def test_nan_of_a_read_key_is_not_hidden() -> None:
    """Keeps out: a target that is not finite on one rank, whose text goes on as if nothing had been there."""
    states, _, _ = partial_states(torch.float32)
    pieces = torch.stack([pack_states(AttentionState(each.out_THD.cpu(), each.lse_TH.cpu()), D)[1] for each in states])
    pieces[1, 3] = torch.nan
    for state in (merge_ranks(pieces, E), launch_merge(pieces.to(DEVICE), E)):
        assert bool(state.out_THD[3].isnan().all()) and bool(state.lse_TH[3].isnan().all())
        assert not bool(state.out_THD[[0, 1, 2, 4]].isnan().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernels_equal_their_definition(dtype: torch.dtype) -> None:
    """Keeps out: a row in another rank's piece; an lse beside its place; NaN of a state whose lse is -inf."""
    states, _, _ = partial_states(dtype)
    on_cpu = [AttentionState(each.out_THD.cpu(), each.lse_TH.cpu()) for each in states]
    pieces = torch.stack([pack_states(each, D)[1] for each in on_cpu])
    for each, mine in zip(on_cpu, states, strict=True):
        want, got = pack_states(each, D), launch_pack(mine, (D, T, H, E + 16 // dtype.itemsize)).cpu()
        words = E * dtype.itemsize // 4
        assert torch.equal(got[..., :E].nan_to_num(7), want[..., :E].nan_to_num(7))
        assert torch.equal(got.view(torch.float32)[..., words], want.view(torch.float32)[..., words])
    want, got = merge_ranks(pieces, E), launch_merge(pieces.to(DEVICE), E)
    torch.testing.assert_close(got.out_THD.cpu(), want.out_THD, atol=1e-3 if dtype == torch.float16 else 1e-6, rtol=0)
    torch.testing.assert_close(got.lse_TH.cpu(), want.lse_TH)
