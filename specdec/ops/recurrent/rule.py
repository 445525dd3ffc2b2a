"""Rules of recurrent layers, over trees, over parts of prompts, over whole rows: what all of them have in common.

A head's state S is [K, V].  A token with log-decay g and key k turns it into exp(g) S + k (x) u, and reads q S of the new one.
Of a delta rule u = beta (v - k exp(g) S), of others u = v.  A log-decay is a number a head, or one for each channel of keys.

No node of a tree needs a state of its own.  With D_i the log-decays summed along node i's path, and sums over the path alone:

    u_i   = beta_i (v_i - exp(D_i) k_i S - sum over j above i of (k_i . exp(D_i - D_j) k_j) u_j)
    out_i = exp(D_i) q_i S + sum over j above i, and i, of (q_i . exp(D_i - D_j) k_j) u_j

so S is read once, whatever the tree.  A sum adds a path to it: exp(D_last) S + sum over j of exp(D_last - D_j) k_j (x) u_j.
A part of a prompt is a chain, cut into blocks.  Everything is computed in the states' dtype.

This module knows no projection and no kernel: a rule's own module makes RuleInputs of what a layer gives, and chooses kernels.

Shapes: as of states.py.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.ops.recurrent.conv import Convolution
from specdec.ops.recurrent.states import ChunkSteps, LayerStates, RuleStates, TreeSteps

BLOCK = 64  # tokens of a chain that are computed together


class RuleInputs(NamedTuple):
    """What a rule reads of tokens, in the states' dtype.

    q_BNGK: queries, scaled.  k_BNGK: keys.  v_BNHV: values.  decay_BNH: log-decays, at most 0: [B, N, H], or [B, N, H, K].
    beta_BNH: strengths of a delta rule; None: the rule adds values as they are.
    """

    q_BNGK: Tensor
    k_BNGK: Tensor
    v_BNHV: Tensor
    decay_BNH: Tensor
    beta_BNH: Tensor | None = None

    def run(self, begin: int, end: int) -> RuleInputs:
        """Those of some tokens of each row."""
        q, k, v, decay = (x[:, begin:end] for x in self[:4])
        return RuleInputs(q, k, v, decay, None if self.beta_BNH is None else self.beta_BNH[:, begin:end])

    @property
    def q_BNHK(self) -> Tensor:
        return of_value_heads(self.q_BNGK, self.v_BNHV.shape[2])

    @property
    def k_BNHK(self) -> Tensor:
        return of_value_heads(self.k_BNGK, self.v_BNHV.shape[2])

    @property
    def decay_BNHK(self) -> Tensor:
        """[B, N, H, K], or [B, N, H, 1]."""
        return self.decay_BNH if self.decay_BNH.dim() == 4 else self.decay_BNH[..., None]


class RecurrentRule(NamedTuple):
    """What a rule's module computes for a layer, [T, H, V], of what the convolution made and of the layer's gates.

    trees: of trees' nodes; parts: of parts of prompts; both with the layer's memory and a pass's steps.
    rows: of whole rows, [B, N, H, V], with key heads and their width; differentiable.
    convolved_trees: of trees' nodes, of what the convolution reads, with its weights and the layer's whole memory; None: nobody
    computes both at once.
    """

    trees: Callable[[Tensor, Any, RuleStates, TreeSteps], Tensor]
    parts: Callable[[Tensor, Any, RuleStates, ChunkSteps], Tensor]
    rows: Callable[[Tensor, Any, int, int], Tensor]
    convolved_trees: Callable[[Tensor, Convolution, Any, LayerStates, TreeSteps], Tensor] | None = None


def of_value_heads(x_BNGK: Tensor, heads: int) -> Tensor:
    """[B, N, H, K]: each key head serves neighbouring value heads."""
    return x_BNGK.repeat_interleave(heads // x_BNGK.shape[2], dim=2)


def without_broken(tokens: RuleInputs) -> tuple[RuleInputs, Tensor]:
    """(the tokens with zeros for what is not finite, which outputs these say nothing of [B, N, H, V]).

    A node of a tree whose numbers overflow must reach no node beside it, and masks are products, through which NaN goes.  No
    text goes on after it: its own output is NaN.
    """
    q, k, v, decay, beta = tokens
    q_sound, k_sound = (x.isfinite().all(-1, keepdim=True) for x in (q, k))
    sound_BNH1 = of_value_heads(q_sound & k_sound, v.shape[2]) & tokens.decay_BNHK.isfinite().all(-1, keepdim=True)
    if beta is not None:
        sound_BNH1 = sound_BNH1 & beta.isfinite()[..., None]
        beta = beta.where(sound_BNH1[..., 0], 0)
    sound_BNHV = sound_BNH1 & v.isfinite()
    decay = decay.where(sound_BNH1 if decay.dim() == 4 else sound_BNH1[..., 0], 0)
    return RuleInputs(q.where(q_sound, 0), k.where(k_sound, 0), v.where(sound_BNHV, 0), decay, beta), sound_BNHV


def on_paths(state_BHKV: Tensor, tokens: RuleInputs, mask_BNN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs [B, N, H, V], u [B, N, H, V], log-decays summed along each node's path, shaped as the tokens').

    mask_BNN: bool, whether node j is i or above i.
    """
    q_BNHK, k_BNHK, decay_BNHK = tokens.q_BNHK, tokens.k_BNHK, tokens.decay_BNHK
    summed_BNHK = torch.einsum("bij,bjhk->bihk", mask_BNN.to(decay_BNHK.dtype), decay_BNHK)
    faded_BNHK = summed_BNHK.exp()
    # Of nodes on different branches the difference may be large: it never meets exp.
    apart_BNNHK = (summed_BNHK[:, :, None] - summed_BNHK[:, None]).masked_fill(~mask_BNN[..., None, None], -torch.inf)
    fading_BNNHK = apart_BNNHK.exp()
    u_BHNV = tokens.v_BNHV.transpose(1, 2)
    if tokens.beta_BNH is not None:
        beta_BNH1 = tokens.beta_BNH[..., None]
        kk_BHNN = faded_products(k_BNHK, k_BNHK, fading_BNNHK)
        system_BHNN = (beta_BNH1.transpose(1, 2) * kk_BHNN).tril(-1)
        right_BNHV = beta_BNH1 * (tokens.v_BNHV - torch.einsum("bnhk,bhkv->bnhv", k_BNHK * faded_BNHK, state_BHKV))
        u_BHNV = torch.linalg.solve_triangular(system_BHNN, right_BNHV.transpose(1, 2), upper=False, unitriangular=True)
    qk_BHNN = faded_products(q_BNHK, k_BNHK, fading_BNNHK)
    out_BNHV = torch.einsum("bnhk,bhkv->bnhv", q_BNHK * faded_BNHK, state_BHKV) + (qk_BHNN @ u_BHNV).transpose(1, 2)
    return out_BNHV, u_BHNV.transpose(1, 2), summed_BNHK.view_as(tokens.decay_BNH)


def faded_products(x_BNHK: Tensor, k_BNHK: Tensor, fading_BNNHK: Tensor) -> Tensor:
    """[B, H, N, N]: of each x with each key, as faded as the x sees it.  fading_BNNHK: [.., K], or [.., 1]."""
    if fading_BNNHK.shape[-1] == 1:
        return torch.einsum("bihk,bjhk->bhij", x_BNHK, k_BNHK) * fading_BNNHK[..., 0].permute(0, 3, 1, 2)
    return torch.einsum("bihk,bijhk,bjhk->bhij", x_BNHK, fading_BNNHK, k_BNHK)


def with_path(state_BHKV: Tensor, k_BEHK: Tensor, u_BEHV: Tensor, decay_BEH: Tensor, count_B: Tensor) -> Tensor:
    """The states after the first count_B tokens of a path each.  decay_BEH: log-decays summed along it, [B, E, H] or more."""
    decay_BEHK = decay_BEH if decay_BEH.dim() == 4 else decay_BEH[..., None]
    places_E = torch.arange(k_BEHK.shape[1], dtype=torch.int64, device=count_B.device)
    on_BE11 = (places_E < count_B[:, None])[..., None, None]
    at_B = (count_B.long() - 1).clamp(min=0)
    last_BHK = decay_BEHK.take_along_dim(at_B[:, None, None, None], dim=1)[:, 0].where(count_B[:, None, None] > 0, 0)
    factor_BEHK = (last_BHK[:, None] - decay_BEHK).masked_fill(~on_BE11, -torch.inf).exp()
    k, u = (x.where(on_BE11, 0) for x in (k_BEHK, u_BEHV))  # other places may hold NaN
    return last_BHK.exp()[..., None] * state_BHKV + torch.einsum("behk,behv->bhkv", k * factor_BEHK, u)


def over_trees(tokens: RuleInputs, memory: RuleStates, steps: TreeSteps) -> Tensor:
    """[B, N, H, V]: each node's output, in the states' dtype.

    The pending path is added to the state, and the nodes leave what a later pass needs to add theirs.
    """
    heads, nodes = memory.state_PHKV.shape[1], steps.parents_BN.shape[1]
    left_B = steps.read_B.where(steps.count_B > 0, 0)
    at_BE = left_B[:, None], steps.path_BE
    k_BEHK = of_value_heads(memory.k_LNGK[at_BE], heads)
    state_BHKV = with_path(
        memory.state_PHKV[steps.read_B], k_BEHK, memory.u_LNHV[at_BE], memory.decay_LNH[at_BE], steps.count_B
    )
    sound, sound_BNHV = without_broken(tokens)
    out_BNHV, u_BNHV, summed_BNH = on_paths(state_BHKV, sound, ancestors(steps))
    memory.state_PHKV.index_copy_(0, steps.write_B, state_BHKV)
    for kept, new in ((memory.k_LNGK, tokens.k_BNGK), (memory.u_LNHV, u_BNHV), (memory.decay_LNH, summed_BNH)):
        kept[steps.write_B, :nodes] = new
    return out_BNHV.masked_fill(~sound_BNHV, torch.nan)


def ancestors(steps: TreeSteps) -> Tensor:
    """[B, N, N] bool: whether node j is i or above i."""
    parents_BN = steps.parents_BN
    B, N = parents_BN.shape
    nodes_N = torch.arange(N, dtype=torch.int64, device=parents_BN.device)
    mask_BNN = (nodes_N == nodes_N[:, None]).expand(B, N, N)
    above_BN = parents_BN
    for _ in range(steps.max_depth):
        mask_BNN = mask_BNN | (nodes_N == above_BN[..., None])
        above_BN = parents_BN.gather(1, above_BN)
    return mask_BNN


def over_parts(tokens: RuleInputs, memory: RuleStates, steps: ChunkSteps) -> Tensor:
    """[T, H, V]: each token's output, in the states' dtype; that of padding is anything.  tokens: of all parts, as one row."""
    out_THV, cu = torch.zeros_like(tokens.v_BNHV[0]), steps.cu_B1.tolist()
    for b, (read, write, keep, after) in enumerate(
        zip(*(x.tolist() for x in (steps.read_B, steps.write_B, steps.keep_B, steps.after_B)), strict=True)
    ):
        state, borders = memory.state_PHKV[read][None], (cu[b], cu[b] + after, cu[b + 1])
        for (begin, end), number in zip(pairwise(borders), (keep, write), strict=True):
            out_1NHV, state = run_chain(state, tokens.run(begin, end))
            out_THV[begin:end] = out_1NHV[0]
            memory.state_PHKV[number] = state[0]
    return out_THV


def run_chain(state_BHKV: Tensor, tokens: RuleInputs) -> tuple[Tensor, Tensor]:
    """(outputs [B, N, H, V], the states after all tokens), in blocks of a chain."""
    B, N = tokens.v_BNHV.shape[:2]
    outputs = [tokens.v_BNHV[:, :0]]
    for begin in range(0, N, BLOCK):
        block = tokens.run(begin, min(begin + BLOCK, N))
        count = block.v_BNHV.shape[1]
        causal_BNN = torch.ones(count, count, dtype=torch.bool, device=state_BHKV.device).tril().expand(B, count, count)
        out_BNHV, u_BNHV, summed_BNH = on_paths(state_BHKV, block, causal_BNN)
        outputs.append(out_BNHV)
        counts_B = torch.full((B,), count, dtype=torch.int32, device=state_BHKV.device)
        state_BHKV = with_path(state_BHKV, block.k_BNHK, u_BNHV, summed_BNH, counts_B)
    return torch.cat(outputs, dim=1), state_BHKV


def over_rows(tokens: RuleInputs) -> Tensor:
    """[B, N, H, V]: whole rows from their first token on, without states that anybody keeps; differentiable."""
    B, _, H, V = tokens.v_BNHV.shape
    return run_chain(tokens.v_BNHV.new_zeros(B, H, tokens.k_BNGK.shape[3], V), tokens)[0]
