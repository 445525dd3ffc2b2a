"""Rounds whose functions run as a capture runs them, twice for nothing and then once: on a CPU, where nothing is captured.

A capture warms up by calling its function, and restores after each call the tensors that it was told of.  So whatever else a
later phase reads must come out the same however often the function has run.
"""

from collections.abc import Callable, Hashable
from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.heads.block_zoo import HEADS  # which the zoo then has
from toolkit.models import Zoo, ragged_prompts
from torch import Tensor

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.ops.cuda_graph import GraphSet
from specdec.runner.rounds import RoundRunner

SAMPLING = [
    SamplingParams(max_tokens=11),
    SamplingParams(max_tokens=16, repetition_penalty=1.2, presence_penalty=0.3),
    SamplingParams(max_tokens=9, temperature=0.9, seed=3),
    SamplingParams(max_tokens=13),
]
LEVELS = [2, 0, 0, 2, 2, 0]
assert "dspark-rnn" in HEADS


def outputs(decoder: SpecDecoder) -> list[tuple[list[int], list[int]]]:
    driver = Driver(decoder)
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
    want = outputs(zoo.decoder("llama", kind, spec, **settings))
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
        saved = [tensor.clone() for tensor in mutable]
        for _ in range(warm_ups):
            fn()
            for tensor, value in zip(mutable, saved, strict=True):
                tensor.copy_(value)
            before()
        return fn()

    monkeypatch.setattr(GraphSet, "run", run)
    monkeypatch.setattr(RoundRunner, "_fuses", lambda self, needs: whole)
    assert outputs(zoo.decoder("llama", kind, spec, **settings)) == want
    assert calls > 20 and any(sum(accepted) for _, accepted in want)
