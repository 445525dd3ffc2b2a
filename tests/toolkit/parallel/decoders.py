"""A decoder whose ranks are threads of one process."""

from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from specdec import SpecConfig, SpecDecoder
from specdec.decoder import Tokenizer
from specdec.draft.kind import Draft
from specdec.draft.mtp.worker import PageEnds
from specdec.draft.ngram.store import TokenStore
from specdec.loading.build import build_runner, plan_pool
from specdec.loading.load import load_pair
from specdec.loading.ranks import run_step
from specdec.models.target import Target
from specdec.options import EngineOptions
from specdec.steps import Step
from toolkit.driver import Driver
from toolkit.parallel.ranks import Queues, ThreadGroup, on_ranks

Result = TypeVar("Result")


def fill_with_nan(cache: Any) -> None:
    """Makes what was never written visible wherever it is read; a text's tokens are ids wherever they lie."""
    if isinstance(cache, PageEnds):
        cache.states_PX.fill_(torch.nan)
    for buffers in cache.buffers_of.values() if not isinstance(cache, TokenStore | PageEnds) else ():
        for buffer in buffers.values():
            buffer.fill_(torch.nan if buffer.is_floating_point() else 99)


def with_ranks(
    target: Path, draft: Draft, spec: SpecConfig, size: int, use: Callable[[SpecDecoder], Result],
    prepare: Callable[[Target], None] = lambda model: None, **settings: Any,
) -> Result:  # fmt: skip
    """What `use` gives for a decoder of `size` ranks, all of whose caches hold NaN where nothing was written.

    prepare: what is done to each rank's share of the target first.
    """
    options = EngineOptions(device="cpu", max_seq_len=80, tensor_parallel_size=size, **settings)
    steps: list[SimpleQueue[Step | None]] = [SimpleQueue() for _ in range(size)]
    results: list[Result] = []

    def work(group: ThreadGroup) -> None:
        model, head, resolved, folder = load_pair(target, draft, spec, options, group)
        prepare(model)
        if group.rank:
            runner = build_runner(model, head, resolved, plan_pool(model, head, resolved))
            for cache in runner.workers.caches:
                fill_with_nan(cache)
            for step in iter(steps[group.rank].get, None):
                run_step(runner, step)
            return
        with SpecDecoder(model, head, resolved, Tokenizer(folder)) as decoder:
            driver, others = Driver(decoder), Queues(steps[1:])
            for cache in driver.caches:
                fill_with_nan(cache)
            driver.lead(others)
            try:
                results.append(use(decoder))
            finally:
                others.send(None)

    on_ranks(size, work)
    return results[0]
