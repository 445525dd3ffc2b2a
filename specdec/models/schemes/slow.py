"""Where weights of 8 or 4 bits make decoding slower than unquantised ones, and what is said of it.

Few bits are fewer bytes to read, which is what a step waits for, if a kernel multiplies with the quantised values themselves.
Where none does, every pass dequantises the weights anew (ops/products/quantised.py).  Knows no checkpoint by name.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from specdec.models.schemes.rules import Quantization

FIRST = (9, 0)  # the first compute capability with kernels for quantised weights
NARROW = 32  # threshold in columns of a scale: groups of so few have no kernel for Hopper, and the general kernel was slower
CPU = (
    "on a CPU, where every pass dequantises them anew: a plain step of a model of 135M weights took 9 to 15 times as "
    "long in fp8, and 4 to 7 times in int4"
)
GROUPS = (
    "with a scale for each 32 columns or fewer: on an H200 a plain step of the Llama-3.1-8B shape took 7.5 ms (int8), 4.6 "
    "(int4) and 5.2 (mxfp4) in place of 3.7"
)


def slowness(groups: Collection[int], capability: tuple[int, int] | None, dtype: torch.dtype) -> tuple[str, str]:
    """Why such weights decode slower than unquantised ones, and which other setting helps besides giving them up.

    Both are empty where they don't, and the latter where there is none.
    groups: columns of a scale, in any of the matrices but experts', which have kernels of their own.  capability: of the GPU;
        None: a CPU.
    """
    if capability is None:
        return CPU, ""
    where = f"on a GPU of compute capability {'.'.join(map(str, capability))}"
    if capability < FIRST:
        return (
            f"{where}, for which there is no kernel that reads quantised weights, so that every pass dequantises them anew",
            "",
        )
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return f"in {name}, in which every pass dequantises them anew", "dtype='bfloat16'"
    if any(0 < group <= NARROW for group in groups):
        return GROUPS, ""
    return "", ""


def slow_warning(why: str, helps: str, quantization: Quantization) -> str:
    """What to tell whoever runs such weights.  why, helps: of `slowness`."""
    if quantization.setting or quantization.method == "gguf":
        plain = f"{quantization.setting or 'quantize'}='none'"
    else:
        plain = "an unquantised checkpoint" if why != GROUPS else "one with a scale for each 128 columns or each row"
    nearest = " or ".join(filter(None, (helps, plain)))
    what = f"weights in {quantization} save memory, but decode slower than unquantised ones {why}"
    return f"{what}; nearest that is faster: {nearest}"
