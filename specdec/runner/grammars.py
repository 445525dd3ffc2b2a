"""The rows whose texts obey a grammar: where each text stands, and the masks with which a pass chooses its tokens.

Masks are made on the host.  A round's trees come to the host in one copy through pinned memory; those with drafts that break a
grammar are completed, and written back before the target reads them.  The masks of all nodes are made while it does, and go
back in one copy before tokens are chosen.  What a round emits comes in a copy of its own as soon as it is known, so that the
host looks at what may follow while the device extends and drafts.

Of the ranks of a model the first alone has matchers: how near to its limits the library is depends on all that it has looked
at, and ranks that ask it apart could end drafts at different places.  The others take trees, masks and ends from the first.

Shapes: B rows of a pass, N nodes, G of the rows that have a grammar, X words of a mask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from specdec.batch.emitted import EmittedRows, FirstTokens
from specdec.batch.grammars.masks import BitMasks
from specdec.batch.transfer import host_memory, to_device
from specdec.batch.tree import DraftTree
from specdec.generation import Emitted
from specdec.grammar.late import LateMatcher
from specdec.grammar.library import Grammars
from specdec.grammar.matcher import Matcher
from specdec.grammar.tree_completion import TreeCompletion, look_ahead
from specdec.parallel.group import ALONE, Group
from specdec.runner.readback import HostCopy, Readback
from specdec.steps import Grammar, LeaveRows, PromptPart, RowEntry

HostTree: TypeAlias = tuple[Sequence[int], Sequence[int]]  # tokens and parents
HostTrees: TypeAlias = dict[int, tuple[list[int], list[int]]]  # by row
NO_TREE: HostTree = (), ()


@dataclass
class GrammarRow:
    """One text."""

    matcher: Matcher | LateMatcher | None  # of the first rank; others have none
    speculates: bool  # whether draft tokens may be accepted
    runs: bool = False  # whether its prompt is complete
    is_unreported: bool = False  # whether its drafts have ended here, and the scheduler does not know yet


class UnreadTokens(NamedTuple):
    """Tokens that a pass has emitted and no matcher has taken: of these texts, at these places of the copy."""

    host_copy: HostCopy
    texts: Sequence[tuple[int, GrammarRow]]
    read: Callable[[Tensor], list[Emitted]]  # makes rows of the copy


class GrammarRows:
    """The rows with a grammar, by row of the batch.  vocab_size: the target's.  group: the ranks of the model.

    library: compiles what rows ask for; None as long as nobody may ask, and on ranks after the first.
    """

    def __init__(self, readback: Readback, vocab_size: int, group: Group = ALONE) -> None:
        self._readback, self._vocab_size, self._group = readback, vocab_size, group
        self.library: Grammars | None = None
        self._rows: dict[int, GrammarRow] = {}
        self._unread: deque[UnreadTokens] = deque()
        self._follows = True  # whether texts go on along what rounds emit
        self._buffers: dict[tuple[int, int], BitMasks] = {}  # by B and N, since graphs read them

    # ---- rows come and go ----

    def enter(self, entry: RowEntry) -> None:
        """A request takes a row, which `leave` has cleared."""
        if entry.grammar is not None:
            matcher = self._matcher(entry.grammar)
            if matcher is not None:
                matcher.take(entry.written)
            self._rows[entry.row] = GrammarRow(matcher, entry.speculates)

    def _matcher(self, grammar: Grammar) -> Matcher | LateMatcher | None:
        if self._group.rank != 0:
            return None
        assert self.library is not None, "whoever checks grammars hands the runner what compiles them"
        return self.library.matcher(grammar)

    def leave(self, step: LeaveRows) -> None:
        """Rows move and end."""
        moved = {target: self._rows.get(source) for source, target in step.moves}
        for row in (*moved, *step.cleared):
            self._rows.pop(row, None)
        self._rows |= {target: row for target, row in moved.items() if row is not None}
        held = {id(row) for row in self._rows.values()}
        for each in [each for each in self._unread if not any(id(row) in held for _, row in each.texts)]:
            self._unread.remove(each)
            each.host_copy.drop()

    def stop_drafting(self, rows: Sequence[int]) -> None:
        """No draft token is accepted in these rows any more."""
        for row in rows:
            if row in self._rows:
                self._rows[row].speculates = False

    # ---- what a pass emits ----

    def follow_chunk(self, first: FirstTokens, parts: Sequence[PromptPart]) -> None:
        """Has the texts whose prompts end in a chunk take their first tokens, once these are on the host."""
        texts = self._ending(parts)
        for _, row in texts:
            row.runs = True
        if texts and self._group.rank == 0:
            read = partial(FirstTokens.read, wanted=[part.is_last for part in parts])
            self._unread.append(UnreadTokens(self._readback.start(first.tokens_B[: len(parts)]), texts, read))

    def follow_round(self, emitted: EmittedRows) -> None:
        """Has the texts take what a round emits, once it is on the host.

        Nobody asks for masks while all texts wait for their grammars, so what has come is taken here.
        """
        while self._unread and self._unread[0].host_copy.is_there:
            self._take_oldest()
        if self._follows and self._group.rank == 0 and (texts := self._running(len(emitted.numbers_BX))):
            self._unread.append(UnreadTokens(self._readback.start(emitted.numbers_BX), texts, emitted.read))

    @contextmanager
    def only_trying(self) -> Iterator[None]:
        """Inside, rounds are only tried: no text takes what they emit."""
        self._follows = False
        try:
            yield
        finally:
            self._follows = True

    def _take(self) -> None:
        """Waits for what earlier passes have emitted."""
        while self._unread:
            self._take_oldest()

    def _take_oldest(self) -> None:
        host_copy, texts, read = self._unread.popleft()
        emitted = host_copy.read(read)
        for place, row in texts:
            assert row.matcher is not None
            row.matcher.take(emitted[place].tokens)

    # ---- masks ----

    def complete(self, tree: DraftTree) -> HostTrees:
        """Takes drafts that break a grammar out of the trees on the device, and waits for that: see tree_completion.py.

        Returns the trees of rows with a grammar; on ranks after the first, which do not wait, none.
        """
        if tree.num_nodes == 1:
            return {}
        drafted = tree
        if tree.sources_BN is not None:
            tokens_BN, parents_BN, sources_BN = (x.clone() for x in (tree.tokens_BN, tree.parents_BN, tree.sources_BN))
            drafted = replace(tree, tokens_BN=tokens_BN, parents_BN=parents_BN, sources_BN=sources_BN)
        trees = self._completed(tree) if self._group.rank == 0 else HostTrees()
        self._share(tree.tokens_BN)
        if not tree.is_chain:  # the parents of a chain are constants, and stay what they are
            self._share(tree.parents_BN)
        if tree.sources_BN is not None:
            tree.find_sources(drafted)
        return trees

    def _share(self, x: Tensor) -> None:
        """Has x on all ranks hold what it holds on the first, which keeps its own: exchanges that fail give anything."""
        if self._group.size > 1:
            first = self._group.broadcast(x)
            if self._group.rank != 0:
                x.copy_(first)

    def _completed(self, tree: DraftTree) -> HostTrees:
        drafted_2BN = torch.stack((tree.tokens_BN, tree.parents_BN))
        host_copy, made_2BN = self._readback.start(drafted_2BN), self._host(drafted_2BN)
        self._take()
        rows = [(place, row.matcher) for place, row in self._running(len(tree.tokens_BN)) if row.speculates]
        drafting = [(place, judge) for place, matcher in rows if matcher is not None and (judge := matcher.judge) is not None]
        for _, matcher in drafting:  # as long as the device extends and drafts
            if host_copy.device_waits:
                break
            look_ahead(matcher, tree.num_nodes, tree.max_depth, tree.is_chain, lambda: host_copy.device_waits)
        values, is_changed = host_copy.read(Tensor.tolist), False
        trees = {  # those of texts that wait for their grammar stay what they are, and may hold the place where it begins
            place: (values[0][place], values[1][place])
            for place, matcher in rows
            if isinstance(matcher, LateMatcher) and not matcher.is_armed
        }
        for place, matcher in drafting:
            drafted = values[0][place], values[1][place]
            trees[place] = TreeCompletion(matcher, *drafted, tree.max_depth, tree.is_chain).run()
            if trees[place] != drafted:
                values[0][place], values[1][place] = trees[place]
                is_changed = True
        if is_changed:
            made_2BN.numpy()[:] = values
            tree.tokens_BN.copy_(made_2BN[0], non_blocking=True)
            if not tree.is_chain:  # the parents of a chain are constants, and stay what they are
                tree.parents_BN.copy_(made_2BN[1], non_blocking=True)
        return trees

    def _host(self, like: Tensor) -> Tensor:
        return host_memory(like.shape, like.dtype, self._readback.device)

    def of_round(self, rows: int, nodes: int, trees: HostTrees) -> BitMasks:
        """The masks of a round's nodes.  trees: what `complete` gave."""
        self._take()
        texts = [(place, row.matcher, trees.get(place, NO_TREE)) for place, row in self._running(rows)]
        return self._send(rows, nodes, texts)

    def end_drafts(self, rows: int) -> Tensor | None:
        """Ends drafts in rows where the library has reached a limit.  [rows] bool: those where it has done so now; None: none.

        No draft may be accepted in them any more.  Ranks after the first learn of them here.
        """
        ended = [
            place for place, row in self._running(rows) if row.speculates and row.matcher is not None and row.matcher.is_alone
        ]
        self.stop_drafting(ended)
        for place in ended:
            self._rows[place].is_unreported = True
        if not ended and self._group.size == 1:
            return None
        # Whole words, since ranks on GPUs exchange no smaller ones through each other's memory.
        ended_B = to_device([int(place in ended) for place in range(rows)], self._readback.device, torch.int32)
        self._share(ended_B)
        return ended_B > 0

    def report_ended(self) -> list[int]:
        """The rows whose drafts have ended here since the last call."""
        places = [place for place, row in self._rows.items() if row.is_unreported]
        for place in places:
            self._rows[place].is_unreported = False
        return places

    def of_chunk(self, places: int, parts: Sequence[PromptPart]) -> BitMasks:
        """The masks of the first tokens of a chunk's prompts.  places: how many parts the chunk has, with padding."""
        return self._send(places, 1, [(place, row.matcher, NO_TREE) for place, row in self._ending(parts)])

    def _ending(self, parts: Sequence[PromptPart]) -> list[tuple[int, GrammarRow]]:
        return [(place, self._rows[part.row]) for place, part in enumerate(parts) if part.is_last and part.row in self._rows]

    def _running(self, rows: int) -> list[tuple[int, GrammarRow]]:
        return [(place, row) for place, row in sorted(self._rows.items()) if row.runs and place < rows]

    def _send(self, rows: int, nodes: int, texts: Sequence[tuple[int, Matcher | LateMatcher | None, HostTree]]) -> BitMasks:
        """Makes the masks of texts at these places, and copies them to the device."""
        if (rows, nodes) not in self._buffers:
            device, words = self._readback.device, -(-self._vocab_size // 32)
            buffer = torch.zeros(rows, nodes, words, dtype=torch.int32, device=device)
            self._buffers[rows, nodes] = BitMasks(buffer, torch.full((rows,), -1, dtype=torch.int32, device=device))
        masks = self._buffers[rows, nodes]
        place_B = self._host(masks.place_B)
        number_B = place_B.numpy()
        number_B[:] = -1
        number_B[[place for place, *_ in texts]] = range(len(texts))
        masks.place_B.copy_(place_B, non_blocking=True)
        words_GNX = masks.words_GNX[: len(texts)]
        if self._group.rank == 0:
            host_GNX = self._host(words_GNX)
            for host_NX, (_, matcher, tree) in zip(host_GNX.numpy(), texts, strict=True):
                assert matcher is not None
                matcher.fill(host_NX, *tree)
            words_GNX.copy_(host_GNX, non_blocking=True)
        if texts:
            self._share(words_GNX)
        return masks
