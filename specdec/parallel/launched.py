"""Ranks that a launcher such as torchrun has started: each process finds its place in the environment.

The first rank waits for a connection of each other one, over which it then passes messages, as to processes of its own.
Ranks may be on several machines.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
from itertools import count
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple

import torch.distributed as dist

from specdec.parallel.processes import PATIENCE, START_PATIENCE, OtherRanks, RankPipe, RankWork, Rendezvous, run_work

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_meetings = count()  # of this process; all ranks make the same ones, in the same order


class LaunchedProcess(NamedTuple):
    """What a launcher says of this process.  local_rank: its number on its machine, of `local_size`."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def launched(size: int) -> LaunchedProcess | None:
    """This process's place, if a launcher has started `size` ranks; None for one rank, or where no launcher has.

    ValueError if it has started another number of processes.
    """
    if size == 1 or not all(os.environ.get(name) for name in VARIABLES) or os.environ["WORLD_SIZE"] == "1":
        return None
    rank, found = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if found != size:
        raise ValueError(
            f"tensor_parallel_size must be the number of processes that the launcher has started, {found}, got {size}; nearest "
            f"setting that works: tensor_parallel_size={found}"
        )
    return LaunchedProcess(rank, size, int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size)))


def meet_others(process: LaunchedProcess) -> OtherRanks:
    """The other ranks, once all of them have connected to this one, the first."""
    store = _meet(process)
    host, key = os.environ["MASTER_ADDR"], secrets.token_bytes(32)
    pipes: dict[int, Connection] = {}
    with socket.create_server((host, 0)) as server:
        store.set("first rank", f"{server.getsockname()[1]} {key.hex()}")
        server.settimeout(START_PATIENCE.total_seconds())
        while len(pipes) < process.size - 1:
            pipe = _pipe_of(server.accept()[0])
            deliver_challenge(pipe, key)
            answer_challenge(pipe, key)
            pipes[pipe.recv()] = pipe
    return OtherRanks(Rendezvous(0, process.size, store), [pipes[rank] for rank in range(1, process.size)], [])


def run_other_rank(process: LaunchedProcess, work: RankWork) -> None:
    """Runs the work of this rank, which is not the first.  See `run_work`."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first rank's, which ends the others
    store = _meet(process)
    port, key = store.get("first rank").decode().split()
    address = os.environ["MASTER_ADDR"], int(port)
    pipe = _pipe_of(socket.create_connection(address, timeout=PATIENCE.total_seconds()))
    answer_challenge(pipe, bytes.fromhex(key))
    deliver_challenge(pipe, bytes.fromhex(key))
    pipe.send(process.rank)
    run_work(work, Rendezvous(process.rank, process.size, store), RankPipe(pipe))


def _meet(process: LaunchedProcess) -> dist.Store:
    """A store of the ranks' own for one decoder, within the launcher's."""
    store, _, _ = next(iter(dist.rendezvous("env://", timeout=START_PATIENCE)))
    return dist.PrefixStore(f"specdec/{next(_meetings)}", store)


def _pipe_of(line: socket.socket) -> Connection:
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a step must not wait for more to send
    return Connection(line.detach())
