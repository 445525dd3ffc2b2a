"""The gate on an output, without a norm: of attention in Qwen3-Next and Qwen3.5 (a sigmoid), of Mamba-2 in Falcon-H1 (SiLU).

On a CPU and under autograd the definition here runs; on a GPU it is one launch of output_gate_triton.py.  Both round what opens
to the dtype of the gate before it is multiplied, as transformers does.

Shapes: T tokens, R rows asked for, Q heads, D head dimension.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import use_kernels


def gated_output(out_RQD: Tensor, gate_TQD: Tensor, rows_R: Tensor | None = None, silu: bool = False) -> Tensor:
    """[R, Q * D]: out * sigmoid(gate of the same token), or out * silu of it.

    rows_R: int64, which of the T tokens' outputs these are; None: all.  A token's gates lie side by side.
    """
    if use_kernels(out_RQD):
        from specdec.ops.recurrent.gates.output_gate_triton import launch_gated_output

        return launch_gated_output(out_RQD, gate_TQD, rows_R, silu)
    gate_RQD = gate_TQD if rows_R is None else gate_TQD.index_select(0, rows_R)
    return (out_RQD * (F.silu(gate_RQD) if silu else gate_RQD.sigmoid())).flatten(1)
