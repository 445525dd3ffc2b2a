"""Picking rows out of each sequence's rows: the features along a path, or the last accepted row.

On a CPU and under autograd the definition here runs; on a GPU it is one launch of rows_triton.py.

Shapes: B sequences, N rows of a sequence, E picked rows, F columns.
"""

from __future__ import annotations

from torch import Tensor

from specdec.ops.launch import use_kernels


def take_rows(x_BNF: Tensor, index_BE: Tensor, out: Tensor | None = None) -> Tensor:
    """[B, E, F]: row index_BE[b, e] (int64) of sequence b.  out: memory for the result, contiguous."""
    if use_kernels(x_BNF):
        from specdec.ops.rows_triton import launch_take_rows

        return launch_take_rows(x_BNF, index_BE, out)
    taken_BEF = x_BNF.gather(1, index_BE[..., None].expand(-1, -1, x_BNF.shape[2]))
    return taken_BEF if out is None else out.copy_(taken_BEF)


def select_rows(x_TF: Tensor, rows_R: Tensor) -> Tensor:
    """[R, F]: the given rows (int64) of a whole batch."""
    return take_rows(x_TF[None], rows_R[None])[0]
