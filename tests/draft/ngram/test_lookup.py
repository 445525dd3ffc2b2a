"""Places where a text's end stood before, and trees of what followed there, against a search by hand."""

import math

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.oracles.ngrams import followers, places, random_texts
from torch import Tensor

from specdec.draft.ngram.grow import candidates_of, grow
from specdec.draft.ngram.lookup import SHIFT, PagedTexts, continuations, find_matches, match_keys
from specdec.draft.ngram.lookup_triton import launch_match_keys
from specdec.draft.ngram.store import TokenStore
from specdec.draft.ngram.store_triton import launch_write
from specdec.draft.tree.build_tree import best_nodes

LENS = [0, 1, 2, 3, 17, 33, 48]


@pytest.mark.parametrize("span", [None, 9], ids=["all", "span"])
@pytest.mark.parametrize("alphabet", [1, 2, 5])
def test_places_and_what_follows(alphabet: int, span: int | None) -> None:
    """Keeps out: entries after a text's end, places before the span, a far place before a near one or an earlier one before a
    later, a continuation that leaves the text."""
    text, entries = random_texts(LENS, alphabet, span, seed=alphabet)
    back = [0] * len(LENS) if alphabet == 5 else [0, 0, 1, 1, 5, 40, 20]
    matches = find_matches(text, torch.tensor(back), 3)
    following = continuations(text, matches, 5).tolist()
    for row, own in enumerate(entries):
        want = places(own, span, back[row])[:3]
        assert matches.found_BM[row].tolist() == [True] * len(want) + [False] * (3 - len(want))
        got = list(zip(matches.lengths_BM[row].tolist(), matches.ends_BM[row].tolist(), strict=True))[: len(want)]
        assert got == want
        for index in range(3) if want else ():
            length, end = want[index] if index < len(want) else want[0]
            assert following[row][index] == followers(own, end, 5)
        if own and not want:
            assert following[row] == [[own[-1]] * 5] * 3


@pytest.mark.parametrize("span", [None, 9], ids=["all", "span"])
def test_the_kernel_finds_the_same_places(span: int | None) -> None:
    """Keeps out: a block's edge that loses a place or reads past it."""
    text, _ = random_texts(LENS, 2, span, seed=4)
    there = PagedTexts(text.tokens_N.to(DEVICE), text.pages.to(DEVICE), text.lens_B.to(DEVICE), span)
    back = torch.tensor([0, 0, 1, 0, 5, 40, 20])
    got = launch_match_keys(there, back.to(DEVICE), 3, block=16).topk(3, dim=1).values.cpu()
    want = match_keys(text, back).topk(3, dim=1).values
    assert torch.equal(got, want) and int(want.max()) >> SHIFT > 1


def test_what_a_round_emits_is_written_after_the_text() -> None:
    """Keeps out: a row's tokens in another row's pages, and more tokens than were given."""
    text, _ = random_texts(LENS[1:6], 50, None, seed=3)
    before, tokens = text.tokens_N.clone(), torch.randint(100, 200, (5, 9))[:, :7]
    store = TokenStore(len(before), torch.device("cpu"))
    store.tokens_N.copy_(before)
    store.append(text.pages, text.lens_B, tokens)
    there = before.to(DEVICE, copy=True)
    launch_write(text.pages.to(DEVICE), text.lens_B.to(DEVICE), tokens.to(DEVICE), there)
    assert torch.equal(there.cpu(), store.tokens_N) and int((store.tokens_N != before).sum()) == tokens.numel()
    after = PagedTexts(store.tokens_N, text.pages, text.lens_B, None).at(text.lens_B.long()[:, None] + torch.arange(7))
    assert torch.equal(after, tokens)


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        paths.append((*paths[parents[node]], tokens[node]))
    return paths


def continuation_batch(seed: int) -> Tensor:
    return torch.randint(3, (20, 4, 5), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("nodes", [2, 9, 21])
def test_trees_of_continuations(nodes: int) -> None:
    """Keeps out: siblings with one token, which acceptance forbids; a node that is no continuation's beginning while one of
    them is left out; a path deeper than its continuation; scores that are shares, where a tree promises logarithms."""
    tokens = continuation_batch(nodes)
    tokens[0] = tokens[0, :1]  # all alike: the rest of the tree is filled
    lengths = torch.randint(0, 9, (20, 4), generator=torch.Generator().manual_seed(1))
    root = torch.arange(100, 120)
    by_share, tree = best_nodes(candidates_of(tokens, lengths), root, nodes, 5), grow(tokens, lengths, root, nodes)
    assert torch.equal(tree.tokens_BN, by_share.tokens_BN) and torch.equal(tree.parents_BN, by_share.parents_BN)
    for row in range(20):
        paths = paths_of(tree.tokens_BN[row].tolist(), tree.parents_BN[row].tolist())
        assert len(set(paths)) == nodes, "siblings hold one token"
        beginnings = {tuple(each[: depth + 1]) for each in tokens[row].tolist() for depth in range(5)}
        filled = [path for path in paths[1:] if path not in beginnings]
        assert all(len(path) == 1 for path in filled) and len(filled) == max(0, nodes - 1 - len(beginnings))
        weights = dict.fromkeys(beginnings, 0)
        for each, length in zip(tokens[row].tolist(), lengths[row].tolist(), strict=True):
            for depth in range(5):
                weights[tuple(each[: depth + 1])] += length + 1
        scores = {path: weight * 0.8 ** (len(path) - 1) for path, weight in weights.items()}
        left_out = [scores[path] for path in beginnings - set(paths)]
        chosen = [scores[path] for path in set(paths) & beginnings]
        assert not left_out or max(left_out) <= min(chosen) * (1 + 1e-5)
        assert tree.scores_BN is not None
        total = sum(each + 1 for each in lengths[row].tolist())
        survival = {(): 1.0, **{path: score / total for path, score in scores.items()}}
        want_scores = [math.log(survival[path]) if path in survival else -math.inf for path in paths]
        assert tree.scores_BN[row].tolist() == pytest.approx(want_scores, abs=1e-5)
        assert tree.scores_BN[row, 0] == 0 and (tree.scores_BN[row] <= tree.scores_BN[row, tree.parents_BN[row]]).all()
