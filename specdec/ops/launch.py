"""When specdec's kernels run, and how one kernel may start before the kernel in front of it is complete.

Every package that launches Triton uses this module; it knows no kernel.

On Hopper and later, launches are chained by programmatic dependent launch (PDL).  A chained kernel starts as soon as every
program of the kernel in front of it has executed `gdc_launch_dependents` (the trigger, T below) or has ended.  `gdc_wait`
blocks a program until the kernel in front is complete and its writes are visible.  Three kernels A, B and C, launched in this
order on one stream:

    time -->
    A  |setup|T|wait|== reads, writes ===|
    B           |setup|T|... gdc_wait ...|== reads, writes ===|
    C                    |setup|......... gdc_wait ...........|== reads, writes ===|

Here A and B trigger before their own waits, so C starts while A is still running.

Rules for every chained kernel C.  Breaking one is a data race, which tests may not show.
- Every program of C executes gdc_wait, and writes no memory before it.  B ends after its own wait, and so did A; therefore A, B
  and all earlier kernels are complete when C's wait is over.  From then on C may read and write anything, and memory that
  earlier kernels used may be reused as if nothing overlapped.
- Before its wait, C may read only what is known to be complete when C starts.  Weights always qualify, because no kernel writes
  them.  The other cases depend on where the kernels in front trigger.
- Complete is not visible: only gdc_wait makes writes visible to plain loads, and until then an SM's L1 cache may hold what
  stood there before.  Memory of a graph's pool is used again and again, so that an old value there may be a token id, and now
  a slot is read.  Loads before the wait of anything that kernels write therefore come from L2 (cache_modifier=".cg"), where
  every complete kernel's writes are.
- B triggers after its wait ("late"): every program of B has seen A complete.  Before its wait, C may read what A and all
  earlier kernels wrote; it must not read what B wrote.
- B triggers before its wait ("early"): A may still be running.  Before its wait, C must not read what A or B wrote.  If A
  triggers late, the kernels in front of A are complete, and C may read what they wrote; if A triggers early too, the same
  question arises one kernel further in front.
- B never triggers, or is no chained kernel (cuBLAS, torch): C starts when B is complete, and may read everything.

compiling/chains.py is the table of all kernels: when each triggers and why, and what it reads before its wait.
"""

from __future__ import annotations

import importlib.util
import threading
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specdec.ops.operator import is_traced

PDL_FROM = (9, 0)  # the first compute capability whose launches can be chained
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def use_kernels(x: Tensor) -> bool:
    """Whether specdec's kernels compute on x: x is on a GPU, has a dtype that they know, and no gradient is recorded.

    While a pass is traced no kernel is launched: functions without an operator (operator.py) are recorded as they are defined.
    """
    if not x.is_cuda or is_traced(x):
        return False
    return x.dtype in KERNEL_DTYPES and not torch.is_grad_enabled() and has_triton()


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@cache
def has_gluon() -> bool:
    """Whether the installed Triton has Gluon, in which the kernels for Hopper GPUs alone are written."""
    return importlib.util.find_spec("triton.experimental.gluon") is not None


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether kernels can be chained by programmatic dependent launch: on compute capability 9.0 or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= PDL_FROM


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have.  Triton's interpreter on a CPU knows no limit."""
    if device.type != "cuda":
        return 1 << 30
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the field
    bytes_: int = properties.shared_memory_per_block_optin
    return bytes_


_launching: defaultdict[torch.device, threading.Lock] = defaultdict(threading.Lock)


def launching(device: torch.device) -> AbstractContextManager[object]:
    """Keeps the launches of a block together: no other thread launches on that device meanwhile.

    The rules for chained kernels are about the kernels in front on the stream, and the threads of two decoders share a stream.
    """
    return _launching[device] if device.type == "cuda" else nullcontext()


def chained(device: torch.device) -> dict[str, Any]:
    """Launch options of a chained kernel: its constexpr PDL, and the launch attribute where the GPU supports it."""
    return {"PDL": True, "launch_pdl": True} if has_pdl(device) else {"PDL": False}
