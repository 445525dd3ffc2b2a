"""Decides which kind of round comes next: plain, paused, or speculative with a number of levels.

A round in which no row speculates is plain.  With num_steps="auto", another round of no levels is a paused round.  It keeps
the tokens that the drafter has not seen, at most MAX_PAUSE for each row that speculates, until the drafter catches up.  This
module knows numbers and the shapes of trees.
"""

from __future__ import annotations

from specdec.config import SpecConfig
from specdec.engine.auto_steps import StepChooser
from specdec.limits import MAX_PAUSE
from specdec.steps import CatchUp, Needs, RunRound


class Speculation:
    """Chooses the kind of each round.

    spec: the tree's shape; None: there is no drafter.
    new_shape_seconds: see StepChooser.
    most_tokens: of a text, beyond which nothing is drafted; None: there is no such length.
    pause: paused rounds since the drafter last caught up; no row that speculates has more tokens than this that the drafter
        has not seen.  Whoever takes rows away sets it to 0 once no running row speculates, since no such token is left then.
    """

    def __init__(self, spec: SpecConfig | None, new_shape_seconds: float, most_tokens: int | None = None) -> None:
        self.spec, self.most_tokens = spec, most_tokens
        self.chooser = StepChooser(spec.max_steps, new_shape_seconds) if spec and spec.is_auto else None
        self.pause = 0

    def next_round(self, rows: int, needs: Needs, shared: bool, share: float) -> tuple[CatchUp | None, RunRound]:
        """The next round, and the drafter's catching up if that must come before it.

        rows: of the batch, padding included.  needs: see RunRound.  shared: whether rows read common pages together.
        share: the share of the running rows that speculate, from 0 to 1.
        """
        if not share:
            assert not self.pause, "tokens that the drafter has not seen belong to a row that speculates"
            return None, RunRound(rows, "plain", None, needs, shared)
        spec = self._shape(rows, share)
        catch_up = None
        if self.pause and (spec is not None or self.pause == MAX_PAUSE):
            catch_up, self.pause = CatchUp(rows, needs, shared), 0
        timed = self.chooser is not None
        if spec is not None:
            return catch_up, RunRound(rows, "speculative", spec, needs, shared, timed)
        self.pause += 1
        return catch_up, RunRound(rows, "paused", None, needs, shared, timed)

    def observe(self, step: RunRound, depths: int, seconds: float, accepted: list[int]) -> None:
        """Records the seconds of a timed round, and how many draft tokens each row that speculates accepted."""
        if self.chooser is not None:
            self.chooser.observe_cost(step.rows, depths, seconds)
            self.chooser.observe_acceptance(depths, accepted)

    def _shape(self, rows: int, share: float) -> SpecConfig | None:
        """The shape of the next round's tree; None: the round is paused."""
        assert self.spec is not None, "without a drafter no row speculates"
        if self.chooser is None:
            return self.spec
        steps = self.chooser.choose(rows, share)
        return self.spec.at(steps) if steps else None
