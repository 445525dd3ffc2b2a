"""A small world for each cell of the matrix: sequences, layers of every kind, and what dense masked attention makes of them.

Shapes: B sequences, N tokens of each, T = B * N, H heads, K kv heads, D head dim, C latent rank, X keys of a sequence.
"""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.caches.fp8_latent import FP8_LATENTS, Fp8LatentLayout
from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.int8_keys import INT8_KEYS, Int8KeysLayout, queries_as_read
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.layout import CacheLayout
from specdec.attention.caches.mla_cache import LatentLayout
from specdec.attention.caches.quant_cache import QuantLayout
from specdec.attention.caches.sparse_cache import SparseLatentLayout, SparseLatentView
from specdec.attention.caches.split_cache import PairedView, SplitLayout
from specdec.attention.differential.inputs import DifferentialInputs
from specdec.attention.differential.subtract import Difference, subtract_halves
from specdec.attention.encoder.encoder_texts import EncoderTexts
from specdec.attention.encoder.inputs import CrossInputs
from specdec.attention.encoder.texts import attend_texts, encoder_segment
from specdec.attention.inputs import DenseHeads, HeadInputs, LayerCall, LayerInputs, QueryInputs, SplitInputs
from specdec.attention.kinds import FULL, PLAIN, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.ops.rope import HeadPrep
from toolkit.attention import sparse_cells
from toolkit.attention.caches import Scattered
from toolkit.attention.cells import (
    DEVICE,
    DIFFERENCE,
    LAYERS,
    LENS,
    LONGEST,
    PAIRS,
    PARENTS,
    RANKS,
    REACH,
    SHARED,
    SINKS,
    SLOPES,
    SOFTCAP,
    SPARSE,
    TEXTS,
    D,
    E,
    H,
    K,
    MatrixCell,
    N,
    dtype_of,
)
from toolkit.oracles.attention import dense_attention, of_kind
from toolkit.trees import chain_shape, mask_of


class Absorbed(LayerInputs):
    """Queries that are absorbed already, and latents as they are stored."""

    def __init__(self, q_THL: Tensor, latent_TL: Tensor) -> None:
        self.q_THL, self.latent_TL = q_THL, latent_TL

    def paged(self, call: LayerCall) -> Tensor:
        assert isinstance(call.view, LatentView)
        call.view.put(call.slots_T, self.latent_TL)
        return call.attend(self.q_THL)

    def dense(self) -> DenseHeads:
        raise NotImplementedError("the matrix has a definition of its own")


def split_row(row: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [tokens, K, D] and values [tokens, K, E] of one row of numbers a token."""
    k, v = row.split((K * D, K * E), dim=1)
    return k.unflatten(1, (K, D)), v.unflatten(1, (K, E))


@functools.cache  # made before a capture, in which nothing may be copied from the host
def difference() -> Difference:
    factor, scale, eps = DIFFERENCE
    return Difference(torch.tensor(factor, device=DEVICE), scale, eps)


def magnified(out_THE: Tensor) -> Tensor:
    """[T, H / 2, 1], at least 1: how much the norm of a difference of near equal outputs magnifies the rounding of both."""
    first, second = out_THE.unflatten(1, (K // 2, 2, -1)).unbind(2)
    factor, scale, _ = DIFFERENCE
    most = first.norm(dim=-1, keepdim=True) + factor * second.norm(dim=-1, keepdim=True)
    return (scale * most / (first - factor * second).norm(dim=-1, keepdim=True)).clamp(min=1).flatten(1, 2)


class World:
    """Two sequences whose pages lie scattered, with N more tokens each: a chain, or a tree.  Unread slots hold NaN.

    There is a layer of every kind, and, but for latents, one more that shares the windowed layer's keys and values.
    """

    def __init__(self, cell: MatrixCell, seed: int = 0) -> None:
        self.cell, P = cell, cell.page_size
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype_of(cell.backend)
        pages = Scattered(list(LENS), P, extra=N + 1, seed=seed, device=DEVICE)  # two passes may follow each other
        self.table, self.lens_B = pages.table_BW, pages.lens_B
        self.cache = self.new_cache(pages.num_slots)
        self.texts = self.new_cache(len(TEXTS) * LONGEST) if cell.extra == "cross" else None
        text_pages = torch.arange(len(TEXTS), dtype=torch.int32, device=DEVICE).flip(0)
        self.encoder_texts = EncoderTexts(text_pages, torch.tensor(TEXTS, dtype=torch.int32, device=DEVICE), LONGEST)
        self.mask_NN = mask_of(list(PARENTS) if cell.tree else chain_shape(N)[0]).to(DEVICE)
        self.depth_N = self.mask_NN.sum(-1) - 1
        self.deepest = int(self.depth_N.max()) + 1
        self.scoring = Scoring(0.25) if cell.rank else PLAIN  # absorbed queries do not tell the scale
        if cell.capped:
            self.scoring = Scoring(0.3, SOFTCAP, torch.tensor(SINKS, device=DEVICE))
        if cell.extra == "alibi":
            roots = cell.page_size == 4  # of distances; at other page sizes slopes are multiplied with the distances
            self.scoring = replace(self.scoring, slopes_H=torch.tensor(SLOPES, device=DEVICE), sqrt_alibi=roots)
        self.heads_kv, self.head_dim = (1, cell.rank + cell.rope_dim) if cell.rank else (K, cell.head_dim)
        self.fill()

    def new_cache(self, num_slots: int) -> KVCache:
        kinds, device = tuple(replace(kind, alibi=self.cell.extra == "alibi") for kind in LAYERS.values()), DEVICE
        if self.cell.rank:
            dims, in_bytes = (self.cell.rank, self.cell.rope_dim), self.cell.kv_cache_dtype == FP8_LATENTS
            latents = Fp8LatentLayout(*dims) if in_bytes else LatentLayout(*dims, self.dtype)
            if self.cell.cache not in SPARSE:
                return KVCache(latents, kinds, num_slots, device=device)
            layout = SparseLatentLayout(latents, sparse_cells.DIM, self.dtype)
            return KVCache(layout, (FULL,) * len(kinds), num_slots, device=device)  # such layers have no windows
        if self.cell.cache == "split":
            return KVCache(SplitLayout(K, D, E, self.dtype), kinds, num_slots, device=device)
        own = self.cell.head_dim
        layout: CacheLayout = HeadsLayout(K, own, self.dtype)
        if self.cell.kv_cache_dtype == INT8_KEYS:
            layout = Int8KeysLayout(K, own, self.dtype, self.cell.int8_queries)
        elif self.cell.kv_cache_dtype != "auto":
            layout = QuantLayout(self.cell.kv_cache_dtype, K, own, device, int8_queries=self.cell.int8_queries)
        if self.cell.cache in PAIRS:
            return KVCache(layout, kinds, num_slots, device=device)
        kinds, kv_layers = (*kinds, kinds[SHARED]), (*range(len(kinds)), SHARED)
        return KVCache(layout, kinds, num_slots, device=device, kv_layers=kv_layers)

    def rand(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(DEVICE, self.dtype)

    def write(self, layer: int, slots_T: Tensor, kv_T2KD: Tensor, cache: KVCache | None = None) -> None:
        view = (cache or self.cache).view(layer)
        if isinstance(view, LatentView):
            view.put(slots_T, kv_T2KD.flatten(1))
        elif isinstance(view, SparseLatentView) and view.index_keys is not None:
            latent_TL, view.index_keys[slots_T] = sparse_cells.split(kv_T2KD.flatten(1), self.head_dim)[:2]
            view.latents.put(slots_T, latent_TL)
        elif self.cell.cache == "split":
            view.write_heads(slots_T, *split_row(kv_T2KD))  # type: ignore[attr-defined]
        else:
            view.write(slots_T, kv_T2KD)

    def fill(self) -> None:
        """Committed tokens; everything else is NaN, or has NaN for its scale."""
        for cache in filter(None, (self.cache, self.texts)):
            for junk in cache.buffers.values():
                junk.view(torch.uint8).fill_(0xFF) if junk.dtype.itemsize == 1 else junk.fill_(torch.nan)
        for layer in range(len(LAYERS)):
            slots_T = torch.cat([self.slots(b, L) for b, L in enumerate(LENS)])
            self.write(layer, slots_T, self.fresh(len(slots_T)))
        if self.texts is not None:
            slots_S = torch.cat([self.text_slots(b) for b in range(len(TEXTS))])
            self.write(0, slots_S, self.fresh(len(slots_S)), self.texts)

    def text_slots(self, b: int) -> Tensor:
        return int(self.encoder_texts.page_B[b]) * LONGEST + torch.arange(TEXTS[b], device=DEVICE)

    def fresh(self, tokens: int) -> Tensor:
        shapes = {"split": (K * (D + E),)} | dict.fromkeys(RANKS, (1, self.head_dim))
        shapes |= dict.fromkeys(SPARSE, (1, self.head_dim + sparse_cells.WIDTH))
        return self.rand(tokens, *shapes.get(self.cell.cache, (2, K, self.cell.head_dim)))

    def slots(self, b: int, count: int) -> Tensor:
        return PageTable(self.table[b : b + 1], self.cell.page_size).slots_at(torch.arange(count, device=DEVICE)[None])[0]

    def attention(self, backend: Any) -> PagedAttention:
        """Builds the plan from lens_B, as a captured pass does."""
        P, at_N = self.cell.page_size, torch.arange(N, device=DEVICE)
        slots_BN = PageTable(self.table, P).slots_at(self.lens_B.long()[:, None] + at_N)
        if not self.cell.tree:
            plan = AttentionPlan(
                (causal_segment(PageTable(self.table, P), self.lens_B + N, N),), cross=self.encoder_texts.read_by(N)
            )
            return PagedAttention(backend, self.cache, PassTables(plan, slots_BN.flatten()), encoder_cache=self.texts)
        suffix = replace(Segment.empty(len(LENS) * N, self.deepest, 1, device=DEVICE), base_B=self.lens_B)
        fill_tree_suffix(suffix, slots_BN, self.mask_NN.expand(len(LENS), N, N))
        positions_T = (self.lens_B.long()[:, None] + self.depth_N).flatten()
        prefix = prefix_segment(PageTable(self.table, P), self.lens_B, N)
        plan = AttentionPlan((prefix,), positions_T, suffix, self.encoder_texts.read_by(N))
        return PagedAttention(backend, self.cache, PassTables(plan, slots_BN.flatten()), encoder_cache=self.texts)

    def forward(self, attn: PagedAttention, q_THD: Tensor, kv: list[Tensor]) -> list[Tensor]:
        """One pass: every layer stores its tokens, and attends; the layer that shares attends with other queries."""
        outs = []
        for layer, fresh in enumerate(kv):
            if self.cell.cache in SPARSE:
                assert self.cell.rank
                outs.append(
                    attn(layer, sparse_cells.layer_inputs(q_THD, fresh.flatten(1), self.cell.rank), scoring=self.scoring)
                )
            elif self.cell.rank:
                outs.append(attn(layer, Absorbed(q_THD, fresh.flatten(1)), scoring=self.scoring))
            elif self.cell.cache == "split":
                outs.append(attn(layer, SplitInputs(DenseHeads(q_THD, *split_row(fresh))), scoring=self.scoring))
            else:
                qkv_TXD, prep = torch.cat((q_THD, fresh.flatten(1, 2)), dim=1), HeadPrep(None, K)
                inputs: LayerInputs = HeadInputs(qkv_TXD, prep)
                if self.cell.cache in PAIRS:
                    inputs = DifferentialInputs(qkv_TXD, prep, difference())
                outs.append(attn(layer, inputs, scoring=self.scoring))
        if self.cell.ordinary:
            outs.append(attn(len(kv), QueryInputs(-q_THD, HeadPrep(None, 0)), scoring=self.scoring))
        if self.cell.extra == "cross":
            outs.append(attn(0, CrossInputs(q_THD), scoring=self.scoring))
        if self.cell.extra == "encoder":
            heads = (q_THD, *kv[0].unbind(1))
            outs += [attend_texts(attn.backend, *heads, self.read_both_ways(reach), self.scoring) for reach in (None, REACH)]
        return outs

    def read_both_ways(self, reach: int | None) -> Segment:
        """The pass's tokens as texts of an encoder, one a sequence."""
        cu_seqlens = torch.arange(0, len(LENS) * N + 1, N, dtype=torch.int32, device=DEVICE)
        return encoder_segment(cu_seqlens, N, torch.arange(N, device=DEVICE).repeat(len(LENS)), reach, ragged=False)

    def dense_extras(self, q_THD: Tensor, kv: list[Tensor]) -> list[Tensor]:
        """By the definition: what `forward` returns after the layers' outputs."""
        at_N, q_BNHD = torch.arange(N, device=DEVICE), q_THD.unflatten(0, (len(LENS), N))
        if self.cell.extra == "cross":
            texts = [self.texts.view(0).read(self.text_slots(b), torch.float64) for b in range(len(TEXTS))]
            q_BNHD = queries_as_read(self.texts.view(0), q_BNHD.double())
            return [torch.cat([dense_attention(q, *text, None, self.scoring)[0] for q, text in zip(q_BNHD, texts)])]
        if self.cell.extra != "encoder":
            return []
        outs = []
        for seen_NN in (None, (at_N - at_N[:, None]).abs() <= REACH):
            rows = zip(q_BNHD, *(x.unflatten(0, (len(LENS), N)) for x in kv[0].unbind(1)))
            outs.append(torch.cat([dense_attention(q, k, v, seen_NN, self.scoring)[0] for q, k, v in rows]))
        return outs

    def dense(self, layer: int, q_THD: Tensor) -> tuple[Tensor, Tensor | float]:
        """By the definition, in float64, over what the cache hands out: a mask of positions and ancestors, one softmax.

        Also returns how many times as large as elsewhere rounding errors may be.
        """
        kind, outs = self.cache.kinds[layer], []
        for b, q_NHD in enumerate(q_THD.unflatten(0, (len(LENS), N))):
            L = int(self.lens_B[b])
            view = self.cache.view(layer)
            view = PairedView.of(view) if self.cell.cache in PAIRS else view  # type: ignore[arg-type]
            k, v = view.read(self.slots(b, L + N), torch.float64)
            at_X = torch.cat((torch.arange(L, device=DEVICE), L + self.depth_N))
            seen_NX = torch.cat((torch.ones(N, L, dtype=torch.bool, device=DEVICE), self.mask_NN), dim=1)
            seen_NX &= of_kind(kind, L + self.depth_N, at_X)
            if isinstance(view, SparseLatentView):
                tokens_NX = self.last[layer].flatten(1)[b * N : (b + 1) * N]
                seen_NX = sparse_cells.selected(view, self.slots(b, L + N), tokens_NX, seen_NX)
            distance_NX = at_X - (L + self.depth_N)[:, None]
            q_NHD = queries_as_read(view, q_NHD.double())
            outs.append(dense_attention(q_NHD, k, v, seen_NX, self.scoring, distance_NX)[0])
        out = torch.cat(outs)
        if self.cell.cache in PAIRS:
            return subtract_halves(out, K, difference()), magnified(out)
        return out, 1.0

    def inputs(self) -> tuple[Tensor, list[Tensor]]:
        self.last = [self.fresh(len(LENS) * N) for _ in LAYERS]
        q_THD = self.rand(len(LENS) * N, H, self.head_dim)
        if self.cell.float8_queries:  # such that float8 holds them: then the library must find the same weights
            q_THD = q_THD.to(torch.float8_e4m3fn).to(self.dtype)
        return q_THD, [fresh.clone() for fresh in self.last]

    def check(self, outs: list[Tensor], q_THD: Tensor, kv: list[Tensor]) -> None:
        tolerance = self.cell.tolerance
        layers = range(len(self.cache.kinds))
        wants = [self.dense(layer, q_THD if layer < len(LAYERS) else -q_THD) for layer in layers]
        names = [f"layer {layer}, {self.cache.kinds[layer]}" for layer in layers] + [self.cell.extra] * 2
        wants += [(want, 1.0) for want in self.dense_extras(q_THD, kv)]
        assert len(outs) == len(wants)
        for name, out, (want, size) in zip(names, outs, wants):
            torch.testing.assert_close(
                out.double() / size, want / size, atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
        assert len(outs) == len(wants)
