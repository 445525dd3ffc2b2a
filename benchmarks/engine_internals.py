"""What the experiments of these rooms change or read inside a running engine, which no user can.

This is the only script here that touches the engine's parts.  It knows nothing of what is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from specdec.attention.caches.kv_cache import KVCache
from specdec.batch.emitted import FirstTokens
from specdec.batch.tree import DraftTree
from specdec.batch.trees.tables import tree_tables
from specdec.config import SamplingParams, SpecConfig
from specdec.decoder import SpecDecoder
from specdec.engine.pages import admission, groups
from specdec.engine.request import Request
from specdec.engine.totals import Totals
from specdec.runner import grammars as looking
from specdec.runner.grammars import GrammarRows
from specdec.runner.workers import Workers
from specdec.steps import RunChunk, RunRound

CHUNK = groups.RING_PREFILL


def workers_of(decoder: SpecDecoder) -> Workers:
    """Both models' workers and the batch, of a decoder that nothing else uses."""
    workers: Workers = decoder.engine.runner.workers
    return workers


# ---- caches ----


def target_cache(decoder: SpecDecoder) -> KVCache:
    return decoder.engine.runner.workers.verifier.cache


def caches(decoder: SpecDecoder) -> list[KVCache]:
    """The target's, and the draft's if there is one."""
    drafter: Any = decoder.engine.runner.workers.drafter
    return [target_cache(decoder)] + ([drafter.cache] if drafter else [])


def grammar_rows(decoder: SpecDecoder) -> GrammarRows:
    """The rows that obey a grammar, which compile it by the decoder's own library from now on."""
    runner: Any = decoder.engine.runner
    rows: GrammarRows = runner.grammars
    runner.use_grammars(decoder.grammars)
    return rows


def hold_looking(hold: Callable[[Any, str], None]) -> None:
    """Calls hold(holder, name) with what rows of grammars call to look ahead, which the holder has under that name."""
    hold(looking, "look_ahead")


def clear_caches(decoder: SpecDecoder) -> None:
    """Fills the keys and values of both models with zeros."""
    with torch.inference_mode():
        for cache in caches(decoder):
            cache.buffers["kv"].zero_()


def replace_drafter(decoder: SpecDecoder, drafter: Any) -> None:
    """From now on rounds ask this drafter."""
    decoder.engine.runner.workers.drafter = drafter


def num_pages(decoder: SpecDecoder) -> int:
    """Pages of the KV pool."""
    return decoder.engine.scheduler.admission.pool.num_pages


def set_rings(rings: bool) -> None:
    """Whether layers with a window get rings of pages in decoders that are built from now on."""
    for module in (admission, groups):
        module.RING_PREFILL = CHUNK if rings else 10**9


def without_prefill(decoder: SpecDecoder) -> None:
    """From now on prompts enter as though they had been prefilled: the keys and values in their pages are there already."""

    runner: Any = decoder.engine.runner
    state = runner.workers.state

    def run(chunk: RunChunk) -> FirstTokens:
        device, parts = state.lens_B.device, chunk.parts
        rows, ends, last = (
            torch.tensor(numbers, device=device)
            for numbers in ([p.row for p in parts], [p.end for p in parts], [int(p.is_last) for p in parts])
        )
        bonus = torch.randint(1000, 100000, (len(parts),), device=device)
        kept = runner.workers.drafter.rows if runner.workers.drafter else None
        if kept is not None:
            kept.level1_tokens_BK[rows] = torch.randint_like(kept.level1_tokens_BK[rows], 1000, 90000)
            kept.level1_hidden_BH[rows] = torch.randn_like(kept.level1_hidden_BH[rows])
        state.start_rows(rows, ends.int(), last.int(), bonus)
        return FirstTokens(bonus)

    runner.prompts.run = run
    scheduler = decoder.engine.scheduler  # so all prompts enter at once
    scheduler.budget = replace(scheduler.budget, beside_rounds=10**9, alone=10**9, whole_prompts=10**9)


# ---- shared prefixes ----


def set_sharing(decoder: SpecDecoder, shared: bool, in_every_pass: bool) -> None:
    """Whether rows that name the same pages read them once.  in_every_pass: in passes of many queries too, which must be said
    before anything is captured."""
    sharing, runner = decoder.engine.scheduler.sharing, decoder.engine.runner
    assert sharing is not None
    sharing.min_saved = 0 if shared else math.inf
    if in_every_pass:
        runner.shared = runner.shared._replace(max_queries=10**6)


def is_shared(decoder: SpecDecoder) -> bool:
    """Whether the last round's rows read pages together."""
    sharing = decoder.engine.scheduler.sharing
    assert sharing is not None
    return sharing.shares


def give_copies(decoder: SpecDecoder) -> None:
    """Every row but the first gets the shared pages as copies of its own, as without prefix caching."""
    engine = decoder.engine
    admission, state = engine.scheduler.admission, engine.runner.workers.state
    pool, size = admission.pool, admission.pool.page_size
    fixed = [admission.fixed_pages(request, False) for request in engine.running]
    count = next(i for i, page in enumerate(fixed[0]) if page != fixed[1][i])
    for row in range(1, len(engine.running)):
        pages = torch.tensor(pool.admit(("copy", row), count * size), device=state.lens_B.device)
        offsets = torch.arange(size, device=pages.device)
        old = (state.pages.table[row, :count].long()[:, None] * size + offsets).flatten()
        new = (pages[:, None] * size + offsets).flatten()
        for cache in caches(decoder):
            for layer in cache.buffers["kv"]:
                layer[new] = layer[old]
        state.pages.table[row, :count] = pages.int()


def take_copies(decoder: SpecDecoder, rows: int) -> None:
    """Gives the pages of `give_copies` back to the pool."""
    for row in range(1, rows):
        decoder.engine.scheduler.admission.pool.release(("copy", row))


@torch.inference_mode()
def sharing_difference(decoder: SpecDecoder, rows: int, num_heads: int, head_dim: int) -> float:
    """How far one layer's attention, shared, is from the same attention unshared: ||a - b|| / ||b||, both in bf16."""
    runner: Any = decoder.engine.runner
    verifier, state, device = runner.workers.verifier, runner.workers.state.narrow(rows), runner.device
    tree = DraftTree.chain(torch.zeros(rows, 6, dtype=torch.int64, device=device))
    q = torch.randn(rows * 6, num_heads, head_dim, dtype=torch.bfloat16, device=device)
    outs = []
    for each in (state, state.sharing(runner.shared)):
        tables = tree_tables(each, tree)
        cache, backend = verifier.cache, verifier.backend
        prepared = backend.prepare(tables.plan.local(cache.kinds[3]))
        torch.cuda.synchronize()  # attention reads its tables before it waits: in a model they are much older
        outs.append(backend.attend(q, cache.view(3), prepared).out_THD.double())
    return float((outs[1] - outs[0]).norm() / outs[0].norm())


# ---- what is drafted ----


def set_acceptance(decoder: SpecDecoder, probability: float) -> None:
    """Changes the probability of every level, which must have been forced before, in captured graphs too."""
    synthetic = decoder.engine.runner.workers.verifier.synthetic
    assert synthetic is not None
    with torch.inference_mode():
        synthetic.probs_S.fill_(probability)


class OneShape:
    """Stands where the controller of "auto" stands: chooses one shape and learns nothing."""

    tries = False

    def __init__(self, shape: SpecConfig) -> None:
        self.shape = shape

    def choose(self, *given: Any) -> SpecConfig:
        return self.shape

    def observe(self, *given: Any) -> None:
        """Whatever a round shows, the shape stays."""


@contextmanager
def fixed_shape(decoder: SpecDecoder, shape: SpecConfig) -> Iterator[None]:
    """Makes "auto" run rounds of this shape alone inside the block, of which its controller is told nothing."""
    speculation: Any = decoder.engine.scheduler.speculation
    controller, speculation.controller = speculation.controller, OneShape(shape)
    try:
        yield
    finally:
        speculation.controller = controller


def timed_rounds(decoder: SpecDecoder) -> list[tuple[str, float]]:
    """The label and milliseconds of each round that speculation is told of from now on, those of fixed shapes included.

    The label of a round without levels is "none".
    """
    speculation, found = decoder.engine.scheduler.speculation, list[tuple[str, float]]()
    observe = speculation.observe

    def observed(step: RunRound, seconds: float, *given: Any) -> None:
        found.append((step.spec.label if step.spec else "none", 1e3 * seconds))
        observe(step, seconds, *given)

    speculation.observe = observed  # type: ignore[method-assign]
    return found


def time_captures(decoder: SpecDecoder) -> list[tuple[str, float]]:
    """The seconds of each capture from now on, warm-ups included, and its key."""
    rounds, found = decoder.engine.runner.rounds, list[tuple[str, float]]()
    for graphs in (rounds.round_graphs, rounds.phase_graphs):

        def timed(key: Any, fn: Any, mutable: Any, warm_ups: int = 2, graphs: Any = graphs, run: Any = graphs.run) -> Any:
            is_new, start = key not in graphs, time.perf_counter()
            outputs = run(key, fn, mutable, warm_ups)
            if is_new:
                torch.cuda.synchronize()
                found.append((str(key), time.perf_counter() - start))
            return outputs

        graphs.run = timed
    return found


# ---- outputs of given lengths ----


def open_request(prompt: list[int], most: int, length: int) -> Request:
    """A request that may write `most` tokens and ends after `length`, as though the model had ended it there."""
    request = Request.new(prompt, SamplingParams(max_tokens=most), 0, frozenset((0,)), lambda ids: "", False)
    take = request.output.take

    def ended(tokens: Sequence[int]) -> int:
        left = length - len(request.output.token_ids)
        return take([token or 1 for token in tokens] if len(tokens) < left else [*(t or 1 for t in tokens[: left - 1]), 0])

    request.output.take = ended  # type: ignore[method-assign]
    return request


def run_requests(decoder: SpecDecoder, requests: Sequence[Request]) -> tuple[float, int]:
    """Runs them to their ends, all submitted at once: the seconds, and the most rows at once."""
    engine, most, start = decoder.engine, 0, time.perf_counter()
    engine.submit(requests)
    while not engine.is_idle:
        engine.step()
        most = max(most, len(engine.scheduler.states))
    return time.perf_counter() - start, most


def totals(decoder: SpecDecoder) -> Totals:
    """What its engine has done since it was made."""
    return decoder.engine.totals()


@contextmanager
def taken_pages(decoder: SpecDecoder, tokens: int | None) -> Iterator[None]:
    """Inside the block, the pool holds no more than so many tokens; None: what it holds.  The decoder is idle."""
    pool, size = decoder.engine.scheduler.admission.pool, decoder.settings.page_tokens
    pool.lend("taken", 0 if tokens is None else pool.num_free - min(pool.num_free, -(-tokens // size)))
    try:
        yield
    finally:
        pool.release("taken")
