"""What an indexer chooses over keys that ranks share, and attention over it, against brute force by position.

Scores are exact: queries, keys and weights are small whole numbers, so that many scores tie.

Shapes: B sequences, N nodes, T queries, J indexer heads, H heads of a rank, K latent width, E latent rank.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from toolkit.attention.caches import Scattered
from toolkit.kernels import HAS_GPU, use_kernels_everywhere
from toolkit.parallel.ranks import ThreadGroup, on_ranks
from toolkit.prompts import ragged_prompts
from toolkit.trees import random_shape
from torch import Tensor

from specdec.attention.attend import make_backend
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.mla_cache import LatentLayout
from specdec.attention.caches.sparse_cache import SparseLatentLayout
from specdec.attention.context_parallel.selection import ShardedCandidates, sharded_segment
from specdec.attention.context_parallel.sharding import KVSharding
from specdec.attention.context_parallel.tables import ContextParallel
from specdec.attention.inputs import LayerCall, PreparedPlan
from specdec.attention.kinds import FULL, Scoring
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.sparse.inputs import reads_all
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.batch.trees.tables import context_parallel_tables

N, STEPS, J, I, H, E, K = 5, 3, 2, 16, 2, 16, 32
LAYOUT = SparseLatentLayout(LatentLayout(E, K - E, torch.float32), I, torch.float32)
SCORING = Scoring(scale=0.3)


class World(NamedTuple):
    """A pass over sequences: what each position holds of both buffers, and which positions each query may select from.

    tokens_BPX: latents, then keys of the indexer, of committed tokens and after them of the pass's own.
    committed: how many tokens of each row are.
    visible: for each query its row, and its candidates as places in tokens_BPX, in the order of positions.
    tables_on: the pass on one rank: (its plan, the slot of each of its own tokens in turn).
    """

    where: Scattered
    tokens_BPX: Tensor
    committed: list[int]
    visible: list[tuple[int, list[int]]]
    q_TJI: Tensor
    w_TJ: Tensor
    q_THK: Tensor
    tables_on: Callable[[ContextParallel], tuple[AttentionPlan, Tensor]]


def whole(dice: torch.Generator, *shape: int) -> Tensor:
    """Small whole numbers in float32."""
    return torch.randint(-2, 3, shape, generator=dice).float()


def of_pass(
    where: Scattered, committed: list[int], visible: list[tuple[int, list[int]]], ranks: int, tables_on: object
) -> World:
    dice, T = torch.Generator().manual_seed(7), len(visible)
    longest = 1 + max(place for _, places in visible for place in places)
    tokens_BPX = torch.cat((where.randn(len(committed), longest, K), whole(dice, len(committed), longest, I)), 2)
    given = whole(dice, T, J, I), whole(dice, T, J), where.randn(T, ranks * H, K)
    return World(where, tokens_BPX, committed, visible, *given, tables_on)


def of_trees(lens: list[int], page_size: int, ranks: int, is_chain: bool, dice: random.Random) -> World:
    where = Scattered(lens, page_size * ranks, extra=N, seed=ranks)
    tokens_BN = torch.zeros(len(lens), N, dtype=torch.int64)
    parents = torch.tensor([random_shape(N, STEPS, dice)[0] for _ in lens])
    tree = DraftTree.chain(tokens_BN) if is_chain else DraftTree(tokens_BN, parents, STEPS)
    visible = [
        (row, [*range(length), *(length + int(n) for n in tree.mask_BNN[row, node].nonzero())])
        for row, length in enumerate(lens)
        for node in range(N)
    ]

    def tables_on(context: ContextParallel) -> tuple[AttentionPlan, Tensor]:
        state = BatchState.empty(len(lens), where.table_BW.shape[1], page_size=page_size * ranks, device="cpu")
        state.pages.table.copy_(where.table_BW)
        state.lens_B.copy_(where.lens_B)
        tables = context_parallel_tables(state, tree, context)
        return tables.plan, tables.slots_BN.flatten()

    return of_pass(where, lens, visible, ranks, tables_on)


def of_prompts(lens: list[int], start: int, page_size: int, ranks: int) -> World:
    """Prompts that have run up to token `start`."""
    where = Scattered(lens, page_size * ranks, seed=ranks)
    (tables,) = ragged_prompts([[1] * n for n in lens], where.table_BW, page_size * ranks, start).tables
    visible = [(row, [*range(at + 1)]) for row, length in enumerate(lens) for at in range(start, length)]

    def tables_on(context: ContextParallel) -> tuple[AttentionPlan, Tensor]:
        found = context.of_prompts(tables).tables
        return found.plan, found.slots_T

    return of_pass(where, [start] * len(lens), visible, ranks, tables_on)


def chosen(world: World, query: int, topk: int) -> list[int]:
    """The places that the query selects, by the definition: best score first, ties to the lower position."""
    row, places = world.visible[query]
    products_JV = (world.q_TJI[query].double() @ world.tokens_BPX[row, places, K:].double().T * I**-0.5).relu()
    scores = (world.w_TJ[query].double() @ products_JV).tolist()
    return [places[at] for at in sorted(range(len(places)), key=lambda at: (-scores[at], at))[:topk]]


def check(world: World, backend: str, ranks: int, page_size: int, run: int, topk: int) -> None:
    """Each chosen key is read on one rank, which keeps its position; attention over all ranks is as by definition."""
    T, pages, own_tokens = len(world.visible), world.where.num_pages, [0] * len(world.committed)
    for row, places in world.visible:
        own_tokens[row] = max(own_tokens[row], places[-1] + 1 - world.committed[row])

    def on_rank(group: ThreadGroup) -> tuple[Segment, dict[int, tuple[int, int]], Tensor]:
        owned = KVSharding(group.rank, ranks, page_size, run)
        context = ContextParallel(group, owned, pages * page_size, T + 3)
        plan, slots_T = world.tables_on(context)
        cache, held = KVCache(LAYOUT, [FULL], pages * page_size + context.room), {}
        buffers = [cache.buffers[buffer.name][0].fill_(torch.nan) for buffer in LAYOUT.buffers]

        def keep(slot: int, row: int, place: int) -> None:
            latent, key = world.tokens_BPX[row, place].split((K, I))
            for buffer, value in zip(buffers, (latent, key), strict=True):
                buffer[slot] = value
            held[slot] = row, place

        for row, length in enumerate(world.committed):
            local = owned.local_slots(world.where.slots(row, 0, length)).tolist()
            for place in range(length):
                if bool(owned.keeps(torch.tensor(place))):
                    keep(local[place], row, place)
        own = [(row, length + n) for row, length in enumerate(world.committed) for n in range(own_tokens[row])]
        for slot, (row, place) in zip(slots_T.tolist(), own, strict=True):
            keep(slot, row, place)
        view = cache.view(0)
        candidates = ShardedCandidates.of(plan, T)
        rows = sharded_segment(world.q_TJI, world.w_TJ, view.index_keys, candidates, topk)  # type: ignore[attr-defined]
        reader = make_backend(backend)
        call = LayerCall(reader, view, FULL, slots_T, PreparedPlan(plan), None, SCORING, {})
        q_THK = world.q_THK[:, group.rank * H : (group.rank + 1) * H].contiguous()
        state = call.over_ranks(q_THK, view.latents, reader.prepare(AttentionPlan((rows,))))  # type: ignore[attr-defined]
        return rows, held, state.out_THD

    found = on_ranks(ranks, on_rank, in_turns=backend == "triton")
    for query, (row, places) in enumerate(world.visible):
        want, got = chosen(world, query, topk), []
        for rank, (rows, held, _) in enumerate(found):
            slots = rows.pages.table[query, : int(rows.cache_seqlens[query])].tolist()
            assert all(held[slot][0] == row for slot in slots)
            own = [held[slot][1] for slot in slots]
            positions = [places.index(place) for place in own]  # a node stands where its path has it
            assert positions == sorted(positions) and all(position // run % ranks == rank for position in positions)
            got += own
        assert sorted(got) == sorted(want)
        latents = world.tokens_BPX[row, want, :K].double()
        out_HE = (world.q_THK[query].double() @ latents.T * 0.3).softmax(-1) @ latents[:, :E]
        torch.testing.assert_close(torch.cat([out[query] for _, _, out in found]).double(), out_HE, atol=2e-5, rtol=1e-4)


LAYOUTS = [(2, 4, 1), (2, 4, 4), (4, 6, 3)]


@pytest.mark.parametrize("kind", ["chain", "tree", "prompts"])
@pytest.mark.parametrize(("ranks", "page_size", "run"), LAYOUTS)
def test_ranks_choose_as_one(ranks: int, page_size: int, run: int, kind: str) -> None:
    """Random lengths, and numbers of keys to choose.  Keeps out: ties that go to the lower rank, a key that is the best of a
    rank and not chosen, own tokens read on every rank, counts of a rank that its neighbour uses."""
    dice = random.Random(repr((ranks, page_size, run, kind)))
    for topk in (1, 4, dice.randrange(5, 40)):
        if kind == "prompts":
            world = of_prompts([9 + dice.randrange(30), 10, 9 + dice.randrange(20)], 8, page_size, ranks)
        else:
            lens = [0, 1, run, *(dice.randrange(70) for _ in range(3))]
            world = of_trees(lens, page_size, ranks, kind == "chain", dice)
        check(world, "torch", ranks, page_size, run, topk)


@pytest.mark.skipif(HAS_GPU, reason="the interpreter's turn; a GPU has tests/gpu/test_gpu_context.py")
@pytest.mark.parametrize("kind", ["tree", "prompts"])
def test_kernels_choose_as_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: scores that the kernels skip because a rank has few keys, page tables in place of positions."""
    launched = use_kernels_everywhere(monkeypatch)
    world = of_prompts([13, 30], 10, 4, 2) if kind == "prompts" else of_trees([0, 3, 41], 4, 2, False, random.Random(4))
    check(world, "triton", 2, 4, 2, 6)
    assert {"launch_best_keys", "launch_scores", "launch_selection", "launch_pack", "launch_merge"} <= set(launched)


def test_the_last_rows_of_a_chunk_have_its_tokens_too() -> None:
    """Keeps out: a last token that reads all keys of its row, because those of its own chunk were counted as one."""
    where = Scattered([30], 8, seed=2)
    (given,) = ragged_prompts([[1] * 30], where.table_BW, 8, 4).tables
    cached = replace(given.plan.segments[0], max_cached=4)  # of 30 tokens, 26 are the chunk's
    tables = given._replace(plan=AttentionPlan((cached,), given.plan.positions_T))

    def on_rank(group: ThreadGroup) -> None:
        context = ContextParallel(group, KVSharding(group.rank, 2, 4, 4), where.num_pages * 4, 40)
        found = context.of_prompts(tables).tables
        assert found.rows_plan is not None
        for plan in (found.plan, found.rows_plan):
            assert not reads_all(plan, 29) and reads_all(plan, 40)

    on_ranks(2, on_rank)
