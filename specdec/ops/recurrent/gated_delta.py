"""The gated delta rule (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5: over trees, over parts of prompts, over whole rows.

A head's state S is [K, V].  A token with log-decay g, key k of length 1, value v and strength beta turns it into
exp(g) S + k (x) u with u = beta (v - k exp(g) S), and reads q S of the new one.

No node of a tree needs a state of its own.  With D_i the log-decays summed along node i's path, and sums over the path alone:

    u_i   = beta_i (v_i - exp(D_i) k_i S - sum over j above i of exp(D_i - D_j) (k_i . k_j) u_j)
    out_i = exp(D_i) q_i S + sum over j above i, and i, of exp(D_i - D_j) (q_i . k_j) u_j

so S is read once, whatever the tree.  A sum adds a path to it: exp(D_last) S + sum over j of exp(D_last - D_j) k_j (x) u_j.
A part of a prompt is a chain, cut into blocks.  Everything is computed in the states' dtype.  On a GPU each pass over trees is
one or two launches of trees/rule_triton.py, and each over parts two of chunks/launch.py.

Shapes: as of states.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import use_kernels
from specdec.ops.recurrent.states import ChunkSteps, LayerStates, TreeSteps

BLOCK = 64  # tokens of a chain that are computed together
EPS = 1e-6  # of the length of queries and keys


class Gates(NamedTuple):
    """What a layer's gates are made of.  a_TH, b_TH: projections.  A_log_H, dt_bias_H: weights, in float32 or wider."""

    a_TH: Tensor
    b_TH: Tensor
    A_log_H: Tensor
    dt_bias_H: Tensor

    def decay_TH(self, dtype: torch.dtype) -> Tensor:
        """Each token's log-decay, at most 0."""
        return -self.A_log_H.to(dtype).exp() * F.softplus(self.a_TH.to(dtype) + self.dt_bias_H.to(dtype))

    def beta_TH(self, dtype: torch.dtype) -> Tensor:
        """Each token's strength, between 0 and 1."""
        return self.b_TH.sigmoid().to(dtype)


class RuleInputs(NamedTuple):
    """What the rule reads of tokens: queries (scaled), keys, values, log-decays, strengths."""

    q_BNHK: Tensor
    k_BNGK: Tensor
    v_BNHV: Tensor
    decay_BNH: Tensor
    beta_BNH: Tensor

    def run(self, begin: int, end: int) -> RuleInputs:
        """Those of some tokens of each row."""
        return RuleInputs(*(x[:, begin:end] for x in self))

    @property
    def k_BNHK(self) -> Tensor:
        return of_value_heads(self.k_BNGK, self.v_BNHV.shape[2])


def read_tokens(y_BNC: Tensor, gates: Gates, key_heads: int, key_width: int, dtype: torch.dtype) -> RuleInputs:
    """From the convolution's outputs.  gates: of the same tokens, one after the other."""
    B, N, _ = y_BNC.shape
    value_heads, keys = gates.A_log_H.shape[0], key_heads * key_width
    q, k, v = (x.unflatten(-1, (heads, -1)).to(dtype) for x, heads in zip(
        y_BNC.split((keys, keys, y_BNC.shape[2] - 2 * keys), dim=-1), (key_heads, key_heads, value_heads), strict=True
    ))  # fmt: skip
    q, k = (x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt() for x in (q, k))
    decay_BNH, beta_BNH = (x.view(B, N, value_heads) for x in (gates.decay_TH(dtype), gates.beta_TH(dtype)))
    return RuleInputs(of_value_heads(q * key_width**-0.5, value_heads), k, v, decay_BNH, beta_BNH)


def of_value_heads(x_BNGK: Tensor, heads: int) -> Tensor:
    """[B, N, H, K]: each key head serves neighbouring value heads."""
    return x_BNGK.repeat_interleave(heads // x_BNGK.shape[2], dim=2)


def without_broken(tokens: RuleInputs) -> tuple[RuleInputs, Tensor]:
    """(the tokens with zeros for what is not finite, which outputs these say nothing of [B, N, H, V]).

    A node of a tree whose numbers overflow must reach no node beside it, and masks are products, through which NaN goes.  No
    text goes on after it: its own output is NaN.
    """
    q, k_BNGK, v, decay, beta = tokens
    sound_BNG1 = k_BNGK.isfinite().all(-1, keepdim=True)
    sound_BNH1 = q.isfinite().all(-1, keepdim=True) & of_value_heads(sound_BNG1, v.shape[2])
    sound_BNH1 = sound_BNH1 & (decay.isfinite() & beta.isfinite())[..., None]
    sound_BNHV, sound_BNH = sound_BNH1 & v.isfinite(), sound_BNH1[..., 0]
    k_BNGK = k_BNGK.where(sound_BNG1, 0)
    inputs = RuleInputs(
        q.where(sound_BNH1, 0), k_BNGK, v.where(sound_BNHV, 0), decay.where(sound_BNH, 0), beta.where(sound_BNH, 0)
    )
    return inputs, sound_BNHV


def on_paths(state_BHKV: Tensor, tokens: RuleInputs, mask_BNN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs [B, N, H, V], u [B, N, H, V], log-decays summed along each node's path [B, N, H]).

    mask_BNN: bool, whether node j is i or above i.
    """
    k_BNHK, mask_BHNN = tokens.k_BNHK, mask_BNN[:, None]
    summed_BNH = mask_BNN.to(tokens.decay_BNH.dtype) @ tokens.decay_BNH
    by_head_BHN = summed_BNH.transpose(1, 2)
    # Of nodes on different branches the difference may be large: it never meets exp.
    decay_BHNN = (by_head_BHN[..., None] - by_head_BHN[..., None, :]).masked_fill(~mask_BHNN, -torch.inf).exp()
    faded_BNH1 = summed_BNH.exp()[..., None]
    kk_BHNN = torch.einsum("bihk,bjhk->bhij", k_BNHK, k_BNHK) * decay_BHNN
    system_BHNN = (tokens.beta_BNH.transpose(1, 2)[..., None] * kk_BHNN).tril(-1)
    right_BNHV = tokens.beta_BNH[..., None] * (tokens.v_BNHV - torch.einsum("bnhk,bhkv->bnhv", k_BNHK * faded_BNH1, state_BHKV))
    u_BHNV = torch.linalg.solve_triangular(system_BHNN, right_BNHV.transpose(1, 2), upper=False, unitriangular=True)
    qk_BHNN = torch.einsum("bihk,bjhk->bhij", tokens.q_BNHK, k_BNHK) * decay_BHNN
    out_BNHV = torch.einsum("bnhk,bhkv->bnhv", tokens.q_BNHK * faded_BNH1, state_BHKV) + (qk_BHNN @ u_BHNV).transpose(1, 2)
    return out_BNHV, u_BHNV.transpose(1, 2), summed_BNH


def with_path(state_BHKV: Tensor, k_BEHK: Tensor, u_BEHV: Tensor, decay_BEH: Tensor, count_B: Tensor) -> Tensor:
    """The states after the first count_B tokens of a path each.  decay_BEH: log-decays summed along it."""
    places_E = torch.arange(k_BEHK.shape[1], dtype=torch.int64, device=count_B.device)
    on_BE = places_E < count_B[:, None]
    last_BH = decay_BEH.gather(1, (count_B.long() - 1).clamp(min=0)[:, None, None].expand(-1, 1, decay_BEH.shape[2]))[:, 0]
    last_BH = last_BH.where(count_B[:, None] > 0, 0)
    factor_BEH = (last_BH[:, None] - decay_BEH).masked_fill(~on_BE[..., None], -torch.inf).exp()
    k, u = (x.where(on_BE[..., None, None], 0) for x in (k_BEHK, u_BEHV))  # other places may hold NaN
    return last_BH.exp()[..., None, None] * state_BHKV + torch.einsum("behk,behv->bhkv", k * factor_BEH[..., None], u)


def tree_outputs(y_TC: Tensor, gates: Gates, layer: LayerStates, steps: TreeSteps) -> Tensor:
    """[T, H, V]: each node's output, in y's dtype.  y_TC: what the convolution made of queries, keys and values.

    The pending path is added to the state, and the nodes leave what a later pass needs to add theirs.
    """
    if use_kernels(y_TC):
        from specdec.ops.recurrent.trees.rule_triton import launch_tree_rule

        return launch_tree_rule(y_TC, gates, layer, steps)
    B, N = steps.parents_BN.shape
    (_, heads, width, _), key_heads = layer.state_PHKV.shape, layer.k_LNGK.shape[2]
    tokens = read_tokens(y_TC.view(B, N, -1), gates, key_heads, width, layer.state_PHKV.dtype)
    left_B = steps.read_B.where(steps.count_B > 0, 0)
    at_BE = left_B[:, None], steps.path_BE
    k_BEHK = of_value_heads(layer.k_LNGK[at_BE], heads)
    state_BHKV = with_path(layer.state_PHKV[steps.read_B], k_BEHK, layer.u_LNHV[at_BE], layer.decay_LNH[at_BE], steps.count_B)
    sound, sound_BNHV = without_broken(tokens)
    out_BNHV, u_BNHV, summed_BNH = on_paths(state_BHKV, sound, ancestors(steps))
    out_BNHV = out_BNHV.masked_fill(~sound_BNHV, torch.nan)
    layer.state_PHKV.index_copy_(0, steps.write_B, state_BHKV)
    for kept, new in ((layer.k_LNGK, tokens.k_BNGK), (layer.u_LNHV, u_BNHV), (layer.decay_LNH, summed_BNH)):
        kept[steps.write_B, :N] = new
    return out_BNHV.flatten(0, 1).to(y_TC.dtype)


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


def chunk_outputs(y_TC: Tensor, gates: Gates, layer: LayerStates, steps: ChunkSteps) -> Tensor:
    """[T, H, V]: each token's output, in y's dtype; that of padding is anything."""
    if use_kernels(y_TC):
        from specdec.ops.recurrent.chunks.launch import launch_chunk_rule

        return launch_chunk_rule(y_TC, gates, layer, steps)
    (_, heads, width, value_width), key_heads = layer.state_PHKV.shape, layer.k_LNGK.shape[2]
    out_THV, cu = y_TC.new_zeros(len(y_TC), heads, value_width), steps.cu_B1.tolist()
    for b, (read, write, keep, after) in enumerate(
        zip(*(x.tolist() for x in (steps.read_B, steps.write_B, steps.keep_B, steps.after_B)), strict=True)
    ):
        here = slice(cu[b], cu[b + 1])
        own = gates._replace(a_TH=gates.a_TH[here], b_TH=gates.b_TH[here])
        tokens = read_tokens(y_TC[None, here], own, key_heads, width, layer.state_PHKV.dtype)
        state, parts = layer.state_PHKV[read][None], [range(after), range(after, cu[b + 1] - cu[b])]
        for part, number in zip(parts, (keep, write), strict=True):
            out_1NHV, state = run_chain(state, tokens.run(part.start, part.stop))
            out_THV[cu[b] + part.start : cu[b] + part.stop] = out_1NHV[0].to(y_TC.dtype)
            layer.state_PHKV[number] = state[0]
    return out_THV


def run_chain(state_BHKV: Tensor, tokens: RuleInputs) -> tuple[Tensor, Tensor]:
    """(outputs [B, N, H, V], the states after all tokens), in blocks of a chain."""
    B, N = tokens.decay_BNH.shape[:2]
    outputs = [tokens.v_BNHV[:, :0]]
    for begin in range(0, N, BLOCK):
        block = tokens.run(begin, min(begin + BLOCK, N))
        count = block.decay_BNH.shape[1]
        causal_BNN = torch.ones(count, count, dtype=torch.bool, device=state_BHKV.device).tril().expand(B, count, count)
        out_BNHV, u_BNHV, summed_BNH = on_paths(state_BHKV, block, causal_BNN)
        outputs.append(out_BNHV)
        counts_B = torch.full((B,), count, dtype=torch.int32, device=state_BHKV.device)
        state_BHKV = with_path(state_BHKV, block.k_BNHK, u_BNHV, summed_BNH, counts_B)
    return torch.cat(outputs, dim=1), state_BHKV


def row_outputs(y_BNC: Tensor, gates: Gates, key_heads: int, key_width: int, value_width: int) -> Tensor:
    """[B, N, H, V], in y's dtype: whole rows from their first token on, without states that anybody keeps; differentiable."""
    dtype = torch.promote_types(y_BNC.dtype, torch.float32)
    tokens = read_tokens(y_BNC, gates, key_heads, key_width, dtype)
    heads = gates.A_log_H.shape[0]
    state_BHKV = torch.zeros(len(y_BNC), heads, key_width, value_width, dtype=dtype, device=y_BNC.device)
    return run_chain(state_BHKV, tokens)[0].to(y_BNC.dtype)
