"""Decides after which tokens of a text the state of its recurrent layers is kept for later prompts.

A pass over a part of a text can keep one state beside the row's own, at a border of pages.  Three kinds of places are worth it:

- Where texts that begin alike go on differently, the end of a system prompt for example.  The second such text finds the pages
  of the first one, and no state at their end; it keeps that state, and the third one begins there.  A text that waits for
  another one's prompt asks for such a place, too.
- The last border of a prompt: the next turn of a conversation, and the same prompt once more, begin there.
- Every so many tokens of a long prompt, so that a text which shares most of it does not begin from nothing.

This module knows counts only.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

STATE_EVERY = 4096  # tokens between places in a long prompt
LEAST_KEPT = 64  # no state is kept that saves fewer tokens beyond the last one
SHARE = 4  # the places in a long prompt take at most 1/4 of all numbers, so that one prompt does not drop everybody's states


def distance(every: int, page_size: int, tokens: int, numbers: int) -> int:
    """Tokens between places in a prompt of `tokens` tokens: a multiple of `every`, which is rounded to pages.

    numbers: how many states can be kept.
    """
    unit = max(1, every // page_size) * page_size
    return unit * max(1, -(-SHARE * tokens // (unit * max(1, numbers))))


def worth_most(places: Collection[int], begun: int) -> int:
    """The place that saves most tokens to those who share a text's beginning up to each of these places, all of them together.

    begun: what is found without it.
    """
    return max(sorted(set(places)), key=lambda place: (place - begun) * sum(other >= place for other in places))


@dataclass
class StatePlaces:
    """The places of one text, as counts of its leading tokens.

    begun: where the last state is: that with which the row has begun, or that which it has kept since.
    last: the last border of pages before the text's last token.
    every: tokens between places in a long prompt, see `distance`.
    shared: places up to which others begin as this text does, by who does.
    """

    begun: int
    last: int
    every: int
    shared: dict[Hashable, int] = field(default_factory=dict)

    def choose(self, start: int, end: int, least: int) -> int | None:
        """The place at which a part of the text keeps the state, from token `start` up to `end`; None: it keeps none.

        least: no state is kept that is fewer tokens beyond the last one.
        """
        low = max(start + 1, self.begun + least)
        if wanted := [place for place in self.shared.values() if low <= place <= end]:
            return worth_most(wanted, self.begun)
        if low <= self.last <= end:
            return self.last
        between = min(end, self.last - self.every) // self.every * self.every
        return between if between >= low else None
