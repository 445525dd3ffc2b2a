"""Forced acceptance: the asked probabilities, along the best path only, the same at every repetition.

Keeps out: capacity plans from acceptance that nobody asked for.
"""

from __future__ import annotations

import random

import pytest
import torch
from toolkit.driver import Driver
from toolkit.inside.captures import capturing
from toolkit.models import Zoo
from toolkit.trees import children_of, random_trees
from torch import Tensor

from specdec import SamplingParams, SpecConfig
from specdec.batch.tree import DraftTree
from specdec.generation import Stats
from specdec.ops.cuda_graph import GraphSet
from specdec.verify.accept import accept_path
from specdec.verify.synthetic import SyntheticAcceptance

VOCAB = 40


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def ones(rows: int) -> Tensor:
    """All rows speculate."""
    return torch.ones(rows, dtype=torch.int32)


def best_path(parents: list[int]) -> list[int]:
    """From the root to each first child's first child."""
    children, path = children_of(parents), [0]
    while children[path[-1]]:
        path.append(children[path[-1]][0])
    return path


@pytest.mark.slow_cases
@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("probs", [[0.8, 0.7, 0.6, 0.5], [0.2, 0.9, 1.0, 0.4]])
def test_each_depth_is_accepted_as_often_as_asked(probs: list[float], chain: bool) -> None:
    """Keeps out: one draw for a whole path, draws that repeat from round to round, probabilities of the wrong depth."""
    S, rows = len(probs), 150
    synthetic = SyntheticAcceptance.of(probs, VOCAB, "cpu")
    seed_B, lens_B = torch.arange(rows) * 7 - 300, torch.randint(500, (rows,), dtype=torch.int32)
    reached, accepted = [0] * S, [0] * S
    for number in range(20):  # 3,000 rounds; lengths grow as in an engine
        tree = random_trees(rows, S + 1 if chain else 14, S, VOCAB, random.Random(number), chain)
        target_BN = torch.randint(VOCAB, tree.tokens_BN.shape)
        got = accept_path(tree, synthetic.force(tree, target_BN, seed_B, lens_B, ones(len(seed_B))), ones(len(seed_B)))
        for row in range(rows):
            path, a = best_path(tree.parents_BN[row].tolist()), int(got.accepted_B[row])
            assert got.path_BE[row, : a + 1].tolist() == path[: a + 1], "only the best path is accepted"
            for depth in range(min(a + 1, len(path) - 1)):
                reached[depth] += 1
                accepted[depth] += a > depth
        lens_B += got.accepted_B + 1
    assert min(reached) > 50
    for n, hits, p in zip(reached, accepted, probs, strict=True):
        assert abs(hits - n * p) <= 4 * (n * p * (1 - p)) ** 0.5, (n, hits, p)


def test_nothing_and_everything() -> None:
    """Keeps out: a comparison that is wrong where the noise is exactly 0 or 1."""
    for chain in (False, True):
        tree = random_trees(200, 6 if chain else 16, 5, VOCAB, random.Random(3), chain)
        target_BN = torch.randint(VOCAB, tree.tokens_BN.shape)
        seed_B, lens_B = torch.arange(200), torch.arange(200)
        longest = [len(best_path(parents)) - 1 for parents in tree.parents_BN.tolist()]
        for p, wanted in ((0.0, [0] * 200), (1.0, longest)):
            synthetic = SyntheticAcceptance.of([p] * 5, VOCAB, "cpu")
            accepted = accept_path(
                tree, synthetic.force(tree, target_BN, seed_B, lens_B, ones(len(seed_B))), ones(len(seed_B))
            ).accepted_B
            assert accepted.tolist() == wanted


def test_logits_that_are_no_numbers_stay_visible() -> None:
    """Keeps out: a target that overflows and whose capacity is planned as though it worked."""
    tree = DraftTree.chain(torch.tensor([[5, 6, 7, 8]]))
    targets_BN = torch.tensor([[6, -1, 8, 9]])
    synthetic = SyntheticAcceptance.of([1.0] * 3, 100, "cpu")
    got = synthetic.force(tree, targets_BN, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), ones(1))
    assert got.tolist()[0][:2] == [6, -1]
    assert int(accept_path(tree, got, ones(1)).accepted_B) == 1


def test_a_row_that_does_not_speculate_keeps_the_targets_tokens() -> None:
    """Keeps out: a plain request whose text is forced, because another one's acceptance is."""
    tree = random_trees(60, 9, 3, VOCAB, random.Random(2))
    target_BN, speculates_B = torch.randint(VOCAB, tree.tokens_BN.shape), torch.arange(60, dtype=torch.int32) % 2
    inputs = tree, target_BN, torch.arange(60), torch.arange(60)
    synthetic = SyntheticAcceptance.of([0.7] * 3, VOCAB, "cpu")
    forced_BN, got_BN = synthetic.force(*inputs, ones(60)), synthetic.force(*inputs, speculates_B)
    assert torch.equal(got_BN[::2], target_BN[::2]) and not torch.equal(forced_BN[::2], target_BN[::2])
    assert torch.equal(got_BN[1::2], forced_BN[1::2])


@pytest.mark.parametrize("vocab", [15, 16, VOCAB])
def test_a_refused_node_holds_none_of_its_childrens_tokens(vocab: int) -> None:
    """Keeps out: a second child that is accepted by chance.  15 tokens: fewer than nodes, shifts run over the end."""
    tree = random_trees(100, 15, 3, vocab, random.Random(vocab))
    target_BN = torch.randint(vocab, tree.tokens_BN.shape)
    refused = SyntheticAcceptance.of([0.0] * 3, vocab, "cpu").force(
        tree, target_BN, torch.arange(100), torch.arange(100), ones(100)
    )
    for row in range(100):
        tokens, own = tree.tokens_BN[row].tolist(), target_BN[row].tolist()
        for node, children in children_of(tree.parents_BN[row].tolist()).items():
            held = {tokens[child] for child in children}
            shift = next(s for s in range(vocab) if (own[node] + s) % vocab not in held)
            assert int(refused[row, node]) == (own[node] + shift) % vocab


def test_what_is_accepted_depends_on_seed_and_position_alone() -> None:
    """Keeps out: noise of the row or the batch, and rows that all accept alike."""
    synthetic = SyntheticAcceptance.of([0.5] * 5, VOCAB, "cpu")
    tree = DraftTree.chain(torch.randint(VOCAB, (64, 6)))
    target_BN = torch.randint(VOCAB, (64, 6))
    seed_B, lens_B = torch.full((64,), 11), torch.full((64,), 90)
    seed_B[32:], lens_B[::2] = torch.arange(32), torch.arange(32)
    order = torch.randperm(64)
    accepted = accept_path(
        tree, synthetic.force(tree, target_BN, seed_B, lens_B, ones(len(seed_B))), ones(len(seed_B))
    ).accepted_B
    shuffled = DraftTree.chain(tree.tokens_BN[order])
    forced_BN = synthetic.force(shuffled, target_BN[order], seed_B[order], lens_B[order], ones(64))
    again = accept_path(shuffled, forced_BN, ones(64)).accepted_B
    assert torch.equal(accepted[order], again)
    assert len(set(accepted[1:32:2].tolist())) == 1  # one seed, one position
    assert len(set(accepted[:32:2].tolist())) > 2 and len(set(accepted[33::2].tolist())) > 2


@pytest.mark.slow_cases
@pytest.mark.parametrize("spec", [SpecConfig(4, 1, 5), SpecConfig(3, 3, 9)], ids=str)
def test_the_engine_accepts_what_is_forced(zoo: Zoo, spec: SpecConfig) -> None:
    """Keeps out: forced acceptance that the engine ignores, or that changes plain decoding too."""
    decoder = zoo.decoder("llama", "eagle3", spec, max_batch_size=2)
    prompts = [[1, 2, 3], [4, 5]]
    sampling = SamplingParams(max_tokens=40, seed=0, ignore_eos=True)
    plain = [output.token_ids for output in decoder.generate(prompts, sampling, speculate=False)]
    for p, tau in ((0.0, 1), (1.0, spec.num_steps + 1)):
        Driver(decoder).force_acceptance([p] * spec.num_steps)
        outputs = decoder.generate(prompts, sampling)
        stats = Stats.total([output.stats for output in outputs])
        if spec.topk == 1 or p == 0:
            assert stats.accept_length == tau
        assert 1 <= stats.accept_length <= tau
        assert [output.token_ids for output in decoder.generate(prompts, sampling, speculate=False)] == plain


@pytest.mark.gpu
def test_it_runs_inside_a_graph() -> None:
    """Keeps out: a host read, or a copy from the host, that can't be captured."""
    tree = random_trees(8, 16, 5, VOCAB, random.Random(1))
    target_BN, seed_B, lens_B = torch.randint(VOCAB, (8, 16)), torch.arange(8), torch.arange(8, dtype=torch.int32)
    wanted = SyntheticAcceptance.of([0.5] * 5, VOCAB, "cpu").force(tree, target_BN, seed_B, lens_B, ones(8))
    on_gpu = DraftTree(tree.tokens_BN.cuda(), tree.parents_BN.cuda(), tree.max_depth)
    synthetic = SyntheticAcceptance.of([0.5] * 5, VOCAB, "cuda")
    inputs = target_BN.cuda(), seed_B.cuda(), lens_B.cuda(), ones(8).cuda()
    synthetic.force(on_gpu, *inputs)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        got = synthetic.force(on_gpu, *inputs)
    for _ in range(3):
        got.fill_(-1)
        graph.replay()
        assert torch.equal(got.cpu(), wanted)


class OneGraph(GraphSet):
    """As if a round had been captured."""

    def __len__(self) -> int:
        return 1


def test_captured_rounds_follow_new_probabilities(zoo: Zoo) -> None:
    """Keeps out: a captured round that goes on reading the probabilities of its capture."""
    driver = Driver(zoo.decoder("llama", "ngram", SpecConfig(2, 1, 3)))
    read_by_a_graph = driver.force_acceptance([0.25, 0.5])
    driver.force_acceptance([1.0, 0.75])
    assert read_by_a_graph.tolist() == [1.0, 0.75]
    driver.use_graphs(OneGraph(False), True)
    with pytest.raises(AssertionError, match="as it was captured"):
        driver.force_acceptance([1.0])
