"""How many levels to draft, by batch size: from what rounds were measured to cost and how far drafts were accepted lately.

Speculation that would lose is not used: 0 levels is plain decoding, kept ready to speculate again.  Knows numbers only.
"""

from __future__ import annotations

import math

GAIN = 0.02  # a change of levels must promise this much more tokens per second
PROBE_COST = 0.004  # the share of time that each kind of look may cost: all levels, and none
MEMORY = 300  # row-rounds after which an observation of acceptance counts 1/e
PRIOR_ACCEPTED, PRIOR_REACHED = 1.4, 2.0  # before anything was seen
FIRST_LOOKS = 4  # rounds of no and of all levels that a new batch size begins with; of each the first is not timed
SMOOTHING = 0.2  # weight of the newest cost


class StepChooser:
    """Chooses 0 .. max_steps levels for the next round of a batch of so many rows.

    new_shape_seconds: what the first round of a shape takes beyond its own time (compiling, capturing).
    """

    def __init__(self, max_steps: int, new_shape_seconds: float = 0.0) -> None:
        self.max_steps, self.new_shape_seconds = max_steps, new_shape_seconds
        self._missed: dict[int, float] = {}  # rows -> seconds that a shape not used yet would have saved
        self._costs: dict[int, dict[int, float]] = {}  # rows -> steps -> seconds
        self._seen: dict[tuple[int, int], int] = {}  # (rows, steps) -> rounds timed
        self._current: dict[int, int] = {}
        self._since: dict[tuple[int, int], int] = {}  # (rows, steps) -> rounds since such a round
        self._reached = [0.0] * max_steps
        self._accepted = [0.0] * max_steps

    def choose(self, rows: int) -> int:
        """The levels of the next round of `rows` rows."""
        for steps in (self.max_steps, 0):
            if self._seen.get((rows, steps), 0) < FIRST_LOOKS:
                return steps
        steps = self._current[rows] = self._affordable(rows, self._best(rows))
        for look in (self.max_steps, 0):  # how far drafts would be accepted; what plain decoding costs by now
            waited = self._since[rows, look] = self._since.get((rows, look), 0) + 1
            if look != steps and waited >= self._interval(rows, steps, look):
                steps = look
                break
        self._since[rows, steps] = 0
        return steps

    def observe_cost(self, rows: int, steps: int, seconds: float) -> None:
        """What a round took, without the catching up of a draft behind a pause, which steady drafting does not pay.

        The first of its kind is not counted: it compiled and captured.
        """
        seen = self._seen[rows, steps] = self._seen.get((rows, steps), 0) + 1
        if seen == 1:
            return
        costs = self._costs.setdefault(rows, {})
        known = costs.get(steps)
        if known is None:
            costs[steps] = seconds
        elif seen <= FIRST_LOOKS:  # a first look may have been disturbed: the least of a few counts
            costs[steps] = min(known, seconds)
        else:
            costs[steps] = known + SMOOTHING * (min(seconds, 2 * known) - known)

    def observe_acceptance(self, steps: int, accepted: list[int]) -> None:
        """How many draft tokens each row of a round of `steps` levels took."""
        fade = math.exp(-len(accepted) / MEMORY)
        for depth in range(steps):
            self._reached[depth] = self._reached[depth] * fade + sum(a >= depth for a in accepted)
            self._accepted[depth] = self._accepted[depth] * fade + sum(a > depth for a in accepted)

    def accept_length(self, steps: int) -> float:
        """Expected tokens of a round of so many levels."""
        total, reach = 1.0, 1.0
        for reached, accepted in zip(self._reached[:steps], self._accepted[:steps], strict=True):
            reach *= (accepted + PRIOR_ACCEPTED) / (reached + PRIOR_REACHED)
            total += reach
        return total

    def cost(self, rows: int, steps: int) -> float:
        """Seconds of a round: measured, or between the nearest two that were."""
        costs = self._costs[rows]
        if steps in costs:
            return costs[steps]
        low = max(known for known in costs if known < steps)
        high = min(known for known in costs if known > steps)
        return costs[low] + (costs[high] - costs[low]) * (steps - low) / (high - low)

    def _rate(self, rows: int, steps: int) -> float:
        return self.accept_length(steps) / self.cost(rows, steps)

    def _best(self, rows: int) -> int:
        """The levels with the most tokens a second; a little more is no reason to change."""
        best = max(range(self.max_steps + 1), key=lambda steps: self._rate(rows, steps))
        current = self._current.get(rows)
        if current is not None and self._rate(rows, best) < (1 + GAIN) * self._rate(rows, current):
            return current
        return best

    def _affordable(self, rows: int, steps: int) -> int:
        """A new shape only once as much was lost without it as it costs: never more than twice the best, whatever comes."""
        known = [other for other in range(self.max_steps + 1) if (rows, other) in self._seen]
        if steps in known or not self.new_shape_seconds:
            return steps
        usual = max(known, key=lambda other: self._rate(rows, other))
        gain = self.cost(rows, usual) * (self._rate(rows, steps) / self._rate(rows, usual) - 1)
        missed = self._missed.get(rows, 0.0) + gain
        self._missed[rows] = 0.0 if missed >= self.new_shape_seconds else missed
        return steps if missed >= self.new_shape_seconds else usual

    def _interval(self, rows: int, steps: int, look: int) -> float:
        """Rounds between two looks at other levels, so that what they lose stays a small share of the time."""
        fair = self.accept_length(look) / self._rate(rows, steps)  # what its tokens would cost otherwise
        lost = max(0.0, self.cost(rows, look) - fair)
        return max(16.0, lost / (PROBE_COST * self.cost(rows, steps)))
