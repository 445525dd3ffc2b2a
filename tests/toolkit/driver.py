"""The test driver: the only place in tests/ that knows what a decoder and its engine are made of.

A test says what it wants ("fail in verify", "poison the caches", "nothing leaked").  Where the engine changes how it does that,
this file changes and the tests do not.  A `Driver` holds no state of its own, so any number of them may drive one decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.plan import slots_at
from specdec.batch.packed import ChunkShape
from specdec.batch.tree import DraftTree
from specdec.engine.request import Request
from specdec.runner import prompts as prompt_runner
from specdec.runner.phase_clock import PhaseClock
from specdec.runner.readback import Ticket
from specdec.steps import RunChunk, RunRound, Step
from specdec.verify.synthetic import SyntheticAcceptance
from toolkit.drafters import Script
from toolkit.pages import check_books

Model = Literal["target", "draft"]
Decode = Callable[[Sequence[int]], str]

# What can be made to fail: the object of the engine that does it, and the name of its method.
PHASES = {
    "prefill": ("verifier", "prefill"), "draft prefill": ("drafter", "prefill"), "draft": ("drafter", "draft"),
    "verify": ("verifier", "verify"), "extend": ("drafter", "extend"), "read": ("", "read"),
}  # fmt: skip


def new_request(
    prompt: list[int],
    sampling: SamplingParams | int,
    *,
    eos: Iterable[int] = (),
    decode: Decode = lambda ids: "",
    streaming: bool = False,
) -> Request:
    """A request that did not come through the decoder's door: its end tokens and its decoding are the test's.

    sampling: an int stands for that many tokens, greedily.
    """
    params = SamplingParams(max_tokens=sampling) if isinstance(sampling, int) else sampling
    return Request.new(prompt, params, params.seed or 0, frozenset(eos), decode, streaming)


class Driver:
    """Drives a decoder a step at a time, looks inside it, and breaks it on purpose."""

    def __init__(self, decoder: SpecDecoder) -> None:
        self.decoder = decoder
        self._engine: Any = decoder.engine
        self._scheduler: Any = decoder.engine.scheduler
        self._runner: Any = decoder.engine.runner
        self._workers: Any = decoder.engine.runner.workers

    # ---- requests ----

    def submit(self, prompt: Any, sampling: SamplingParams, speculate: bool = True, streaming: bool = False) -> Request:
        """A prompt through the decoder's door, into the queue."""
        request = self.decoder.new_request(prompt, sampling, streaming=streaming)
        self.decoder._submit([request], speculate)
        return request

    def add(self, request: Request, speculate: bool = True) -> Request:
        """A request of `new_request`, into the queue."""
        self.decoder._submit([request], speculate)
        return request

    def step(self) -> None:
        """Runs one chunk of the prompts that have entered, or one round."""
        self._engine.step()

    def run_until_idle(self) -> None:
        while not self.is_idle:
            self.step()

    def cancel(self, request: Request) -> None:
        self._engine.cancel(request)

    def cancel_all(self) -> None:
        for request in [*(seat.request for seat in self._scheduler.seats), *self.waiting]:
            self.cancel(request)

    @property
    def running(self) -> list[Request]:
        """The requests whose prompts have run, in the order of their rows."""
        return list(self._engine.running)

    def request_in(self, row: int) -> Request | None:
        """The running request of a row; None: the row is padding for rounds."""
        seats = self._scheduler.seats
        return seats[row].request if row < len(seats) and seats[row].runs else None

    @property
    def waiting(self) -> list[Request]:
        return list(self._scheduler.waiting)

    @property
    def is_idle(self) -> bool:
        return self._engine.is_idle

    @property
    def rounds_in_flight(self) -> int:
        """Chunks and rounds that were launched and whose tokens were not read yet."""
        return len(self._engine._unread)

    @property
    def waits(self) -> int:
        """How often the host has waited for the device."""
        return self._runner.readback.waits

    @property
    def pause(self) -> int:
        """The most tokens that the draft of any row has yet to see."""
        return self._scheduler.speculation.pause

    # ---- pages ----

    @property
    def pages_free(self) -> int:
        """Pages that belong to no request, whether or not the prefix cache keeps something in them."""
        return self._scheduler.admission.free_pages

    @property
    def pages_total(self) -> int:
        """Pages that requests can own at all."""
        return self._scheduler.admission.pool.capacity

    @property
    def pages_allocated(self) -> int:
        """Pages that the caches hold, the dummy page included."""
        return self._scheduler.admission.pool.num_pages

    @property
    def page_size(self) -> int:
        return self._scheduler.admission.pool.page_size

    @property
    def ring(self) -> int | None:
        """Pages that a sequence goes around; None: it has a page for all its tokens."""
        return self._scheduler.admission.pool.ring

    @property
    def looked_up_and_found(self) -> tuple[int, int]:
        """Prompt tokens that were looked for in the prefix cache, and those found."""
        return self._scheduler.admission.lookup_tokens, self._scheduler.admission.hit_tokens

    def kept_pages(self, tokens: list[int]) -> list[int]:
        """The pages that the prefix cache keeps of a text, draft rows included."""
        return [node.page for node in self._scheduler.admission.cache.find(tokens, True)]

    def assert_books_balance(self) -> None:
        """At any time: each page is free or has one owner; what the prefix cache keeps is counted."""
        pool, admission = self._scheduler.admission.pool, self._scheduler.admission
        owned = [page for pages in pool._owned.values() for page in pages]
        assert sorted(owned + pool._free) == list(range(1, pool.num_pages))  # each page once, the dummy never
        if admission.cache is not None:
            check_books(admission, [seat.request for seat in self._scheduler.seats])

    def assert_nothing_leaked(self) -> None:
        """With nothing to do: no request, no round in flight, every page free, every row padding."""
        state = self._workers.state
        assert self.is_idle and not self.waiting and not self.running and not self.rounds_in_flight
        assert not self._scheduler.admission.places and self.pages_free == self.pages_total
        self.assert_books_balance()
        assert not state.active_B.any() and not state.page_table_BW.any()

    @contextmanager
    def leave_room_for(self, *tokens: int) -> Iterator[None]:
        """Inside, pages are held back until only requests of so many tokens (prompt and output) fit beside each other."""
        pool = self._scheduler.admission.pool
        pool.admit("ballast", pool.capacity * pool.page_size - sum(n + self._scheduler.admission.lookahead for n in tokens))
        yield
        pool.release("ballast")

    # ---- what rows and caches hold ----

    def lens(self, row: int) -> int:
        """Committed tokens of a row."""
        return int(self._workers.state.lens_B[row])

    def bonus(self, row: int) -> int:
        """The last emitted token of a row."""
        return int(self._workers.state.bonus_B[row])

    @property
    def drafter(self) -> Any:
        return self._workers.drafter

    @property
    def caches(self) -> tuple[Any, ...]:
        """The target's cache, and the draft's if there is a draft."""
        return tuple(self.cache(model) for model in ("target", "draft") if model == "target" or self.decoder.head is not None)

    def cache(self, model: Model) -> Any:
        if model == "target":
            return self._workers.verifier.cache
        return getattr(self.drafter, "inner", self.drafter).cache

    def committed_kv(self, model: Model, row: int) -> Tensor:
        """[layers, L, 2, K, D] of a row's committed tokens."""
        table = self._workers.state.page_table_BW[row : row + 1]
        slots = slots_at(table, torch.arange(self.lens(row))[None], self.page_size)
        return self.cache(model).kv[:, slots[0]]

    def fresh_kv(self, model: Model, text: list[int]) -> Tensor:
        """The same of a text that was prefilled whole, in an engine of its own."""
        decoder = self.decoder
        other = Driver(SpecDecoder(decoder.model, decoder.head, decoder.settings, decoder.tokenizer))
        other.add(new_request(text, 20))
        while not other.running or not other.running[0].output.token_ids:
            other.step()
        return other.committed_kv(model, 0)

    def page_kv(self, model: Model, page: int) -> Tensor:
        """[layers, page_size, 2, K, D] of one page, as a view."""
        return self.cache(model).kv[:, page * self.page_size : (page + 1) * self.page_size]

    def poison_free_slots(self, value: float, *models: Model) -> None:
        """Every slot of the caches (of all models, if none is named) holds this value.  Only while nothing runs."""
        assert self.is_idle
        for cache in [self.cache(model) for model in models] or self.caches:
            cache.kv.fill_(value)

    def poison_free_rows(self) -> None:
        """Every row's bonus token and draft features are junk.  Only while nothing runs."""
        assert self.is_idle
        with torch.inference_mode():
            self._workers.state.bonus_B.random_(0, self.decoder.model.config.vocab_size)
            self._workers.state.level1_hidden_BH.fill_(torch.nan)

    def blind_tables(self, rows: int, pages: int) -> None:
        """The page tables of the first rows say the dummy page for their first pages, and that one holds nonsense."""
        self._workers.state.page_table_BW[:rows, :pages] = 0
        for cache in self.caches:
            cache.kv[:, : self.page_size] = 1e4

    # ---- settings that only tests change ----

    def set_depth(self, rounds: int) -> None:
        """Rounds that are launched before the oldest is read."""
        self._engine.depth = rounds

    @property
    def depth(self) -> int:
        return self._engine.depth

    def set_chunk(self, tokens: int) -> int:
        """Prompt tokens that one pass takes at most.  Returns what it was."""
        before = self._scheduler.budget
        self._scheduler.budget = replace(before, beside_rounds=tokens, alone=tokens, whole_prompts=tokens)
        return before.whole_prompts

    def set_least_shared(self, tokens: int) -> None:
        """(rows - 1) * tokens from which rows read together what they share."""
        self._scheduler.sharing.least_saved = tokens

    def script_levels(self, *steps: int) -> None:
        """num_steps="auto" chooses these levels for the next rounds, and then always the last."""
        self._scheduler.speculation.chooser = Script(*steps)

    def replace_drafter(self, drafter: Any) -> None:
        self._workers.drafter = drafter

    def replace_backend(self, backend: Any) -> None:
        """Both models' attention runs on this backend."""
        self._workers.verifier.backend = self.drafter.backend = backend

    def force_acceptance(self, probs: list[float]) -> None:
        """Drafts are accepted with these probabilities, level by level, whatever the target says."""
        vocab_size, device = self.decoder.model.config.vocab_size, self.decoder.settings.device
        self._workers.verifier.synthetic = SyntheticAcceptance.of(probs, vocab_size, device)

    # ---- faults and hooks ----

    @contextmanager
    def fail_in(self, phase: str, error: BaseException, call: int | None = None) -> Iterator[None]:
        """Inside, a phase raises: every time, or at its call number `call` (from 0) alone.  phase: a key of PHASES."""
        owner, name = PHASES[phase]
        victim = getattr(self._workers, owner) if owner else Ticket
        original, calls = getattr(victim, name), iter(range(10**9))

        def raising(*args: Any, **kwargs: Any) -> Any:
            if call is None or next(calls) == call:
                raise error
            return original(*args, **kwargs)

        with patch.object(victim, name, raising):
            yield

    def before_step(self, kind: Any, call: int, action: Callable[[], None]) -> None:
        """`action` runs once: before the runner is given its step number `call` (from 0, from now on) of that kind or kinds."""
        calls = iter(range(10**9))

        def look(step: Step) -> None:
            if isinstance(step, kind) and next(calls) == call:
                action()

        self._watch(look)

    def before_each_round(self, hook: Callable[[], None]) -> None:
        """From now on `hook` runs before each round is launched; none is launched if it leaves no request running."""
        launch = self._scheduler._next_round

        def hooked() -> Any:
            hook()
            return launch() if self.running else None

        self._scheduler._next_round = hooked

    def _watch(self, look: Callable[[Step], None]) -> None:
        """`look` sees every step that the runner is given from now on."""
        run = self._runner.run

        def spy(step: Step) -> Any:
            look(step)
            return run(step)

        self._runner.run = spy

    def watch_sharing(self) -> list[tuple[int, int]]:
        """A list that grows: (members, tokens) of every round whose rows share."""
        seen: list[tuple[int, int]] = []
        shared = self._runner.shared

        def look(step: Step) -> None:
            if isinstance(step, RunRound) and step.shared:
                seen.append((int((shared.shared_B > 0).sum()), int(shared.length_1)))

        self._watch(look)
        return seen

    def watch_prefills(self) -> list[int]:
        """A list that grows: the tokens of every pass over prompts."""
        sizes: list[int] = []

        def look(step: Step) -> None:
            if isinstance(step, RunChunk):
                sizes.append(sum(len(part.token_ids) for part in step.parts))

        self._watch(look)
        return sizes

    def pad_prefills(self) -> list[ChunkShape]:
        """From now on prompts run padded to buckets, as captured graphs would run them.  A list that grows: the buckets."""
        seen: list[ChunkShape] = []
        runner = self._runner.prompts

        def replay(chunk: RunChunk) -> Tensor:
            seen.append(prompt_runner.bucket_of(ChunkShape.of(chunk.parts)))
            return runner.replay(chunk, prompt_runner.Work(seen[-1], chunk.mode, chunk.drafted))

        runner.run = replay
        return seen

    # ---- rounds ----

    def draft(self, rows: int, spec: SpecConfig) -> DraftTree:
        """The next tree of the first rows; nothing of the batch changes but slots beyond its lengths."""
        with torch.inference_mode():
            return self.drafter.draft(self._workers.state.narrow(rows), spec)

    def run_phases(self, rows: int, spec: SpecConfig) -> None:
        """Draft, verify and extend of one round, called one after the other without the engine."""
        state = self._workers.state.narrow(rows)
        with torch.inference_mode():
            tree = self.drafter.draft(state, spec)
            result = self._workers.verifier.verify(state, tree, "greedy")
            self.drafter.extend(state, result.base_lens_B, result.tokens_BE, result.accepted_B, result.features_BEF)

    def num_graphs(self, kind: Literal["round", "phase", "prefill"]) -> int:
        """CUDA graphs of whole rounds, of single phases, or of passes over prompts."""
        rounds = self._runner.rounds
        graphs = {"round": rounds.round_graphs, "phase": rounds.phase_graphs, "prefill": self._runner.prompts.graphs}
        return len(graphs[kind])

    @contextmanager
    def timed_phases(self) -> Iterator[PhaseClock]:
        """Inside, every phase is waited for and timed, from zero."""
        clock = self._runner.clock
        clock.clear()
        clock.enabled = True
        yield clock
        clock.enabled = False

    @property
    def times_phases(self) -> bool:
        return self._runner.clock.enabled
