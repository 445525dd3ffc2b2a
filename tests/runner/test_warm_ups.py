"""Rounds whose functions run as a capture runs them, twice for nothing and then once: on a CPU, where nothing is captured.

A capture warms up by calling its function, and restores after each call the tensors that it was told of.  So whatever else a
later phase reads must come out the same however often the function has run.
"""

from collections.abc import Callable, Hashable
from typing import Any

import pytest
from toolkit.driver import Driver, new_request
from toolkit.heads.block_zoo import HEADS  # which the zoo then has
from toolkit.models import Zoo, ragged_prompts
from torch import Tensor

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.draft.eagle import worker
from specdec.ops.cuda_graph import GraphSet
from specdec.runner.rounds import RoundRunner
from specdec.verify.verifier import TargetVerifier, TreePass

SAMPLING = [
    SamplingParams(max_tokens=11),
    SamplingParams(max_tokens=16, repetition_penalty=1.2, presence_penalty=0.3),
    SamplingParams(max_tokens=9, temperature=0.9, seed=3),
    SamplingParams(max_tokens=13),
]
LEVELS = [2, 0, 0, 2, 2, 0]
assert "dspark-rnn" in HEADS


Trees = list[list[list[int]]]


def outputs(decoder: SpecDecoder, trees: Trees) -> list[tuple[list[int], list[int]]]:
    """What requests got, and what each round accepted.  trees: gets the tokens of all trees that the target reads."""
    driver, read_tree = Driver(decoder), TargetVerifier.read_tree

    def spy(self: TargetVerifier, state: BatchState, tree: DraftTree, with_features: bool = True) -> TreePass:
        trees.append(tree.tokens_BN.tolist())
        return read_tree(self, state, tree, with_features)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TargetVerifier, "read_tree", spy)
        return _outputs(decoder, driver)


def _outputs(decoder: SpecDecoder, driver: Driver) -> list[tuple[list[int], list[int]]]:
    driver.set_depth(0)
    driver.script_levels(*LEVELS * 20)
    prompts = [[*prompt, *prompt] for prompt in ragged_prompts(40, 4, seed=5)]
    return [(out.token_ids, out.stats.accepted_per_round) for out in decoder.generate(prompts, SAMPLING)]


@pytest.mark.parametrize("whole", [False, True], ids=["phases", "whole rounds"])
@pytest.mark.parametrize("kind", ["eagle3", "p-eagle", "dspark-rnn", "ngram"])
def test_warm_ups_change_nothing(zoo: Zoo, kind: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a tensor that a phase advances and that is missing among those that a capture restores: lengths, tokens that a
    pause kept, counts of tokens, first levels.  The first round of each shape would then be wrong, on GPUs alone."""
    settings: dict[str, Any] = {"page_size": 4, "max_batch_size": 2}
    spec = SpecConfig("auto", 2, 6)
    trees: Trees = []
    want = outputs(zoo.decoder("llama", kind, spec, **settings), trees)
    seen: Trees = []
    calls = 0

    def run(
        self: GraphSet,
        key: Hashable,
        fn: Callable[[], Any],
        mutable: list[Tensor],
        warm_ups: int = 2,
        before: Callable[[], object] = lambda: None,
    ) -> Any:
        nonlocal calls
        calls += warm_ups
        saved, before_all = [tensor.clone() for tensor in mutable], len(seen)
        for _ in range(warm_ups):
            fn()
            for tensor, value in zip(mutable, saved, strict=True):
                tensor.copy_(value)
            before()
        del seen[before_all:]
        return fn()

    monkeypatch.setattr(GraphSet, "run", run)
    monkeypatch.setattr(RoundRunner, "_fuses", lambda self, needs: whole)
    assert outputs(zoo.decoder("llama", kind, spec, **settings), seen) == want
    assert seen == trees and calls > 20 and any(sum(accepted) for _, accepted in want)


def test_few_tokens_and_many_leave_the_same_first_level(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: where a round has many tokens, a hidden state of another row's token, from which its next tree grows."""
    found = []
    for few in (worker.FEW_ROWS, 0):
        monkeypatch.setattr(worker, "FEW_ROWS", few)
        trees: Trees = []
        decoder = zoo.decoder("llama", "eagle3", SpecConfig("auto", 2, 6), page_size=4, max_batch_size=3, dtype="float64")
        found.append((outputs(decoder, trees), trees))
    assert found[0] == found[1]


def test_a_narrow_tree_begins_with_the_best_of_a_wide_first_level(zoo: Zoo) -> None:
    """Keeps out: with levels and branches that vary, a tree of few branches that begins with the worst of as many as there may
    be."""
    drawn, narrow = [], SpecConfig(3, 2, 6)
    for spec in (narrow, SpecConfig("auto", 4, 16)):
        decoder = zoo.decoder("llama", "eagle3", spec, page_size=4, max_batch_size=1)
        driver = Driver(decoder)
        driver.set_depth(0)
        driver.add(new_request([5, 9, 2, 7, 1], 20))
        driver.step()
        tree = driver.draft(1, narrow)
        drawn.append((tree.tokens_BN.tolist(), tree.parents_BN.tolist()))
    assert drawn[0] == drawn[1]
