"""The paths of texts in pages: the kernel against the definition."""

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.oracles.ngrams import random_texts

from specdec.batch.tree import DraftTree
from specdec.draft.join.paths import Paths, find_paths
from specdec.draft.join.survival import Survival
from specdec.draft.ngram.lookup import PagedTexts, best_keys

LENS = [0, 1, 2, 3, 17, 33, 48]


def check(seed: int, depth: int, has_scores: bool, span: int | None) -> None:
    from specdec.draft.join.paths_triton import launch_paths

    text, _ = random_texts(LENS, 2 + seed, span, seed)
    survival, B = Survival(torch.device("cpu")), len(LENS)
    survival.counts_CLG2.random_(200)
    tree = DraftTree.chain(torch.randint(9, (B, 4)))
    if has_scores:
        tree = DraftTree(tree.tokens_BN, tree.parents_BN.clone(), 3, scores_BN=torch.zeros(B, 4))
    want, got = Paths.empty(B, 9, torch.device("cpu")), Paths.empty(B, 9, torch.device(DEVICE))
    want.tokens_BPD.fill_(7), got.tokens_BPD.fill_(7)  # what another round has left
    steps = find_paths(text, tree, survival, depth, want)
    scores = None if tree.scores_BN is None else tree.scores_BN.to(DEVICE)
    on_device = DraftTree(tree.tokens_BN.to(DEVICE), tree.parents_BN.to(DEVICE), 3, tree.is_chain, scores)
    there = PagedTexts(text.tokens_N.to(DEVICE), text.pages.to(DEVICE), text.lens_B.to(DEVICE), span)
    ours = launch_paths(there, best_keys(text, 2).to(DEVICE), on_device, survival.counts_CLG2.to(DEVICE), depth, got)
    torch.testing.assert_close(ours.cpu(), steps, atol=1e-6, rtol=1e-5)
    assert torch.equal(got.tokens_BPD.cpu(), want.tokens_BPD) and torch.equal(got.lengths_BP.cpu(), want.lengths_BP)


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
