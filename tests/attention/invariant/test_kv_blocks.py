"""Attention in one order of sums: plain steps, chunks of prompts and nodes of trees give the same bits.

On a GPU in bfloat16, else in float16 under Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from toolkit.inside.interpreter import dot_exactly
from toolkit.kernels import DEVICE, HAS_GPU
from toolkit.oracles.reference import ReferenceBackend
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.layout import KVView
from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.caches.split_cache import PairedView
from specdec.attention.invariant.backend import InvariantBackend
from specdec.attention.invariant.plan import MAX_COLUMNS, KVBlocks, doublings_of, kv_blocks_before
from specdec.attention.invariant.states_triton import kv_block_of, kv_block_start
from specdec.attention.kinds import FULL, PLAIN, LayerKind, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, prefix_segment
from specdec.attention.segment import AttentionPlan
from specdec.attention.state import AttentionState
from specdec.batch.tree import DraftTree
from specdec.batch.trees.tables import path_tables

DTYPE = torch.bfloat16 if HAS_GPU else torch.float16
ALL_AT_ONCE, ONE_BLOCK_EACH = 1, 10**6  # how many programs the GPU is said to run: few take all KV blocks, many take one
PATH = (0, 1, 3)  # in a tree of PARENTS, the nodes that hold the text
PARENTS = (0, 0, 0, 1, 1)
MIN_KV_BLOCK = 64  # keys: so few that short sequences have several KV blocks
pytestmark = pytest.mark.usefixtures("poisoned_new_memory")


@pytest.fixture(autouse=True)
def _sums_in_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        dot_exactly(monkeypatch)


class World:
    """A sequence of `length` tokens on scattered pages.  Unread slots hold NaN."""

    def __init__(self, length: int, K: int = 1, G: int = 2, D: int = 16, page: int = 4) -> None:
        random = torch.Generator().manual_seed(length + D)
        pages = -(-length // page) + 4
        self.table_1W = torch.randperm(pages, generator=random).int()[None].to(DEVICE)
        self.pages = PageTable(self.table_1W, page)
        self.slots = (self.table_1W[0].long()[:, None] * page + torch.arange(page, device=DEVICE)).flatten()
        self.kv = torch.full((pages * page, 2, K, D), torch.nan, dtype=DTYPE, device=DEVICE)
        self.kv[self.slots[:length]] = torch.randn(length, 2, K, D, generator=random).to(DEVICE, DTYPE)
        self.q_THD = torch.randn(length, K * G, D, generator=random).to(DEVICE, DTYPE)

    def ask(
        self,
        q_THD: Tensor,
        plan: AttentionPlan,
        kind: LayerKind,
        programs: int,
        scoring: Scoring = PLAIN,
        kv: Tensor | None = None,
    ) -> AttentionState:
        backend = InvariantBackend(programs, KVBlocks(self.min_keys, 2, MAX_COLUMNS if HAS_GPU else 16))
        view = self.view(self.kv if kv is None else kv)
        return backend.attend(q_THD, view, backend.prepare(plan.local(kind)), scoring if scoring.scale else self.scoring)

    scoring, min_keys = PLAIN, MIN_KV_BLOCK

    def view(self, kv: Tensor) -> KVView:
        return MHAView(kv)

    def tokens(self, start: int, end: int, kind: LayerKind, programs: int, scoring: Scoring = PLAIN) -> AttentionState:
        """The attention of the tokens from `start` to `end`, each of which reads up to itself."""
        return self.ask(self.q_THD[start:end], self.plan(start, end), kind, programs, scoring)

    def plan(self, start: int, end: int) -> AttentionPlan:
        return AttentionPlan((causal_segment(self.pages, ints(end), end - start),))

    def tree(self, length: int, kind: LayerKind, programs: int) -> AttentionState:
        """The attention of a tree's nodes after `length` tokens.  The nodes of PATH hold the tokens that come next."""
        N = len(PARENTS)
        kv, q_THD = self.kv.clone(), torch.randn(N, *self.q_THD.shape[1:]).to(DEVICE, DTYPE)
        kv[self.slots[length : length + N]] = torch.randn(N, *kv.shape[1:]).to(DEVICE, DTYPE)
        for depth, node in enumerate(PATH):
            kv[self.slots[length + node]] = self.kv[self.slots[length + depth]]
            q_THD[node] = self.q_THD[length + depth]
        parents_1N = torch.tensor([PARENTS], device=DEVICE)
        tree = DraftTree(parents_1N, parents_1N, 2)
        positions_T, _, suffix = path_tables(self.pages, ints(length), tree)
        prefix = prefix_segment(self.pages, ints(length), N)
        return self.ask(q_THD, AttentionPlan((prefix,), positions_T, suffix), kind, programs, kv=kv)


class Pairs(World):
    """Heads of differential attention: a query reads one half of a pair's key, and both values."""

    def __init__(self, length: int, K: int = 2, G: int = 1, D: int = 16, page: int = 4) -> None:
        super().__init__(length, K, G, D, page)

    def view(self, kv: Tensor) -> KVView:
        return PairedView(kv)


class Latents(World):
    """Latents of rank C and a rotated part of R elements, which H heads read."""

    scoring = Scoring(scale=0.2)

    def __init__(self, length: int, H: int = 2, C: int = 16, R: int = 6, page: int = 4) -> None:
        super().__init__(length, 1, H, C + R, page)
        self.kv, self.rank = self.kv[:, 0, 0].contiguous(), C

    def view(self, kv: Tensor) -> KVView:
        return MLAView(kv, self.rank)


class Pieces(Latents):
    """Latents that are so long that their values are cut into two parts."""

    def __init__(self, length: int) -> None:
        super().__init__(length, C=2 * MAX_COLUMNS if HAS_GPU else 32)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def same(a: AttentionState, b: AttentionState) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def rows(state: AttentionState, start: int, end: int | None = None) -> AttentionState:
    return AttentionState(*(x[start:end] for x in state))


@triton.jit
def _starts(keys, blocks, firsts, N: tl.constexpr, MIN_KV_BLOCK: tl.constexpr, DOUBLINGS: tl.constexpr):
    n = tl.arange(0, N)
    block = kv_block_of(tl.load(keys + n), MIN_KV_BLOCK, DOUBLINGS)
    first = kv_block_start(block, MIN_KV_BLOCK, DOUBLINGS)
    tl.store(blocks + n, block)
    tl.store(firsts + n, first)


@pytest.mark.parametrize("doublings", [0, 1, 5])
def test_kv_blocks_tile_the_positions(doublings: int) -> None:
    """Keeps out: a position in no KV block or in two, and a host that plans fewer KV blocks than the kernels count."""
    starts, position = [], 0
    for block in range(16 * (doublings + 1) + 20):
        starts.append(position)
        position += 64 << min(block // 16, doublings)
    keys = sorted({max(0, start + offset) for start in starts for offset in (-1, 0, 1)})
    keys = (keys + [0] * 128)[:128]
    blocks, firsts = (torch.empty(128, dtype=torch.int32, device=DEVICE) for _ in range(2))
    _starts[(1,)](ints(*keys), blocks, firsts, N=128, MIN_KV_BLOCK=64, DOUBLINGS=doublings)
    want = [max(i for i, start in enumerate(starts) if start <= key) for key in keys]
    assert blocks.tolist() == want and firsts.tolist() == [starts[block] for block in want]
    assert [kv_blocks_before(key + 1, doublings, MIN_KV_BLOCK) for key in keys] == [block + 1 for block in want]


OF_CHUNKS = [
    (World, FULL), (World, LayerKind(window=70)), (World, LayerKind(chunk=131)), (Pairs, LayerKind(window=70)), (Latents, FULL),
    (Pieces, FULL),
]  # fmt: skip


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("make", "kind"), OF_CHUNKS)
def test_a_token_s_attention_does_not_depend_on_its_chunk(make: type[World], kind: LayerKind) -> None:
    """Keeps out: steps that begin where a chunk or a window begins, splits by the number of programs, masked keys."""
    world = make(140)
    chunk = world.tokens(122, 140, kind, ALL_AT_ONCE)
    assert same(chunk, world.tokens(122, 140, kind, ONE_BLOCK_EACH))
    for position, programs in ((122, ALL_AT_ONCE), (128, ONE_BLOCK_EACH), (139, ONE_BLOCK_EACH)):
        assert same(world.tokens(position, position + 1, kind, programs), rows(chunk, position - 122, position - 121))
    want = ReferenceBackend()
    wide = world.view(world.kv.double())
    right = want.attend(world.q_THD[122:].double(), wide, want.prepare(world.plan(122, 140).local(kind)), world.scoring)
    for got, exact in zip(chunk, right, strict=True):
        torch.testing.assert_close(got.double(), exact.double(), atol=2e-2 if HAS_GPU else 3e-3, rtol=0)


OF_TREES = [
    *((World, FULL, length) for length in (62, 126, 128)), *((World, LayerKind(window=70), length) for length in (62, 128)),
    (World, LayerKind(window=2), 126), (Pairs, FULL, 126), (Latents, FULL, 126), (Pieces, FULL, 128),
]  # fmt: skip


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize(("make", "kind", "length"), OF_TREES)
def test_a_node_s_attention_is_that_of_a_plain_step(make: type[World], kind: LayerKind, length: int) -> None:
    """Keeps out: a tree's keys summed apart from the prefix, a tree across the end of a step or a KV block, siblings read."""
    world = make(140)
    steps = [world.tokens(length + depth, length + depth + 1, kind, ALL_AT_ONCE) for depth in range(len(PATH))]
    for programs in (ALL_AT_ONCE, ONE_BLOCK_EACH):
        nodes = world.tree(length, kind, programs)
        for node, step in zip(PATH, steps, strict=True):
            assert same(rows(nodes, node, node + 1), step), (programs, node)


def test_scoring_and_padded_rows() -> None:
    """Keeps out: a softcap that one of the ways blocks out, NaN in a row without keys."""
    world, scoring = World(70), Scoring(scale=0.3, softcap=2.0)
    chunk = world.tokens(60, 70, FULL, ALL_AT_ONCE, scoring)
    assert same(world.tokens(69, 70, FULL, ONE_BLOCK_EACH, scoring), rows(chunk, 9))
    assert not torch.equal(chunk.out_THD, world.tokens(60, 70, FULL, ALL_AT_ONCE).out_THD)
    for programs in (ALL_AT_ONCE, ONE_BLOCK_EACH):
        empty = world.ask(world.q_THD[:1], AttentionPlan((causal_segment(world.pages, ints(0), 1),)), FULL, programs)
        assert empty.out_THD.eq(0).all() and empty.lse_TH.eq(-torch.inf).all()


HEADS = [(World, (8, 4, 128, 16)), (World, (2, 3, 64, 1)), (World, (1, 8, 256, 32)), (World, (4, 1, 80, 7))]
PAIRS = [(Pairs, (4, 2, 128, 16)), (Pairs, (2, 3, 64, 1))]
LATENTS = [(Latents, (128, 512, 64, 16)), (Latents, (16, 512, 64, 1)), (Latents, (40, 256, 32, 7)), (Latents, (3, 48, 16, 5))]
KINDS = (FULL, LayerKind(window=300), LayerKind(chunk=256))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("make", "shape", "kind"),
    [*((*each, kind) for each in HEADS + PAIRS for kind in KINDS), *((*each, FULL) for each in LATENTS)],
)
def test_real_shapes(make: Any, shape: tuple[int, ...], kind: LayerKind) -> None:
    """Keeps out: kernels whose products or reductions compile to other instructions than each other's."""
    world = make(2500, *shape)
    world.min_keys = 128
    chunk = world.tokens(0, 2500, kind, ALL_AT_ONCE)
    assert same(rows(chunk, 2000), world.tokens(2000, 2500, kind, ONE_BLOCK_EACH))
    for position in (0, 63, 64, 127, 128, 700, 2047, 2048, 2049, 2304, 2499):
        step = world.tokens(position, position + 1, kind, ONE_BLOCK_EACH)
        assert same(step, world.tokens(position, position + 1, kind, ALL_AT_ONCE))
        assert same(step, rows(chunk, position, position + 1)), position
    for length in (1, 60, 126, 128, 700, 2047, 2302):
        for programs in (ALL_AT_ONCE, ONE_BLOCK_EACH):
            nodes = world.tree(length, kind, programs)
            for depth, node in enumerate(PATH):
                assert same(rows(nodes, node, node + 1), rows(chunk, length + depth, length + depth + 1)), (length, node)


def test_a_span_has_short_kv_blocks() -> None:
    """Keeps out: a windowed layer far from position 0 whose window lies in one KV block, which one program would read."""
    want = {None: 4, 128: 0, 1024: 0, 4096: 2, 10**6: 4}
    assert {span: doublings_of(span, MIN_KV_BLOCK) for span in want} == want
