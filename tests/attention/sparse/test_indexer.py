"""The indexer's definition: scores, the best keys, their slots, and the plan's candidates.

Keeps out: the scale of a head left out, ties by anything but position, a conversion that keeps gaps or pages beyond the table.
"""

import pytest
import torch
from toolkit.attention.sparse import IndexWorld, tree_mask
from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.sparse.candidates import CandidateKeys
from specdec.attention.sparse.indexer import indexer_scores, select_rows, to_slots
from specdec.attention.sparse.segment import sparse_segment


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_scores_are_weighted_sums_of_positive_products() -> None:
    """By the formula, written out.  Keeps out: relu after the sum, the head dim's scale forgotten."""
    torch.manual_seed(0)
    q_THD, w_TH, k_ND = torch.randn(3, 5, 8), torch.randn(3, 5), torch.randn(7, 8)
    want = [[sum(w_TH[t, h] * max(q_THD[t, h] @ k * 8**-0.5, 0) for h in range(5)) for k in k_ND] for t in range(3)]
    torch.testing.assert_close(indexer_scores(q_THD, w_TH, k_ND), torch.tensor(want))


def test_selection_takes_the_best_and_the_earlier_of_equals() -> None:
    """Brute force over small integers, so that most scores tie.  Keeps out: invisible keys, NaN as the best score."""
    torch.manual_seed(1)
    scores = torch.randint(-2, 3, (40, 12)).float()
    scores[::7, 3], scores[5] = torch.nan, 0.0
    visible_T = torch.randint(0, 13, (40,), dtype=torch.int32)
    for topk in (1, 4, 12, 20):
        rows = select_rows(scores, visible_T, topk)
        for row_N, visible, got in zip(scores, visible_T.tolist(), rows.tolist(), strict=True):
            keys = [-torch.inf if x != x else x for x in row_N[:visible].tolist()]
            want = sorted(sorted(range(visible), key=lambda i, keys=keys: (-keys[i], i))[:topk])
            assert got == want + [-1] * (min(topk, 12) - len(want))


def test_positions_become_slots_without_gaps() -> None:
    """Gaps, pages beyond the table, and a path.  Keeps out: a gap that becomes slot 0, a path looked up in the table."""
    rows = torch.tensor([[-1, 0, 5, -1, 9, 11], [3, -1, 6, 7, 8, 40]], dtype=torch.int32)
    tables = PageTable(torch.tensor([[7, 2, 4], [1, 9, 3]], dtype=torch.int32), 4)
    slots, counts = to_slots(rows, tables, ints(1, 0), ints(12, 6))
    assert counts.tolist() == [4, 1] and slots[0].tolist() == [4, 37, 13, 15, 0, 0] and slots[1].tolist() == [31, 0, 0, 0, 0, 0]
    path = torch.tensor([[90, 91], [80, 81]], dtype=torch.int32)
    slots, counts = to_slots(rows, tables, ints(1, 0), ints(9, 6), path)
    assert counts.tolist() == [3, 3] and slots[:, :3].tolist() == [[4, 37, 90], [31, 80, 81]]


def test_candidates_of_a_plan() -> None:
    """Causal rows of unequal length, a row that holds nothing yet, padding after the last row."""
    table = torch.arange(6, dtype=torch.int32).view(3, 2)
    segment = Segment(PageTable(table, 4), ints(7, 0, 4), ints(0, 3, 3, 4), 3, True, ragged=True)
    candidates = CandidateKeys.of(AttentionPlan((segment,)), 6)
    assert candidates.rows_T[:4].tolist() == [0, 0, 0, 2] and candidates.visible_T.tolist() == [5, 6, 7, 4, 0, 0]
    assert candidates.width == 8 and candidates.counts_T(6).tolist() == [5, 6, 6, 4, 0, 0]


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_trees_select_what_their_paths_select(page_size: int) -> None:
    """Every node selects the tokens that a chain of its path would.  Keeps out: siblings, and path positions out of order."""
    n, lens, topk = 7, [20, 3], 6
    tree = IndexWorld.make("tree", lens, n, page_size, seed=page_size)
    got = sparse_segment(tree.q_THD, tree.w_TH, tree.keys_XD, tree.candidates, topk)
    prefix, suffix = tree.plan.segments[0], tree.plan.suffix
    assert suffix is not None
    for t, (slots, count) in enumerate(zip(got.pages.table, got.cache_seqlens.tolist())):
        row, node = divmod(t, n)
        path = int(tree_mask(n)[node].sum())
        at = torch.arange(lens[row])
        before = prefix.pages.table[row, at // page_size] * page_size + at % page_size
        table = torch.cat((before, suffix.pages.table[t, :path])).int()[None]
        chain = causal_segment(PageTable(table), ints(lens[row] + path), 1)
        candidates = CandidateKeys.of(AttentionPlan((chain,)), 1)
        want = sparse_segment(tree.q_THD[t][None], tree.w_TH[t][None], tree.keys_XD, candidates, topk)
        assert count == int(want.cache_seqlens) and torch.equal(slots[:count], want.pages.table[0, :count])


def test_few_keys_are_all_selected() -> None:
    """topk beyond what is visible.  Keeps out: a row that lists a key twice, or one of its future."""
    world = IndexWorld.make("causal", [9, 4], 3, 4)
    got = sparse_segment(world.q_THD, world.w_TH, world.keys_XD, world.candidates, 100)
    slots, visible_T = world.all_slots()
    assert torch.equal(got.cache_seqlens, visible_T)
    for row, every, count in zip(got.pages.table, slots, visible_T.tolist()):
        assert torch.equal(row[:count].long(), every[:count])
