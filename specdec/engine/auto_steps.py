"""Chooses how many levels to draft, by batch size, from the measured cost of rounds and the recent acceptance of drafts.

Where speculation would be slower than plain decoding, the chooser answers 0 levels, which is plain decoding that stays ready
to speculate again.  To notice when the answer should change, the chooser sometimes asks for a probe: one round with another
number of levels than the best, run only to measure it.  This module knows numbers only.
"""

from __future__ import annotations

import math

GAIN = 0.02  # the threshold for a change of levels: it must promise this share more tokens per second
PROBE_COST = 0.004  # the share of time that each of the two kinds of probes (all levels, no levels) may cost
MEMORY = 300  # an observation of acceptance counts 1/e after so many later ones; one row of one round is one observation
PRIOR_ACCEPTED, PRIOR_REACHED = 1.4, 2.0  # what each depth is assumed to have seen before the first observation
# A new batch size begins with so many rounds of all levels and so many of none.  The first of each kind is not counted, because
# it also compiles and captures.
FIRST_PROBES = 4
SMOOTHING = 0.2  # the weight of the newest cost in the moving average


class StepChooser:
    """Chooses between 0 and max_steps levels for the next round of a batch of a given number of rows.

    new_shape_seconds: how much longer the first round of a shape takes than a later one, because it compiles and captures.
    """

    def __init__(self, max_steps: int, new_shape_seconds: float = 0.0) -> None:
        self.max_steps, self.new_shape_seconds = max_steps, new_shape_seconds
        self._missed: dict[int, float] = {}  # rows -> seconds that a shape without any round so far would have saved
        self._costs: dict[int, dict[int, float]] = {}  # rows -> steps -> seconds
        self._seen: dict[tuple[int, int], int] = {}  # (rows, steps) -> rounds timed
        self._current: dict[int, int] = {}  # rows -> the levels last chosen as the best, probes apart
        self._since: dict[tuple[int, int], int] = {}  # (rows, steps) -> rounds since the last one of that kind
        # By depth, fading with time: rows whose draft reached the depth, and rows whose draft token there was accepted.
        self._reached = [0.0] * max_steps
        self._accepted = [0.0] * max_steps
        self._share = 1.0  # of the rows, those that speculate; the others gain nothing from a draft and wait for it

    def choose(self, rows: int, share: float) -> int:
        """The number of levels of the next round of `rows` rows.  share: the share of the running rows that speculate."""
        self._share = share
        for steps in (self.max_steps, 0):
            if self._seen.get((rows, steps), 0) < FIRST_PROBES:
                return steps
        steps = self._current[rows] = self._affordable(rows, self._best(rows))
        # A probe of all levels shows how far drafts would be accepted; a probe of none shows what plain decoding costs by now.
        for probe in (self.max_steps, 0):
            waited = self._since[rows, probe] = self._since.get((rows, probe), 0) + 1
            if probe != steps and waited >= self._interval(rows, steps, probe):
                steps = probe
                break
        self._since[rows, steps] = 0
        return steps

    def observe_cost(self, rows: int, steps: int, seconds: float) -> None:
        """Records how long a round took.

        seconds: of the round alone.  The time in which a drafter catches up after a pause does not belong here, because steady
        drafting does not pay it.  The first round of its kind is not counted, because it compiled and captured.
        """
        seen = self._seen[rows, steps] = self._seen.get((rows, steps), 0) + 1
        if seen == 1:
            return
        costs = self._costs.setdefault(rows, {})
        known = costs.get(steps)
        if known is None:
            costs[steps] = seconds
        elif seen <= FIRST_PROBES:  # something may have disturbed one of the first probes, so the least of them counts
            costs[steps] = min(known, seconds)
        else:
            costs[steps] = known + SMOOTHING * (min(seconds, 2 * known) - known)

    def observe_acceptance(self, steps: int, accepted: list[int]) -> None:
        """Records how many draft tokens each row that speculates accepted in a round of `steps` levels."""
        fade = math.exp(-len(accepted) / MEMORY)
        for depth in range(steps):
            self._reached[depth] = self._reached[depth] * fade + sum(a >= depth for a in accepted)
            self._accepted[depth] = self._accepted[depth] * fade + sum(a > depth for a in accepted)

    def accept_length(self, steps: int) -> float:
        """The tokens that a round of `steps` levels is expected to emit for each row on average, the bonus token included."""
        total, reach = 1.0, self._share
        for reached, accepted in zip(self._reached[:steps], self._accepted[:steps], strict=True):
            reach *= (accepted + PRIOR_ACCEPTED) / (reached + PRIOR_REACHED)
            total += reach
        return total

    def cost(self, rows: int, steps: int) -> float:
        """Seconds of a round: as measured, or interpolated between the nearest two numbers of levels that were measured."""
        costs = self._costs[rows]
        if steps in costs:
            return costs[steps]
        low = max(known for known in costs if known < steps)
        high = min(known for known in costs if known > steps)
        return costs[low] + (costs[high] - costs[low]) * (steps - low) / (high - low)

    def _rate(self, rows: int, steps: int) -> float:
        return self.accept_length(steps) / self.cost(rows, steps)

    def _best(self, rows: int) -> int:
        """The levels with the most tokens per second.  A gain below the threshold GAIN is no reason to change."""
        best = max(range(self.max_steps + 1), key=lambda steps: self._rate(rows, steps))
        current = self._current.get(rows)
        if current is not None and self._rate(rows, best) < (1 + GAIN) * self._rate(rows, current):
            return current
        return best

    def _affordable(self, rows: int, steps: int) -> int:
        """`steps` if its shape has run before, or if it is worth its first round; otherwise the best levels that have run.

        A shape is worth its first round once the rounds without it have lost as much time as that round costs.  By this rule
        the chooser never pays more than twice what the best choice in hindsight would have paid.
        """
        known = [other for other in range(self.max_steps + 1) if (rows, other) in self._seen]
        if steps in known or not self.new_shape_seconds:
            return steps
        usual = max(known, key=lambda other: self._rate(rows, other))
        gain = self.cost(rows, usual) * (self._rate(rows, steps) / self._rate(rows, usual) - 1)
        missed = self._missed.get(rows, 0.0) + gain
        self._missed[rows] = 0.0 if missed >= self.new_shape_seconds else missed
        return steps if missed >= self.new_shape_seconds else usual

    def _interval(self, rows: int, steps: int, probe: int) -> float:
        """How many rounds lie between two probes of `probe` levels, so that probes lose only a small share of the time."""
        fair = self.accept_length(probe) / self._rate(rows, steps)  # what the probe's tokens cost at the usual levels
        lost = max(0.0, self.cost(rows, probe) - fair)
        return max(16.0, lost / (PROBE_COST * self.cost(rows, steps)))
