"""The test driver: the only place in tests/ that knows what a decoder and its engine are made of.

A test says what it wants ("fail in verify", "poison the caches"), and this file changes when the engine changes inside.
A `Driver` holds no state, so several of them may drive one decoder.
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
from specdec.attention.pages import PageTable
from specdec.batch.tree import DraftTree
from specdec.engine.needs import union
from specdec.engine.request import Request
from specdec.parallel.processes import OtherRanks
from specdec.runner.phase_clock import PhaseClock
from specdec.steps import ForceAcceptance
from toolkit.drafters import Script
from toolkit.pages import check_books, fill_numbers
from toolkit.tables.driven import TableHooks

Model = Literal["target", "draft"]
Decode = Callable[[Sequence[int]], str]


def new_request(
    prompt: list[int],
    sampling: SamplingParams | int,
    *,
    eos: Iterable[int] = (),
    decode: Decode = lambda ids: "",
    streaming: bool = False,
    speculate: bool = True,
) -> Request:
    """A request made without a decoder's checks, whose end tokens and decoding the test chooses.

    sampling: an int stands for greedy sampling of at most so many tokens.
    """
    params = SamplingParams(max_tokens=sampling) if isinstance(sampling, int) else sampling
    return Request.new(prompt, params, params.seed or 0, frozenset(eos), decode, streaming, speculate)


class Driver(TableHooks):
    """Drives a decoder a step at a time, looks inside it, and breaks it on purpose."""

    def __init__(self, decoder: SpecDecoder) -> None:
        self.decoder = decoder
        self._engine: Any = decoder.engine
        self._scheduler: Any = decoder.engine.scheduler
        self._runner: Any = decoder.engine.runner
        self._workers: Any = decoder.engine.runner.workers
        self._late: list[Request] = self._engine.__dict__.setdefault("cancelled_late", [])  # one list for all its drivers

    # ---- requests ----

    def submit(self, prompt: Any, sampling: SamplingParams, speculate: bool = True, streaming: bool = False) -> Request:
        """Checks a prompt as `SpecDecoder.generate` does, and queues its request."""
        ids = self.decoder.encode(prompt)
        return self.add(self.decoder.new_request(ids, sampling, streaming=streaming, speculate=speculate))

    def add(self, request: Request) -> Request:
        """Queues a request of `new_request`."""
        with self.decoder.owner.turn:
            self._engine.submit([request])
        return request

    def step(self) -> None:
        """Runs one chunk of the prompts that have entered, or one round, on the thread of the test."""
        with self.decoder.owner.turn:
            self._engine.step()
            while self._late:
                self._engine.cancel(self._late.pop())

    def settle(self) -> None:
        """Waits until the decoder's thread has carried out what callers asked of it, cancellations for example."""
        self.decoder.owner.settle()

    def run_until_idle(self) -> None:
        while not self.is_idle:
            self.step()

    def cancel(self, request: Request) -> None:
        """Ends a request; from a hook inside `step`, at the end of that step."""
        if not self.decoder.owner.turn.acquire(blocking=False):
            self._late.append(request)
            return
        self._engine.cancel(request)
        self.decoder.owner.turn.release()

    def cancel_all(self) -> None:
        for request in [*(state.request for state in self._scheduler.states), *self.waiting]:
            self.cancel(request)

    @property
    def running(self) -> list[Request]:
        """The requests whose prompts have run, in the order of their rows."""
        return list(self._engine.running)

    def request_in(self, row: int) -> Request | None:
        """The running request of a row; None: the row is padding for rounds."""
        states = self._scheduler.states
        return states[row].request if row < len(states) and states[row].runs else None

    @property
    def waiting(self) -> list[Request]:
        return [state.request for state in self._scheduler.waiting]

    @property
    def is_idle(self) -> bool:
        return self._engine.is_idle

    @property
    def rounds_in_flight(self) -> int:
        """How many chunks and rounds have been launched whose tokens have not been read."""
        return len(self._engine._unread)

    @property
    def waits(self) -> int:
        """How often the host has waited for the device."""
        return self._runner.readback.waits

    @property
    def pause(self) -> int:
        """The number of paused rounds since the drafter last caught up."""
        return self._scheduler.speculation.pause

    @contextmanager
    def break_owner(self, error: BaseException) -> Iterator[None]:
        """Makes the decoder's thread fail inside the block in its own work, outside of the engine."""
        with patch.object(self.decoder.owner, "_deliver", side_effect=error):
            yield

    @property
    def ended(self) -> dict[str, int]:
        """How many requests have ended, by how."""
        return dict(self._engine.totals().requests)

    # ---- pages ----

    @property
    def pages_free(self) -> int:
        """Pages that belong to no request, whether or not the prefix cache keeps something in them."""
        return self._scheduler.admission.free_pages

    @property
    def pages_total(self) -> int:
        """Pages that requests can own altogether."""
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
        """The pages of the ring that a sequence reuses; None: a sequence has pages for all its tokens in some layers."""
        return self._scheduler.admission.pool.ring

    @property
    def local_ring(self) -> int | None:
        """The pages of the ring that a sequence reuses in layers with a span, beside layers that have pages for all tokens."""
        local = self._scheduler.admission.local
        return None if local is None else local.ring

    @property
    def copies_kept(self) -> int:
        """How many ring pages the prefix cache keeps copies of."""
        return len(self._scheduler.admission.copies)

    @property
    def cache_bytes(self) -> int:
        """The bytes of both models' caches."""
        return sum(cache.bytes for cache in self.caches)

    @property
    def looked_up_and_found(self) -> tuple[int, int]:
        """How many prompt tokens were looked up in the prefix cache, and how many of them were found."""
        return self._scheduler.admission.lookup_tokens, self._scheduler.admission.hit_tokens

    def kept_pages(self, tokens: list[int]) -> list[int]:
        """The pages of a text that the prefix cache keeps with the drafter's keys and values."""
        return [node.page for node in self._scheduler.admission.cache.find(tokens, True)]

    def assert_books_balance(self) -> None:
        """Asserts what must hold at any time: each page is free or has one owner, and the prefix cache counts its users."""
        pool, admission = self._scheduler.admission.pool, self._scheduler.admission
        for each in (pool,) if admission.local is None else (pool, admission.local):
            owned = [page for pages in each._owned.values() for page in pages]
            assert sorted(owned + each._free) == list(range(1, each.num_pages))  # each page once, the dummy never
        if admission.cache is not None:
            check_books(admission, [state.request for state in self._scheduler.states])

    def assert_nothing_leaked(self) -> None:
        """Asserts that the engine is idle: no request, no round in flight, every page free, every row padding."""
        self.settle()
        state = self._workers.state
        assert self.is_idle and not self.waiting and not self.running and not self.rounds_in_flight
        assert not self._scheduler.admission.allocations and self.pages_free == self.pages_total
        assert self._engine.totals().local_pages_used == 0
        self.assert_books_balance()
        assert not state.active_B.any() and not state.page_table_BGW.any()

    @contextmanager
    def leave_room_for(self, *tokens: int) -> Iterator[None]:
        """Takes pages away inside the block, so that the rest just fits requests of so many tokens (prompt and output)."""
        admission, pool = self._scheduler.admission, self._scheduler.admission.pool
        admission.make_room(pages := pool.capacity - sum(pool.pages_for(n + admission.lookahead) for n in tokens))
        pool.lend("ballast", pages)
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
        """The target's cache, and the drafter's if there is a head that keeps keys and values."""
        return tuple(map(self.cache, ("target", "draft")[: 2 if (head := self.decoder.head) and head.needs.models else 1]))

    def cache(self, model: Model) -> Any:
        if model == "target":
            return self._workers.verifier.cache
        return getattr(self.drafter, "inner", getattr(self.drafter, "drafter", self.drafter)).cache

    def committed_kv(self, model: Model, row: int) -> Tensor:
        """[layers, L, 2, K, D]: keys and values of a row's committed tokens."""
        cache = self.cache(model)
        (group,) = cache.group_numbers
        pages = PageTable(self._workers.state.of_group(group).pages.table[row : row + 1], self.page_size)
        return cache.buffers["kv"][:, pages.slots_at(torch.arange(self.lens(row))[None])[0]]

    def fresh_kv(self, model: Model, text: list[int]) -> Tensor:
        """The keys and values of a text that another engine has just prefilled in one chunk, like `committed_kv`."""
        decoder = self.decoder
        other = Driver(SpecDecoder(decoder.model, decoder.head, decoder.settings, decoder.tokenizer))
        other.add(new_request(text, 20))
        while not other.running or not other.running[0].output.token_ids:
            other.step()
        return other.committed_kv(model, 0)

    def page_kv(self, model: Model, page: int) -> Tensor:
        """[layers, page_size, 2, K, D]: a view of one page's keys and values."""
        return self.cache(model).buffers["kv"][:, page * self.page_size : (page + 1) * self.page_size]

    def poison_free_slots(self, value: float, *models: Model) -> None:
        """Fills idle caches (of all models, if none is named) with this value; of int8 caches the scales."""
        assert self.is_idle
        for cache in [self.cache(model) for model in models] or self.caches:
            for buffers in cache.buffers_of.values():
                fill_numbers(buffers, value)

    def poison_free_rows(self) -> None:
        """Fills every row's bonus token and hidden state with junk.  To be called only while nothing runs."""
        assert self.is_idle
        with torch.inference_mode():
            self._workers.state.bonus_B.random_(0, self.decoder.model.config.vocab_size)
            self.drafter.rows.level1_hidden_BH.fill_(torch.nan)

    def poison_padding(self) -> None:
        """Fills what belongs to no request, while others run: free pages and the dummy page with NaN, free rows with junk.

        Their ids stay ids: a row's last token is one that the model has, in padding too, which is asserted.
        """
        state, vocab_size = self._workers.state, self.decoder.model.config.vocab_size
        pages = torch.tensor([0, *self._scheduler.admission.pool._free])
        slots = (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
        with torch.inference_mode():
            assert bool(((state.bonus_B >= 0) & (state.bonus_B < vocab_size)).all())
            for cache in self.caches:
                for buffers in cache.buffers_of.values():
                    buffers["kv"][:, slots.to(buffers["kv"].device)] = torch.nan
            state.bonus_B[len(self._scheduler.states) :].random_(0, vocab_size)
            for tensor in self.drafter.rows.tensors():
                if tensor.is_floating_point():
                    tensor[len(self._scheduler.states) :] = torch.nan

    def blind_tables(self, rows: int, pages: int) -> None:
        """Writes the dummy page over the first `pages` entries of the first rows' page tables, and junk into the dummy page."""
        self._workers.state.page_table_BGW[:rows, :, :pages] = 0
        for cache in self.caches:
            for buffers in cache.buffers_of.values():
                buffers["kv"][:, : self.page_size] = 1e4

    # ---- settings that only tests change ----

    def set_depth(self, rounds: int) -> None:
        """Sets how many launches may be unread."""
        self._engine.depth = rounds

    @property
    def depth(self) -> int:
        return self._engine.depth

    def set_chunk(self, tokens: int) -> int:
        """Sets the most prompt tokens of one chunk.  Returns the old limit for whole prompts."""
        before = self._scheduler.budget
        self._scheduler.budget = replace(before, beside_rounds=tokens, alone=tokens, whole_prompts=tokens)
        return before.whole_prompts

    def set_least_shared(self, tokens: int) -> None:
        """Sets the threshold of (rows - 1) * tokens from which rows read common pages together."""
        self._scheduler.sharing.min_saved = tokens

    def script_levels(self, *steps: int) -> None:
        """`script_shapes` with trees of so many levels, of as many branches and nodes as the decoder's spec allows."""
        topk, most = self.decoder.settings.spec.topk, self.decoder.settings.spec.num_draft_tokens
        nodes = [min(most, s + 1 if topk == 1 else 1 + topk + topk * topk * (s - 1)) for s in steps]
        self.script_shapes(*[SpecConfig(s, topk, n) if s else None for s, n in zip(steps, nodes, strict=True)])

    def script_shapes(self, *shapes: SpecConfig | None) -> None:
        """Makes num_steps="auto" choose these shapes for the next rounds, None for no levels, and then always the last."""
        self._scheduler.speculation.controller = Script(*shapes)

    def controller_that_tries(self) -> Any:
        """The controller of num_steps="auto", which tries shapes from now on, as it does where graphs are captured."""
        controller = self._scheduler.speculation.controller
        controller.tries, controller.ready_seconds = True, 0.2
        return controller

    def make_ready(self) -> None:
        """Captures, or tries, whatever num_steps="auto" may run later."""
        self._engine.make_ready()

    def replace_drafter(self, drafter: Any) -> None:
        self._workers.drafter = drafter

    def replace_backend(self, backend: Any) -> None:
        """Makes both models' attention run on this backend."""
        self._workers.verifier.backend = self.drafter.backend = backend

    def lead(self, other_ranks: OtherRanks) -> None:
        """Has other ranks told each step before it runs."""
        self._runner.lead(other_ranks)

    def force_acceptance(self, probs: list[float]) -> Tensor:
        """Makes rounds accept draft tokens with these probabilities by level, and returns the tensor that they read."""
        self._runner.run(ForceAcceptance(tuple(probs)))
        synthetic = self._workers.verifier.synthetic
        assert synthetic is not None
        return synthetic.probs_S

    # ---- rounds ----

    def draft(self, rows: int, spec: SpecConfig) -> DraftTree:
        """The next tree of the first rows.  Drafting changes nothing of the batch but slots after the committed tokens."""
        with torch.inference_mode():
            needs = union(request.choice.needs for request in self.running)
            return self.drafter.draft(self._workers.state.narrow(rows), spec, needs)

    def run_phases(self, rows: int, spec: SpecConfig) -> None:
        """Runs draft, verify and extend of one round, without the engine, with what the running requests need."""
        state = self._workers.state.narrow(rows)
        with torch.inference_mode():
            needs = union(request.choice.needs for request in self.running)
            tree = self.drafter.draft(state, spec, needs)
            verifier = self._workers.verifier
            result = verifier.accept(state, tree, needs, verifier.read_tree(state, tree))
            self.drafter.extend(state, needs, result.new)

    def num_graphs(self, kind: Literal["round", "phase", "prefill", "mixed"]) -> int:
        """How many CUDA graphs there are of whole rounds, of single phases, of chunks of prompts, or of both in one pass."""
        rounds, prompts, mixed = self._runner.rounds, self._runner.prompts.graphs, self._runner.mixed.graphs
        return len({"round": rounds.round_graphs, "phase": rounds.phase_graphs, "prefill": prompts, "mixed": mixed}[kind])

    @contextmanager
    def timed_phases(self) -> Iterator[PhaseClock]:
        """Times every phase inside the block, from zero."""
        clock = self._runner.clock
        clock.clear()
        clock.enabled = True
        yield clock
        clock.enabled = False

    @property
    def times_phases(self) -> bool:
        return self._runner.clock.enabled
