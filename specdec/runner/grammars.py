"""The rows whose texts obey a grammar: where each text stands, and the masks with which a pass chooses its tokens.

Masks are made on the host.  A round's trees come to the host in one copy through pinned memory; those with drafts that break a
grammar are completed, and written back before the target reads them.  The masks of all nodes are made while it does, and go
back in one copy before tokens are chosen.  What a round emits comes in a copy of its own, which is read before the next round's
trees are completed.  All ranks of a model do the same with the same tokens.

Shapes: B rows of a pass, N nodes, G of the rows that have a grammar, X words of a mask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from specdec.batch.masks import BitMasks
from specdec.batch.tree import DraftTree
from specdec.grammar.completion import Completion
from specdec.grammar.library import Grammars
from specdec.grammar.matcher import Matcher
from specdec.runner.readback import Readback, Ticket
from specdec.steps import Entry, LeaveRows, PromptPart

HostTrees: TypeAlias = dict[int, tuple[list[int], list[int]]]  # tokens and parents of trees, by row


@dataclass
class GrammarRow:
    """One text.  speculates: whether draft tokens may be accepted in it.  runs: whether its prompt is complete.

    is_unreported: whether its drafts have ended here, and the scheduler does not know yet.
    """

    matcher: Matcher
    speculates: bool
    runs: bool = False
    is_unreported: bool = False


class Unread(NamedTuple):
    """Tokens that a pass has emitted and no matcher has taken: of these texts, at these places of the copy.

    is_round: whether a place holds a count and then so many tokens and one more, or one token.
    """

    ticket: Ticket
    texts: Sequence[tuple[int, GrammarRow]]
    is_round: bool


class GrammarRows:
    """The rows with a grammar, by row of the batch.  vocab_size: the target's.

    grammars: compiles what rows ask for; None as long as nobody may ask.
    """

    def __init__(self, readback: Readback, vocab_size: int) -> None:
        self._readback, self._vocab_size = readback, vocab_size
        self.grammars: Grammars | None = None
        self._rows: dict[int, GrammarRow] = {}
        self._unread: deque[Unread] = deque()
        self._buffers: dict[tuple[int, int], BitMasks] = {}  # by B and N, since graphs read them

    # ---- rows come and go ----

    def enter(self, entry: Entry) -> None:
        """A request takes a row, which `leave` has cleared."""
        if entry.grammar is not None:
            assert self.grammars is not None, "whoever checks grammars hands the runner what compiles them"
            self._rows[entry.row] = GrammarRow(self.grammars.matcher(entry.grammar), entry.speculates)

    def leave(self, step: LeaveRows) -> None:
        """Rows move and end."""
        moved = {target: self._rows.get(source) for source, target in step.moves}
        for row in (*moved, *step.cleared):
            self._rows.pop(row, None)
        self._rows |= {target: row for target, row in moved.items() if row is not None}
        held = {id(row) for row in self._rows.values()}
        for each in [each for each in self._unread if not any(id(row) in held for _, row in each.texts)]:
            self._unread.remove(each)
            each.ticket.drop()

    def stop_drafting(self, rows: Sequence[int]) -> None:
        """No draft token is accepted in these rows any more."""
        for row in rows:
            if row in self._rows:
                self._rows[row].speculates = False

    # ---- what a pass emits ----

    def follow_chunk(self, tokens_B: torch.Tensor, parts: Sequence[PromptPart]) -> None:
        """Has the texts whose prompts end in a chunk take their first tokens, once these are on the host."""
        texts = [(place, self._rows[part.row]) for place, part in enumerate(parts) if part.is_last and part.row in self._rows]
        for _, row in texts:
            row.runs = True
        if texts:
            self._unread.append(Unread(self._readback.start(tokens_B), texts, False))

    def follow_round(self, emitted_BX: torch.Tensor) -> None:
        """Has the texts take what a round emits, once it is on the host.  emitted_BX: see Round."""
        if texts := self._running(emitted_BX.shape[0]):
            self._unread.append(Unread(self._readback.start(emitted_BX), texts, True))

    def _take(self) -> None:
        """Waits for what earlier passes have emitted."""
        while self._unread:
            ticket, texts, is_round = self._unread.popleft()
            values = ticket.read()
            for place, row in texts:
                row.matcher.take(values[place][1 : values[place][0] + 2] if is_round else [values[place]])

    # ---- masks ----

    def complete(self, tree: DraftTree) -> HostTrees:
        """Takes drafts that break a grammar out of the trees on the device, and waits for that: see completion.py."""
        if tree.num_nodes == 1:
            return {}
        ticket = self._readback.start(torch.stack((tree.tokens_BN, tree.parents_BN)))
        self._take()
        tokens_BN, parents_BN = ticket.read()
        trees, changed = HostTrees(), []
        for place, row in self._running(len(tokens_BN)):
            if not row.speculates or row.matcher.is_over or row.matcher.is_stuck:
                continue
            drafted = tokens_BN[place], parents_BN[place]
            trees[place] = Completion(row.matcher, *drafted, tree.max_depth, tree.is_chain).run()
            if trees[place] != drafted:
                changed.append([place, *trees[place][0], *trees[place][1]])
        if changed:
            self._write(tree, changed)
        return trees

    def _write(self, tree: DraftTree, changed: list[list[int]]) -> None:
        """Changes trees on the device.  changed: each one's place, tokens and parents."""
        device, N = self._readback.device, tree.num_nodes
        values_GX = torch.tensor(changed, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        tree.tokens_BN.index_copy_(0, values_GX[:, 0], values_GX[:, 1 : N + 1])
        if not tree.is_chain:  # the parents of a chain are constants, and stay what they are
            tree.parents_BN.index_copy_(0, values_GX[:, 0], values_GX[:, N + 1 :])

    def of_round(self, rows: int, nodes: int, trees: HostTrees) -> BitMasks:
        """The masks of a round's nodes.  trees: what `complete` gave."""
        self._take()
        texts = [(place, row.matcher, *trees.get(place, ((), ()))) for place, row in self._running(rows)]
        return self._send(rows, nodes, texts)

    def end_drafts(self, rows: int) -> list[int]:
        """The rows in whose drafts the library has newly reached a limit: none may be accepted in them any more."""
        ended = [place for place, row in self._running(rows) if row.speculates and row.matcher.is_alone]
        self.stop_drafting(ended)
        for place in ended:
            self._rows[place].is_unreported = True
        return ended

    def report_ended(self) -> list[int]:
        """The rows whose drafts have ended here since the last call."""
        places = [place for place, row in self._rows.items() if row.is_unreported]
        for place in places:
            self._rows[place].is_unreported = False
        return places

    def of_chunk(self, places: int, parts: Sequence[PromptPart]) -> BitMasks:
        """The masks of the first tokens of a chunk's prompts.  places: how many parts the chunk has, with padding."""
        texts = [
            (place, self._rows[part.row].matcher, (), ())
            for place, part in enumerate(parts)
            if part.is_last and part.row in self._rows
        ]
        return self._send(places, 1, texts)

    def _running(self, rows: int) -> list[tuple[int, GrammarRow]]:
        return [(place, row) for place, row in sorted(self._rows.items()) if row.runs and place < rows]

    def _send(self, rows: int, nodes: int, texts: Sequence[tuple[int, Matcher, Sequence[int], Sequence[int]]]) -> BitMasks:
        """Makes the masks of texts at these places, and copies them to the device.

        The host's memory is new for each pass, since copies out of it may be under way; torch keeps pinned memory for that.
        """
        device, words = self._readback.device, -(-self._vocab_size // 32)
        is_pinned = device.type == "cuda"
        if (rows, nodes) not in self._buffers:
            buffer = torch.zeros(rows, nodes, words, dtype=torch.int32, device=device)
            self._buffers[rows, nodes] = BitMasks(buffer, torch.full((rows,), -1, dtype=torch.int32, device=device))
        masks = self._buffers[rows, nodes]
        host_GNX = torch.empty(len(texts), nodes, words, dtype=torch.int32, pin_memory=is_pinned)
        place_B = torch.full((rows,), -1, dtype=torch.int32, pin_memory=is_pinned)
        for number, (place, matcher, tokens_N, parents_N) in enumerate(texts):
            place_B[place] = number
            matcher.fill(host_GNX[number].numpy(), tokens_N, parents_N)
        masks.words_GNX[: len(texts)].copy_(host_GNX, non_blocking=True)
        masks.place_B.copy_(place_B, non_blocking=True)
        return masks
