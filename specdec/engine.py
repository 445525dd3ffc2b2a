"""Continuous batching: admits requests, runs rounds, hands out tokens, gives pages back.

A round is draft -> build tree -> verify -> accept -> commit -> extend.  Knows requests, rows and pages; what a phase computes
is the worker's and the verifier's business.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.batch import BatchState
from specdec.cuda_graph import GraphSet, on_device
from specdec.models.packed import PackedPrompts
from specdec.pages import PagePool
from specdec.request import Request
from specdec.tree import DraftTree
from specdec.verify.verifier import SamplingMode, TargetVerifier

MAX_PREFILL_TOKENS = {"cuda": 8192, "cpu": 1024}  # in one prefill pass: bounds its activations, and on a CPU its mask


class Drafter(Protocol):
    """What the engine needs of a draft; `DraftWorker` is the real one, tests bring others."""

    def draft(self, state: BatchState) -> DraftTree: ...
    def extend(
        self, state: BatchState, base_lens_B: Tensor, tokens_BE: Tensor, last_B: Tensor, features_BEF: Tensor
    ) -> None: ...
    def prefill(self, state: BatchState, prompts: PackedPrompts, features_TF: Tensor) -> None: ...


class Engine:
    """Runs requests on one target and, if there is one, one drafter.

    state: tensors for the batch, as many rows as can run at once.  lookahead: slots behind the committed tokens that a
    round may write.  time_phases: measure every phase (each is then waited for, which costs time of its own).
    """

    def __init__(
        self,
        verifier: TargetVerifier,
        drafter: Drafter | None,
        state: BatchState,
        pool: PagePool,
        lookahead: int,
        cuda_graphs: bool,
    ) -> None:
        self.verifier, self.drafter = verifier, drafter
        self.state, self.pool, self.lookahead = state, pool, lookahead
        self.graphs = GraphSet(cuda_graphs)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # its index is its row
        self.speculate = drafter is not None
        self.max_prefill_tokens = MAX_PREFILL_TOKENS[state.lens_B.device.type]
        self.time_phases = False
        self.phase_seconds: defaultdict[str, float] = defaultdict(float)
        self.phase_calls: Counter[str] = Counter()
        self._lens: dict[Request, int] = {}
        self._tabled: dict[Request, int] = {}  # pages written to the request's row of the page table

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running)

    def tokens_needed(self, request: Request) -> int:
        """The most slots the request can come to occupy, look-ahead included."""
        return len(request.prompt_ids) + request.sampling.max_tokens + self.lookahead

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
        pages = self.pool.pages_for(self.tokens_needed(request))
        if pages > self.pool.capacity:
            most = self.pool.capacity * self.pool.page_size - self.lookahead - len(request.prompt_ids)
            raise ValueError(
                f"prompt ({len(request.prompt_ids)} tokens) + max_tokens + look-ahead ({self.lookahead}) must fit the KV pool "
                f"of {self.pool.capacity * self.pool.page_size} tokens, got max_tokens={request.sampling.max_tokens}; nearest "
                + (f"setting that works: max_tokens={most}" if most > 0 else "thing that works: a shorter prompt")
            )

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
        except Exception as error:
            for request in list(self.running):
                self._fail(request, error)
            raise

    # ---- admission ----

    def _admit(self) -> bool:
        """Fills free rows in the order of arrival.  Whether any request entered."""
        batch: list[Request] = []
        tokens = 0
        while self.waiting and len(self.running) < self.state.rows:
            request = self.waiting[0]
            if not self.pool.can_admit(self.tokens_needed(request)):
                break
            if batch and tokens + len(request.prompt_ids) > self.max_prefill_tokens:
                break
            self.waiting.popleft()
            self.pool.admit(request, self.tokens_needed(request))
            self._enter(request)
            batch.append(request)
            tokens += len(request.prompt_ids)
        if batch:
            try:
                with self._phase("prefill"):
                    self._prefill(batch)
            except Exception as error:
                for request in batch:
                    self._fail(request, error)
        return bool(batch)

    def _enter(self, request: Request) -> None:
        row = len(self.running)
        self.running.append(request)
        self._lens[request] = len(request.prompt_ids)
        self._tabled[request] = 0
        sampling = request.sampling
        self.state.temperature_B[row] = sampling.temperature
        self.state.top_k_B[row] = sampling.top_k
        self.state.top_p_B[row] = sampling.top_p
        self.state.seed_B[row] = request.seed
        self._reserve(request, self._lens[request] + self.lookahead)

    def _prefill(self, batch: list[Request]) -> None:
        """Prompts, packed, through the target and then the draft; each request gets its first token."""
        rows_B = torch.tensor([self.running.index(request) for request in batch], device=self.state.lens_B.device)
        state = self.state.pick(rows_B)
        prompts = [request.prompt_ids for request in batch]
        size = self.max_prefill_tokens  # several prompts fit one pass together; one alone may take several
        for start in range(0, max(map(len, prompts)), size):
            packed = PackedPrompts.pack(prompts, state.page_table_BW, self.pool.page_size, start, size)
            first_B, features_TF = self.verifier.prefill(packed, state.sampling, _sampling_mode(batch), self.speculate)
            state.bonus_B.copy_(first_B)
            if self.speculate:
                assert self.drafter is not None
                self.drafter.prefill(state, packed, features_TF)
        state.lens_B.copy_(torch.tensor([len(prompt) for prompt in prompts]))
        state.active_B.fill_(1)
        for target, source in zip(self.state.tensors(), state.tensors(), strict=True):
            target.index_copy_(0, rows_B, source)
        for request, token in zip(batch, first_B.tolist(), strict=True):
            self._hand_out(request, lambda r=request, t=token: r.take_first(t))

    # ---- rounds ----

    def _round(self) -> None:
        """One round over the running rows, padded to a bucket when graphs are on; one synchronisation, to read tokens."""
        for request in self.running:
            self._reserve(request, self._lens[request] + self.lookahead)
        rows = self._bucket(len(self.running)) if self.graphs.enabled else len(self.running)
        state, mode = self.state.narrow(rows), _sampling_mode(self.running)
        if self.speculate:
            tree, result = self._speculate(state, rows, mode)
        else:
            key = ("decode", rows, mode)
            moved = [state.lens_B, state.bonus_B]
            with self._phase("decode"):
                tree, result = self.graphs.run(key, lambda: self._decode(state, mode), moved)
        with self._phase("rest"):
            self._hand_out_round(torch.cat((result.accepted_B[:, None], result.tokens_BE), dim=1).tolist(), tree)

    def _decode(self, state: BatchState, mode: SamplingMode) -> tuple[DraftTree, Any]:
        tree = DraftTree.chain(state.bonus_B[:, None])
        return tree, self.verifier.verify(state, tree, mode, with_features=False)

    def _speculate(self, state: BatchState, rows: int, mode: SamplingMode) -> tuple[DraftTree, Any]:
        drafter, verifier = self.drafter, self.verifier
        assert drafter is not None
        level1 = [state.level1_tokens_BK, state.level1_logp_BK, state.level1_hidden_BH]
        with self._phase("draft"):
            tree = self.graphs.run(("draft", rows), lambda: drafter.draft(state), [])
        with self._phase("verify"):
            moved = [state.lens_B, state.bonus_B]
            result = self.graphs.run(("verify", rows, mode), lambda: verifier.verify(state, tree, mode), moved)
        with self._phase("extend"):

            def extend() -> None:
                drafter.extend(state, result.base_lens_B, result.tokens_BE, result.accepted_B, result.features_BEF)

            self.graphs.run(("extend", rows, mode), extend, level1)
        return tree, result

    def _hand_out_round(self, emitted: list[list[int]], tree: DraftTree) -> None:
        for request, (accepted, *tokens) in zip(list(self.running), emitted, strict=False):
            self._lens[request] += accepted + 1
            take = tokens[: accepted + 1]
            self._hand_out(request, lambda r=request, t=take: r.take_round(t, tree.num_nodes - 1, tree.max_depth))

    def _hand_out(self, request: Request, take: Any) -> None:
        """Gives a request its tokens.  If that fails (its tokenizer, say), only this request does."""
        try:
            take()
        except Exception as error:
            request.error = error
        if request.is_done:
            self._leave(request)

    def _fail(self, request: Request, error: Exception) -> None:
        if not request.is_done:
            request.error = error
            self._leave(request)

    # ---- rows and pages ----

    def _reserve(self, request: Request, tokens: int) -> None:
        """Pages for so many tokens, and their numbers in the request's row of the page table."""
        pages = self.pool.reserve(request, min(tokens, self.tokens_needed(request)))
        done = self._tabled[request]
        if len(pages) > done:
            new = torch.tensor(pages[done:], dtype=torch.int32)
            self.state.page_table_BW[self.running.index(request), done : len(pages)] = new.to(self.state.lens_B.device)
            self._tabled[request] = len(pages)

    def _leave(self, request: Request) -> None:
        """Frees the request's pages and row; the last row moves into the gap, so that rows stay dense."""
        row, last = self.running.index(request), len(self.running) - 1
        self.running[row] = self.running[last]
        self.running.pop()
        if row != last:
            self.state.move_row(last, row)
        self.state.clear_row(last)
        self.pool.release(request)
        del self._lens[request], self._tabled[request]

    def _bucket(self, rows: int) -> int:
        """The next power of two, or all rows."""
        return min(self.state.rows, 1 << (rows - 1).bit_length())

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Adds up a phase's seconds, if asked to; on a GPU that means waiting for it."""
        if not self.time_phases:
            yield
            return
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.phase_seconds[name] += time.perf_counter() - start
        self.phase_calls[name] += 1

    def _wait(self) -> None:
        if self.state.lens_B.device.type == "cuda":
            torch.cuda.synchronize()


def _sampling_mode(requests: list[Request]) -> SamplingMode:
    sampled = [r.sampling for r in requests if r.sampling.temperature > 0]
    if not sampled:
        return "greedy"
    return "filtered" if any(s.top_k > 0 or s.top_p < 1 for s in sampled) else "sampled"
