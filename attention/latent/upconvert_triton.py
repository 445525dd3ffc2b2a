"""The kernel that converts rows of cached 8-bit latents to 16 or 32 bits, one after the other in a workspace.

`upconvert` in upconvert.py defines what it computes.  A program converts BLOCK latents of one row; programs beyond a row's end
do nothing.

Order of chained launches (specdec/ops/launch.py): everything is read after gdc_wait.

Shapes: B rows, W pages of a row, N latents of a program, C latent rank, R rotated dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.caches.latent_view import LatentView
from specdec.attention.kernels.tables_triton import slots_on
from specdec.attention.kernels.tiles_triton import padded
from specdec.attention.latent.keys import LatentKeys
from specdec.attention.latent.mla_triton import latents, rotated_parts
from specdec.attention.pages import PageTable
from specdec.ops.launch import chained

BLOCK = 16  # latents of a program


@triton.jit(do_not_specialize=["stride_row"], do_not_specialize_on_alignment=["page_table", "lens", "starts"])
def upconvert_kernel(
    latent,  # [slots, C]
    rope,  # [slots, R]
    scales,  # [slots, C / 128] float32
    page_table,  # [B, W] int32
    lens,  # [B] int32
    starts,  # [B] int32
    out,  # [rows of the workspace, C + R]
    stride_row,
    LATENT_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    SCALED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1)
    place_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok_N = place_N < tl.load(lens + row)
    page_N = tl.load(page_table + row.to(tl.int64) * stride_row + place_N // PAGE_SIZE, mask=ok_N, other=0)
    slot_N = slots_on(page_N, place_N, PAGE_SIZE)
    to: tl.constexpr = out.dtype.element_ty
    c_NC = latents(latent, scales, slot_N, ok_N, LATENT_STRIDE, SCALES_STRIDE, to, RANK, PADDED_RANK, SCALED)
    r_NR = rotated_parts(rope, slot_N, ok_N, ROPE_STRIDE, to, ROPE, PADDED_ROPE)
    to_N = out + (tl.load(starts + row).to(tl.int64) + place_N) * (RANK + ROPE)
    c, r = tl.arange(0, PADDED_RANK), tl.arange(0, PADDED_ROPE)
    tl.store(to_N[:, None] + c[None, :], c_NC, mask=ok_N[:, None] & (c < RANK)[None, :])
    tl.store(to_N[:, None] + RANK + r[None, :], r_NR, mask=ok_N[:, None] & (r < ROPE)[None, :])


def launch_upconvert(
    view: LatentView, pages: PageTable, lens_B: Tensor, starts_B: Tensor, max_len: int, out_NL: Tensor
) -> None:
    """`upconvert.upconvert` for rows of at most `max_len` latents."""
    C, L, keys = view.rank, view.width, LatentKeys.of(view)
    assert out_NL.is_contiguous() and out_NL.shape[1] == L and pages.table.stride(1) == 1
    upconvert_kernel[(triton.cdiv(max_len, BLOCK), lens_B.shape[0])](
        *keys.pointers, pages.table, lens_B, starts_B, out_NL, pages.table.stride(0),
        PAGE_SIZE=pages.page_size, RANK=C, PADDED_RANK=padded(C), ROPE=L - C, PADDED_ROPE=padded(L - C), BLOCK_N=BLOCK,
        num_warps=4, **keys.options, **chained(out_NL.device),
    )  # fmt: skip
