"""A mixture of experts by our own kernels: the weighted sum of the MLPs of each token's top-k experts.

On a CPU, in float32, under autograd and in a trace the functions of models/mixtures/products.py compute it by torch's products.
On a GPU the kernel in kernels/experts/mixture_triton.py converts quantised values on their way to the tensor cores, for any
number of tokens; few_tokens_triton.py does so for few tokens, in two launches, and takes dense experts too; few_hopper.py for
up to 8 tokens on Hopper GPUs.  The policy chooses (`mixture_tiles`).  This module knows no model.

Shapes: T tokens, H hidden size, E experts, K experts of a token (top_k), P = T * K pairs, F intermediate size of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.ops.launch import has_gluon, has_pdl, has_triton, use_kernels
from specdec.ops.operator import is_traced
from specdec.ops.products.dense import gelu_mul, relu2, silu_mul, tma_reads
from specdec.ops.products.formats.experts import QuantisedStack, has_units, scales_form
from specdec.ops.products.gpus import match_of
from specdec.ops.products.numerics import Numerics
from specdec.ops.products.partials import Partials
from specdec.ops.products.routing import Unchosen
from specdec.ops.products.stacked import weighted_sum
from specdec.ops.products.tiles.experts import (
    MAX_READ,
    MAX_SORTED,
    ExpertsKind,
    ExpertTiles,
    GroupedTiles,
    MixtureTiles,
    StackedTiles,
    expert_tiles,
)


class SwiGLU(NamedTuple):
    """How an expert's gate multiplies its up projection: gate * sigmoid(alpha * gate) * up.

    limit: gpt-oss's, which holds gates to at most the limit, and ups between -limit and limit, and adds 1 to them; 0: none.
    """

    alpha: float = 1.0
    limit: float = 0.0

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[.., F] of [.., 2F]: the first half is the gate's."""
        if not self.limit:
            assert self.alpha == 1.0
            return silu_mul(gate_up)
        gate, up = gate_up.chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(self.alpha * gate))


@dataclass(frozen=True)
class Relu2:
    """What experts without a gate make of their up projection: its square, or 0 where it is below 0."""

    def __call__(self, up: Tensor) -> Tensor:
        """[.., F] of [.., F]."""
        return relu2(up)


@dataclass(frozen=True)
class GeGLU:
    """How an expert's gate multiplies its up projection: gelu(gate) * up, by tanh."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[.., F] of [.., 2F]: the first half is the gate's."""
        return gelu_mul(gate_up)


Activation = SwiGLU | GeGLU | Relu2


def epilogue(activation: Activation | None) -> dict[str, Any]:
    """The constexprs by which kernels compute it at the end of a product; None: of a product that nothing follows."""
    if isinstance(activation, SwiGLU):
        return {"ACTIVATION": "swiglu", "ALPHA": activation.alpha, "LIMIT": activation.limit}
    name = "none" if activation is None else "geglu" if isinstance(activation, GeGLU) else "relu2"
    return {"ACTIVATION": name, "ALPHA": 1.0, "LIMIT": 0.0}


def inputs_of(activation: Activation | None) -> int:
    """How many rows of the first matrix make a number of its result: a gate's and an up's, or one."""
    return 2 if isinstance(activation, SwiGLU | GeGLU) else 1


class Form(NamedTuple):
    """What experts compute besides their products.  Biases: [E, rows of the projection].

    activation: where it is Relu2, what others call gate and up projections is up projections alone.
    skips: whether some pairs are skipped.  Their topk_ids are E, which is no expert, and their weights 0; what would be their
    outputs is never written.
    """

    activation: Activation = SwiGLU()
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    skips: bool = False


PLAIN = Form()


class QuantisedExperts(NamedTuple):
    """gate_up: gate and up projections, 2F rows each; the first F rows are the gate's."""

    gate_up: QuantisedStack
    down: QuantisedStack
    form: Form = PLAIN


class DenseExperts(NamedTuple):
    """As above, of matrices [E, 2F, H] and [E, H, F] in x's dtype."""

    gate_up: Tensor
    down: Tensor
    form: Form = PLAIN


Stack = QuantisedStack | Tensor
Experts = QuantisedExperts | DenseExperts


class SharedExperts(NamedTuple):
    """Experts that every token passes, stored as the dense ones are, with the same width and activation, and without biases.

    gate_up_GH: all their gate rows, if they have gates, and below them all their up rows.  down_HF: their columns side by side.
    gate_T1: what weighs them, float32; None: nothing.  number: how many they are.
    """

    gate_up_GH: Tensor
    down_HF: Tensor
    gate_T1: Tensor | None
    number: int


class SharedOutput(NamedTuple):
    """out_TH: the output of the experts that every token passes.  gate_T1: what weighs it, float32; None: nothing."""

    out_TH: Tensor
    gate_T1: Tensor | None

    def added_to(self, x_TH: Tensor) -> Tensor:
        """[T, H]: x plus this, in x's dtype."""
        return x_TH + (self.out_TH if self.gate_T1 is None else (self.out_TH * self.gate_T1).to(x_TH.dtype))


def mixture_tiles(x_TH: Tensor, experts: Experts, top_k: int, numerics: Numerics) -> MixtureTiles | None:
    """The policy's choice for a mixture; None where no kernel of experts can or shall compute it."""
    if not use_kernels(x_TH) or not len(x_TH):
        return None
    kind: ExpertsKind = "dense"
    hopper = False
    if isinstance(experts, DenseExperts):
        if not all(stack.is_contiguous() and stack.dtype == x_TH.dtype for stack in experts[:2]):
            return None
        count = len(experts.gate_up)
    else:
        gate_up, down = experts[:2]
        if gate_up.kind != down.kind or not all(scales_form(stack.kind, stack.group_size) for stack in (gate_up, down)):
            return None
        count, kind = gate_up.experts, gate_up.kind
        hopper = x_TH.is_cuda and x_TH.dtype == torch.bfloat16 and has_units(gate_up) and has_units(down)
        hopper = hopper and has_gluon() and match_of(x_TH.device).hopper and not isinstance(experts.form.activation, GeGLU)
    gated = inputs_of(experts.form.activation) == 2
    return numerics.mixture_tiles(len(x_TH), top_k, count, kind, x_TH.dtype, has_pdl(x_TH.device), hopper, gated)


def sorted_tiles(x_TH: Tensor, experts: Experts, top_k: int, numerics: Numerics) -> StackedTiles | None:
    """Those of stacked.py's kernels, over pairs that are sorted by expert; None: a library multiplies with dense experts."""
    if not isinstance(experts, DenseExperts):
        return None
    ours = all(stack.is_contiguous() and stack.dtype == x_TH.dtype for stack in experts[:2])
    if not numerics.is_invariant and not (ours and use_kernels(x_TH) and len(x_TH)):
        return None
    return numerics.sorted_tiles(len(x_TH), top_k, len(experts.gate_up), x_TH.dtype, has_pdl(x_TH.device))


def shared_beside(
    experts: Experts, tiles: MixtureTiles, gate_up_GH: Tensor | None, down_HF: Tensor | None, gate_T1: Tensor | None
) -> SharedExperts | None:
    """Shared experts without biases, of a plain SwiGLU or without gates as the chosen ones, if the kernels of few tokens run
    them beside these: a wider MLP is several experts.

    The matrices: as of SharedExperts, or None where they are quantised.
    """
    if tiles.kernel != "few_tokens_triton" or not isinstance(experts, DenseExperts) or gate_up_GH is None or down_HF is None:
        return None
    form, width = experts.form, experts.down.shape[2]
    like = form.activation in (SwiGLU(), Relu2()) and form.gate_up_bias is None and form.down_bias is None
    like = like and down_HF.shape[1] % width == 0
    ours = all(each.is_contiguous() and each.dtype == experts.down.dtype for each in (gate_up_GH, down_HF))
    return SharedExperts(gate_up_GH, down_HF, gate_T1, down_HF.shape[1] // width) if like and ours else None


def grouped_tiles(x_TH: Tensor, experts: Experts, numerics: Numerics) -> tuple[GroupedTiles, GroupedTiles] | None:
    """Those of grouped.py's kernel for many rows an expert, of gate and up, and of down; None: a library multiplies."""
    if not isinstance(experts, DenseExperts) or not use_kernels(x_TH) or not has_pdl(x_TH.device) or not len(x_TH):
        return None
    if isinstance(experts.form.activation, GeGLU):
        return None
    ours = all(stack.is_contiguous() and stack.dtype == x_TH.dtype for stack in experts[:2])
    if not ours or not has_gluon() or not match_of(x_TH.device).hopper:
        return None
    if not tma_reads(*(stack.flatten(0, 1) for stack in experts[:2])):
        return None
    _, H, F = experts.down.shape
    return numerics.grouped_tiles(H, F, x_TH.dtype)


def run_mixture(
    x_TH: Tensor, topk_weights_TK: Tensor, topk_ids_TK: Tensor, experts: Experts, tiles: MixtureTiles,
    shared: SharedExperts | SharedOutput | None = None, partials: bool = False, choice: Unchosen | None = None,
) -> Tensor | Partials:  # fmt: skip
    """[T, H]: the outputs of each token's top-k experts, times their weights (float32), added up in float32.

    shared: terms of the sum.  Experts are computed beside the chosen ones, where `shared_beside` says so.
    partials: whether the caller can add up split-K partials.
    choice: the only token's logits, where the tiles say that the kernel chooses.  Weights and ids are then written here.
    """
    if tiles.kernel != "mixture_triton":
        return few_tokens_experts(x_TH, topk_weights_TK, topk_ids_TK, experts, tiles, shared, partials, choice)
    assert isinstance(experts, QuantisedExperts) and not isinstance(shared, SharedExperts) and choice is None
    out_TH = quantised_experts(x_TH, topk_weights_TK, topk_ids_TK, experts, tiles.gate_up)
    return out_TH if shared is None else shared.added_to(out_TH)


def few_tokens_experts(
    x_TH: Tensor, topk_weights_TK: Tensor, topk_ids_TK: Tensor, experts: Experts, tiles: MixtureTiles,
    shared: SharedExperts | SharedOutput | None = None, partials: bool = False, choice: Unchosen | None = None,
) -> Tensor | Partials:  # fmt: skip
    """`run_mixture` in two launches, of at most 64 tokens; with few_hopper.py's tiles of at most 8.  An id that is no
    expert's counts for nothing.

    Activations are rounded when the token's weight is multiplied in, and sums at their end alone: the result is closer to exact
    sums than the definition's, which rounds each expert's output.
    """
    assert choice is None or (len(x_TH) == 1 and tiles.kernel == "few_hopper")
    chosen = topk_weights_TK.float().contiguous(), topk_ids_TK.contiguous()
    x_TH = x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()
    if tiles.kernel == "few_hopper":
        from specdec.ops.products.kernels.quantised.few_hopper import launch_few_down_hopper, launch_few_gate_up_hopper

        assert isinstance(experts, QuantisedExperts) and not isinstance(shared, SharedExperts)
        gated = launch_few_gate_up_hopper(x_TH, experts.gate_up, experts.form, *chosen, tiles.gate_up, choice)
        splits = partials and tiles.down.splits > 1
        sums = launch_few_down_hopper(gated, experts.down, experts.form, *chosen, tiles.down, shared, splits, choice)
    else:
        from specdec.ops.products.kernels.experts.few_tokens_triton import launch_few_down, launch_few_gate_up

        beside = shared if isinstance(shared, SharedExperts) else None
        gated = launch_few_gate_up(x_TH, experts.gate_up, experts.form, *chosen, tiles.gate_up, beside)
        sums = launch_few_down(gated, experts.down, experts.form, *chosen, tiles.down, shared, partials)
    return Partials(sums, x_TH.dtype) if sums.dim() == 3 else sums


def quantised_experts(
    x_TH: Tensor, topk_weights_TK: Tensor, topk_ids_TK: Tensor, experts: QuantisedExperts, tiles: ExpertTiles | None = None,
    max_read: int = MAX_READ,
) -> Tensor:  # fmt: skip
    """`run_mixture` in three launches, of any number of tokens.

    tiles: other ones than `expert_tiles`.  max_read: up to so many pairs, each program finds its own; more are sorted first.
    """
    from specdec.ops.products.kernels.experts.mixture_triton import launch_quantised_experts

    (T, K), E = topk_ids_TK.shape, experts.gate_up.experts
    pairs, counts_E = topk_ids_TK.flatten(), None
    if T * K > max_read:
        pairs, counts_E = by_expert(topk_ids_TK, E)
    x_TH = x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()
    form, tiles = experts.form, tiles or expert_tiles(T * K, E)
    mid_PF = launch_quantised_experts(x_TH, experts.gate_up, form.gate_up_bias, pairs, counts_E, K, form.activation, tiles)
    out_PH = launch_quantised_experts(mid_PF, experts.down, form.down_bias, pairs, counts_E, K, None, tiles)
    return weighted_sum(out_PH.view(T, K, -1), topk_weights_TK.contiguous())


def by_expert(topk_ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(the indices of pairs sorted by expert, int64 [P]; how many pairs each expert has, int32 [E]).

    Pairs that are skipped come last.  Of pairs of one expert the first is first.
    """
    if topk_ids_TK.is_cuda and not is_traced(topk_ids_TK) and has_triton() and topk_ids_TK.numel():
        from specdec.ops.products.kernels.experts.by_expert_triton import launch_by_expert, launch_by_expert_many

        launch = launch_by_expert if topk_ids_TK.numel() <= MAX_SORTED else launch_by_expert_many
        return launch(topk_ids_TK.flatten(), experts)
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=topk_ids_TK.device)
    counts.index_add_(0, topk_ids_TK.flatten(), counts.new_ones(topk_ids_TK.numel()))
    return topk_ids_TK.flatten().argsort(stable=True), counts[:experts]
