"""The exchange of partial states of attention in context parallelism.

Each rank attends with the queries of all ranks' heads to the tokens that it keeps, so every head has a partial state (out, lse)
on each rank.  An all-to-all brings a head's partial states to the rank that owns the head, which merges them by their lse, in
the order of ranks.  Where every rank owns all heads, an all-gather brings all states to all ranks.

Shapes: T queries, H heads of one rank, D ranks, E value dim, L key dim, X = E + the elements that an lse takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.attention.state import AttentionState
from specdec.ops.launch import use_kernels
from specdec.parallel.group import Group

LSE_BYTES = 16  # of an lse after its output, so that every row is aligned


def all_to_all_states(partial: AttentionState, group: Group) -> AttentionState:
    """The state [T, H, E] of this rank's heads over the tokens of all ranks: an all-to-all, then a merge.

    partial: the state [T, D * H, E] of all ranks' heads over the tokens that this rank keeps.
    """
    if use_kernels(partial.out_THD):
        from specdec.attention.context_parallel.symmetric_triton import can_exchange, launch_all_to_all_states
        from specdec.parallel.symmetric.group import SymmetricGroup

        if isinstance(group, SymmetricGroup) and can_exchange(group.inbox, partial):
            return launch_all_to_all_states(group.inbox, group.rank, group.nanoseconds, partial)
    return merge_ranks(group.all_to_all(pack_states(partial, group.size)), partial.out_THD.shape[2])


def gather_states(partial: AttentionState, group: Group) -> AttentionState:
    """The state [T, H, E] over the tokens of all ranks, where each rank has all heads: the same on all of them, bit for bit.

    partial: the state [T, H, E] over the tokens that this rank keeps.
    """
    return merge_ranks(group.all_gather(pack_states(partial, 1)[0]), partial.out_THD.shape[2])


def pack_states(partial: AttentionState, ranks: int) -> Tensor:
    """[D, T, H, X]: for each rank its heads' outputs, each with its lse beside it, whose bytes are kept as they are."""
    (T, heads, E), out = partial.out_THD.shape, partial.out_THD
    shape = ranks, T, heads // ranks, E + LSE_BYTES // out.itemsize
    if use_kernels(out):
        from specdec.attention.context_parallel.all_to_all_triton import launch_pack

        return launch_pack(partial, shape)
    states_DTHX = out.new_zeros(shape)
    lse_THY = partial.lse_TH.to(torch.float64 if out.itemsize == 8 else torch.float32)[..., None].view(out.dtype)
    states_DTHX[..., :E] = out.unflatten(1, (ranks, -1)).transpose(0, 1)
    states_DTHX[..., E : E + lse_THY.shape[2]] = lse_THY.unflatten(1, (ranks, -1)).transpose(0, 1)
    return states_DTHX


def merge_ranks(states_DTHX: Tensor, value_dim: int) -> AttentionState:
    """Attention over the keys of all ranks, from what `pack_states` made of the states of each.  A query that read none is
    empty.
    """
    if use_kernels(states_DTHX):
        from specdec.attention.context_parallel.all_to_all_triton import launch_merge

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
