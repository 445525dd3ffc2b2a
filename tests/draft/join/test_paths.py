"""The paths of texts in pages, and how likely they are: the kernels against the definitions."""

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.oracles.ngrams import random_texts

from specdec.batch.tree import DraftTree
from specdec.draft.join.paths import Paths, end_paths
from specdec.draft.join.survival import CHAIN, Survival
from specdec.draft.ngram.lookup import PagedTexts, best_keys
from specdec.draft.ngram.source import OwnText, fill_paths

LENS = [0, 1, 2, 3, 17, 33, 48]


def check(seed: int, depth: int, has_scores: bool, span: int | None) -> None:
    from specdec.draft.join.paths_triton import launch_rates
    from specdec.draft.ngram.paths_triton import launch_paths

    text, _ = random_texts(LENS, 2 + seed, span, seed)
    B, classes = len(LENS), [*OwnText.classes, CHAIN]
    survival, there = Survival(classes, torch.device("cpu")), Survival(classes, torch.device(DEVICE))
    survival.counts_CLG2.random_(200)
    there.counts_CLG2.copy_(survival.counts_CLG2)
    tree = DraftTree.chain(torch.randint(2 + seed, (B, 4)))
    if has_scores:
        tree = DraftTree(tree.tokens_BN, tree.parents_BN.clone(), 3, scores_BN=torch.zeros(B, 4))
    want, got = (Paths.empty(B, (0, 1, 2), 9, torch.device(device)) for device in ("cpu", DEVICE))
    want.tokens_BPD.fill_(7), got.tokens_BPD.fill_(7)  # what another round has left
    fill_paths(text, depth, want.of_source(0, 2))
    steps = end_paths(want, tree, survival, depth)
    scores = None if tree.scores_BN is None else tree.scores_BN.to(DEVICE)
    on_device = DraftTree(tree.tokens_BN.to(DEVICE), tree.parents_BN.to(DEVICE), 3, tree.is_chain, scores)
    same_text = PagedTexts(text.tokens_N.to(DEVICE), text.pages.to(DEVICE), text.lens_B.to(DEVICE), span)
    launch_paths(same_text, best_keys(text, 2).to(DEVICE), depth, got.of_source(0, 2))
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
