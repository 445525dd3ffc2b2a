"""What a process holds, counted: so that a long run can show that it held no more at its end than near its beginning."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import torch

WATCHED = ("specdec.", "asyncio", "_asyncio", "starlette.", "fastapi.", "uvicorn.", "anyio.", "concurrent.")
ALSO = ("coroutine", "async_generator", "generator", "Task", "Future", "socket")
CONTAINERS = (list, dict, set, deque)
MAX_BYTES = 32 << 20


@dataclass
class Held:
    """threads: by name, without their numbers.  objects: of the server's own types, by type.  sizes: of containers, by id."""

    threads: Counter[str]
    files: int
    objects: Counter[str]
    sizes: dict[int, int]
    rss: int
    gpu: int


def held() -> Held:
    """What this process holds now, after collecting garbage."""
    gc.collect()
    memory = rss()  # before the counting, which needs memory too
    everything = gc.get_objects()
    sizes = {id(thing): len(thing) for thing in everything if type(thing) in CONTAINERS}
    objects: Counter[str] = Counter()
    for kind, count in Counter(map(type, everything)).items():  # names by type, because there are millions of objects
        if kind not in CONTAINERS and (str(kind.__module__).startswith(WATCHED) or kind.__name__ in ALSO):
            objects[f"{kind.__module__}.{kind.__qualname__}"] += count
    return Held(threads(), len(os.listdir("/proc/self/fd")), objects, sizes, memory, gpu_bytes())


def threads() -> Counter[str]:
    return Counter(thread.name.rstrip("0123456789_-") for thread in threading.enumerate())


def rss() -> int:
    """Bytes of memory that the process occupies."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def gpu_bytes() -> int:
    """Bytes of tensors on the GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def more_of(before: Held, after: Held, requests: int) -> list[str]:
    """What grew between two moments in which nothing ran, with so many requests between them.

    Memory may grow by 32 MiB in all: allocators keep what they were given, and rare sizes of batches need buffers of their own.
    Objects of the server's types may become more by one in a hundred requests, or 24, containers longer by one in ten, or 48,
    which leaves room for caches that fill up: what tokens do to a text that waits for its call is kept, for example.
    """
    found = [f"threads: {after.threads - before.threads}"] if after.threads - before.threads else []
    if after.files > before.files:
        found.append(f"open files: {before.files}, then {after.files}")
    for name, was, became in (("memory", before.rss, after.rss), ("GPU memory", before.gpu, after.gpu)):
        if became - was > MAX_BYTES:
            found.append(f"{name}: {was >> 20} MiB, then {became >> 20}")
    grown = {kind: count - before.objects[kind] for kind, count in after.objects.items()}
    found += [f"{more} more objects of {kind}" for kind, more in grown.items() if more > max(24, requests // 100)]
    return found + [f"a container grew: {line}" for line in grown_containers(before, after, max(48, requests // 10))]


def grown_containers(before: Held, after: Held, most: int) -> list[str]:
    """The beginnings of containers that were there before and have become longer by more than `most`."""
    longer = {key for key, size in after.sizes.items() if key in before.sizes and size - before.sizes[key] > most}
    return [
        f"{type(thing).__name__} from {before.sizes[id(thing)]} to {len(thing)}: {summary(thing)}"
        for thing in gc.get_objects()
        if id(thing) in longer and type(thing) in CONTAINERS and thing is not before.sizes and thing is not after.sizes
    ]


def summary(thing: Any) -> str:
    """What a container holds, in one line."""
    kinds = Counter(type(item).__name__ for item in list(thing)[-50:])
    return f"{dict(kinds)}, last {str(list(thing)[-1:])[:200]}"
