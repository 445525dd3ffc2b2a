"""Shapes that are tried on the side: the batch is afterwards what it was, whatever the shape.

Keeps out: a row whose length, bonus token, first level or pause a trial has moved, and a trial while a row is full of tokens
that the drafter has not seen.
"""

import random
from itertools import cycle
from typing import Any

import pytest
from toolkit.driver import Driver, new_request
from toolkit.models import Zoo, ragged_prompts

from specdec import SamplingParams, SpecConfig
from specdec.engine.speculation import Speculation
from specdec.steps import CatchUp, RunRound, Step, Try

AUTO = SpecConfig("auto", 3, 12)


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", ["eagle3", "ngram"])
def test_texts_do_not_change_when_shapes_are_tried_and_change_each_round(zoo: Zoo, kind: str) -> None:
    """The controller is a random one, which tries all shapes that it is about to run."""
    decoder = zoo.decoder("llama", kind, AUTO, page_size=4, max_batch_size=3, max_seq_len=120)
    driver, rng = Driver(decoder), random.Random(kind)
    driver.set_depth(1)
    controller = driver.controller_that_tries()
    shapes = (None, *controller.shapes)
    controller.wanted = lambda rows, share, ready: [shape for shape in shapes if shape not in ready and rng.random() < 0.2]
    controller.choose = lambda rows, share, pause, ready: rng.choice(
        [shape for shape in shapes if shape in ready] or [AUTO.shapes[0]]
    )
    prompts = ragged_prompts(40, 5, seed=3)
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=30))
    assert [out.token_ids for out in outputs] == [zoo.greedy("llama", prompt, 30) for prompt in prompts]
    assert controller.books and all(book.costs.is_known(None) for book in controller.books.values())


def follow(controller: Any, tried: tuple[SpecConfig | None, ...]) -> None:
    """Makes a controller try these shapes first, and then run three shapes and none in turn."""
    plan = cycle((*AUTO.shapes[:3], AUTO.shapes[-1], None))
    controller.wanted = lambda rows, share, ready: [shape for shape in tried if shape not in ready]
    controller.choose = lambda rows, share, pause, ready: next(plan)


def test_acceptance_is_that_of_a_run_without_trials(zoo: Zoo) -> None:
    """Keeps out: a trial that spoils what the drafter knows, of which the text says nothing."""
    runs = []
    for tries in (False, True):
        decoder = zoo.decoder("llama", "eagle3", AUTO, page_size=4, max_batch_size=1, max_seq_len=120)
        driver = Driver(decoder)
        controller = driver.controller_that_tries()
        follow(controller, (None, *AUTO.shapes) if tries else ())
        (out,) = decoder.generate([5, 9, 2, 7], SamplingParams(max_tokens=40))
        runs.append((out.token_ids, out.stats.accepted_per_round))
    assert runs[0] == runs[1]


def test_everything_that_may_run_is_made_ready(zoo: Zoo) -> None:
    """Keeps out: a text that waits for a capture although all of them were asked for before."""
    decoder = zoo.decoder("llama", "eagle3", AUTO, page_size=4, max_batch_size=2, max_seq_len=120)
    driver = Driver(decoder)
    controller = driver.controller_that_tries()
    decoder.generate([[5, 9, 2], [7, 1]], SamplingParams(max_tokens=6))
    driver.make_ready()
    assert all(book.costs.is_known(shape) for book in controller.books.values() for shape in (None, *controller.shapes))
    assert {size.rows for size in controller.books} == {1, 2}
    steps = list[Step]()
    driver.watch(steps.append)
    decoder.generate([[5, 9, 2], [7, 1]], SamplingParams(max_tokens=20))
    assert any(isinstance(step, RunRound) for step in steps) and not any(isinstance(step, Try) for step in steps)
    driver.make_ready()
    assert not any(isinstance(step, Try) for step in steps)


def test_the_drafter_catches_up_before_a_trial(zoo: Zoo) -> None:
    """Keeps out: a trial that keeps one more token of a row than there is room for."""
    speculation = Speculation(AUTO.shapes, 0.2, is_auto=True)
    controller = speculation.controller
    assert controller is not None
    needs = new_request([1], 1).choice.needs
    controller.choose = lambda rows, share, pause, ready: None  # type: ignore[method-assign]
    before = [speculation.next_round(1, needs, False, 1.0)[0] for _ in range(3)]
    assert before[0] and not before[1] and speculation.pause == 3
    controller.wanted = lambda rows, share, ready: [AUTO.shapes[-1]]  # type: ignore[method-assign]
    steps, step = speculation.next_round(1, needs, False, 1.0)
    assert isinstance(steps[0], CatchUp) and isinstance(steps[1], Try) and step.kind == "paused" and speculation.pause == 1
