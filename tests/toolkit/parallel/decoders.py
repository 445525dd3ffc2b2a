"""A decoder whose ranks are threads of one process."""

from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from specdec import SpecConfig, SpecDecoder
from specdec.decoder import Tokenizer
from specdec.loading.build import build_runner
from specdec.loading.load import load_pair
from specdec.loading.memory import pool_plan
from specdec.options import EngineOptions
from specdec.runner.runner import follow
from specdec.steps import Step
from toolkit.driver import Driver
from toolkit.parallel.ranks import ThreadGroup, on_ranks

Result = TypeVar("Result")


def with_ranks(
    target: Path, draft: Path, spec: SpecConfig, size: int, use: Callable[[SpecDecoder], Result], **settings: Any
) -> Result:
    """What `use` gives for a decoder of `size` ranks, all of whose caches hold NaN where nothing was written."""
    options = EngineOptions(device="cpu", max_seq_len=80, tensor_parallel_size=size, **settings)
    steps: list[SimpleQueue[Step | None]] = [SimpleQueue() for _ in range(size)]
    results: list[Result] = []

    def work(group: ThreadGroup) -> None:
        model, head, resolved, folder = load_pair(target, draft, spec, options, group)
        assert head is not None
        if group.rank:
            runner = build_runner(model, head, resolved, pool_plan([model.config, head.config.model], resolved))
            for cache in runner.workers.caches:
                for planes in cache.planes_of.values():
                    planes.get("scales", next(iter(planes.values()))).fill_(torch.nan)
            follow(runner, iter(steps[group.rank].get, None))
            return
        with SpecDecoder(model, head, resolved, Tokenizer(folder)) as decoder:
            driver, others = Driver(decoder), steps[1:]
            driver.poison_free_slots(torch.nan)
            driver.tell_steps(lambda step: [queue.put(step) for queue in others] and None)
            try:
                results.append(use(decoder))
            finally:
                for queue in others:
                    queue.put(None)

    on_ranks(size, work)
    return results[0]
