"""One layer's attention over a cache that ranks divide, and commits into it, against float64 attention by position.

Shapes: B sequences, N nodes, T = B * N, H heads of a rank, L committed tokens.
"""

import random
from collections.abc import Callable
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
from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.layout import CacheLayout
from specdec.attention.caches.mla_cache import LatentLayout
from specdec.attention.context_parallel.sharding import KVSharding
from specdec.attention.context_parallel.tables import ContextParallel
from specdec.attention.inputs import LayerCall, PreparedPlan
from specdec.attention.kinds import FULL, LayerKind, Scoring
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.batch.trees.tables import context_parallel_tables

H, N, STEPS, KEY, VALUE = 2, 6, 3, 16, 8
LATENTS: Callable[[torch.dtype], CacheLayout] = lambda dtype: LatentLayout(VALUE, KEY - VALUE, dtype)  # noqa: E731
HEADS: Callable[[torch.dtype], CacheLayout] = lambda dtype: HeadsLayout(1, KEY, dtype)  # noqa: E731
SCORING = Scoring(scale=0.4)
WINDOWS = [LayerKind(window=2), LayerKind(window=9), LayerKind(window=30), LayerKind(chunk=7), LayerKind(chunk=16)]


class World(NamedTuple):
    """tokens_BX: what the buffer holds of each position, of nodes after the committed ones.  q_THD: of all ranks' heads."""

    where: Scattered
    tokens_BX: Tensor
    q_THD: Tensor
    tree: DraftTree


def make_world(lens: list[int], page_size: int, ranks: int, is_chain: bool, shape: tuple[int, ...]) -> World:
    where = Scattered(lens, page_size * ranks, extra=N, seed=ranks)
    tokens_BX = where.randn(len(lens), max(lens) + N, *shape)
    q_THD = where.randn(len(lens) * N, ranks * H, KEY)
    rng = random.Random(5)
    parents = [[0, *range(N - 1)] if is_chain else random_shape(N, STEPS, rng)[0] for _ in lens]
    tokens_BN = torch.zeros(len(lens), N, dtype=torch.int64)
    tree = DraftTree.chain(tokens_BN) if is_chain else DraftTree(tokens_BN, torch.tensor(parents), STEPS)
    return World(where, tokens_BX, q_THD, tree)


def by_position(world: World, is_latent: bool, kind: LayerKind) -> Tensor:
    """[T, heads, E] in float64: each node reads the committed tokens and its own path, as far as the kind lets it."""
    outs, mask_BNN = [], world.tree.mask_BNN
    for row, length in enumerate(world.where.lens):
        kept = world.tokens_BX[row].double()
        k, v = (kept, kept[:, :VALUE]) if is_latent else (kept[:, 0, 0], kept[:, 1, 0])
        for node in range(N):
            at = torch.tensor([*range(length), *(length + int(n) for n in mask_BNN[row, node].nonzero())])
            at = at[first_of(kind, len(at) - 1) :]
            q_HD = world.q_THD[row * N + node].double()
            outs.append((q_HD @ k[at].T * 0.4).softmax(-1) @ v[at])
    return torch.stack(outs)


def first_of(kind: LayerKind, position: int) -> int:
    return 0 if kind.reads_all else int(kind.first_keys(torch.tensor([position])))


def check(
    layout: Callable[[torch.dtype], CacheLayout], backend: str, ranks: int, page_size: int, run: int, is_chain: bool,
    lens: list[int], kind: LayerKind = FULL,
) -> None:  # fmt: skip
    """Every rank's heads attend as by definition; then the path of every row is committed, and lies where it belongs."""
    (buffer,) = layout(torch.float32).buffers
    world = make_world(lens, page_size, ranks, is_chain, buffer.shape)
    B, pages = len(lens), world.where.num_pages
    want_THE = by_position(world, layout is LATENTS, kind)
    path_BE = torch.tensor([max(map(list, world.tree.mask_BNN[row]), key=sum) for row in range(B)])  # a longest path
    path_BE = torch.stack([each.nonzero()[:, 0][: STEPS + 1] for each in path_BE])

    def on_rank(group: ThreadGroup) -> Tensor:
        owned = KVSharding(group.rank, ranks, page_size, run)
        context = ContextParallel(group, owned, pages * page_size, B * N + 3)
        state = BatchState.empty(B, world.where.table_BW.shape[1], page_size=page_size * ranks, device="cpu")
        state.pages.table.copy_(world.where.table_BW)
        state.lens_B.copy_(world.where.lens_B)
        cache = KVCache(layout(torch.float32), [kind], pages * page_size + context.room)
        kept = cache.buffers[buffer.name].fill_(torch.nan)[0]
        for row, length in enumerate(lens):
            local_slots = owned.local_slots(world.where.slots(row, 0, length))
            kept[local_slots] = world.tokens_BX[row, :length]
        kept[:page_size] = torch.nan  # the dummy page, where the others' tokens went
        tables = context_parallel_tables(state, world.tree, context)
        for row, length in enumerate(lens):
            kept[tables.slots_BN[row]] = world.tokens_BX[row, length : length + N]
        prepared, reader = PreparedPlan(tables.plan), make_backend(backend)
        q_THD = world.q_THD[:, group.rank * H : (group.rank + 1) * H].contiguous()
        call = LayerCall(reader, cache.view(0), kind, tables.slots_BN.flatten(), prepared, None, SCORING, {})
        out_THE = call.attend(q_THD)
        torch.testing.assert_close(out_THE.double(), want_THE[:, group.rank * H : (group.rank + 1) * H], atol=2e-5, rtol=1e-4)
        assert tables.targets_BN is not None
        assert torch.equal(tables.plan.positions_T, (world.where.lens_B[:, None] + world.tree.depths_BN).flatten())
        cache.move(tables.slots_BN, path_BE, 0, tables.targets_BN[:, : path_BE.shape[1]])
        return kept

    kept = on_ranks(ranks, on_rank, in_turns=backend == "triton")
    for row, length in enumerate(lens):
        for step, node in enumerate(path_BE[row].tolist()):
            rank = (length + step) // run % ranks
            slot = KVSharding(rank, ranks, page_size, run).local_slots(world.where.slots(row, length + step, length + step + 1))
            assert torch.equal(kept[rank][slot][0], world.tokens_BX[row, length + node])


@pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("layout", [LATENTS, HEADS], ids=["latents", "heads"])
@pytest.mark.parametrize(("ranks", "page_size", "run"), [(2, 4, 1), (2, 4, 2), (2, 4, 4), (4, 3, 1), (4, 3, 3), (4, 1, 1)])
def test_ranks_attend_as_one(
    layout: Callable[[torch.dtype], CacheLayout], ranks: int, page_size: int, run: int, is_chain: bool
) -> None:
    """Rows of 0 and 1 tokens, of a run less one, and of all ranks' runs.  Keeps out: a branch by what one rank keeps, NaN of
    ranks without a token, a mask that meets the sharded part, a commit to a rank that does not keep the position."""
    check(layout, "torch", ranks, page_size, run, is_chain, [0, 1, run - 1, run, run * ranks, 5 * run * ranks + run + 1])


@pytest.mark.slow_cases(keep=6)
@pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", WINDOWS, ids=str)
@pytest.mark.parametrize(("ranks", "page_size", "run"), [(2, 4, 1), (2, 4, 4), (4, 3, 3)])
def test_ranks_read_what_lies_in_a_window(ranks: int, page_size: int, run: int, kind: LayerKind, is_chain: bool) -> None:
    """Windows within the tree, within a run of one rank, and over several pages.  Keeps out: first keys counted in the whole
    sequence, windows of a scratch's own positions, ranks of which no token lies in the window."""
    rng = random.Random(repr((ranks, page_size, run, kind, is_chain)))
    check(HEADS, "torch", ranks, page_size, run, is_chain, [0, 1, run * ranks, *(rng.randrange(60) for _ in range(4))], kind)


@pytest.mark.parametrize("kind", [FULL, *WINDOWS], ids=str)
@pytest.mark.parametrize("layout", [LATENTS, HEADS], ids=["latents", "heads"])
def test_parts_of_prompts_attend_as_one(layout: Callable[[torch.dtype], CacheLayout], kind: LayerKind) -> None:
    """All tokens of a pass, and its last ones alone.  Keeps out: what ranks keep of a prompt that the last token does not read,
    which is all that a prompt's first token is made of; windows of a scratch's own positions."""
    ranks, page_size, run, start, lens = 2, 4, 2, 6, [13, 8]  # each prompt has run up to token 6
    (buffer,) = layout(torch.float32).buffers
    where = Scattered(lens, page_size * ranks)
    tokens_BX, counts = where.randn(len(lens), max(lens), *buffer.shape), [n - start for n in lens]
    q_THD, pages = where.randn(sum(counts), ranks * H, KEY), where.num_pages
    (whole,) = ragged_prompts([[1] * n for n in lens], where.table_BW, page_size * ranks, start).tables
    outs = []
    for row, length in enumerate(lens):
        kept = tokens_BX[row].double()
        k, v = (kept, kept[:, :VALUE]) if layout is LATENTS else (kept[:, 0, 0], kept[:, 1, 0])
        for at in range(start, length):
            q_HD = q_THD[len(outs)].double()
            seen = slice(first_of(kind, at), at + 1)
            outs.append((q_HD @ k[seen].T * 0.4).softmax(-1) @ v[seen])
    want_THE, last_B = torch.stack(outs), torch.tensor(counts).cumsum(0) - 1

    def on_rank(group: ThreadGroup) -> None:
        owned = KVSharding(group.rank, ranks, page_size, run)
        context = ContextParallel(group, owned, pages * page_size, sum(counts))
        tables = context.of_prompts(whole).tables
        cache = KVCache(layout(torch.float32), [kind], pages * page_size + context.room)
        kept = cache.buffers[buffer.name].fill_(torch.nan)[0]
        for row in range(len(lens)):
            kept[owned.local_slots(where.slots(row, 0, start))] = tokens_BX[row, :start]
        kept[:page_size] = torch.nan  # the dummy page, where the others' tokens went
        kept[tables.slots_T] = torch.cat([tokens_BX[row, start:length] for row, length in enumerate(lens)])
        own = slice(group.rank * H, (group.rank + 1) * H)
        for plan, rows_T in ((tables.plan, torch.arange(sum(counts))), (tables.rows_plan, last_B)):
            assert plan is not None
            call = LayerCall(
                make_backend("torch"), cache.view(0), kind, tables.slots_T, PreparedPlan(plan), rows_T, SCORING, {}
            )
            out_RHE = call.attend(q_THD[rows_T, own].contiguous())
            torch.testing.assert_close(out_RHE.double(), want_THE[rows_T, own], atol=2e-5, rtol=1e-4)

    on_ranks(ranks, on_rank)


@pytest.mark.skipif(HAS_GPU, reason="the interpreter's turn; a GPU has tests/gpu/test_gpu_context.py")
@pytest.mark.slow_cases
@pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("layout", "kind"),
    [(LATENTS, FULL), (HEADS, FULL), (HEADS, WINDOWS[1]), (HEADS, WINDOWS[-1])],
    ids=["latents", "heads", "window", "chunk"],
)
def test_kernels_attend_as_one(
    layout: Callable[[torch.dtype], CacheLayout], kind: LayerKind, is_chain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps out: states, suffixes and commits that only the kernels see: no splits before a suffix, targets of their own."""
    launched = use_kernels_everywhere(monkeypatch)
    check(layout, "triton", 2, 4, 2, is_chain, [0, 3, 21], kind)
    assert {"launch_local_lens", "launch_local_slots", "launch_pack", "launch_merge", "launch_move"} <= set(launched)
