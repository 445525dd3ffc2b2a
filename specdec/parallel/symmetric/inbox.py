"""The memory through which ranks reach each other: what lies where in it, and how a rank opens the others'.

GPUs of one machine share memory by CUDA's handles for other processes.  The driver gives them out for memory that it has itself
allocated, and opens them on the GPU that is current.  (torch would open them on the GPU that they come from, and so make a
context there, which takes memory.)
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.ops.launch import has_triton
from specdec.parallel.group import Group

# Programs of one exchange at most.  A GPU must hold all of them at once, or one that runs may wait for one that can't start; so
# there are no more than multiprocessors.
CHANNELS = 128
BLOCK = 512  # pairs of words of a small tensor that one program exchanges
ROW_BYTES = 32768  # of the longest row that is exchanged: 16,384 numbers of 16 bits
ROOM = 64 << 20  # bytes of an inbox for exchanges of many rows; more rows go in several exchanges
MARKS = 128  # rows that a channel takes from each sender in one exchange, at most
HANDLE_BYTES = 64


class Layout(NamedTuple):
    """What lies where in every rank's inbox: messages, then rows, then the marks of rows.

    channels: programs of one exchange at most.  row_bytes: of the longest row that is exchanged, a multiple of 16.  room: bytes
    for rows.
    """

    ranks: int
    channels: int = CHANNELS
    row_bytes: int = ROW_BYTES
    room: int = ROOM

    @property
    def capacity(self) -> int:
        """Messages from each sender to a channel."""
        return max(2 * BLOCK, self.row_bytes // 4)

    @property
    def words(self) -> int:
        """The most words of 32 bits that a rank sends to another in one exchange of messages."""
        return self.channels * (self.capacity // (2 * BLOCK)) * 2 * BLOCK

    @property
    def area(self) -> int:
        """Bytes of rows from each sender to a channel."""
        return max(self.row_bytes, self.room // self._areas // 16 * 16)

    def slots(self, row_bytes: int) -> int:
        """Rows of that length from each sender to a channel."""
        return min(self.area // row_bytes, MARKS)

    @property
    def rows_at(self) -> int:
        return self._areas * self.capacity * 8

    @property
    def marks_at(self) -> int:
        return self.rows_at + self._areas * self.area

    @property
    def num_bytes(self) -> int:
        return self.marks_at + self._areas * MARKS * 4

    @property
    def _areas(self) -> int:
        return self.channels * 2 * (self.ranks - 1)


class Inbox(NamedTuple):
    """What kernels are given of one rank.

    table_X: int64, the addresses of all ranks' inboxes, then that of `fault`.  counts_C: int32, the calls of each channel.
    fault: one int32 in memory of the host that the GPU reaches too; 0 while nothing has failed.
    """

    layout: Layout
    table_X: Tensor
    counts_C: Tensor
    fault: Tensor


class Unreachable(RuntimeError):
    """A rank can't reach another rank's memory."""


def open_inboxes(group: Group, device: torch.device) -> tuple[Inbox, Callable[[], None]]:
    """This rank's inbox, with all others' opened, and a function that gives everything back.  All ranks of the group call it.

    Unreachable, on all ranks alike, if one can't reach another.
    """
    programs = group.all_reduce_min(torch.cuda.get_device_properties(device).multi_processor_count, device)
    layout = Layout(group.size, min(CHANNELS, int(programs)))
    for rank, machine in enumerate(_gather_bytes(group, _machine(), device)):
        if machine != _machine():
            raise Unreachable(f"ranks {group.rank} and {rank} are on two machines")
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the GPU's context current
        opened: list[int] = []
        own, problem, handle = 0, "", bytes(HANDLE_BYTES)
        try:
            _check_kernels(device)
            own = _allocate(layout.num_bytes)
            handle = _handle_of(own)
        except Unreachable as error:
            problem = f"rank {group.rank}: {error}"
        handles = _gather_bytes(group, handle, device)  # after which every inbox is empty
        addresses = []
        for rank, other in enumerate(handles):
            if rank == group.rank:
                addresses.append(own)
            elif not problem:
                try:
                    opened.append(_open(other))
                    addresses.append(opened[-1])
                except Unreachable as error:
                    problem = f"rank {group.rank} can't open the memory of rank {rank}: {error}"
        problems = [
            text.rstrip(b"\0").decode(errors="replace")
            for text in _gather_bytes(group, problem.encode()[:200].ljust(200, b"\0"), device)
        ]
    give_back = partial(_release, device, own, opened)
    if any(problems):
        give_back()
        raise Unreachable("; ".join(text for text in problems if text))
    fault = torch.zeros(1, dtype=torch.int32, pin_memory=True, device="cpu")
    table_X = torch.tensor([*addresses, fault.data_ptr()], dtype=torch.int64, device=device)
    counts_C = torch.zeros(layout.channels, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)  # kernels read these before they wait for the work in front of them
    return Inbox(layout, table_X, counts_C, fault), give_back


def _check_kernels(device: torch.device) -> None:
    if not has_triton() or torch.cuda.get_device_capability(device) < (8, 0):
        raise Unreachable("exchanges through GPUs' memory need Triton, and a GPU of compute capability 8.0 or later")


def _gather_bytes(group: Group, data: bytes, device: torch.device) -> list[bytes]:
    mine = torch.tensor(list(data), dtype=torch.uint8, device=device)
    return [bytes(each) for each in group.all_gather(mine).tolist()]


def _machine() -> bytes:
    """What tells this machine from others, in 64 bytes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text().strip() if boot.is_file() else platform.node()
    return name.encode()[:64].ljust(64, b"\0")


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_byte * HANDLE_BYTES),)


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    address, number = ctypes.c_uint64, ctypes.c_uint
    driver.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    driver.cuMemAlloc_v2.argtypes = [ctypes.POINTER(address), ctypes.c_size_t]
    driver.cuMemsetD32_v2.argtypes = [address, number, ctypes.c_size_t]
    driver.cuMemFree_v2.argtypes = [address]
    driver.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), address]
    driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(address), _Handle, number]
    driver.cuIpcCloseMemHandle.argtypes = [address]
    return driver


def _check(code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise Unreachable((text.value or b"error %d" % code).decode())


def _allocate(num_bytes: int) -> int:
    address = ctypes.c_uint64()
    _check(_driver().cuMemAlloc_v2(ctypes.byref(address), num_bytes))
    _check(_driver().cuMemsetD32_v2(address, 0, num_bytes // 4))
    torch.cuda.synchronize()
    return address.value


def _handle_of(address: int) -> bytes:
    handle = _Handle()
    _check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), address))
    return bytes(handle)


def _open(handle: bytes) -> int:
    address, reach_peers = ctypes.c_uint64(), 1
    _check(_driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), _Handle.from_buffer_copy(handle), reach_peers))
    return address.value


def _release(device: torch.device, own: int, opened: list[int]) -> None:
    """Errors do not count: a GPU that has failed, or a process that ends, has given back everything already."""
    with torch.cuda.device(device):
        for address in opened:
            _driver().cuIpcCloseMemHandle(address)
        if own:
            _driver().cuMemFree_v2(own)
