"""The paths of texts in pages, and how likely they are: the kernels against the definitions."""

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.oracles.ngrams import followers, match_length, places, random_texts

from specdec.attention.pages import PageTable
from specdec.batch.tree import DraftTree
from specdec.draft.join.paths import Paths, end_paths
from specdec.draft.join.survival import ALL, CHAIN, FEW, IN_STEP, MOST, ONCE, SUPPORTS, Survival
from specdec.draft.ngram.lookup import PagedTexts, match_keys
from specdec.draft.ngram.source import LEAST, MATCHES, OwnText, fill_paths

LENS = [0, 1, 2, 3, 17, 33, 48]
BACK = [[0] * len(LENS), [0, 0, 1, 2, 3, 30, 25], [0, 0, 0, 1, 9, 8, 47]]  # how far back the place is that a text has followed


def check(seed: int, depth: int, has_scores: bool, span: int | None) -> None:
    from specdec.draft.join.paths_triton import launch_rates
    from specdec.draft.ngram.paths_triton import launch_paths

    text, _ = random_texts(LENS, 2 + seed, span, seed)
    B, classes = len(LENS), [*OwnText.classes, CHAIN]
    survival, there = Survival(classes, torch.device("cpu")), Survival(classes, torch.device(DEVICE))
    survival.counts_CLKG2.random_(200)
    there.counts_CLKG2.copy_(survival.counts_CLKG2)
    tree = DraftTree.chain(torch.randint(2 + seed, (B, 4)))
    if has_scores:
        tree = DraftTree(tree.tokens_BN, tree.parents_BN.clone(), 3, scores_BN=torch.zeros(B, 4))
    want, got = (Paths.empty(B, (0, 1, 2), 9, torch.device(device)) for device in ("cpu", DEVICE))
    for paths in (want, got):
        paths.tokens_BPD.fill_(7), paths.support_BP.fill_(SUPPORTS - 1)  # what another round has left
    back = torch.tensor(BACK[seed % 3])
    back_there = back.to(DEVICE, copy=True)
    keys = match_keys(text, back).to(DEVICE)
    fill_paths(text, back, depth, want.of_source(0, 2))
    steps = end_paths(want, tree, survival, depth)
    scores = None if tree.scores_BN is None else tree.scores_BN.to(DEVICE)
    on_device = DraftTree(tree.tokens_BN.to(DEVICE), tree.parents_BN.to(DEVICE), 3, tree.is_chain, scores)
    same_text = PagedTexts(text.tokens_N.to(DEVICE), text.pages.to(DEVICE), text.lens_B.to(DEVICE), span)
    launch_paths(same_text, keys, MATCHES, LEAST, back_there, depth, got.of_source(0, 2))
    assert torch.equal(back_there.cpu(), back)
    ours = launch_rates(got, on_device, there, depth)
    torch.testing.assert_close(ours.cpu(), steps, atol=1e-6, rtol=1e-5)
    for ours_X, theirs_X in zip(got, want, strict=True):
        assert torch.equal(ours_X.cpu(), theirs_X)
    for b in range(B):
        for p in range(2):
            assert int(want.parts_BP[b, p]) == parting(tree, want.tokens_BPD[b, p, :depth].tolist(), b)


def parting(tree: DraftTree, path: list[int], b: int) -> int:
    """Where a path parts from the tree: by hand."""
    at, parents, tokens = 0, tree.parents_BN[b].tolist(), tree.tokens_BN[b].tolist()
    for d in range(len(path) + 1):
        children = {tokens[n]: n for n in range(1, tree.num_nodes) if parents[n] == at}
        if not children:
            return -1
        if d == len(path) or path[d] not in children:
            return d
        at = children[path[d]]
    raise AssertionError("a tree ends")


def chosen(entries: list[int], span: int | None, depth: int, back: int) -> tuple[list[tuple[list[int], int, int]], int]:
    """(tokens, length, support) of both paths, and how far back the place is that the text follows then: by hand."""
    best, at = places(entries, span, back)[:MATCHES], len(entries) - 1 - back
    follows, rated = back > 0 and at >= (max(0, len(entries) - span) if span else 0), []
    for index, (length, end) in enumerate(best):
        alike = [followers(entries, other, 1) for own, other in best if own == length]
        agree = alike.count(followers(entries, end, 1))
        kind = (ONCE if len(alike) == 1 else ALL) if agree == len(alike) else MOST if 2 * agree > len(alike) else FEW
        rated.append((-length, -agree, index, end, IN_STEP if follows and end == at else kind))
    if not rated:
        return [([entries[-1] if entries else -1] * depth, 0, ONCE)] * 2, back
    (length, _, _, end, kind), *rest = sorted(rated)
    first = followers(entries, end, depth), -length, kind
    others = [(followers(entries, e, depth), -own, k) for own, _, _, e, k in rest if followers(entries, e, 1) != first[0][:1]]
    if follows and end != at:
        others = [(followers(entries, at, depth), match_length(entries, at, span), IN_STEP)]
    followed = len(entries) - 1 - end if -length >= LEAST else back
    return [first, *(others[:1] or [(first[0], 0, ONCE)])], followed


@pytest.mark.parametrize("alphabet", [1, 2, 3, 5])
def test_the_best_match_and_one_that_goes_on_otherwise(alphabet: int) -> None:
    """Keeps out: two paths that begin alike while a third place goes on otherwise, a lone match before one that others agree
    with, a match's support that is another's, and a place that is followed after a match by chance."""
    for seed in range(6):
        span, before = [None, 9][seed % 2], BACK[seed % 3]
        text, rows = random_texts(LENS, alphabet, span, seed)
        out, back = Paths.empty(len(LENS), (0, 1), 5, torch.device("cpu")), torch.tensor(before)
        fill_paths(text, back, 5, out)
        for b, entries in enumerate(rows):
            if entries:
                got = zip(out.tokens_BPD[b].tolist(), out.lengths_BP[b].tolist(), out.support_BP[b].tolist(), strict=True)
                assert ([*got], int(back[b])) == chosen(entries, span, 5, before[b])


def test_a_text_goes_on_after_words_that_were_replaced() -> None:
    """A text is copied, and every sixth token is another one.  Keeps out: a copy that waits for a match after each of them, and
    one that goes on from another place where the same token stands."""
    source = [5, 1, 2, 6, 1, 2, 7, 1, 2, 8, 1, 2, 9, 1, 2, 10, 1, 2, 3, 4]
    copy = [token if place % 6 < 5 else 50 + place for place, token in enumerate(source)]
    back, out = torch.zeros(1, dtype=torch.int64), Paths.empty(1, (0, 1), 4, torch.device("cpu"))
    for at in range(4, 17):
        entries = torch.tensor([*source, *copy[:at]], dtype=torch.int32)
        pages = PageTable(torch.zeros(1, 1, dtype=torch.int32), len(entries))
        fill_paths(PagedTexts(entries, pages, torch.tensor([len(entries)], dtype=torch.int32), None), back, 4, out)
        assert source[at : at + 4] in out.tokens_BPD[0].tolist(), at


@pytest.mark.parametrize("has_scores", [True, False], ids=["tree", "chain"])
@pytest.mark.parametrize(("depth", "span"), [(9, None), (3, 9)], ids=str)
def test_the_kernel_finds_the_same_paths(depth: int, span: int | None, has_scores: bool) -> None:
    """Keeps out: tokens of an earlier round after a path's end, a match's length of another path, rates of another group."""
    check(depth, depth, has_scores, span)


@pytest.mark.gpu
def test_the_kernel_on_a_gpu() -> None:
    for seed in range(8):
        for has_scores in (True, False):
            check(seed, 3 + seed % 7, has_scores, [None, 9][seed % 2])
