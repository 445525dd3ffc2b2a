"""Builders against dense masked attention over the whole sequence in float64: who reads what, and nothing else.

Keeps out: a suffix that misses an ancestor or reads a cousin, a page edge off by one, builders that need a fresh buffer.

Shapes: B sequences, N tree nodes, K topk, S steps, T queries, H heads, D head dim, L committed tokens.
"""

from dataclasses import replace

import pytest
import torch
from toolkit.attention.answers import attended
from toolkit.attention.caches import Scattered
from toolkit.attention.segments import narrowed, ragged_causal_segment
from toolkit.oracles.attention import dense_attention
from toolkit.oracles.reference import ReferenceBackend
from toolkit.trees import random_masks
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.pages import PageTable
from specdec.attention.plan import (
    causal_segment,
    fill_draft_suffix,
    fill_tree_suffix,
    prefix_segment,
)
from specdec.attention.segment import AttentionPlan, Segment

H, KV_HEADS, D = 4, 2, 8
BACKENDS = [ReferenceBackend(), TorchBackend()]


class Sequences(Scattered):
    """Sequences in float64 over a cache that holds 1e3 wherever nobody may read."""

    def __init__(self, lens: list[int], extra: int, page_size: int, seed: int = 0) -> None:
        super().__init__(lens, page_size, extra=extra, seed=seed)
        self.view = MHAView(self.fill(2, KV_HEADS, D, dtype=torch.float64, elsewhere=1e3))
        self.dense = [self.view.kv[self.slots(row, 0, n + extra)] for row, n in enumerate(lens)]  # in order of position

    def queries(self, count: int, heads: int, dim: int) -> Tensor:
        return self.randn(count, heads, dim, dtype=torch.float64)


def assert_plan(w: Sequences, plan: AttentionPlan, q_THD: Tensor, masks: list[Tensor], backend: Backend) -> None:
    """masks: of each sequence, [Q, N] over its first N tokens."""
    got = attended(backend, q_THD, w.view, plan).split([len(mask) for mask in masks])
    queries = q_THD.split([len(mask) for mask in masks])
    for q, out, kv, mask in zip(queries, got, w.dense, masks, strict=True):
        k, v = kv[: mask.shape[1]].unbind(1)
        torch.testing.assert_close(out, dense_attention(q, k, v, mask)[0], atol=1e-12, rtol=1e-12)


def lengths(page_size: int) -> list[int]:
    """The edges of a page, nothing, one, and long."""
    return [0, 1, max(page_size - 1, 2), page_size, page_size + 1, 37]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("page_size", [1, 4, 16])
class TestBuilders:
    def test_slots(self, page_size: int, backend: Backend) -> None:
        w = Sequences(lengths(page_size), 3, page_size)
        positions = torch.tensor([[0, n, n + 2] for n in w.lens])
        want = [torch.cat([w.slots(row, p, p + 1) for p in ps]) for row, ps in enumerate(positions.tolist())]
        got = PageTable(w.table_BW, page_size).slots_at(positions)
        assert got.dtype == torch.int64 and torch.equal(got, torch.stack(want))

    def test_tree(self, page_size: int, backend: Backend) -> None:
        """Every node sees the prefix, its ancestors and itself; the table is as narrow as the deepest node allows."""
        w, N = Sequences(lengths(page_size), 9, page_size, seed=1), 9
        mask_BNN = random_masks(len(w.lens), N, seed=1)
        deepest = int(mask_BNN.sum(-1).max())
        for width in (deepest, N):
            suffix = Segment.empty(len(w.lens) * N, width, 1)
            fill_tree_suffix(suffix, w.fresh_slots(), mask_BNN)
            assert torch.equal(suffix.cache_seqlens, mask_BNN.sum(-1).flatten().int())
            plan = AttentionPlan((prefix_segment(PageTable(w.table_BW, page_size), w.lens_B, N),), suffix=suffix)
            masks = [torch.cat((torch.ones(N, n, dtype=torch.bool), mask), 1) for n, mask in zip(w.lens, mask_BNN, strict=True)]
            assert_plan(w, plan, w.queries(len(w.lens) * N, H, D), masks, backend)

    def test_draft_step(self, page_size: int, backend: Backend) -> None:
        """Branch k at step s reads the prefix and the s + 1 slots of its own path, in whatever order they lie."""
        K, S = 3, 4
        w = Sequences(lengths(page_size), K * S, page_size, seed=2)
        fresh = w.fresh_slots()
        for step in range(S):
            picked_BKS = torch.randint(K, (len(w.lens), K, S), generator=w.generator) + K * torch.arange(S)
            ancestors = fresh[:, None].expand(-1, K, -1).gather(2, picked_BKS)
            suffix = Segment.empty(len(w.lens) * K, step + 1, 1)
            fill_draft_suffix(suffix, ancestors, step)
            plan = AttentionPlan((prefix_segment(PageTable(w.table_BW, page_size), w.lens_B, K),), suffix=suffix)
            masks = []
            for n, picked_KS in zip(w.lens, picked_BKS, strict=True):
                own = torch.zeros(K, K * S, dtype=torch.bool).scatter_(1, picked_KS[:, : step + 1], True)
                masks.append(torch.cat((torch.ones(K, n, dtype=torch.bool), own), 1))
            assert_plan(w, plan, w.queries(len(w.lens) * K, H, D), masks, backend)

    @pytest.mark.parametrize("queries", [1, 5])
    def test_causal(self, page_size: int, backend: Backend, queries: int) -> None:
        """Chain, extend and decode: the last queries of each sequence, the corner at the bottom right."""
        w = Sequences(lengths(page_size), queries, page_size, seed=3)
        plan = AttentionPlan((causal_segment(PageTable(w.table_BW, page_size), w.lens_B + queries, queries),))
        masks = [torch.ones(queries, n + queries, dtype=torch.bool).tril(n) for n in w.lens]
        assert_plan(w, plan, w.queries(len(w.lens) * queries, H, D), masks, backend)

    def test_prompts(self, page_size: int, backend: Backend) -> None:
        w = Sequences([n for n in lengths(page_size) if n], 0, page_size, seed=4)
        plan = AttentionPlan((ragged_causal_segment(PageTable(w.table_BW, page_size), w.lens, w.lens),))
        masks = [torch.ones(n, n, dtype=torch.bool).tril() for n in w.lens]
        assert_plan(w, plan, w.queries(sum(w.lens), H, D), masks, backend)

    def test_static_buffers(self, page_size: int, backend: Backend) -> None:
        """Keeps out: a builder that leaves in a dirty, larger buffer what the last, larger batch wrote there."""
        N, big = 6, Segment.empty(40 * 6, 12, 1)
        for lens in ([3, 8, 0, 21], [5], [30, 2]):
            w = Sequences(lens, N, page_size, seed=5)
            mask_BNN = random_masks(len(lens), N, seed=5)
            big.pages.table.random_(0, 9)
            big.cache_seqlens.fill_(12)
            fresh, view = Segment.empty(len(lens) * N, N, 1), narrowed(big, len(lens) * N, N)
            q_THD = w.queries(len(lens) * N, H, D)
            outs = []
            for suffix in (fresh, view):
                fill_tree_suffix(suffix, w.fresh_slots(), mask_BNN)
                plan = AttentionPlan((prefix_segment(PageTable(w.table_BW, page_size), w.lens_B, N),), suffix=suffix)
                outs.append(attended(backend, q_THD, w.view, plan))
            assert torch.equal(*outs)


def test_mask_sorting_packs_to_the_left() -> None:
    """Slots 8 9 10 under the mask row 1 0 1 become 8 10."""
    suffix = Segment.empty(3, 2, 1)
    mask = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    fill_tree_suffix(suffix, torch.tensor([[8, 9, 10]]), mask)
    assert suffix.cache_seqlens.tolist() == [1, 2, 2]
    assert suffix.pages.table[0, 0] == 8 and suffix.pages.table[1:].tolist() == [[8, 9], [8, 10]]


def test_the_most_keys_of_a_window_are_those_of_all_its_queries() -> None:
    """Keeps out: a windowed pass split for the keys of one query alone: the last of five reads four further than the first."""
    segment = replace(Segment.empty(3, 64, 5), span=8)
    assert segment.max_keys == 12
    assert replace(segment, span=62).max_keys == replace(segment, span=None).max_keys == 64
    wide = segment.pages._replace(page_size=16)
    assert replace(segment, pages=wide, span=None).max_keys == 1024
