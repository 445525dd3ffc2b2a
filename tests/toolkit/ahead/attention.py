"""What layers of attention of real widths launch, and what their caches do: see passes.py.

Shapes: T tokens, B sequences, H heads, K kv heads, D head dim, E value dim, L latent width, J indexer heads, I their dims.
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
from specdec.attention.caches.layout import CacheLayout
from specdec.attention.caches.mla_cache import LatentLayout
from specdec.attention.caches.quant_cache import QuantLayout, QuantView
from specdec.attention.caches.sparse_cache import SparseLatentLayout
from specdec.attention.caches.split_cache import SplitLayout
from specdec.attention.context_parallel.all_to_all import merge_ranks, pack_states
from specdec.attention.context_parallel.sharding import KVSharding
from specdec.attention.context_parallel.symmetric_triton import launch_all_to_all_states
from specdec.attention.differential.inputs import DifferentialInputs
from specdec.attention.differential.subtract import Difference
from specdec.attention.inputs import DenseHeads, HeadInputs, LayerCall, LayerInputs, RowInputs, SplitInputs
from specdec.attention.invariant.backend import InvariantBackend
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import FULL, PLAIN, LayerKind, Scoring
from specdec.attention.latent.mla import store_latent
from specdec.attention.latent.prep import LatentPrep
from specdec.attention.latent.upconvert_triton import launch_upconvert
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.sparse.candidates import CandidateKeys as Keys
from specdec.attention.sparse.index_store import IndexPrep
from specdec.attention.sparse.index_store_triton import launch_store_index
from specdec.attention.sparse.launch import launch_best_keys, launch_sparse_segment
from specdec.attention.state import AttentionState
from specdec.ops.rope import HeadPrep, Rotation, ValuePrep
from toolkit.ahead.made import PAGE, counts, floats, halves, has_float8, here, ids, inbox_of, may_be_deterministic


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


def single_queries(backend: TritonBackend, make: Callable[[int], LayerInputs]) -> None:
    """A plain step over few keys, of layers that read all of them or a window."""
    cache = KVCache(HeadsLayout(8, 128, torch.bfloat16), (FULL, LayerKind(window=1024)), 1 << 12, device=here())
    plan = AttentionPlan((causal_segment(PageTable(counts(1, 128), PAGE), counts(1), 1, "queries"),), ids(1))
    tables = PassTables(plan, ids(1))
    for layer, scoring in enumerate((PLAIN, Scoring(softcap=50.0, sinks_H=floats(32)))):
        PagedAttention(backend, cache, *[tables] * len(cache.group_numbers))(layer, make(1), scoring=scoring)


def wide_attention(triton: TritonBackend) -> None:
    """Gemma 4's full layers, in 16 bits and in 8, and MiMo-V2-Flash's, from their projections on."""

    def gemma(T: int) -> LayerInputs:
        prep = HeadPrep(rotation(512, T), 4, halves(36, 512), 1e-6, ValuePrep(normed=True, are_keys=True))
        return HeadInputs(halves(T, 36, 512), prep)

    def mimo(K: int) -> Callable[[int], LayerInputs]:
        prep = ValuePrep(scale=0.707)
        return lambda T: RowInputs(halves(T, (64 + K) * 192 + K * 128), 192, 128, HeadPrep(rotation(192, T), K, values=prep))

    layouts: list[CacheLayout] = [HeadsLayout(4, 512, torch.bfloat16), QuantLayout("int8", 4, 512, here())]
    layouts += [Int8KeysLayout(4, 512, torch.bfloat16), *([QuantLayout("fp8", 4, 512, here())] if has_float8() else [])]
    for layout in layouts:
        attend(triton, layout, FULL, gemma)
    attend(triton, SplitLayout(4, 192, 128, torch.bfloat16), FULL, mimo(4))
    attend(triton, SplitLayout(8, 192, 128, torch.bfloat16), LayerKind(window=128), mimo(8), Scoring(sinks_H=floats(64)))


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
    wide_attention(triton)
    attend(triton, HeadsLayout(8, 128, torch.float16), FULL, heads(32, 8, 128, torch.float16))
    for roots in (False, True):
        alibi = Scoring(slopes_H=floats(32), sqrt_alibi=roots)
        attend(triton, HeadsLayout(8, 128, torch.bfloat16), LayerKind(alibi=True), heads(32, 8, 128), alibi)

    def normed(T: int) -> LayerInputs:
        return HeadInputs(halves(T, 48, 128), HeadPrep(rotation(128, T), 8, halves(40, 128), 1e-6))

    def of_two_widths(T: int) -> LayerInputs:
        return SplitInputs(DenseHeads(halves(T, 16, 192), halves(T, 16, 192), halves(T, 16, 128)))

    def differential(T: int) -> LayerInputs:
        return DifferentialInputs(halves(T, 64, 128), HeadPrep(rotation(128, T), 16), Difference(floats(1)[0], 0.2, 1e-5))

    attend(triton, HeadsLayout(8, 128, torch.bfloat16), FULL, normed)
    single_queries(triton, normed)
    attend(triton, SplitLayout(16, 192, 128, torch.bfloat16), FULL, of_two_widths)

    def weighed(T: int) -> LayerInputs:
        difference = Difference(floats(1)[0], 0.2, 1e-5, floats(256))
        return DifferentialInputs(halves(T, 64, 128), HeadPrep(rotation(128, T), 16), difference)

    attend(triton, HeadsLayout(16, 128, torch.bfloat16), FULL, differential)
    attend(triton, HeadsLayout(16, 128, torch.bfloat16), LayerKind(alibi=True), weighed, Scoring(slopes_H=floats(32)))
    for rounds in (False, True):
        attend(triton, QuantLayout("int8", 16, 128, here(), int8_queries=rounds), FULL, differential)
    if has_float8():
        attend(triton, QuantLayout("fp8", 16, 128, here()), window, differential, capped)


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
            launch_best_keys(q_TJI, weights_TJ, view.index_keys, Keys.of(AttentionPlan(plan.parts[:1]), T), topk)  # type: ignore[attr-defined]
            backend = TritonBackend()
            backend.run(halves(T, 128, 576), view.latents, rows, Scoring(0.1))  # type: ignore[attr-defined]


def context_parallel_attention() -> None:
    """Context parallelism: the sharding of a cache, and the all-to-all of partial states."""
    own = KVSharding(1, 4, 64, 16)
    own.local_lens(counts(8))
    own.local_slots(ids(60))
    inbox = inbox_of(4)
    for heads, E in ((32, 128), (128, 512)):
        state = AttentionState.empty((60, heads, E), torch.bfloat16, here())
        merge_ranks(pack_states(state, 4), E)
    small = AttentionState.empty((1, 32, 128), torch.bfloat16, here())
    launch_all_to_all_states(inbox, 1, 10**9, small)


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
