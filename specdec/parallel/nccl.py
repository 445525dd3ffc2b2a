"""A group of ranks with a GPU each, over NCCL.

NCCL is called directly, on the stream that is current: torch's process group would run each exchange through a stream and
events of its own, watch it from threads that may end the process, and take the host several times as long.  Exchanges can be
captured in CUDA graphs.  This module knows no model and no process.

Shapes: N ranks.
"""

from __future__ import annotations

import ctypes
import os
import threading
from copy import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specdec.parallel.group import Group

# What NCCL is told, unless the environment says otherwise.  The messages of a round are far too small for NVLink's multicast
# to gain anything, and it hangs on machines whose switch is not set up for it.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0"}
_TYPES = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}  # NCCL's numbers of dtypes
_BYTES, _SUM = 1, 0


class UniqueId(ctypes.Structure):
    """What the ranks of a communicator know each other by."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


class NcclGroup(Group):
    """One of several ranks.  name: what `new_name` gave the first rank.  Blocks until all ranks have come."""

    def __init__(self, name: bytes, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._nccl, self._comm, self._ending = library(), ctypes.c_void_p(), threading.Lock()
        self._neighbours: dict[int, NcclGroup] = {}
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes the GPU's context
            _check(self._nccl.ncclCommInitRank(ctypes.byref(self._comm), size, UniqueId.from_buffer_copy(name), rank))

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        all_N = x.new_empty((self.size, *x.shape))
        count = x.numel() * x.element_size()
        if count:
            _check(self._nccl.ncclAllGather(x.data_ptr(), all_N.data_ptr(), count, _BYTES, self._comm, self._stream))
        return all_N

    def all_to_all(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        received = torch.empty_like(x)
        if x.numel():
            _check(self._nccl.ncclGroupStart())
            for rank, (mine, theirs) in enumerate(zip(x, received, strict=True)):
                where = mine.numel() * mine.element_size(), _BYTES, rank, self._comm, self._stream
                _check(self._nccl.ncclSend(mine.data_ptr(), *where))
                _check(self._nccl.ncclRecv(theirs.data_ptr(), *where))
            _check(self._nccl.ncclGroupEnd())
        return received

    def neighbours(self, size: int) -> Group:
        if size == self.size:
            return self
        if size not in self._neighbours:
            self._neighbours[size] = self._split(size)
        return self._neighbours[size]

    def _split(self, size: int) -> NcclGroup:
        """A communicator of this rank's `size` adjacent ranks.  Blocks until all ranks have asked for theirs."""
        assert self.size % size == 0, (self.size, size)
        part = copy(self)
        part.rank, part.size = self.rank % size, size
        part._comm, part._ending, part._neighbours = ctypes.c_void_p(), threading.Lock(), {}
        with torch.cuda.device(self.device):
            where = self._comm, self.rank // size, self.rank, ctypes.byref(part._comm), None
            _check(self._nccl.ncclCommSplit(*where))
        return part

    def all_reduce(self, x: Tensor) -> Tensor:
        """x of all ranks.  With more than two, NCCL adds in an order of its own, which depends on the size of x; so where one
        order is asked for, x travels whole.
        """
        if self.one_order:
            return super().all_reduce(x)
        x, total = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel():
            where = x.data_ptr(), total.data_ptr(), x.numel()
            _check(self._nccl.ncclAllReduce(*where, _TYPES[x.dtype], _SUM, self._comm, self._stream))
        return total

    def abort(self) -> None:
        for part in self._neighbours.values():
            part.abort()
        with self._ending:
            comm, self._comm = self._comm, ctypes.c_void_p()
        if comm.value:
            self._nccl.ncclCommAbort(comm)

    @property
    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)


@cache
def library() -> Any:
    """NCCL, as torch has loaded it.  RuntimeError if there is none."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise RuntimeError(
            f"ranks on GPUs need NCCL, libnccl.so.2, which torch's own packages for CUDA bring: {error}; nearest setting that "
            "works: tensor_parallel_size=1"
        ) from error
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    nccl.ncclGetLastError.restype, nccl.ncclGetLastError.argtypes = ctypes.c_char_p, [pointer]
    nccl.ncclGetUniqueId.argtypes = [ctypes.POINTER(UniqueId)]
    nccl.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, UniqueId, number]
    nccl.ncclAllGather.argtypes = [pointer, pointer, size, number, pointer, pointer]
    nccl.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    nccl.ncclCommAbort.argtypes = [pointer]
    nccl.ncclSend.argtypes = nccl.ncclRecv.argtypes = [pointer, size, number, number, pointer, pointer]
    nccl.ncclCommSplit.argtypes = [pointer, number, number, ctypes.POINTER(pointer), pointer]
    return nccl


def new_name() -> bytes:
    """A name for a new group of ranks, which the first rank passes to the others."""
    name = UniqueId()
    _check(library().ncclGetUniqueId(ctypes.byref(name)))
    return bytes(name)


def version() -> str:
    """NCCL's version."""
    number = ctypes.c_int()
    _check(library().ncclGetVersion(ctypes.byref(number)))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def _check(code: int) -> None:
    if code:
        nccl = library()
        why = [text.decode() for text in (nccl.ncclGetErrorString(code), nccl.ncclGetLastError(None)) if text]
        raise RuntimeError(f"NCCL failed: {', '.join(why)}")
