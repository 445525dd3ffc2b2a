"""Steps of a head's training as one CUDA graph on a GPU: what an eager run makes of the same rows."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec import SpecDecoder
from specdec.shipped import draft_folder, target_folder
from specdec.train.lesson.lesson import Lesson
from specdec.train.selftext import SelfText
from specdec.train.settings import HeadRun
from specdec.train.step import EAGER

pytestmark = pytest.mark.gpu

STEPS = EAGER + 12
SETTINGS = dict(texts=24, width=48, longest_prompt=16, steps=STEPS, batch=2, warmup=2, lr=1e-3, eval_every=5, patience=0)
KINDS = [("eagle3", "float32"), ("eagle3", "bfloat16"), ("p-eagle", "float32"), ("dflash", "float32"), ("dspark", "float32")]


@pytest.fixture(scope="module")
def pair() -> SpecDecoder:
    return SpecDecoder.from_pretrained(target_folder(), draft_folder(), device="cuda", dtype="float32", max_seq_len=64)


def lesson(pair: SpecDecoder, run: HeadRun, checkpoint: Path) -> Lesson:
    rows = torch.randint(2048, (24, 48), generator=torch.Generator().manual_seed(0))
    return Lesson(pair, SelfText(rows, torch.full((24,), 5)), run, (1, 13, 24), checkpoint, {}, time.monotonic())


def losses(made: Lesson, resume: bool = False) -> list[float]:
    """Training and held-out losses, of evaluations that come between replays; warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [loss for _, *both in made.fit(resume, lambda head: None).history for loss in both]


@pytest.mark.parametrize(("kind", "precision"), KINDS)
def test_a_captured_run_is_an_eager_one(kind: str, precision: str, pair: SpecDecoder, tmp_path: Path) -> None:
    """Keeps out: a graph that keeps the rate or the rows of its capture, or that a warm-up has led a step on; a gradient that a
    replay adds to the one before; weights that an evaluation between replays does not see; an optimizer that warns."""
    run = HeadRun(kind=kind, precision=precision, **SETTINGS)  # type: ignore[arg-type]
    captured, eager = (lesson(pair, replace(run, capture=how), tmp_path / how) for how in ("auto", "off"))
    found, wanted = losses(captured), losses(eager)
    # Sums that atomic additions make differ in their last bits from run to run, and steps of Adam carry that on.
    assert found == pytest.approx(wanted, rel=2e-3 if precision == "float32" else 2e-2)
    assert min(found[-2:]) < max(found[:2]), "the steps after the capture train"


def test_a_resumed_run_is_captured_again(pair: SpecDecoder, tmp_path: Path) -> None:
    """Keeps out: a graph over moments or weights that loading has replaced, and moments that begin anew."""
    run = HeadRun(precision="float32", **SETTINGS)  # type: ignore[arg-type]
    whole = losses(lesson(pair, run, tmp_path / "whole"))
    first, stops = lesson(pair, run, tmp_path / "parts"), iter([False, False, True])

    def stop(head: object) -> None:  # after the steps, and before the checkpoint of the third evaluation
        if next(stops):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.fit(False, stop)
    assert first.checkpoint.load().step == 10 > EAGER
    assert losses(lesson(pair, run, tmp_path / "parts"), resume=True) == pytest.approx(whole, rel=2e-3)
