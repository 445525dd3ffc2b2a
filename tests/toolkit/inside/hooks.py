"""The part of the driver that breaks an engine on purpose, watches its steps, and holds it back."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from specdec import SpecDecoder
from specdec.batch.ragged import ChunkShape
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.engine.launches.mixing import Mixing
from specdec.engine.pages.admission import Admission
from specdec.engine.pages.pool import PagePool
from specdec.engine.request import Request
from specdec.grammar.library import Grammars
from specdec.ops.compiling.rehearsal import Rehearsals
from specdec.ops.cuda_graph import GraphSet
from specdec.runner import prompts as prompt_runner
from specdec.runner.first_passes import FirstPasses
from specdec.runner.readback import HostCopy
from specdec.steps import Needs, PromptPart, RunChunk, RunMixed, RunRound, Step

PHASES = {  # what can be made to fail: the object of the engine that does it, and the name of its method
    "prefill": ("verifier", "prefill"), "draft prefill": ("drafter", "prefill"), "draft": ("drafter", "draft"),
    "verify": ("verifier", "read_tree"), "extend": ("drafter", "extend"), "read": ("", "read"),
    "mixed": ("verifier", "read_mixed"),
}  # fmt: skip


class GrammarTree(NamedTuple):
    """A tree after a text: what the drafter proposed, and what the target has read."""

    text: list[int]
    drafts: list[int]
    drafts_above: list[int]
    tokens: list[int]
    parents: list[int]
    max_depth: int


class Hooks:
    """Faults and hooks of one engine, whose parts `Driver` knows."""

    decoder: SpecDecoder
    _scheduler: Any
    _runner: Any
    _workers: Any

    @property
    def speculation(self) -> Any:
        """What decides about the kinds and shapes of rounds."""
        return self._scheduler.speculation

    @property
    def running(self) -> list[Request]:
        raise NotImplementedError

    @property
    def is_idle(self) -> bool:
        raise NotImplementedError

    def settle(self) -> None:
        raise NotImplementedError

    def request_in(self, row: int) -> Request | None:
        raise NotImplementedError

    @contextmanager
    def rounds_by_hand(self) -> Iterator[threading.Semaphore]:
        """Inside, each round waits until the semaphore is released once for it; afterwards rounds run freely again."""
        let_run, run, is_over = threading.Semaphore(0), self._runner.run, threading.Event()

        def held(step: Step) -> Any:
            while isinstance(step, RunRound) and not is_over.is_set() and not let_run.acquire(timeout=0.05):
                pass
            return run(step)

        with patch.object(self._runner, "run", held):
            try:
                yield let_run
            finally:
                is_over.set()

    @contextmanager
    def fail_in(self, phase: str, error: BaseException, call: int | None = None) -> Iterator[None]:
        """Makes a phase raise inside the block: in every call, or only in call number `call` (from 0).

        phase: a key of PHASES.
        """
        owner, name = PHASES[phase]
        victim = getattr(self._workers, owner) if owner else HostCopy
        original, calls = getattr(victim, name), iter(range(10**9))

        def raising(*args: Any, **kwargs: Any) -> Any:
            if call is None or next(calls) == call:
                raise error
            return original(*args, **kwargs)

        with patch.object(victim, name, raising):
            yield

    def pad_rows(self) -> None:
        """From now on rounds compute a power of two of rows, as they do where graphs are captured."""
        self._scheduler.pads_rows = True

    def mix(self, least: int | None, pads: bool = False) -> list[RunMixed]:
        """From now on chunks and rounds share passes of at least so many tokens; None: they take turns.

        pads: whether the passes are padded, as captured ones are.  Returns a list that grows by each such pass.
        """
        seen = list[RunMixed]()
        self._scheduler.mixing = None if least is None else Mixing(least)
        self._runner.mixed.always_pads = pads
        self.watch(lambda step: seen.append(step) if isinstance(step, RunMixed) else None)
        return seen

    def use_mixed_graphs(self, graphs: GraphSet) -> None:
        """Makes these run what passes of a chunk and a round give to CUDA graphs."""
        self._runner.mixed.graphs = graphs

    @property
    def mixes(self) -> bool:
        """Whether chunks and rounds share passes."""
        return self._scheduler.mixing is not None

    def may_rehearse(self) -> None:
        """From now on passes may be rehearsed, as on a GPU."""
        self._runner._rehearses = True

    def expect_round(self, rehearsals: Rehearsals) -> None:
        """From now on the decoder has rehearsed for a round that is to come."""
        first = self._runner._first = FirstPasses(self._runner.prompts, self._runner.rounds, None)
        first._rehearsals = rehearsals

    def rehearse(self, prompt: list[int], needs: Needs, spec: SpecConfig, rows: int) -> list[Tensor]:
        """Rehearses a chunk and a round as if they were the first.  Returns the tensors that a rehearsal changed."""
        workers, runner = self._workers, self._runner
        state, drafter = workers.state, workers.need_drafter()
        buffers = [buffer for cache in workers.caches for buffers in cache.buffers_of.values() for buffer in buffers.values()]
        kept = [*state.tensors(), *buffers, *drafter.changed(state)]
        before = [tensor.clone() for tensor in kept]
        first, some = FirstPasses(runner.prompts, runner.rounds, spec), state.narrow(rows)
        with torch.inference_mode():
            first.before_chunk(some, RunChunk((PromptPart(0, prompt, 0, -1),), needs, True, float(len(prompt)), False))
            first.before_round(some, RunRound(rows, "speculative", spec, needs))
        bytes_of = [(now.contiguous().view(torch.uint8), old.view(torch.uint8)) for now, old in zip(kept, before, strict=True)]
        return [tensor for tensor, (now, old) in zip(kept, bytes_of, strict=True) if not torch.equal(now, old)]

    @contextmanager
    def fail_every_step(self, error: BaseException) -> Iterator[None]:
        """Makes every step that the runner is given raise inside the block, as after a failure of the GPU."""
        with patch.object(self._runner, "run", side_effect=error):
            yield

    @contextmanager
    def fail_in_planning(self, error: BaseException) -> Iterator[None]:
        """Makes every look for a waiting request's pages raise inside the block, before the request has a row."""
        with patch.object(self._scheduler.admission, "find", side_effect=error):
            yield

    def before_step(self, kind: Any, call: int, action: Callable[[], None]) -> None:
        """`action` runs once: before the runner is given its step number `call` (from 0, from now on) of that kind or kinds."""
        calls = iter(range(10**9))

        def look(step: Step) -> None:
            if isinstance(step, kind) and next(calls) == call:
                action()

        self.watch(look)

    def before_each_round(self, hook: Callable[[], None]) -> None:
        """Makes `hook` run before each round is launched.  No round is launched if the hook leaves no request running."""
        launch = self._scheduler._next_round

        def hooked() -> Any:
            hook()
            return launch() if self.running else None

        self._scheduler._next_round = hooked

    def watch(self, watcher: Callable[[Step], None]) -> None:
        """Makes `watcher` see every step before the runner gets it."""
        run = self._runner.run

        def spy(step: Step) -> Any:
            watcher(step)
            return run(step)

        self._runner.run = spy

    def watch_sharing(self) -> list[tuple[int, int]]:
        """A list that grows with every round whose rows read pages together, by (how many rows do, tokens in these pages)."""
        seen: list[tuple[int, int]] = []
        shared = self._runner.shared

        def watcher(step: Step) -> None:
            if isinstance(step, RunRound) and step.shared:
                seen.append((int((shared.shared_B > 0).sum()), int(shared.length_1)))

        self.watch(watcher)
        return seen

    def watch_prefills(self) -> list[int]:
        """A list that grows with every chunk of prompts, by its number of tokens."""
        sizes: list[int] = []

        def watcher(step: Step) -> None:
            if isinstance(step, RunChunk):
                sizes.append(sum(len(part.token_ids) for part in step.parts))

        self.watch(watcher)
        return sizes

    def pad_prefills(self) -> list[ChunkShape]:
        """Makes chunks run padded to their buckets, as captured graphs run them.  Returns a list that grows by each bucket."""
        seen: list[ChunkShape] = []
        runner = self._runner.prompts

        def replay(chunk: RunChunk) -> Tensor:
            seen.append(prompt_runner.bucket_of(runner.shape_of(chunk)))
            return runner.replay(chunk, prompt_runner.ChunkKey(seen[-1], chunk.needs, chunk.drafted))

        runner.run = replay
        return seen

    @property
    def backend(self) -> Any:
        """What the target's attention runs on."""
        return self._workers.verifier.backend

    @property
    def other_ranks(self) -> Any:
        """The other ranks."""
        return self._runner.readback.other_ranks

    def set_least_shared_to_wait(self, tokens: int) -> None:
        """Makes a prompt wait for another one's prefill if both share at least so many tokens that are not in the cache."""
        self._scheduler.admission.min_shared_to_wait = tokens

    def keep_states_from(self, tokens: int) -> None:
        """Has recurrent states kept for later prompts that save so few tokens beyond the last one."""
        self._scheduler.admission.text_states.least = tokens

    @contextmanager
    def small_pool(self, pages: int) -> Iterator[None]:
        """Inside the block, requests own pages of a pool of so many.  The decoder is idle, and keeps none before."""
        whole = self._scheduler.admission
        assert self.is_idle and whole.local is None
        pool = PagePool(pages + 1, whole.pool.page_size, whole.pool.ring)
        kept = None if whole.text_states is None else whole.text_states.kept.numbers
        small = Admission(pool, whole.lookahead, whole.cache is not None, kept_states=kept)
        self._scheduler.pages.admission = small
        small.min_shared_to_wait = whole.min_shared_to_wait
        yield
        self.settle()
        self._scheduler.pages.admission = whole

    @contextmanager
    def stepping_back(self, chance: random.Random, each: float) -> Iterator[Counter[Request]]:
        """Inside the block, before each step with that probability, one of the rows that did so least often steps back, each at
        most three times.  Gives the number of times by request.
        """
        scheduler, counts = self._scheduler, Counter[Request]()
        grow = scheduler.grow

        def growing() -> Any:
            state = min(scheduler.states, key=lambda state: (counts[state.request], chance.random()), default=None)
            if state is not None and counts[state.request] < 3 and chance.random() < each:
                counts[state.request] += 1
                scheduler._step_back(state)
            return grow()

        scheduler.grow = growing
        yield counts
        del scheduler.grow

    @property
    def stepped_back(self) -> tuple[int, int]:
        """How often rows have stepped back, and how many tokens were computed again for it."""
        totals = self._scheduler.totals
        return totals.stepped_back, totals.recomputed_tokens

    def expect_short_outputs(self) -> None:
        """From now on requests enter as though every output were about to end, so that rows must step back."""
        self._scheduler.admission.lengths.rest = lambda written, most, number: 1

    def end_outputs(self, lengths: list[int]) -> None:
        """Tells the forecast of pages that outputs of these lengths have ended."""
        for length in lengths:
            self._scheduler.admission.lengths.add(length)

    def use_graphs(self, graphs: GraphSet, whole: bool) -> None:
        """Makes these run what rounds give to CUDA graphs: whole rounds, or their phases."""
        rounds = self._runner.rounds
        rounds.round_graphs = rounds.phase_graphs = graphs
        rounds.graph_mode = "round" if whole else "step"

    def use_grammars(self, grammars: Grammars) -> None:
        """Gives a decoder without a tokenizer grammars over one of their own."""
        self.decoder.grammars = grammars
        self._runner.use_grammars(grammars)

    def reach_grammar_limits(self) -> None:
        """As if the library of grammars could look at no more drafts of the texts that hold a row."""
        for row in self._runner.grammars._rows.values():
            row.matcher.is_alone = True

    @contextmanager
    def watch_origins(self) -> Iterator[dict[Request, list[int]]]:
        """Where each request's tokens came from, counted inside the block by a walk down each tree that the target has read.

        From the root on, a node that holds the emitted token is one level deeper; the token that no child holds is the target's
        own.  Tokens that are cut off later are among them.
        """
        seen: dict[Request, list[int]] = {}
        verifier = self._workers.verifier
        accept = verifier.accept

        def accepted(state: Any, tree: DraftTree, *rest: Any) -> Any:
            trees = torch.stack((tree.tokens_BN, tree.parents_BN), 1).tolist()
            result = accept(state, tree, *rest)
            for row, (nodes, parents) in enumerate(trees):
                if (request := self.request_in(row)) is not None:
                    tokens = result.new.tokens_BE[row].tolist() if state.speculates_B[row] else []
                    seen.setdefault(request, [0]).extend([*range(1, walk(nodes, parents, tokens) + 1), 0])
            return result

        with patch.object(verifier, "accept", accepted):
            yield seen

    @contextmanager
    def watch_trees(self) -> Iterator[list[GrammarTree]]:
        """A list that grows, inside the block, with each tree of a row with a grammar that the target reads."""
        seen: list[GrammarTree] = []
        drafted: list[tuple[int, list[int], list[list[int]]]] = []
        grammars, verifier = self._runner.grammars, self._workers.verifier
        complete, read_tree = grammars.complete, verifier.read_tree

        def completed(tree: DraftTree) -> Any:
            before = torch.stack((tree.tokens_BN, tree.parents_BN), 1).tolist()
            trees = complete(tree)
            drafted[:] = [(row, list(grammars._rows[row].matcher._tokens), before[row]) for row in trees]
            return trees

        def read(state: Any, tree: DraftTree, *rest: Any) -> Any:
            now = torch.stack((tree.tokens_BN, tree.parents_BN), 1).tolist()
            seen.extend(GrammarTree(text, *before, *now[row], tree.max_depth) for row, text, before in drafted)
            drafted.clear()
            return read_tree(state, tree, *rest)

        with patch.object(grammars, "complete", completed), patch.object(verifier, "read_tree", read):
            yield seen


def walk(nodes: list[int], parents: list[int], tokens: list[int]) -> int:
    """How many levels a text goes down in a tree."""
    at = depth = 0
    for token in tokens:
        children = [node for node in range(1, len(nodes)) if parents[node] == at and nodes[node] == token]
        if not children:
            break
        at, depth = children[0], depth + 1
    return depth


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Whether the condition comes true within that time, by the work of another thread."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()
