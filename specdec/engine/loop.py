"""Continuous batching: admits requests, launches rounds, hands out tokens, gives pages back.

Rounds are launched back to back and their tokens read `depth` rounds late, so that the device never waits for the host.
Knows requests and rows; which pages they get is `pages/admission.py`'s business, what a round computes `rounds.py`'s.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch

from specdec.batch.packed import PackedPrompts
from specdec.batch.state import BatchState
from specdec.config import GraphMode, SpecConfig
from specdec.engine.auto_steps import StepChooser
from specdec.engine.pages.admission import Admission
from specdec.engine.pages.pool import PagePool
from specdec.engine.pages.sharing import RowSharing, can_share
from specdec.engine.request import Request
from specdec.limits import MAX_PAUSE
from specdec.models.kv import heads_a_key
from specdec.ops.cuda_graph import on_device
from specdec.runner.prefill import PrefillRunner
from specdec.runner.readback import Readback, Ticket
from specdec.runner.rounds import Drafter, Round, RoundRunner
from specdec.startup import STARTUP
from specdec.verify.verifier import SamplingMode, TargetVerifier

MAX_PREFILL_TOKENS = {"cuda": 8192, "cpu": 1024}  # in one prefill pass: bounds its activations, and on a CPU its mask
CAPTURE_SECONDS = 0.2  # of a round's graph, its warm-up included, on a slow host
DEPTH = {"cuda": 1, "cpu": 0}  # rounds launched before the oldest is read; a CPU has nobody to run ahead of


class InFlight(NamedTuple):
    """A round that was launched and not read yet.  requests: who held its rows then, in their order."""

    ticket: Ticket
    requests: list[Request]
    round: Round
    rows: int


class Engine:
    """Runs requests on one target and, if there is one, one drafter.

    state: tensors for the batch, as many rows as can run at once.  lookahead: slots behind the committed tokens that rounds
    in flight may write.  prefix_caching: keep pages for prompts that begin as earlier ones did.
    """

    def __init__(
        self,
        verifier: TargetVerifier,
        drafter: Drafter | None,
        spec: SpecConfig | None,
        state: BatchState,
        pool: PagePool,
        lookahead: int,
        cuda_graphs: GraphMode,
        prefix_caching: bool = False,
    ) -> None:
        device = state.lens_B.device
        self.verifier, self.drafter, self.spec = verifier, drafter, spec
        self.state, self.pool, self.lookahead = state, pool, lookahead
        self.admission = Admission(pool, lookahead, prefix_caching)
        self.rounds = RoundRunner(cuda_graphs, device)
        self.prefills = PrefillRunner(bool(cuda_graphs))
        self.readback = Readback(device)
        self.depth = DEPTH[device.type]
        self.chooser = StepChooser(spec.max_steps, CAPTURE_SECONDS if cuda_graphs else 0.0) if spec and spec.is_auto else None
        self.pause = 0  # the most tokens that the draft of any row has yet to see
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # its index is its row
        self.in_flight: deque[InFlight] = deque()
        self.speculate = drafter is not None
        self.max_prefill_tokens = MAX_PREFILL_TOKENS[device.type]
        heads = heads_a_key(verifier.model.config)
        self.sharing = RowSharing(state, pool.page_size, heads) if prefix_caching and can_share(heads) else None

    @property
    def num_graphs(self) -> int:
        """CUDA graphs captured so far."""
        return len(self.rounds.round_graphs) + len(self.rounds.phase_graphs) + len(self.prefills.graphs)

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running)

    def set_speculate(self, speculate: bool) -> None:
        """Switches between rounds and plain decoding; only between requests, whose draft KV would be missing."""
        if speculate == self.speculate:
            return
        if not self.is_idle:
            raise RuntimeError(
                f"speculate={speculate} can't start while requests run with speculate={self.speculate}; "
                "finish or close the open stream first"
            )
        self.speculate = speculate

    def check(self, request: Request) -> None:
        """ValueError if the pool could never hold the request."""
        self.admission.check(request)

    def add(self, request: Request) -> None:
        """Queues a request that passed `check`."""
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Ends a request early, wherever it is, and frees its place.  A finished request stays as it is."""
        if request.is_done:
            return
        request.cancelled = True
        if request in self.running:
            self._leave(request)
        else:
            self.waiting.remove(request)

    @torch.inference_mode()
    def step(self) -> None:
        """Prefills what fits, so that first tokens wait for nothing; if nothing waits to enter, runs one round.

        If a prefill fails, the requests that entered with it get its error, and the others go on.  If a round fails, all
        running requests get its error, and it is raised.
        """
        try:
            with on_device(self.state.lens_B.device):
                if not self._admit() and self.running:
                    self._round()
        except BaseException as error:  # an interrupt too leaves the batch half moved on
            for request in list(self.running):
                self._fail(request, error)
            raise

    # ---- admission ----

    def _admit(self) -> bool:
        """Fills free rows in the order of arrival.  Whether any request entered."""
        batch: list[Request] = []
        tokens = longest = 0
        most = min(self.max_prefill_tokens, self.admission.max_prefill_tokens)
        while self.waiting and len(self.running) < self.state.rows:
            request = self.waiting[0]
            found = self.admission.find(request, self.speculate)
            if found is None or (batch and self.admission.should_wait(request, found, batch)):
                break
            new = len(request.prompt_ids) - found.tokens
            if batch and (tokens + new > self.max_prefill_tokens or max(longest, new) > most):
                break  # several prompts fit one pass together; one alone may take several
            if not self.admission.admit(request, found):
                break
            self.waiting.popleft()
            self._enter(request)
            batch.append(request)
            tokens, longest = tokens + new, max(longest, new)
        if batch:
            try:
                with self.rounds.clock.phase("prefill"):
                    self._prefill(batch, most)
                STARTUP.lap("first prefill")
            except Exception as error:  # of any kind, a prompt too long for the memory above all: those that run go on
                for request in batch:
                    self._fail(request, error)
        return bool(batch)

    def _enter(self, request: Request) -> None:
        row, pages = len(self.running), self.admission.places[request].table
        self.running.append(request)
        self._rows_changed()
        state, sampling = self.state, request.sampling
        table = torch.tensor(pages, dtype=torch.int32)
        state.page_table_BW[row, : len(pages)] = table.to(state.page_table_BW.device)
        state.temperature_B[row] = sampling.temperature
        state.top_k_B[row] = sampling.top_k
        state.top_p_B[row] = sampling.top_p
        state.seed_B[row] = request.seed

    def _prefill(self, batch: list[Request], size: int) -> None:
        """Prompts, packed, through the target and then the draft, from where the prefix cache ends, `size` tokens a pass.

        Each request gets its first token.
        """
        rows_B = torch.tensor([self.running.index(request) for request in batch], device=self.state.lens_B.device)
        state = self.state.pick(rows_B)
        prompts = [request.prompt_ids for request in batch]
        starts = [self.admission.places[request].start for request in batch]
        drafter = self.drafter if self.speculate else None
        for done in range(0, max(len(p) - start for p, start in zip(prompts, starts, strict=True)), size):
            begins = [start + done for start in starts]
            packed = PackedPrompts.pack(prompts, state.page_table_BW, self.pool.page_size, begins, size)
            first_B = self.prefills.run(self.verifier, drafter, state, packed, _sampling_mode(batch))
        state.lens_B.copy_(torch.tensor([len(prompt) for prompt in prompts]))
        state.active_B.fill_(1)
        state.pending_B.zero_()
        for target, source in zip(self.state.tensors(), state.tensors(), strict=True):
            target.index_copy_(0, rows_B, source)
        tokens = first_B.tolist()
        for request in batch:
            self.admission.keep(request, request.prompt_ids, self.speculate)
        for request, token in zip(batch, tokens, strict=True):
            self._hand_out(request, lambda r=request, t=token: r.take_first(t))

    # ---- rounds ----

    def _round(self) -> None:
        """Launches a round, unless those in flight will end every request, and reads the oldest one that is due."""
        launched = any(self._tokens_left(request) > 0 for request in self.running)
        if launched:
            self._launch()
        while len(self.in_flight) > (self.depth if launched else 0):
            self._collect()

    def _tokens_left(self, request: Request) -> int:
        """The most tokens the request can still take behind the rounds in flight, each of which emits at least one."""
        flying = sum(request in flight.requests for flight in self.in_flight)
        return request.sampling.max_tokens - len(request.output.token_ids) - flying

    def _launch(self) -> None:
        """One round over the running rows, padded to a bucket when graphs are on."""
        rows = self._bucket(len(self.running)) if self.rounds.pads_rows else len(self.running)
        state, mode = self.state.narrow(rows), _sampling_mode(self.running)
        if self.sharing is not None:
            state = self.sharing.apply(state, lambda: [self.admission.fixed_pages(request) for request in self.running])
        spec = self._spec(rows)
        if self.pause and (spec is not None or self.pause == MAX_PAUSE):
            assert self.drafter is not None
            self.rounds.catch_up(self.drafter, state)
            self.pause = 0
        begun = self.readback.mark() if self.chooser else None
        if spec is not None:
            assert self.drafter is not None
            launched = self.rounds.speculative(self.verifier, self.drafter, state, spec, mode)
        elif self.speculate:
            launched = self.rounds.paused(self.verifier, state, mode)
            self.pause += 1
        else:
            launched = self.rounds.plain(self.verifier, state, mode)
        ticket = self.readback.start(launched.emitted_BX, begun)
        self.in_flight.append(InFlight(ticket, list(self.running), launched, rows))

    def _spec(self, rows: int) -> SpecConfig | None:
        """The shape of the next round's tree; None for no tree."""
        if not self.speculate:
            return None
        assert self.spec is not None
        if self.chooser is None:
            return self.spec
        steps = self.chooser.choose(rows)
        return self.spec.at(steps) if steps else None

    def _collect(self) -> None:
        """Waits for the oldest round in flight and hands its tokens out; requests that ended meanwhile take none."""
        with self.rounds.clock.phase("rest"):
            flight = self.in_flight.popleft()
            emitted = flight.ticket.read()
            STARTUP.lap("first round")
            if self.chooser and self.speculate:
                self.chooser.observe_cost(flight.rows, flight.round.depths, flight.ticket.seconds())
                self.chooser.observe_acceptance(flight.round.depths, [row[0] for row in emitted[: len(flight.requests)]])
            for request, (accepted, *tokens) in zip(flight.requests, emitted, strict=False):
                if not request.is_done:
                    take, size = tokens[: accepted + 1], (flight.round.drafted, flight.round.depths)
                    self._hand_out(request, lambda r=request, t=take, s=size: r.take_round(t, *s))

    def _hand_out(self, request: Request, take: Any) -> None:
        """Gives a request its tokens.  If that fails (its tokenizer, say), only this request does."""
        try:
            take()
        except Exception as error:  # of any kind: it is handed to whoever asks for the result
            request.error = error
        if request.is_done:
            self._leave(request)

    def _fail(self, request: Request, error: BaseException) -> None:
        if not request.is_done:
            request.error = error
            self._leave(request)

    # ---- rows and pages ----

    def _leave(self, request: Request) -> None:
        """Frees the request's pages and row; the last row moves into the gap, so that rows stay dense."""
        row, last = self.running.index(request), len(self.running) - 1
        self.running[row] = self.running[last]
        self.running.pop()
        if row != last:
            self.state.move_row(last, row)
        self.state.clear_row(last)
        if request.error is None:  # else nobody knows what was written
            known = request.prompt_ids + request.output.token_ids
            lag = self.pause if self.speculate else 0  # tokens whose draft rows may be missing
            self.admission.keep(request, known[: max(0, len(known) - lag)], self.speculate)
        self.admission.leave(request)
        self._rows_changed()
        if not self.running:  # what is in flight is nobody's any more
            for flight in self.in_flight:
                flight.ticket.drop()
            self.in_flight.clear()
            self.pause = 0

    def _rows_changed(self) -> None:
        if self.sharing is not None:
            self.sharing.forget()

    def _bucket(self, rows: int) -> int:
        """The next power of two, or all rows."""
        return min(self.state.rows, 1 << (rows - 1).bit_length())


def _sampling_mode(requests: list[Request]) -> SamplingMode:
    sampled = [r.sampling for r in requests if r.sampling.temperature > 0]
    if not sampled:
        return "greedy"
    return "filtered" if any(s.top_k > 0 or s.top_p < 1 for s in sampled) else "sampled"
