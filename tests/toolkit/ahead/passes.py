"""What models of real widths launch, room by room: each function calls dispatches and launchers as a pass does.

Meant for the GPU of machine.py, where tensors hold nothing, so that a weight of any size is free.  A kernel that no function
here launches fails tests/ops/compiling/test_ahead.py.

Shapes: T tokens, B sequences, N nodes of each, H heads, K kv heads, D head dim, V vocabulary, W a rank's run of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.backend import Backend
from specdec.attention.caches.fp8_latent import Fp8LatentLayout
from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.int8_keys import Int8KeysLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.mla_cache import LatentLayout
from specdec.attention.caches.planes import CacheLayout
from specdec.attention.caches.quant_cache import FP8_LEAST_ARCHITECTURE, QuantLayout, QuantView
from specdec.attention.caches.sparse_cache import SparseLatentLayout
from specdec.attention.caches.split_cache import SplitLayout
from specdec.attention.context.exchange import merged, packed
from specdec.attention.context.ownership import Ownership
from specdec.attention.context.swap_triton import launch_swap_states
from specdec.attention.differential.inputs import DifferentialInputs
from specdec.attention.differential.subtract import Difference
from specdec.attention.inputs import DenseHeads, HeadInputs, LayerCall, LayerInputs, SplitInputs
from specdec.attention.invariant.backend import InvariantBackend
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import FULL, PLAIN, LayerKind, Scoring
from specdec.attention.latent.mla import store_latent
from specdec.attention.latent.prep import LatentPrep
from specdec.attention.latent.upconvert_triton import launch_upconvert
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.sparse.candidates import Candidates as Keys
from specdec.attention.sparse.index_store import IndexPrep
from specdec.attention.sparse.index_store_triton import launch_store_index
from specdec.attention.sparse.launch import launch_sparse_segment
from specdec.attention.state import AttentionState
from specdec.batch.masks import BitMasks, masked_logits
from specdec.draft.block.rounds.correct_triton import launch_corrected_logits, launch_greedy_chain
from specdec.draft.block.rounds.grow_triton import launch_best_paths
from specdec.draft.block.rounds.pairs_triton import launch_fill_pairs
from specdec.draft.block.rounds.tables_triton import launch_block_tables
from specdec.draft.ngram.lookup import Text
from specdec.draft.ngram.lookup_triton import launch_match_keys
from specdec.draft.tree.branches_triton import launch_fork
from specdec.draft.tree.build_tree_triton import launch_best_nodes
from specdec.draft.tree.expand import Beam, Candidates
from specdec.draft.tree.expand_triton import launch_expand, launch_first_level
from specdec.ops.noise.border import borders
from specdec.ops.noise.floor import Filters
from specdec.ops.noise.gumbel import Noise, gumbel_noise, perturb
from specdec.ops.noise.sample import sampled_tokens
from specdec.ops.norm import add_rms_norm, pair_rms_norm, rms_norm
from specdec.ops.products.dense import gated_linear, linear, linear_terms, silu_mul
from specdec.ops.products.experts import CodedExperts, Form, Gate, coded_experts, runs_on_codes
from specdec.ops.products.formats.experts import StackedCodes, step_bytes, steps_of
from specdec.ops.products.formats.quantised import Codes, row_bytes
from specdec.ops.products.numerics import INVARIANT
from specdec.ops.products.quantised import quantised_gated_linear, quantised_linear, quantised_linear_terms
from specdec.ops.products.stacked import each_linear, experts_linear, weighted_sum
from specdec.ops.rope import HeadPrep, Rotation
from specdec.ops.rows import prepend, take_columns, take_rows, take_run
from specdec.ops.topk import greedy_tokens, top_tokens
from specdec.parallel.scan_triton import launch_scan_ranks
from specdec.parallel.symmetric.flat_triton import launch_flat
from specdec.parallel.symmetric.inbox import Inbox, Layout
from specdec.parallel.symmetric.rows_triton import launch_rows
from specdec.verify.accept_triton import launch_accept
from specdec.verify.tables_triton import launch_path_tables

VOCABULARY, HIDDEN, PAGE = 128256, 4096, 16
DTYPES = (torch.bfloat16, torch.float16)


def halves(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


def floats(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float32)


def ids(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int64)


def counts(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int32)


def here() -> torch.device:
    """The GPU whose launches are being recorded."""
    return floats(0).device


def may_be_deterministic() -> bool:
    """As loading/resolve.py has it."""
    return torch.cuda.get_device_capability(here())[0] == 9


def has_float8() -> bool:
    return torch.cuda.get_device_capability(here()) >= FP8_LEAST_ARCHITECTURE


# Products and norms.


def products() -> None:
    """A layer of 8 and of 70 billion parameters, the last product, and expert stacks of an invariant policy."""
    for rows in (1, 6, 16, 32, 60, 128, 192, 512, 2048):
        for H, F in ((4096, 14336), (8192, 28672)):
            x, wide = halves(rows, H), halves(rows, F)
            linear(x, halves(H + H // 2, H))
            linear_terms(x, halves(H, H))
            linear_terms(wide, halves(H, F))
            gated_linear(x, halves(2 * F, H))
            if may_be_deterministic():
                linear(x, halves(H, H), halves(H), INVARIANT)
                gated_linear(x, halves(2 * F, H), None, INVARIANT)
        linear(halves(rows, HIDDEN), halves(VOCABULARY, HIDDEN))
        silu_mul(halves(rows, 2 * 14336))
    for T in (1, 60, 2048):
        E, K, H, F = 128, 8, 2048, 768
        order, each = ids(T * K), counts(E)
        if may_be_deterministic():
            each_linear(halves(T, 128, 128), halves(128, 512, 128), torch.bfloat16)
            experts_linear(halves(T, H), halves(E, 2 * F, H), order, each, K, gated=True)
            experts_linear(halves(T * K, F), halves(E, H, F), order, each, K, gated=False)
        weighted_sum(halves(T, K, H), floats(T, K))


def quantised_products() -> None:
    for kind, group, zeros in (
        ("e4m3", 0, False),
        ("int8", 128, True),
        ("int4", 128, True),
        ("int4", 32, False),
        ("e2m1", 32, False),
    ):
        for dtype in DTYPES[: 2 if kind == "int4" else 1]:
            for rows in (1, 6, 16, 60, 192, 2048):
                for O, I, gated in ((6144, 4096, False), (4096, 14336, False), (28672, 4096, True)):
                    groups = I // group if group else 1
                    weight = Codes(
                        kind, torch.empty(O, row_bytes(kind, I), dtype=torch.uint8), halves(O, groups, dtype=dtype),
                        torch.empty(O, groups, dtype=torch.int8) if zeros else None, I, group,
                    )  # fmt: skip
                    x = halves(rows, I, dtype=dtype)
                    if gated:
                        quantised_gated_linear(x, weight)
                    else:
                        quantised_linear(x, weight)
                        quantised_linear_terms(x, weight)


def coded_mixtures() -> None:
    """Experts of 8 and 4 bits, those of gpt-oss among them."""
    forms = (("e4m3", 0), ("e4m3", 128), ("int8", 0), ("int4", 128), ("int4", 32), ("e2m1", 32))
    for kind, group in forms:
        E, K, H, F = (32, 4, 2880, 2880) if kind == "e2m1" else (128, 8, 2048, 768)
        gpt_oss = kind == "e2m1"

        def stack(O: int, I: int) -> StackedCodes:
            planes = torch.empty(E * O, steps_of(I) * step_bytes(kind), dtype=torch.uint8)  # noqa: B023
            scales = halves(E * O, -(-I // group) if group else 1)  # noqa: B023
            if gpt_oss:  # noqa: B023
                scales = torch.empty(E * O, 4 * steps_of(I), dtype=torch.uint8)  # noqa: B023
            return StackedCodes(kind, E, planes, scales, None, I, group)  # noqa: B023

        form = Form(Gate(1.702, 7.0), halves(E, 2 * F), halves(E, H)) if gpt_oss else Form()
        experts = CodedExperts(stack(2 * F, H), stack(H, F), form)
        for T in (1, 6, 60, 2048):
            if runs_on_codes(halves(T, H), experts):
                coded_experts(halves(T, H), floats(T, K), ids(T, K), experts)


def norms_and_rows() -> None:
    for H in (2048, 4096, 7168):
        for T in (1, 60, 2048):
            x, delta, weight = halves(T, H), halves(T, H), halves(H)
            rms_norm(x, weight, 1e-5)
            add_rms_norm(x, delta, weight, 1e-5)
            pair_rms_norm(ids(T), halves(VOCABULARY, H), weight, x, weight, 1e-5)
    take_rows(halves(8, 60, HIDDEN), ids(8, 6))
    take_run(halves(8, 60, HIDDEN), ids(8), 4)
    take_columns(halves(8, HIDDEN), counts(HIDDEN))
    prepend(ids(8), ids(8, 5))


# Attention.


def rotation(D: int, T: int, dtype: torch.dtype = torch.bfloat16) -> Rotation:
    return Rotation(halves(8192, 2, D, dtype=dtype), ids(T))


def plans(kind: LayerKind, B: int) -> Iterator[tuple[AttentionPlan, int]]:
    """Plans, each with its number of tokens: a step, a chain, a tree of 60 nodes, and a chunk of a prompt."""
    pages, lens_B = PageTable(counts(B, 512), PAGE), counts(B)
    for queries in (1, 6, 2048):
        yield AttentionPlan((causal_segment(pages, lens_B, queries, "queries"),), ids(B * queries)), B * queries
    tree = replace(Segment.of_slots(counts(B * 60, 8), counts(B * 60), lens_B))
    yield AttentionPlan((prefix_segment(pages, lens_B, 60, "none"),), ids(B * 60), tree), B * 60


def attend(
    backend: Backend, layout: CacheLayout, kind: LayerKind, make: Callable[[int], LayerInputs], scoring: Scoring = PLAIN
) -> None:
    """One layer in passes of every kind, for one sequence and for 32."""
    cache = KVCache(layout, (kind,), 1 << 16, device=here())
    if isinstance(view := cache.view(0), QuantView):
        view.needs_scale = False  # a first pass has set it
    for B in (1, 32):
        for plan, T in plans(kind, B):
            PagedAttention(backend, cache, PassTables(plan, ids(T)))(0, make(T), scoring=scoring)


def heads_attention() -> None:
    """Heads of many widths, in 16 bits and in 8, with and without windows, softcaps, sinks and slopes."""
    triton = TritonBackend()
    window, capped = LayerKind(window=1024), Scoring(softcap=50.0)

    def heads(H: int, K: int, D: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[int], LayerInputs]:
        return lambda T: HeadInputs(halves(T, H + 2 * K, D, dtype=dtype), HeadPrep(rotation(D, T, dtype), K))

    for H, K, D in ((32, 8, 128), (16, 8, 256), (14, 2, 64), (32, 32, 96)):
        plain, make = HeadsLayout(K, D, torch.bfloat16), heads(H, K, D)
        attend(triton, plain, FULL, make)
        attend(triton, plain, window, make, replace(capped, sinks_H=floats(H)))
        if D >= 128 and has_float8():
            attend(triton, QuantLayout("fp8", K, D, here()), FULL, make)
        for rounds in (False, True) if D >= 128 else ():
            attend(triton, QuantLayout("int8", K, D, here(), int8_queries=rounds), FULL, make)
            attend(triton, Int8KeysLayout(K, D, torch.bfloat16, rounds), FULL, make)
        if may_be_deterministic():
            attend(InvariantBackend(), plain, FULL, make)
            attend(InvariantBackend(), plain, window, make, capped)
    attend(triton, HeadsLayout(8, 128, torch.float16), FULL, heads(32, 8, 128, torch.float16))
    attend(triton, HeadsLayout(8, 128, torch.bfloat16), LayerKind(alibi=True), heads(32, 8, 128), Scoring(slopes_H=floats(32)))

    def normed(T: int) -> LayerInputs:
        return HeadInputs(halves(T, 48, 128), HeadPrep(rotation(128, T), 8, halves(40, 128), 1e-6))

    def of_two_widths(T: int) -> LayerInputs:
        return SplitInputs(DenseHeads(halves(T, 16, 192), halves(T, 16, 192), halves(T, 16, 128)))

    def differential(T: int) -> LayerInputs:
        return DifferentialInputs(halves(T, 64, 128), HeadPrep(rotation(128, T), 16), Difference(floats(1)[0], 0.2, 1e-5))

    attend(triton, HeadsLayout(8, 128, torch.bfloat16), FULL, normed)
    attend(triton, SplitLayout(16, 192, 128, torch.bfloat16), FULL, of_two_widths)
    attend(triton, HeadsLayout(16, 128, torch.bfloat16), FULL, differential)


class Latents(LayerInputs):
    """Absorbed queries [T, H, L], whose last R numbers still have to be rotated, as the latents'."""

    def __init__(self, T: int, heads: int) -> None:
        self.q_THL, self.fresh_TL = halves(T, heads, 576), halves(T, 576)

    def paged(self, call: LayerCall) -> Tensor:
        prep = LatentPrep(rotation(64, len(self.q_THL)), halves(512), 1e-6)
        store_latent(call.view, self.q_THL[..., 512:], self.fresh_TL, call.slots_T, prep)  # type: ignore[arg-type]
        return call.attend(self.q_THL)

    def dense(self) -> DenseHeads:
        raise NotImplementedError


def latent_layouts() -> list[Any]:
    """DeepSeek's."""
    return [LatentLayout(512, 64, torch.bfloat16), *([Fp8LatentLayout(512, 64)] if has_float8() else [])]


def latent_attention() -> None:
    """DeepSeek's latents with all heads and with a rank's, in 16 and in 8 bits."""
    scoring = Scoring(0.1)
    for heads in (128, 16):
        for layout in latent_layouts():
            attend(TritonBackend(), layout, FULL, lambda T: Latents(T, heads), scoring)  # noqa: B023
        if may_be_deterministic():
            attend(InvariantBackend(), LatentLayout(512, 64, torch.bfloat16), FULL, lambda T: Latents(T, heads), scoring)  # noqa: B023
    cache, pages = KVCache(latent_layouts()[-1], (FULL,), 1 << 16, device=here()), PageTable(counts(2, 512), PAGE)
    launch_upconvert(cache.view(0), pages, counts(2), counts(2), 4096, halves(8192, 576))  # type: ignore[arg-type]


def sparse_attention() -> None:
    """DeepSeek-V3.2's indexer, and attention over the keys that it chose."""
    topk, J, I = 2048, 64, 128
    for latent in latent_layouts():
        view = KVCache(SparseLatentLayout(latent, I, torch.bfloat16), (FULL,), 1 << 16, device=here()).view(0)
        for plan, T in plans(FULL, 8):
            q_TJI, both, slots_T = halves(T, J, I), halves(T, I + J), ids(T)
            key_TI, weights_TJ = both.split((I, J), dim=1)
            prep = IndexPrep(rotation(64, T), halves(I), halves(I), 1e-6, 0.1)
            weights_TJ = launch_store_index(view.index_keys, q_TJI, key_TI, weights_TJ, slots_T, prep)  # type: ignore[attr-defined]
            rows = launch_sparse_segment(q_TJI, weights_TJ, view.index_keys, Keys.of(plan, T), topk)  # type: ignore[attr-defined]
            backend = TritonBackend()
            backend.run(halves(T, 128, 576), view.latents, rows, Scoring(0.1))  # type: ignore[attr-defined]


def divided_attention() -> None:
    """Context parallelism: who keeps what, and how states travel."""
    own = Ownership(1, 4, 64, 16)
    own.counts(counts(8))
    own.own_slots(ids(60))
    inbox = inbox_of(4)
    for heads, E in ((32, 128), (128, 512)):
        state = AttentionState.empty((60, heads, E), torch.bfloat16, here())
        merged(packed(state, 4), E)
    small = AttentionState.empty((1, 32, 128), torch.bfloat16, here())
    launch_swap_states(inbox, 1, 10**9, small)


def caches_that_move() -> None:
    """What a commit does to a cache, and what rounds read of page tables."""
    for layout in (HeadsLayout(8, 128, torch.bfloat16), QuantLayout("int8", 8, 128, here()), *latent_layouts()):
        cache = KVCache(layout, (FULL,) * 2, 1 << 16, device=here())
        cache.move(ids(8, 60), ids(8, 6))
        cache.move(ids(8, 60), ids(8, 6), targets_BE=ids(8, 6))
    pages = PageTable(counts(8, 512), PAGE)
    for by_step in (False, True):
        pages.next_tokens(counts(8), 6, by_step)
    from specdec.attention.kernels.tables_triton import launch_first_keys, launch_last_positions

    launch_last_positions(counts(8), 6)
    for kind in (LayerKind(window=512), LayerKind(chunk=8192)):
        launch_first_keys(kind, ids(8), None, None)
        launch_first_keys(kind, ids(8), counts(8), counts(8))


def flash_queries() -> None:
    """Queries of flash-attn 3 over a float8 cache."""
    from specdec.attention.flash.queries_triton import launch_float8_queries

    for T, most in ((8, 1), (4096, 2048)) if has_float8() else ():
        launch_float8_queries(halves(T, 32, 128), counts(3), most, 8)


# Rounds.


def filters_of(B: int) -> Filters:
    options = floats(B, 6)
    return Filters(options[:, 0], ids(B), options[:, 1], options[:, 2])


def sampling() -> None:
    """Top-k, greedy and sampled tokens of logits, filters, shared noise, and bans."""
    for V, dtype in ((VOCABULARY, torch.bfloat16), (32000, torch.float32)):
        for B, N in ((1, 1), (1, 60), (8, 60)):
            R = B * N
            logits, options = torch.empty(R, V, dtype=dtype), filters_of(B)
            noise = Noise(options.temperature_B, ids(B), counts(B), 1, 1.0, 1.0)
            filtered = noise._replace(floor_weight=4.0, filters=options)
            top_tokens(logits, 8)
            top_tokens(logits, 8, noise=filtered)
            top_tokens(logits, 8, ids(V))
            greedy_tokens(logits)
            greedy_tokens(logits, noise=noise)
            perturb(logits, noise)
            perturb(logits, filtered, ids(V))
            border = borders(logits, options)
            for cut in (None, border):
                sampled_tokens(logits, options.temperature_B, ids(B), ids(R), cut)
            masked_logits(logits, BitMasks(counts(2, N, -(-V // 32)), counts(B)))
    gumbel_noise(ids(4), ids(4), 32000)


def drafting() -> None:
    """Trees of EAGLE heads, blocks and n-grams."""
    pages, device = PageTable(counts(8, 512), PAGE), here()
    for B in (1, 8):
        for K in (4, 10):
            candidates = Candidates.empty(B, K, 6, device)
            launch_first_level(candidates, ids(B, K), floats(B, K))
            beam = Beam(ids(B, K), floats(B, K), ids(B, K), ids(B, K))
            for offsets in (None, ids(32000)):
                launch_expand(candidates, 2, beam, halves(B * K, 32000), offsets)
            launch_best_nodes(candidates, ids(B), 60)
            launch_best_paths(floats(B, 7, K), ids(B, 7, K), ids(B), 60)
            own = PageTable(counts(B, 512), PAGE)
            launch_fork(own, counts(B), ids(B, K), halves(B, HIDDEN), counts(B, 0))
            launch_fork(own, counts(B), ids(B, K), halves(B * K, HIDDEN), counts(B * K, 3))
        for rank in (64, 256):
            w1, w2, offsets = halves(VOCABULARY, rank), halves(32000, rank), ids(32000)
            launch_corrected_logits(halves(B, 32000), ids(B * 8), w1, w2)
            launch_greedy_chain(halves(B, 7, 32000), ids(B), w1, w2, offsets)
    launch_fill_pairs(ids(8, 6), ids(8), halves(8, 6, HIDDEN), 5, halves(1, HIDDEN), 12)
    launch_block_tables(pages, counts(8), counts(8), ids(8, 6), ids(8), 16, 5)
    launch_match_keys(Text(counts(1 << 16), pages, counts(8), None), 8)


def verifying() -> None:
    from specdec.batch.tree import DraftTree

    class State:
        """The columns of a batch that acceptance reads."""

        lens_B, bonus_B, active_B, speculates_B = counts(8), ids(8), counts(8), counts(8)

    for N, depth in ((60, 7), (7, 6)):
        tree = DraftTree(ids(8, N), ids(8, N), depth, is_chain=N == depth + 1)
        launch_accept(tree, ids(8, N), State())  # type: ignore[arg-type]
        launch_path_tables(PageTable(counts(8, 512), PAGE), counts(8), ids(8, N), depth + 1)


def inbox_of(ranks: int) -> Inbox:
    layout = Layout(ranks)
    return Inbox(layout, ids(ranks + 1), counts(layout.channels), counts(1))


def exchanges() -> None:
    """Sums, gathers and swaps of 2 and of 8 ranks."""
    for ranks in (2, 8):
        inbox = inbox_of(ranks)
        for T, few in ((1, True), (60, True), (2048, False)):
            launch_rows(inbox, 1, 10**9, halves(T, HIDDEN), halves(T, HIDDEN), halves(HIDDEN), 1e-5, few)
            launch_rows(inbox, 1, 10**9, None, halves(T, HIDDEN), None, 0.0, few)
        for kind in ("sum", "gather", "swap"):
            launch_flat(inbox, 1, 10**9, halves(ranks, 4096), kind)  # type: ignore[arg-type]
        launch_scan_ranks(halves(60, VOCABULARY // ranks), 8, True, lambda own: ids(ranks, len(own)), 1)  # noqa: B023


PASSES: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        products, quantised_products, coded_mixtures, norms_and_rows, heads_attention, latent_attention, sparse_attention,
        divided_attention, caches_that_move, flash_queries, sampling, drafting, verifying, exchanges,
    )
}  # fmt: skip
