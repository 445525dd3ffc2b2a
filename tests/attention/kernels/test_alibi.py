"""ALiBi: logits get a slope times the distance of positions.  Every plan against one dense softmax over positions, in float64.

The oracle counts positions by itself: a committed token stands at its number, a node of a tree at L plus its depth.

Shapes: B sequences, N queries of each, X keys of a sequence, H heads, K kv heads, D head dim, S levels.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from toolkit.attention.caches import Scattered
from toolkit.attention.segments import on_device, plan_on_device, ragged_causal_segment
from toolkit.kernels import DEVICE, HAS_GPU
from toolkit.oracles.attention import dense_attention, of_kind
from toolkit.trees import random_masks
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.quant_cache import QuantView, to_int8
from specdec.attention.eager.dense import attend_rows
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import LayerKind, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_draft_suffix, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.shared import SharedPrefix, split_shared

N, S = 6, 3
LENS = [0, 3000 if HAS_GPU else 70, 33, 2]
SLOPES = (0.5, -0.25, 0.125, 1.5, 0.0, 0.7, 0.01, 0.3)
ALIBI, WINDOW = LayerKind(alibi=True), LayerKind(window=7, alibi=True)


class World(NamedTuple):
    """A plan, and for each sequence its keys' slots and what each of its queries sees: the oracle's part.

    at_BX, at_BN: positions of each sequence's keys and queries.  seen_BNX: which key each query reads.
    """

    pages: Scattered
    plan: AttentionPlan
    slots_BX: list[Tensor]
    at_BX: list[Tensor]
    at_BN: list[Tensor]
    seen_BNX: list[Tensor]


def causal_world(P: int, counts: list[int], ragged: bool) -> World:
    """The last counts[b] tokens of each sequence ask; the others are committed."""
    pages = Scattered(LENS, P, extra=N)
    ends = [n + N for n in LENS]
    if ragged:
        segment = ragged_causal_segment(PageTable(pages.table_BW, P), counts, ends)
    else:
        segment = causal_segment(PageTable(pages.table_BW, P), torch.tensor(ends, dtype=torch.int32), counts[0])
    at_BX = [torch.arange(end) for end in ends]
    at_BN = [torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
    seen = [at_X <= at_N[:, None] for at_X, at_N in zip(at_BX, at_BN, strict=True)]
    slots = [pages.slots(b, 0, end) for b, end in enumerate(ends)]
    return World(pages, AttentionPlan((segment,), torch.cat(at_BN) if ragged else None), slots, at_BX, at_BN, seen)


def decode(P: int) -> World:
    return causal_world(P, [1] * len(LENS), False)


def chain(P: int) -> World:
    return causal_world(P, [N] * len(LENS), False)


def prompts(P: int) -> World:
    return causal_world(P, [1, 40, N, 3], True)


def tree(P: int, shared: bool = False) -> World:
    """Random trees, so that a path's nodes have numbers far from their depths."""
    pages, mask_BNN = Scattered(LENS, P, extra=N), random_masks(len(LENS), N, 5)
    own = prefix_segment(PageTable(pages.table_BW, P), pages.lens_B, N)
    segments: tuple[Segment, ...] = (own,)
    if shared:  # the two long sequences begin with the same pages
        tokens = 32 // P * P
        pages.table_BW[1, : tokens // P] = pages.table_BW[2, : tokens // P]
        prefix = SharedPrefix.empty(pages.table_BW, 64)
        prefix.set([1, 2], pages.table_BW[2, : tokens // P].tolist(), tokens)
        segments = split_shared(own, prefix)
    suffix = replace(Segment.empty(len(LENS) * N, N, 1), base_B=pages.lens_B)
    fill_tree_suffix(suffix, pages.fresh_slots(), mask_BNN)
    depth_BN = mask_BNN.sum(-1) - 1
    at_BN = list(pages.lens_B[:, None].long() + depth_BN)
    at_BX = [torch.cat((torch.arange(n), at_N)) for n, at_N in zip(LENS, at_BN, strict=True)]
    seen = [torch.cat((torch.ones(N, n, dtype=torch.bool), mask), 1) for n, mask in zip(LENS, mask_BNN, strict=True)]
    slots = [pages.slots(b, 0, n + N) for b, n in enumerate(LENS)]
    return World(pages, AttentionPlan(segments, torch.cat(at_BN), suffix), slots, at_BX, at_BN, seen)


def shared_tree(P: int) -> World:
    return tree(P, shared=True)


def draft(P: int) -> World:
    """The last step of a draft: two branches a sequence, each with S slots of its own path."""
    pages, branches = Scattered(LENS, P, extra=N), 2
    slots_BKS = pages.fresh_slots()[:, : branches * S].view(len(LENS), branches, S)
    suffix = replace(Segment.empty(len(LENS) * branches, S, 1), base_B=pages.lens_B)
    fill_draft_suffix(suffix, slots_BKS, S - 1)
    at_BN = [torch.full((branches,), n + S - 1) for n in LENS]
    at_BX = [torch.cat((torch.arange(n), n + torch.arange(S).repeat(branches))) for n in LENS]
    own = torch.eye(branches, dtype=torch.bool).repeat_interleave(S, 1)
    seen = [torch.cat((torch.ones(branches, n, dtype=torch.bool), own), 1) for n in LENS]
    slots = [torch.cat((pages.slots(b, 0, n), slots_BKS[b].flatten())) for b, n in enumerate(LENS)]
    plan = AttentionPlan((prefix_segment(PageTable(pages.table_BW, P), pages.lens_B, branches),), torch.cat(at_BN), suffix)
    return World(pages, plan, slots, at_BX, at_BN, seen)


def want(w: World, q_THD: Tensor, view: MHAView | QuantView, kind: LayerKind, scoring: Scoring) -> Tensor:
    outs, start = [], 0
    for slots_X, at_X, at_N, seen_NX in zip(w.slots_BX, w.at_BX, w.at_BN, w.seen_BNX, strict=True):
        k, v = view.read(slots_X, torch.float64)
        seen_NX = seen_NX & of_kind(kind, at_N, at_X)
        q_NHD, start = q_THD[start : start + len(at_N)], start + len(at_N)
        outs.append(dense_attention(q_NHD, k, v, seen_NX, scoring, at_X - at_N[:, None])[0])
    return torch.cat(outs)


BACKENDS = {"torch": (TorchBackend, torch.float64), "triton": (lambda: TritonBackend(40), torch.float32)}
PLANS = [decode, chain, prompts, tree, shared_tree, draft]
CASES = [
    pytest.param(name, plan_of, kind, ((4, 2, 8), (3, 1, 24), (1, 3, 8))[p % 3], (1, 4, 16)[(p + k) % 3], (p + k) % 2 == 0,
                 id=f"{name}-{plan_of.__name__}-{kind}".replace(" ", ""))
    for name in BACKENDS for p, plan_of in enumerate(PLANS) for k, kind in enumerate((ALIBI, WINDOW))
]  # fmt: skip


@pytest.mark.slow_cases(keep=5)
@pytest.mark.parametrize(("name", "plan_of", "kind", "heads", "P", "eight_bit"), CASES)
def test_distances_are_those_of_positions(
    name: str, plan_of: Callable[[int], World], kind: LayerKind, heads: tuple[int, int, int], P: int, eight_bit: bool
) -> None:
    """Keeps out: a distance counted from a row's or a path's start, by a node's number, or by a slot; a head's slope given to
    its neighbour; slopes that the softcap caps; distances lost when a shared prefix or a split is merged.
    """
    softcap, (group, K, _) = 3.0 if eight_bit else None, heads
    scoring = Scoring(0.4, softcap, None, torch.tensor(SLOPES[: group * K]))
    hold(name, plan_of(P), kind, heads, eight_bit, scoring)


@pytest.mark.parametrize("plan_of", [prompts, shared_tree, draft])
@pytest.mark.parametrize("name", BACKENDS)
def test_roots_of_distances(name: str, plan_of: Callable[[int], World]) -> None:
    """Keeps out: a root taken of the distance in a block, of a later key, or in one of the two kernels alone."""
    kind = ALIBI if plan_of is shared_tree else WINDOW
    hold(name, plan_of(4), kind, (2, 2, 8), False, Scoring(0.4, None, None, torch.tensor(SLOPES[:4]), sqrt_alibi=True))


@pytest.mark.parametrize("roots", [False, True])
def test_whole_rows(roots: bool) -> None:
    """The attention over a text without a cache, by which texts are proven."""
    scoring, at_T = Scoring(slopes_H=torch.tensor(SLOPES[:4]), sqrt_alibi=roots), torch.arange(23)
    q, k, v = (torch.randn(1, heads, 23, 8, dtype=torch.float64) for heads in (4, 2, 2))
    seen_TT = of_kind(WINDOW, at_T, at_T) & (at_T <= at_T[:, None])
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    want_THD = dense_attention(*rows, seen_TT, scoring, at_T - at_T[:, None])[0]  # type: ignore[misc]
    torch.testing.assert_close(attend_rows(q, k, v, WINDOW, scoring)[0].transpose(0, 1), want_THD)


def hold(name: str, w: World, kind: LayerKind, heads: tuple[int, int, int], eight_bit: bool, scoring: Scoring) -> None:
    """Asserts that a backend gives what one dense softmax gives."""
    (group, K, D), (make, dtype) = heads, BACKENDS[name]
    H = group * K
    kv = w.pages.fill(2, K, D, dtype=dtype)
    view: MHAView | QuantView = MHAView(kv)
    if eight_bit:
        stored, scales_N2K = to_int8(kv)
        view = QuantView(stored, scales_N2K=scales_N2K)
    q_THD = w.pages.randn(sum(map(len, w.at_BN)), H, D, dtype=dtype)
    backend = make()
    prepared = backend.prepare(plan_on_device(w.plan.local(kind), DEVICE))
    got = backend.attend(q_THD.to(DEVICE), on_device(view, DEVICE), prepared, on_device(scoring, DEVICE)).out_THD
    bound = 1e-9 if dtype == torch.float64 else 3e-5
    torch.testing.assert_close(got.double().cpu(), want(w, q_THD, view, kind, scoring), atol=bound, rtol=bound)


@pytest.mark.gpu
@pytest.mark.parametrize("roots", [False, True])
@pytest.mark.parametrize("kind", [ALIBI, WINDOW], ids=str)
@pytest.mark.parametrize("plan_of", PLANS)
def test_bfloat16(plan_of: Callable[[int], World], kind: LayerKind, roots: bool) -> None:
    """Keeps out: a tile, a layout or a precision that is wrong only in compiled code."""
    w, H, K, D = plan_of(16), 32, 8, 128
    view = MHAView(w.pages.fill(2, K, D, dtype=torch.bfloat16))
    scoring = Scoring(slopes_H=2.0 ** -torch.arange(0.25, 8.25, 0.25), sqrt_alibi=roots)
    q_THD = w.pages.randn(sum(map(len, w.at_BN)), H, D, dtype=torch.bfloat16)
    backend = TritonBackend()
    prepared = backend.prepare(plan_on_device(w.plan.local(kind), DEVICE))
    got = backend.attend(q_THD.to(DEVICE), on_device(view, DEVICE), prepared, on_device(scoring, DEVICE)).out_THD
    exact = want(w, q_THD, view, kind, scoring)
    assert float((got.double().cpu() - exact).norm() / exact.norm()) < 1e-2
