"""What the ranks that divide a sequence exchange in each layer: queries one way, states of attention the other.

Each rank answers the queries of all ranks' heads over the tokens that it keeps, so every head gets a state from each rank.
The states are merged by their lse, in the order of ranks, where the head lives.

Shapes: T queries, H heads of one rank, D ranks, E value dim, L key dim, X = E + the numbers that an lse takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.attention.state import AttentionState
from specdec.ops.launch import use_kernels
from specdec.parallel.group import Group

LSE_BYTES = 16  # that an lse takes beside its output, so that every row is aligned


def swap_states(partial: AttentionState, group: Group) -> AttentionState:
    """The state [T, H, E] of this rank's heads over the tokens of all ranks.

    partial: the state [T, D * H, E] of all ranks' heads over the tokens that this rank keeps.
    """
    if use_kernels(partial.out_THD):
        from specdec.attention.context.swap_triton import launch_swap_states, takes_states
        from specdec.parallel.symmetric.group import SymmetricGroup

        if isinstance(group, SymmetricGroup) and takes_states(group.inbox, partial):
            return launch_swap_states(group.inbox, group.rank, group.nanoseconds, partial)
    return merged(group.swap(packed(partial, group.size)), partial.out_THD.shape[2])


def packed(partial: AttentionState, ranks: int) -> Tensor:
    """[D, T, H, X]: for each rank its heads' outputs, each with its lse beside it, whose bytes are kept as they are."""
    (T, heads, E), out = partial.out_THD.shape, partial.out_THD
    shape = ranks, T, heads // ranks, E + LSE_BYTES // out.itemsize
    if use_kernels(out):
        from specdec.attention.context.exchange_triton import launch_pack

        return launch_pack(partial, shape)
    states_DTHX = out.new_zeros(shape)
    lse_THY = partial.lse_TH.to(torch.float64 if out.itemsize == 8 else torch.float32)[..., None].view(out.dtype)
    states_DTHX[..., :E] = out.unflatten(1, (ranks, -1)).transpose(0, 1)
    states_DTHX[..., E : E + lse_THY.shape[2]] = lse_THY.unflatten(1, (ranks, -1)).transpose(0, 1)
    return states_DTHX


def merged(states_DTHX: Tensor, value_dim: int) -> AttentionState:
    """Attention over the keys of all ranks, from what `packed` made of the states of each.  A query that read none is empty."""
    if use_kernels(states_DTHX):
        from specdec.attention.context.exchange_triton import launch_merge

        return launch_merge(states_DTHX, value_dim)
    out_DTHE, itemsize = states_DTHX[..., :value_dim], states_DTHX.itemsize
    exact = torch.float64 if itemsize == 8 else torch.float32
    lse_DTH = states_DTHX[..., value_dim : value_dim + exact.itemsize // itemsize].contiguous().view(exact)[..., 0]
    top_TH = lse_DTH.amax(0)
    weight_DTH = (lse_DTH - torch.where(top_TH == -torch.inf, 0.0, top_TH)).exp()
    total_TH = weight_DTH.sum(0)
    weight_DTH = weight_DTH / torch.where(total_TH == 0, 1.0, total_TH)
    is_read_DTH1 = lse_DTH[..., None] != -torch.inf  # NaN of a key that was read stays NaN
    out_THE = (out_DTHE.to(exact) * weight_DTH[..., None]).where(is_read_DTH1, 0.0).sum(0)
    return AttentionState(out_THE.to(states_DTHX.dtype), top_TH + total_TH.log())
