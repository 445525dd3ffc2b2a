"""A text that is held to its grammar from some place on: after a thought, or after a marker that the model writes.

Until then no draft is judged, and every token may come, but for those that would write the marker and go on.  In a tree of
drafts the place may lie anywhere: nodes after it get the grammar's masks, each of its own path, so that the text is the one
that plain decoding writes.

Shapes: N nodes, X words of a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specdec.grammar.matcher import ALL, Matcher
from specdec.grammar.wait import ARMED, THOUGHT, THOUGHT_MAY_OPEN, WaitPlan, WaitState


class LateMatcher:
    """The state of one text, as Matcher is for a text that a grammar holds from its first token on.

    make: the grammar's matcher at the beginning of what it holds for.  plan: where that is.  ends: ids that end the text.
    """

    def __init__(self, make: Callable[[], Matcher], plan: WaitPlan, ends: Sequence[int]) -> None:
        self._make, self._plan, self._ends = make, plan, frozenset(ends)
        self._held = dict[bytes, Matcher]()  # by the marker with which their texts begin
        self._state, self._has_ended = plan.first, False

    @property
    def is_armed(self) -> bool:
        """Whether the grammar holds for what comes next."""
        return self._state.phase == ARMED

    @property
    def judge(self) -> Matcher | None:
        """What drafts are judged by now; None: nothing."""
        return self._matcher(self._state).judge if self.is_armed else None

    @property
    def is_over(self) -> bool:
        return self._has_ended or (self.is_armed and self._matcher(self._state).is_over)

    @property
    def is_stuck(self) -> bool:
        return self.is_armed and self._matcher(self._state).is_stuck

    @property
    def is_alone(self) -> bool:
        return any(matcher.is_alone for matcher in self._held.values())

    @property
    def reason(self) -> str:
        return next((matcher.reason for matcher in self._held.values() if matcher.reason), "")

    def _matcher(self, state: WaitState) -> Matcher:
        """What holds from a state on."""
        marker = state.tail if state.phase == ARMED else b""
        if marker not in self._held:
            self._held[marker] = self._make()
            self._held[marker].take(self._plan.spelled(marker))
        return self._held[marker]

    def take(self, tokens: Sequence[int]) -> None:
        """Goes on along tokens that the text has got."""
        for number, token in enumerate(tokens):
            if self._plan.is_first_of_answer(self._state, token):
                self._state = WaitState(ARMED)
            if self.is_armed:
                self._matcher(self._state).take(tokens[number:])
                return
            self._has_ended = self._has_ended or token in self._ends
            self._state = self._plan.step(self._state, token)

    def fill(self, masks_NX: np.ndarray, tokens_N: Sequence[int] = (), parents_N: Sequence[int] = ()) -> None:
        """Writes the mask after each node of a tree: see Matcher.fill."""
        if self._has_ended:
            masks_NX[:] = ALL
        elif self.is_armed:
            self._matcher(self._state).fill(masks_NX, tokens_N, parents_N)
        else:
            self._fill_tree(masks_NX, tokens_N, parents_N)

    def _fill_tree(self, masks_NX: np.ndarray, tokens_N: Sequence[int], parents_N: Sequence[int]) -> None:
        """states: of each node.  held: of nodes where the grammar holds, by the node after which it begins to."""
        nodes = max(1, len(tokens_N))
        states: list[WaitState | None] = [self._state]
        begins: list[int | None] = [0 if self._begins_at(self._state) else None]
        for node in range(1, nodes):
            above, token = parents_N[node], tokens_N[node]
            state, begin = states[above], begins[above]
            if state is None or token in self._ends:  # within the grammar, or nobody reads what comes after the end
                states.append(None)
                begins.append(begin if state is None else None)
                continue
            if begin is not None and (state.phase == ARMED or self._plan.is_first_of_answer(state, token)):
                states.append(None)
                begins.append(begin)
                continue
            after = self._plan.step(state, token)
            states.append(after)
            begins.append(node if self._begins_at(after) else None)
        masks_NX[:nodes] = ALL
        for node, state in enumerate(states):
            if state is not None and (crossing_X := self._plan.crossing(state)) is not None:
                masks_NX[node, : len(crossing_X)] &= ~crossing_X
            if state is not None and state.phase == THOUGHT and not self._plan.waits:  # what must come has not begun
                for end in self._ends:
                    masks_NX[node, end >> 5] &= ~np.array(1 << (end & 31), np.uint32).view(np.int32)
        for begin in sorted({each for each in begins if each is not None}):
            held = [node for node in range(nodes) if begins[node] == begin]
            self._fill_held(self._matcher(states[begin] or self._state), masks_NX, held, tokens_N, parents_N)
            state, opening = states[begin], self._plan.opening
            if state is not None and state.phase == THOUGHT_MAY_OPEN and opening is not None:
                masks_NX[begin, opening >> 5] |= np.array(1 << (opening & 31), np.uint32).view(np.int32)

    def _begins_at(self, state: WaitState) -> bool:
        """Whether the grammar may hold from a state on."""
        return state.phase == ARMED or (state.phase == THOUGHT_MAY_OPEN and not self._plan.waits)

    def _fill_held(
        self, matcher: Matcher, masks_NX: np.ndarray, held: Sequence[int], tokens_N: Sequence[int], parents_N: Sequence[int]
    ) -> None:
        """The masks of the nodes for which the grammar holds from one node on, the first of them."""
        places = {node: place for place, node in enumerate(held)}
        part_NX = np.empty((len(held), masks_NX.shape[1]), np.int32)
        tokens = [tokens_N[node] for node in held] if len(held) > 1 else ()
        parents = [places.get(parents_N[node], 0) for node in held] if len(held) > 1 else ()
        matcher.fill(part_NX, tokens, parents)
        masks_NX[list(held)] = part_NX
