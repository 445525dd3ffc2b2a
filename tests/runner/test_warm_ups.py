"""Rounds whose functions run as a capture or a replay runs them, on a CPU, where nothing is captured.

A capture warms up by calling its function twice, and restores after each call the tensors that it was told of.  So whatever
else a later phase reads must come out the same however often the function has run.  A replay runs the function that was
captured under its key, with that function's Python values.
"""

from typing import Any

import pytest
import toolkit.recurrent.targets  # noqa: F401 (the zoo has its targets by name)
from toolkit.driver import Driver, new_request
from toolkit.heads.block_zoo import HEADS  # which the zoo then has
from toolkit.inside.warm_ups import Replays, Trees, WarmUps
from toolkit.models import Zoo, ragged_prompts

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.batch.tree import DraftTree
from specdec.draft.eagle.worker import FEW_ROWS
from specdec.shipped import draft_folder, target_folder

SAMPLING = [
    SamplingParams(max_tokens=11),
    SamplingParams(max_tokens=16, repetition_penalty=1.2, presence_penalty=0.3),
    SamplingParams(max_tokens=9, temperature=0.9, seed=3),
    SamplingParams(max_tokens=13),
]
LEVELS = [2, 0, 0, 2, 2, 0]
assert "dspark-rnn" in HEADS


class Watched:
    """A drafter whose trees' tokens a list gets."""

    def __init__(self, inner: Any, trees: Trees) -> None:
        self.inner, self.trees = inner, trees

    def draft(self, *given: Any) -> DraftTree:
        tree: DraftTree = self.inner.draft(*given)
        self.trees.append(tree.tokens_BN.tolist())
        return tree

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def outputs(driver: Driver, trees: Trees) -> list[tuple[list[int], list[int]]]:
    """What requests got, and what each round accepted.  trees: gets the tokens of all trees that are drafted."""
    driver.replace_drafter(Watched(driver.drafter, trees))
    driver.set_depth(0)
    driver.script_levels(*LEVELS * 20)
    prompts = [[*prompt, *prompt] for prompt in ragged_prompts(40, 4, seed=5)]
    return [(out.token_ids, out.stats.accepted_per_round) for out in driver.decoder.generate(prompts, SAMPLING)]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("whole", [False, True], ids=["phases", "whole rounds"])
@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("llama", "eagle3"),
        ("llama", "p-eagle"),
        ("llama", "dspark-rnn"),
        ("llama", "dflash2"),
        ("llama", "ngram"),
        ("llama", "eagle3+suffix"),
        ("qwen3_5_text", "eagle1"),
    ],
)
def test_warm_ups_change_nothing(zoo: Zoo, target: str, kind: str, whole: bool) -> None:
    """Keeps out: a tensor that a phase advances and that is missing among those that a capture restores: lengths, tokens that a
    pause kept, counts of tokens, first levels, numbers of states, the places that texts follow.  The first round of each shape
    would then be wrong, on GPUs alone."""
    settings: dict[str, Any] = {"page_size": 4, "max_batch_size": 2}
    spec = SpecConfig("auto", 2, 6)
    trees: Trees = []
    want = outputs(Driver(zoo.decoder(target, kind, spec, **settings)), trees)
    driver, seen = Driver(zoo.decoder(target, kind, spec, **settings)), Trees()
    graphs = WarmUps(seen)
    driver.use_graphs(graphs, whole)
    assert outputs(driver, seen) == want
    assert seen == trees and graphs.calls > 20 and any(sum(accepted) for _, accepted in want)


@pytest.mark.slow_cases
@pytest.mark.parametrize("spec", [SpecConfig(4, 3, 10), SpecConfig(3, 1, 4)], ids=str)
def test_a_tree_is_read_again_after_a_warm_up(spec: SpecConfig) -> None:
    """Keeps out: rows with a grammar whose accepted path is committed from slots that a warm-up's commit has overwritten.  The
    other rounds read the tree within the function that warms up."""
    sampling = [SamplingParams(max_tokens=16, regex=r"(The|A) [a-z]{2,6}( [a-z]{2,7}){2}\."), SamplingParams(max_tokens=16)]
    found: list[list[list[int]]] = []
    for graphs in (None, WarmUps([])):
        with SpecDecoder.from_pretrained(target_folder(), draft_folder(), spec, device="cpu", max_seq_len=160) as decoder:
            driver = Driver(decoder)
            if graphs is not None:
                driver.use_graphs(graphs, False)
            outs = decoder.generate(["Once upon a time", "Once upon a time"], sampling)
            found.append([out.token_ids for out in outs])
    assert found[0] == found[1] and any(out.stats.accepted > 3 for out in outs)


MIXED = [  # so that rows with different needs run beside each other, and in turns
    *SAMPLING,
    SamplingParams(max_tokens=12, temperature=0.9, seed=3, top_n_sigma=1.0, logprobs=2),
    SamplingParams(max_tokens=6, temperature=1.2, seed=4, top_p=0.7),
    SamplingParams(max_tokens=6, logit_bias={3: 5.0}, min_tokens=3, stop_token_ids=[7]),
    SamplingParams(max_tokens=6, temperature=0.8, seed=5, min_p=0.2, bad_words=[[5], [6, 7]]),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize("whole", [False, True], ids=["phases", "whole rounds"])
@pytest.mark.parametrize("kind", ["eagle3", "ngram"])
def test_replays_depend_on_their_keys_and_tensors_alone(zoo: Zoo, kind: str, whole: bool) -> None:
    """Keeps out: a key that lacks what the captured function depends on, such as a drafter's without noise for rows with noise.
    Rounds would then replay another one's steps, on GPUs alone."""
    prompts = [[*prompt, *prompt] for prompt in ragged_prompts(40, len(MIXED), seed=5)]
    found: list[list[tuple[Any, ...]]] = []
    for graphs in (None, Replays()):
        driver = Driver(zoo.decoder("llama", kind, SpecConfig("auto", 2, 6), page_size=4, max_batch_size=2))
        if graphs is not None:
            driver.use_graphs(graphs, whole)
        driver.set_depth(0)
        driver.script_levels(*LEVELS * 40)
        outs = [*driver.decoder.generate(prompts, MIXED, speculate=False), *driver.decoder.generate(prompts, MIXED)]
        found.append([(out.token_ids, out.stats.accepted_per_round, out.logprobs) for out in outs])
        if graphs is not None:
            assert min(graphs.replays[name] for name in ("decode", "paused", "round" if whole else "verify")) > 5
    assert found[0] == found[1]


def test_few_tokens_and_many_leave_the_same_first_level(zoo: Zoo) -> None:
    """Keeps out: where a round has many tokens, a hidden state of another row's token, from which its next tree grows."""
    found = []
    for few in (FEW_ROWS, 0):
        trees: Trees = []
        driver = Driver(
            zoo.decoder("llama", "eagle3", SpecConfig("auto", 2, 6), page_size=4, max_batch_size=3, dtype="float64")
        )
        driver.drafter.few_rows = few
        found.append((outputs(driver, trees), trees))
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
