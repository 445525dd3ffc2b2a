"""Ranks in processes with a GPU each, which reach each other's memory; and what tests have them do."""

import fcntl
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specdec.attention.context_parallel.all_to_all import pack_states
from specdec.attention.state import AttentionState
from specdec.parallel.group import Group
from specdec.parallel.symmetric import group as groups
from specdec.parallel.symmetric.group import SymmetricGroup, connect
from toolkit.inside.captures import capturing
from toolkit.sanitize.launches import written_down

PATIENCE = timedelta(seconds=60)
EPS = 1e-5


class HostGroup(Group):
    """Exchanges by way of the host, for setting up and for checks."""

    def __init__(self, store: dist.TCPStore, rank: int, size: int) -> None:
        self._gloo, self.rank, self.size = dist.ProcessGroupGloo(store, rank, size, PATIENCE), rank, size

    def all_gather(self, x: Tensor) -> Tensor:
        mine = x.contiguous().cpu()
        all_N = mine.new_empty((self.size, *x.shape))
        self._gloo.allgather([list(all_N.unbind())], [mine]).wait()
        return all_N.to(x.device)

    def abort(self) -> None:
        """Nothing here waits on a device."""


@contextmanager
def in_turn() -> Iterator[None]:
    """Keeps the ranks of one test apart from those of another in other processes.

    Ranks wait for each other on their GPUs.  Where several pairs share GPUs, which run one process at a time, a rank mostly
    waits while its partner does not run, and a test of seconds takes minutes.  Processes that see other GPUs don't meet.
    """
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    with (Path(tempfile.gettempdir()) / f"specdec-tests-of-ranks-{seen}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def on_gpus(size: int, work: Callable[..., Any], *arguments: Any, seconds: float = 50.0) -> list[Any]:
    """What `work(group, ...)`, a function of a module, gives on each of `size` ranks; an exception as text."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(size):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=_run, args=(rank, size, store.port, theirs, work, arguments), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(mine)
    ends = time.monotonic() + seconds
    try:
        return [_answer(pipe, ends - time.monotonic()) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(pipe: Any, seconds: float) -> Any:
    try:
        return pipe.recv() if pipe.poll(max(0.0, seconds)) else "no answer in time"
    except EOFError:
        return "ended without a word"


def _run(rank: int, size: int, port: int, pipe: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        store = dist.TCPStore("127.0.0.1", port, size, is_master=False, wait_for_workers=False)
        with torch.inference_mode():
            group = connect(HostGroup(store, rank, size), device)
            assert isinstance(group, SymmetricGroup)
            pipe.send(work(group, *arguments))
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise


def random_rows(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def sums_and_norms(group: SymmetricGroup, cases: list[tuple[int, int]], dtype: torch.dtype) -> list[str]:
    """What is wrong with sums and norms of (rows, hidden size): against float64, between ranks, and between row counts."""
    wrong = []
    for T, H in cases:
        partials = [random_rows(T, H, seed=1000 * T + rank, dtype=dtype) for rank in range(group.size)]
        x, weight = random_rows(T, H + 8, seed=T, dtype=dtype)[:, :H], random_rows(H, seed=H, dtype=dtype)
        weight = weight if T % 2 else weight.float()  # as zero-centred norms have it
        total, normed = group.all_reduce_add_rms_norm(x, partials[group.rank], weight, EPS)
        added, summed = group.all_reduce_add(x, partials[group.rank]), group.all_reduce(partials[group.rank])
        exact = sum((partial_sum.double() for partial_sum in partials), torch.zeros((), device="cuda").double())
        unit = torch.finfo(dtype).eps
        close = dict(rtol=unit, atol=4 * torch.finfo(torch.float32).eps)
        rounded = total.double()
        want = rounded * (rounded.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
        checks = {
            "total": torch.equal(total, x + summed),
            "sum": torch.allclose(summed.double(), exact, **close),
            "added": torch.equal(added, total),
            "normed": torch.allclose(normed.double(), want, rtol=2 * unit, atol=unit * 1e-2),
        }
        alone = group.all_reduce_add_rms_norm(x[-1:], partials[group.rank][-1:], weight, EPS)
        checks["one row alone"] = all(torch.equal(a[0], b[-1]) for a, b in zip(alone, (total, normed)))
        sums = torch.stack([_fingerprint(each) for each in (total, normed, summed)])
        checks["same on all ranks"] = bool((group.base.all_gather(sums) == sums).all())
        wrong += [f"{T} x {H} {dtype}: {name}" for name, good in checks.items() if not good]
    return wrong


def _fingerprint(x: Tensor) -> Tensor:
    bits = x.flatten().view(torch.int16).long()
    return (bits * (torch.arange(len(bits), device=x.device) % 8191 + 1)).sum()


def every_exchange(group: SymmetricGroup) -> list[str]:
    """What is wrong after each kernel has exchanged a few numbers."""
    from specdec.attention.context_parallel.all_to_all_triton import launch_merge
    from specdec.attention.context_parallel.symmetric_triton import launch_all_to_all_states

    with written_down(f"rank {group.rank}"):
        wrong = []
        for groups.MAX_AS_MESSAGES in (1 << 20, 0):
            wrong += sums_and_norms(group, [(3, 256)], torch.bfloat16)
        own = torch.arange(50, device="cuda") + 100 * group.rank
        all_ranks = torch.stack([own - 100 * group.rank + 100 * rank for rank in range(group.size)])
        wrong += [] if torch.equal(group.all_gather(own), all_ranks) else ["gather"]
        wrong += (
            [] if torch.equal(group.all_to_all(all_ranks + own[0]), all_ranks + all_ranks[group.rank, 0]) else ["all_to_all"]
        )
        states = [
            AttentionState(random_rows(5, 2 * group.size, 64, seed=rank), random_rows(5, 2 * group.size, seed=9 + rank).float())
            for rank in range(group.size)
        ]
        want = launch_merge(torch.stack([pack_states(each, group.size)[group.rank] for each in states]), 64)
        got = launch_all_to_all_states(group.inbox, group.rank, group.nanoseconds, states[group.rank])
        return wrong + ([] if all(map(torch.equal, got, want)) else ["states"])


class Exchanges:
    """Exchanges of many sizes whose right results are known, for every step: small whole numbers."""

    def __init__(self, group: SymmetricGroup, shapes: list[tuple[int, int]]) -> None:
        self.group, self.shapes = group, shapes
        self.step, self.wrong = torch.zeros(2, dtype=torch.int64, device="cuda").unbind()
        self.weights = {H: torch.ones(H, dtype=torch.bfloat16, device="cuda") for _, H in shapes}
        self.places = {(T, H): torch.arange(T * H, device="cuda").view(T, H) for T, H in shapes}

    def partial_sum(self, rank: int, shape: tuple[int, int]) -> Tensor:
        return ((self.step * 31 + rank * 17 + self.places[shape] * 7) % 61 - 30).bfloat16()

    def __call__(self) -> None:
        self.step += 1
        for shape in self.shapes:
            partials = [self.partial_sum(rank, shape) for rank in range(self.group.size)]
            x = (self.places[shape] % 32).bfloat16()
            total, _ = self.group.all_reduce_add_rms_norm(x, partials[self.group.rank], self.weights[shape[1]], EPS)
            summed = torch.stack(partials).float().sum(0)
            self.wrong += (total != x + summed).sum()
            self.wrong += (self.group.all_reduce_add(x, partials[self.group.rank]) != x + summed).sum()
            self.wrong += (self.group.all_reduce(partials[self.group.rank]) != summed).sum()
        ids = (self.step * 5 + torch.arange(6, device="cuda").view(2, 3)) * 2**33
        ranks = torch.arange(self.group.size, device="cuda")[:, None, None]
        self.wrong += (self.group.all_gather(ids + self.group.rank) != ids + ranks).sum()
        words = torch.arange(150_001, dtype=torch.int32, device="cuda") * self.step.int()  # more than a block for each channel
        self.wrong += (self.group.all_gather(words + self.group.rank) != words + ranks[:, 0]).sum()
        self.wrong += (self.group.all_to_all(ids + 10 * self.group.rank + ranks) != ids + 10 * ranks + self.group.rank).sum()


def soak(group: SymmetricGroup, replays: int, shapes: list[tuple[int, int]], seed: int) -> tuple[int, int, float]:
    """(wrong numbers, exchanges, seconds) of replays of a graph with eager calls between them, while rank 0's host lags."""
    exchanges = Exchanges(group, shapes)
    for _ in range(3):
        exchanges()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        exchanges()
    alike, own = random.Random(seed), random.Random(seed + group.rank + 1)
    began, calls = time.monotonic(), 0
    for _ in range(replays):
        graph.replay()
        calls += 1
        if alike.random() < 0.05:
            for _ in range(alike.randrange(1, 3)):
                exchanges()
                calls += 1
        if group.rank == 0 and own.random() < 0.02:
            time.sleep(own.random() * 0.01)
        if own.random() < 0.01:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return int(exchanges.wrong), calls * (3 * len(shapes) + 3), time.monotonic() - began


def lost_rank(group: SymmetricGroup, seconds: float) -> tuple[str, float]:
    """Rank 0 exchanges with ranks that never do: (why it gave up, the seconds that took)."""
    group.patience = seconds
    partial_sum = torch.ones(4, 4096, dtype=torch.bfloat16, device="cuda")
    group.all_reduce(partial_sum)
    torch.cuda.synchronize()
    group.base.all_gather(torch.zeros(1))
    began = time.monotonic()
    if group.rank == 0:
        for _ in range(20):
            group.all_reduce(partial_sum)
        torch.cuda.synchronize()
    waited = time.monotonic() - began
    group.base.all_gather(torch.zeros(1))
    return group.problem(), waited


def aborted(group: SymmetricGroup) -> float:
    """Rank 0 exchanges with ranks that never do, and another thread aborts: the seconds until its GPU is free."""
    partial_sum = torch.ones(4, 4096, dtype=torch.bfloat16, device="cuda")
    group.all_reduce(partial_sum)
    torch.cuda.synchronize()
    group.base.all_gather(torch.zeros(1))
    began = time.monotonic()
    if group.rank == 0:
        threading.Timer(0.3, group.abort).start()
        group.all_reduce(partial_sum)
        torch.cuda.synchronize()
    waited = time.monotonic() - began
    group.base.all_gather(torch.zeros(1))
    return waited
