"""What products, experts and norms of real widths launch: see passes.py.

Shapes: T tokens, H hidden size, F intermediate size, N out, K in, E experts, A experts of a token (top_k).
"""

from __future__ import annotations

import torch

from specdec.models.mixtures.products import placed_experts
from specdec.ops.launch import has_pdl
from specdec.ops.norm import add_normed, add_rms_norm, norm_parts, pair_rms_norm, part_squares, rms_norm
from specdec.ops.products.dense import DenseWeight, gated_linear, linear, relu2, silu_mul
from specdec.ops.products.experts import (
    DenseExperts,
    Form,
    QuantisedExperts,
    Relu2,
    SharedExperts,
    SharedOutput,
    SwiGLU,
    by_expert,
    few_tokens_experts,
    grouped_tiles,
    mixture_tiles,
    quantised_experts,
)
from specdec.ops.products.formats.experts import QuantisedStack, has_units, step_bytes, steps_of
from specdec.ops.products.formats.lossless import LosslessMatrix
from specdec.ops.products.formats.quantised import QuantisedMatrix, row_bytes
from specdec.ops.products.gpus import match_of
from specdec.ops.products.lossless import LosslessWeight
from specdec.ops.products.numerics import FAST, INVARIANT
from specdec.ops.products.own_pairs import LiveRows, own_pairs
from specdec.ops.products.partials import NormedProduct, Partials, TwoProducts, multiplied
from specdec.ops.products.quantised import QuantisedWeight
from specdec.ops.products.routing import RouterRule, RouterWeights, normed_routed, routed
from specdec.ops.products.stacked import each_linear, experts_linear, weighted_sum
from specdec.ops.products.tiles.experts import few_hopper_tiles, few_tokens_tiles, router_tiles
from specdec.ops.rows import prepend, take_columns, take_rows, take_run
from toolkit.ahead.made import DTYPES, HIDDEN, VOCABULARY, counts, floats, halves, here, ids, may_be_deterministic


def products() -> None:
    """A layer of 8 and of 70 billion parameters, the last product, and expert stacks of an invariant policy."""
    for rows in (1, 6, 16, 32, 60, 128, 192, 512, 2048):
        for H, F in ((4096, 14336), (8192, 28672)):
            x, wide = halves(rows, H), halves(rows, F)
            linear(x, halves(H + H // 2, H))
            DenseWeight(halves(H, H)).matmul(x, None, FAST, partials=True)
            DenseWeight(halves(H, F)).matmul(wide, None, FAST, partials=True)
            gated_linear(x, halves(2 * F, H))
            if may_be_deterministic():
                linear(x, halves(H, H), halves(H), INVARIANT)
                gated_linear(x, halves(2 * F, H), None, INVARIANT)
        linear(halves(rows, HIDDEN), halves(VOCABULARY, HIDDEN))
        if rows <= 16:  # of SmolLM2-135M's widths
            linear(halves(rows, 576), halves(960, 576), halves(960))
            gated_linear(halves(rows, 576), halves(3072, 576))
            linear(halves(rows, 1536), halves(576, 1536))
        silu_mul(halves(rows, 2 * 14336))
        relu2(halves(rows, 21504))
    for T in (1, 60, 2048):
        E, A, H, F = 128, 8, 2048, 768
        order, each = ids(T * A), counts(E)
        if may_be_deterministic():
            each_linear(halves(T, 128, 128), halves(128, 512, 128), torch.bfloat16)
            each_linear(floats(T, 1, 4096), floats(1, 192, 4096), torch.float32)  # a router kept in float32
            for gate, biases in ((SwiGLU(), (None, None)), (SwiGLU(1.702, 7.0), (halves(E, 2 * F), halves(E, H)))):
                experts_linear(halves(T, H), halves(E, 2 * F, H), biases[0], order, each, A, activation=gate)
                experts_linear(halves(T * A, F), halves(E, H, F), biases[1], order, each, A, activation=None)
            experts_linear(halves(T, H), halves(E, F, H), None, order, each, A, activation=Relu2())
        weighted_sum(halves(T, A, H), floats(T, A))
        by_expert(ids(T, A), E)
        own_pairs(floats(T, A), ids(T, A), range(64))
        own_pairs(floats(6 * T, A), ids(6 * T, A), range(E), LiveRows(counts(T), ids(T)))


def quantised_products() -> None:
    for kind, group, zero_points in (
        ("e4m3", 0, False),
        ("int8", 128, True),
        ("int4", 128, True),
        ("int4", 32, False),
        ("e2m1", 32, False),
    ):
        for dtype in DTYPES[: 2 if kind == "int4" else 1]:
            for rows in (1, 6, 16, 60, 192, 2048):
                for N, K, gated in ((6144, 4096, False), (4096, 14336, False), (28672, 4096, True)):
                    groups = K // group if group else 1
                    matrix = QuantisedMatrix(
                        kind, torch.empty(N, row_bytes(kind, K), dtype=torch.uint8), halves(N, groups, dtype=dtype),
                        torch.empty(N, groups, dtype=torch.int8) if zero_points else None, K, group,
                    )  # fmt: skip
                    x, weight = halves(rows, K, dtype=dtype), QuantisedWeight(matrix)
                    if gated:
                        weight.gated(x, None, FAST)
                    else:
                        weight.matmul(x, None, FAST)
                        weight.matmul(x, None, FAST, partials=True)


def lossless_products() -> None:
    for N, K in ((6144, 4096), (4096, 14336), (28672, 4096)):
        lossless = LosslessMatrix(
            torch.empty(N, row_bytes("int8", K), dtype=torch.uint8), torch.empty(N, row_bytes("int4", K), dtype=torch.uint8),
            torch.empty(N, dtype=torch.int16), counts(N + 1), counts(1 << 16), torch.empty(1 << 16, dtype=torch.int16),
            counts(N // 8),
        )  # fmt: skip
        weight = LosslessWeight(DenseWeight(halves(N, K)), lossless)
        for rows in (1, 6, 32, 60):
            weight.matmul(halves(rows, K), None, FAST, partials=True)
            weight.gated(halves(rows, K), None, FAST)


def coded_mixtures() -> None:
    """Experts of 8 and 4 bits, those of gpt-oss among them."""
    forms = (("e4m3", 0), ("e4m3", 128), ("int8", 0), ("int4", 128), ("int4", 32), ("e2m1", 32))
    for kind, group in forms:
        E, A, H, F = (32, 4, 2880, 2880) if kind == "e2m1" else (128, 8, 2048, 768)
        gpt_oss = kind == "e2m1"

        def stack(N: int, K: int) -> QuantisedStack:
            qweight = torch.empty(E * N, steps_of(K) * step_bytes(kind), dtype=torch.uint8)  # noqa: B023
            scales = halves(E * N, -(-K // group) if group else 1)  # noqa: B023
            if gpt_oss:  # noqa: B023
                scales = torch.empty(E * N, 4 * steps_of(K), dtype=torch.uint8)  # noqa: B023
            return QuantisedStack(kind, E, qweight, scales, None, K, group)  # noqa: B023

        form = Form(SwiGLU(1.702, 7.0), halves(E, 2 * F), halves(E, H)) if gpt_oss else Form()
        ungated = QuantisedExperts(stack(F, H), stack(H, F), Form(Relu2()))
        for experts in (QuantisedExperts(stack(2 * F, H), stack(H, F), form), ungated):
            for T in (1, 6, 60, 2048):
                if mixture_tiles(halves(T, H), experts, A, FAST) is not None:
                    quantised_experts(halves(T, H), floats(T, A), ids(T, A), experts)
            for T in (1, 8, 32) if has_pdl(here()) else ():
                few_tokens_experts(halves(T, H), floats(T, A), ids(T, A), experts, few_tokens_tiles(T, kind))
                if T <= 8 and has_units(experts.down) and match_of(here()).hopper:
                    few_tokens_experts(halves(T, H), floats(T, A), ids(T, A), experts, few_hopper_tiles(T, kind))


def dense_mixtures() -> None:
    """Routers, and experts of 16 bits, of few tokens: Qwen3-30B-A3B's sizes, gpt-oss's router, and DeepSeek-V3's groups."""
    deepseek = RouterRule(8, "sigmoid", True, groups=8, top_groups=4, group_best=2, normed=True, scaling=2.5)
    for T in (1, 8, 32, 48):
        output, beside = (
            SharedOutput(halves(T, 2048), floats(T, 1)), SharedExperts(halves(1536, 2048), halves(2048, 768), floats(T, 1), 1)
        )  # fmt: skip
        for shared in (None, output, beside) if has_pdl(here()) else ():
            experts, tiles = DenseExperts(halves(128, 1536, 2048), halves(128, 2048, 768)), few_tokens_tiles(T, "dense")
            few_tokens_experts(halves(T, 2048), floats(T, 8), ids(T, 8), experts, tiles, shared, partials=shared is None)
        if has_pdl(here()):  # Nemotron-3-Nano's
            E, A, H, width = 128, 6, 2688, 1856
            ungated, beside = (
                DenseExperts(halves(E, width, H), halves(E, H, width), Form(Relu2())),
                SharedExperts(halves(2 * width, H), halves(H, 2 * width), None, 2),
            )
            few_tokens_experts(halves(T, H), floats(T, A), ids(T, A), ungated, few_tokens_tiles(T, "dense"), beside, True)
        for E, H, rule in ((128, 2048, RouterRule(8, "softmax", normed=True)), (256, 7168, deepseek)):
            correction, router = floats(E) if rule.corrected else None, router_tiles(T, E)
            routed(halves(T, H), RouterWeights(halves(E, H), None, correction), rule, E, router)
            routed(halves(T, H), RouterWeights(halves(E + 1, H), None, correction), rule, E, router)
            for delta in (halves(T, H), Partials(floats(4, T, H), torch.bfloat16)) if T == 1 and not rule.groups else ():
                weights = RouterWeights(halves(E, H), None, correction)
                normed_routed(halves(T, H), delta, halves(H), 1e-6, weights, rule, E)
                normed_routed(halves(T, H), delta, halves(H), 1e-6, weights, rule, E, chooses=False)
        gpt_oss = RouterRule(4, "softmax of chosen", biased=True)
        router = router_tiles(T, 32)
        routed(halves(T, 2880), RouterWeights(floats(32, 2880), floats(32), None), gpt_oss, 32, router)


def many_tokens() -> None:
    """Routers and experts of 16 bits of prompts, the latter on Hopper alone."""
    for E, H, F, rule in (
        (128, 2048, 768, RouterRule(8, "softmax", normed=True)),
        (32, 2880, 2880, RouterRule(4, "softmax of chosen", biased=True)),
    ):
        for T in (300, 4096, 8192):
            weight = floats(E, H) if rule.biased else halves(E, H)
            routed(halves(T, H), RouterWeights(weight, floats(E) if rule.biased else None, None), rule, E, router_tiles(T, E))
            by_expert(ids(16 * T, 8), E)
            form = Form(SwiGLU(1.702, 7.0), halves(E, 2 * F), halves(E, H)) if rule.biased else Form()
            ungated = DenseExperts(halves(E, F, H), halves(E, H, F), Form(Relu2()))
            for experts in (DenseExperts(halves(E, 2 * F, H), halves(E, H, F), form), ungated):
                if (tiles := grouped_tiles(halves(T, H), experts, FAST)) is not None:
                    placed_experts(halves(T, H), floats(T, 8), ids(T, 8), *experts, tiles)


def norms_and_rows() -> None:
    for H in (2048, 4096, 7168):
        for T in (1, 60, 2048):
            x, delta, weight = halves(T, H), halves(T, H), halves(H)
            rms_norm(x, weight, 1e-5)
            qkv, parts = halves(T, H + H // 2), (halves(H), halves(H // 4))
            norm_parts(qkv, parts, 1e-5)
            norm_parts(qkv, parts, 1e-5, part_squares(qkv, (H, H // 4)), 2)
            add_rms_norm(x, delta, weight, 1e-5)
            add_rms_norm(x, TwoProducts(multiplied(delta, 0.5), delta), weight, 1e-5)
            add_rms_norm(x, NormedProduct(delta, weight, 1e-5, halves(1)), weight, 1e-5)
            add_normed(x, delta, weight, 1e-5)
            add_normed(x, multiplied(delta, 0.5), None)
            pair_rms_norm(ids(T), halves(VOCABULARY, H), weight, x, weight, 1e-5)
    take_rows(halves(8, 60, HIDDEN), ids(8, 6))
    take_run(halves(8, 60, HIDDEN), ids(8), 4)
    take_columns(halves(8, HIDDEN), counts(HIDDEN))
    prepend(ids(8), ids(8, 5))
