"""Picking rows out of each sequence's rows: the features along a path, or the last accepted row; columns in another order;
and joining columns of ids.

On a CPU and under autograd the definition here runs; on a GPU it is one launch of rows_triton.py.

Shapes: B sequences, N rows of a sequence, E picked rows, F columns, S ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.ops.index import arange, use_index_kernels
from specdec.ops.launch import use_kernels


def take_rows(x_BNF: Tensor, index_BE: Tensor, out: Tensor | None = None) -> Tensor:
    """[B, E, F]: row index_BE[b, e] (int64) of sequence b.  out: memory for the result, contiguous."""
    if use_kernels(x_BNF):
        from specdec.ops.rows_triton import launch_take_rows

        return launch_take_rows(x_BNF, index_BE, out)
    taken_BEF = x_BNF.gather(1, index_BE[..., None].expand(-1, -1, x_BNF.shape[2]))
    return taken_BEF if out is None else out.copy_(taken_BEF)


def take_run(x_BNF: Tensor, first_B: Tensor, count: int, out: Tensor | None = None) -> Tensor:
    """[B, count, F]: `count` rows of each sequence from row first_B (int64) on.  out: as of `take_rows`."""
    if use_kernels(x_BNF):
        from specdec.ops.rows_triton import launch_take_rows

        return launch_take_rows(x_BNF, first_B[:, None], out, run=count)
    return take_rows(x_BNF, first_B[:, None] + arange(count, x_BNF.device), out)


def take_columns(x: Tensor, order_F: Tensor) -> Tensor:
    """[..., F]: the columns of x that order_F (int32) names.

    On a GPU torch's index_select keeps the product after it from starting early (measured: benchmarks/products/README.md,
    "Weights in 8 and 4 bits").
    """
    if use_kernels(x):
        from specdec.ops.rows_triton import launch_take_columns

        return launch_take_columns(x, order_F)
    return x.index_select(-1, order_F)


def prepend(first_B: Tensor, ids_BS: Tensor) -> Tensor:
    """[B, 1 + S] int64: a column in front of others."""
    if use_index_kernels(ids_BS):
        from specdec.ops.rows_triton import launch_prepend

        return launch_prepend(first_B, ids_BS)
    return torch.cat((first_B[:, None], ids_BS), dim=1)


def select_rows(x_TF: Tensor, rows_R: Tensor) -> Tensor:
    """[R, F]: the given rows (int64) of a whole batch."""
    return take_rows(x_TF[None], rows_R[None])[0]
