"""The weighted sum of each token's top-k experts' MLPs, given who was chosen: by which products it is computed.

No shape in this file depends on the values of a tensor, so all of it can run inside CUDA graphs.  This file knows no router.

Shapes: T tokens, H hidden size, E experts, K experts of a token (top_k), F intermediate size of an expert, G = 2F, P = T * K
pairs of a token and an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.models.layers import MLP, ReluMLP
from specdec.models.linear import LinearStack
from specdec.ops.launch import use_kernels
from specdec.ops.operator import is_traced
from specdec.ops.products.experts import (
    PLAIN,
    DenseExperts,
    Experts,
    Form,
    QuantisedExperts,
    SharedExperts,
    SharedOutput,
    by_expert,
    grouped_tiles,
    inputs_of,
    mixture_tiles,
    run_mixture,
    shared_beside,
    sorted_tiles,
)
from specdec.ops.products.grouped import grouped_linear, has_grouped_product, place_pairs
from specdec.ops.products.numerics import FAST, Numerics
from specdec.ops.products.partials import Partials
from specdec.ops.products.routing import Unchosen
from specdec.ops.products.stacked import experts_linear, spread_rows, weighted_sum
from specdec.ops.products.tiles.experts import GroupedTiles, MixtureTiles, StackedTiles


class SharedMLP(NamedTuple):
    """The MLP that every token passes besides its top-k experts, and what weighs its output; None: nothing."""

    mlp: MLP | ReluMLP
    gate_T1: Tensor | None

    def output(self, x_TH: Tensor) -> SharedOutput:
        out_TH = self.mlp(x_TH)
        assert isinstance(out_TH, Tensor)
        return SharedOutput(out_TH, self.gate_T1)

    def beside(self, experts: Experts, tiles: MixtureTiles) -> SharedExperts | None:
        """Its matrices, if the chosen experts' launches take them too."""
        first, down = self.mlp.gate_up_proj if isinstance(self.mlp, MLP) else self.mlp.up_proj, self.mlp.down_proj
        if first.bias is not None or down.bias is not None:
            return None
        return shared_beside(experts, tiles, first.weight, down.weight, self.gate_T1)


MAX_COPIED = 1 << 30  # bytes of experts' weights that gathered_experts may copy in one call


def mixture(
    x_TH: Tensor, topk_weights_TK: Tensor, topk_ids_TK: Tensor, gate_up: LinearStack, down: LinearStack, form: Form = PLAIN,
    numerics: Numerics = FAST, shared: SharedMLP | None = None, partials: bool = False, choice: Unchosen | None = None,
) -> Tensor | Partials:  # fmt: skip
    """[T, H]: the weighted sum of each token's top-k experts, and the shared experts' output, if there are any.

    It is computed by the kernels for experts, or by torch's products.
    gate_up: gate and up projections; up projections alone where the form has no gate.
    topk_ids: numbers of matrices of the stacks.  partials: whether the caller can add up split-K partials.
    choice: where `chooses` says so: the only token's logits, in place of its weights and ids.
    """
    experts = _stored(gate_up, down, form, x_TH.dtype)
    chosen = topk_weights_TK, topk_ids_TK
    if not gate_up.count:  # other ranks hold all experts
        out_TH = torch.zeros_like(x_TH)
    elif (tiles := mixture_tiles(x_TH, experts, topk_ids_TK.shape[1], numerics)) is not None:
        beside = None if shared is None else shared.beside(experts, tiles) or shared.output(x_TH)
        return run_mixture(x_TH, *chosen, experts, tiles, beside, partials, choice)
    elif (stacked := sorted_tiles(x_TH, experts, topk_ids_TK.shape[1], numerics)) is not None:
        assert isinstance(experts, DenseExperts)
        out_TH = ordered_experts(x_TH, *chosen, experts.gate_up, experts.down, form, stacked)
    elif (grouped := grouped_tiles(x_TH, experts, numerics)) is not None:
        assert isinstance(experts, DenseExperts)
        out_TH = placed_experts(x_TH, *chosen, experts.gate_up, experts.down, form, grouped)
    elif isinstance(experts, DenseExperts):
        out_TH = run_experts(x_TH, *chosen, experts.gate_up, experts.down, form)
    elif 3 * topk_ids_TK.numel() <= gate_up.count and not is_traced(x_TH):  # only the experts in use are dequantised
        ids_TK = _existing(topk_ids_TK, gate_up.count, form)
        gate_up_TKGH, down_TKHF = (stack.dense_of(ids_TK, x_TH.dtype) for stack in (experts.gate_up, experts.down))
        out_TH = paired_experts(x_TH, topk_weights_TK, ids_TK, gate_up_TKGH, down_TKHF, form)
    else:
        out_TH = run_experts(x_TH, *chosen, experts.gate_up.dense(x_TH.dtype), experts.down.dense(x_TH.dtype), form)
    return out_TH if shared is None else shared.output(x_TH).added_to(out_TH)


def chooses(x_TH: Tensor, top_k: int, gate_up: LinearStack, down: LinearStack, form: Form, numerics: Numerics) -> bool:
    """Whether the kernels of `mixture` can choose the only token's experts themselves."""
    if is_traced(x_TH) or len(x_TH) != 1 or not gate_up.count:  # a traced pass serves any number of tokens
        return False
    tiles = mixture_tiles(x_TH, _stored(gate_up, down, form, x_TH.dtype), top_k, numerics)
    return tiles is not None and tiles.chooses


def _stored(gate_up: LinearStack, down: LinearStack, form: Form, dtype: torch.dtype) -> Experts:
    if gate_up.qweight is not None and down.qweight is not None:
        return QuantisedExperts(gate_up.qweight, down.qweight, form)
    return DenseExperts(gate_up.dense(dtype), down.dense(dtype), form)


def run_experts(
    x_TH: Tensor, topk_weights_TK: Tensor, topk_ids_TK: Tensor, gate_up_EGH: Tensor, down_EHF: Tensor, form: Form = PLAIN
) -> Tensor:
    """[T, H]: the weighted sum of each token's top-k experts, added up in float32 or wider.

    gate_up_EGH: gate and up projections of each expert, G = 2F rows; the first F rows are the gate's.  form: gate and biases.

    There are three ways to compute the sum.  Where torch has a grouped product for these weights, the function takes that: it
    reads each expert in use once.  Otherwise, with few pairs, it copies each pair's weights: three times the bytes (read,
    written, read again), but only of the experts in use.  Otherwise every expert computes every token and the weights, most of
    them 0, decide what counts: E / K times the arithmetic.

    A traced pass (torch.export, torch.compile) takes the first way in bf16, the only type for which torch can trace it, and the
    last way otherwise: the number of its tokens may vary.
    """
    if is_traced(x_TH):
        traced = grouped_experts if x_TH.dtype == torch.bfloat16 else masked_experts
        return traced(x_TH, topk_weights_TK, topk_ids_TK, gate_up_EGH, down_EHF, form)
    if has_grouped_product((gate_up_EGH, down_EHF)):
        return grouped_experts(x_TH, topk_weights_TK, topk_ids_TK, gate_up_EGH, down_EHF, form)
    E, pairs = gate_up_EGH.shape[0], topk_ids_TK.numel()
    copied = pairs * (gate_up_EGH[0].numel() + down_EHF[0].numel()) * x_TH.element_size()
    if 3 * pairs <= E and copied <= MAX_COPIED:
        return gathered_experts(x_TH, topk_weights_TK, topk_ids_TK, gate_up_EGH, down_EHF, form)
    return masked_experts(x_TH, topk_weights_TK, topk_ids_TK, gate_up_EGH, down_EHF, form)


def grouped_experts(
    x_TH: Tensor, topk_weights_TK: Tensor, topk_ids_TK: Tensor, gate_up_EGH: Tensor, down_EHF: Tensor, form: Form = PLAIN
) -> Tensor:
    """The sum by torch's grouped product.  Pairs are sorted by expert, so the rows of each expert are one block.

    Where the blocks begin and end stays on the device: the host never reads it.
    """
    T, K = topk_ids_TK.shape
    order_P, counts_E = by_expert(topk_ids_TK, len(gate_up_EGH))
    ends_E = counts_E.cumsum(0, dtype=torch.int32)  # rows after the last end, of skipped pairs, are not computed
    rows_PH = x_TH.index_select(0, order_P // K)
    of_P = None
    if form.gate_up_bias is not None:
        of_P = _existing(topk_ids_TK, len(gate_up_EGH), form).flatten().index_select(0, order_P)
    mid_PF = form.activation(_biased(F.grouped_mm(rows_PH, gate_up_EGH.transpose(1, 2), offs=ends_E), form.gate_up_bias, of_P))
    out_PH = _biased(F.grouped_mm(mid_PF, down_EHF.transpose(1, 2), offs=ends_E), form.down_bias, of_P)
    if use_kernels(out_PH) and topk_weights_TK.dtype == torch.float32:
        numbers_P = torch.arange(T * K, dtype=torch.int64, device=order_P.device)
        places_P = torch.empty_like(order_P).index_copy_(0, order_P, numbers_P)
        return weighted_sum(out_PH, topk_weights_TK.contiguous(), places_P)
    in_order_PH = torch.empty_like(out_PH).index_copy_(0, order_P, out_PH)
    return _weighted(in_order_PH.view(T, K, -1), topk_weights_TK, x_TH.dtype, form)


def ordered_experts(
    x_TH: Tensor,
    topk_weights_TK: Tensor,
    topk_ids_TK: Tensor,
    gate_up_EGH: Tensor,
    down_EHF: Tensor,
    form: Form = PLAIN,
    tiles: StackedTiles | None = None,
) -> Tensor:
    """The sum by kernels that add up in one order, whatever tokens are computed beside each other.  On a GPU alone.

    tiles: other ones than the policy's.
    """
    (T, K), E = topk_ids_TK.shape, gate_up_EGH.shape[0]
    order_P, counts_E = by_expert(topk_ids_TK, E)
    of_pairs = order_P, counts_E, K
    mid_PF = experts_linear(x_TH, gate_up_EGH, form.gate_up_bias, *of_pairs, activation=form.activation, tiles=tiles)
    out_PH = experts_linear(mid_PF, down_EHF, form.down_bias, *of_pairs, activation=None, tiles=tiles)
    return weighted_sum(out_PH.view(T, K, -1), topk_weights_TK)


def placed_experts(
    x_TH: Tensor, topk_weights_TK: Tensor, topk_ids_TK: Tensor, gate_up_EGH: Tensor, down_EHF: Tensor, form: Form,
    tiles: tuple[GroupedTiles, GroupedTiles],
) -> Tensor:  # fmt: skip
    """The sum by the kernels for many rows an expert.  On a Hopper GPU alone."""
    places = place_pairs(topk_ids_TK, len(gate_up_EGH))
    rows_RH = spread_rows(x_TH, places.places_P, places.rows)
    first = tiles[inputs_of(form.activation) == 1]  # tiles of a product without a gate leave room for a wider result
    mid_RF = grouped_linear(rows_RH, gate_up_EGH, form.gate_up_bias, places, form.activation, first)
    out_RH = grouped_linear(mid_RF, down_EHF, form.down_bias, places, None, tiles[1])
    return weighted_sum(out_RH, topk_weights_TK.float().contiguous(), places.places_P)


def gathered_experts(
    x_TH: Tensor, topk_weights_TK: Tensor, topk_ids_TK: Tensor, gate_up_EGH: Tensor, down_EHF: Tensor, form: Form = PLAIN
) -> Tensor:
    """The sum by batched products, in which each pair has its own copy of its expert's weights."""
    ids_TK = _existing(topk_ids_TK, len(gate_up_EGH), form)
    return paired_experts(x_TH, topk_weights_TK, ids_TK, gate_up_EGH[ids_TK], down_EHF[ids_TK], form)


def paired_experts(
    x_TH: Tensor, topk_weights_TK: Tensor, topk_ids_TK: Tensor, gate_up_TKGH: Tensor, down_TKHF: Tensor, form: Form = PLAIN
) -> Tensor:
    """The sum by batched products, given each pair's own matrices."""
    mid_TKF = form.activation(_biased((gate_up_TKGH @ x_TH[:, None, :, None])[..., 0], form.gate_up_bias, topk_ids_TK))
    out_TKH = _biased((down_TKHF @ mid_TKF[..., None])[..., 0], form.down_bias, topk_ids_TK)
    return _weighted(out_TKH, topk_weights_TK, x_TH.dtype, form)


def masked_experts(
    x_TH: Tensor, topk_weights_TK: Tensor, topk_ids_TK: Tensor, gate_up_EGH: Tensor, down_EHF: Tensor, form: Form = PLAIN
) -> Tensor:
    """The sum by a loop in which each expert computes all tokens.

    An expert may yield inf or NaN for a token that did not choose it, so such outputs are replaced by 0, not multiplied by 0.
    """
    dtype = torch.promote_types(x_TH.dtype, topk_weights_TK.dtype)
    columns = len(gate_up_EGH) + form.skips  # the last one is of skipped pairs
    weight_TE = topk_weights_TK.new_zeros(x_TH.shape[0], columns).scatter_(1, topk_ids_TK, topk_weights_TK)
    total_TH = torch.zeros_like(x_TH, dtype=dtype)
    gate_up_biases, down_biases = (
        [None] * len(down_EHF) if bias is None else bias for bias in (form.gate_up_bias, form.down_bias)
    )
    for expert, (gate_up_GH, down_HF) in enumerate(zip(gate_up_EGH, down_EHF)):
        mid_TF = form.activation(F.linear(x_TH, gate_up_GH, gate_up_biases[expert]))
        out_TH = F.linear(mid_TF, down_HF, down_biases[expert])
        weight_T1 = weight_TE[:, expert, None].to(dtype)
        total_TH.addcmul_(torch.where(weight_T1 == 0, 0.0, out_TH.to(dtype)), weight_T1)
    return total_TH.to(x_TH.dtype)


def _biased(out: Tensor, bias_EO: Tensor | None, experts: Tensor | None) -> Tensor:
    """Plus the bias of each row's expert, if there are biases."""
    return out if bias_EO is None else out + bias_EO[experts]


def _existing(topk_ids_TK: Tensor, experts: int, form: Form) -> Tensor:
    """The ids, with an expert's in place of those of skipped pairs."""
    return topk_ids_TK.clamp(max=experts - 1) if form.skips else topk_ids_TK


def _weighted(out_TKH: Tensor, topk_weights_TK: Tensor, dtype: torch.dtype, form: Form) -> Tensor:
    if form.skips:  # outputs of skipped pairs may be anything
        out_TKH = torch.where(topk_weights_TK[..., None] == 0, 0, out_TKH)
    return (out_TKH * topk_weights_TK[..., None]).sum(1).to(dtype)
