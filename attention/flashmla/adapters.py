"""FlashMLA's kernels as our backend calls them: each call takes a segment over latents and returns its state.

The calls are those of DeepSeek's package `flash_mla`; this module translates layouts and conventions, and holds no kernel.
- Pages of 64 latents in 16 bits, for rows of equally many queries, each over its row's keys, causal or not.
- Rows of slots, one query each, as sparse attention leaves them, over latents in bfloat16 or over 656 bytes a token.

The library's own kernels are for Hopper GPUs and DeepSeek's dims, 512 + 64.  A query without keys comes back from it with lse
+inf.

Shapes: T queries, R rows, n queries of each, H heads, C latent rank, L latent width, P page size, I slots of a row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from specdec.attention.caches.fp8_latent import Fp8LatentView, quantise_latents
from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.pages import PageTable
from specdec.attention.segment import Segment, uniform_cu_seqlens
from specdec.attention.state import AttentionState
from specdec.ops.index import arange

PAGE, RANK, WIDTH = 64, 512, 576  # P, C and L
ROW_HEADS = (64, 128)  # the numbers of heads of which the library has kernels over rows of slots
MULTIPLES = {False: 128, True: 64}  # of slots in a row, over latents in 16 bits and in 8
# The kernel over rows in 16 bits is one for prompts: it does not divide a query's keys over the GPU.  Fewer rows are left to
# our kernel.  Measured: benchmarks/latent/README.md, "FlashMLA".
MIN_ROWS = 33
MAX_QUERIES = 2048  # of a call over pages: its float32 scratch takes about 512 MB for so many queries of 128 heads


def reads_pages(q_THL: Tensor, view: LatentView, segment: Segment) -> bool:
    """Whether the library answers this segment as pages."""
    return (
        isinstance(view, MLAView)
        and segment.pages.page_size == PAGE
        and not (segment.ragged or segment.is_per_query)
        and 0 < q_THL.shape[0] <= MAX_QUERIES
        and q_THL.shape[0] == segment.rows * segment.max_seqlen_q
    )


def reads_rows(q_THL: Tensor, view: LatentView, segment: Segment, min_rows: int = MIN_ROWS) -> bool:
    """Whether the library answers this segment as rows of slots."""
    (T, H, _), eight_bits = q_THL.shape, isinstance(view, Fp8LatentView)
    return (
        segment.pages.page_size == segment.max_seqlen_q == 1
        and not (segment.ragged or segment.is_per_query)
        and T == segment.rows
        and q_THL.dtype == torch.bfloat16
        and H in ROW_HEADS
        and segment.pages.capacity % MULTIPLES[eight_bits] == 0
        and T >= (1 if eight_bits else min_rows)
    )


def new_schedule() -> Any:
    """How a call's work is divided over the GPU.  The library fills it in the first call that is given it."""
    from flash_mla import get_mla_metadata

    return get_mla_metadata()[0]


def pages_state(q_THL: Tensor, view: MLAView, segment: Segment, scale: float, schedule: Any) -> AttentionState:
    """The state over pages.  schedule: of calls with the same lengths, queries and heads."""
    from flash_mla import flash_mla_with_kvcache

    q_RnHL = q_THL.unflatten(0, (segment.rows, segment.max_seqlen_q))
    pages = view.latent.unflatten(0, (-1, PAGE))[:, :, None]
    out_RnHC, lse_RHn = flash_mla_with_kvcache(
        q_RnHL, pages, segment.pages.table, segment.cache_seqlens, view.rank, schedule, softmax_scale=scale,
        causal=segment.causal,
    )  # fmt: skip
    return _state(out_RnHC.flatten(0, 1), lse_RHn.transpose(1, 2).flatten(0, 1))


def rows_state(q_THL: Tensor, view: MLAView, segment: Segment, scale: float) -> AttentionState:
    """The state over rows of slots of latents in 16 bits.  What lies in a row after its last key is not used."""
    from flash_mla import flash_mla_sparse_fwd

    slots_T1I, lens_T = segment.pages.table[:, None], segment.cache_seqlens
    out_THC, _, lse_TH = flash_mla_sparse_fwd(
        q_THL, view.latent[:, None], slots_T1I, scale, d_v=view.rank, topk_length=lens_T
    )  # fmt: skip
    return _state(out_THC, lse_TH)


def byte_rows_state(q_THL: Tensor, view: Fp8LatentView, segment: Segment, scale: float, schedule: Any) -> AttentionState:
    """The state over rows of slots of 656 bytes each.  schedule: of calls with as many queries, heads and slots.

    This kernel takes no lengths: what lies in a row after its last key is handed over as -1.
    """
    from flash_mla import flash_mla_with_kvcache

    slots_TI, lens_T = segment.pages.table, segment.cache_seqlens
    slots_TI = torch.where(arange(slots_TI.shape[1], slots_TI.device) < lens_T[:, None], slots_TI, -1)
    bytes_of = view.rows.unflatten(0, (-1, 1))[:, :, None]
    out_T1HC, lse_TH1 = flash_mla_with_kvcache(
        q_THL[:, None], bytes_of, None, None, view.rank, schedule, softmax_scale=scale, is_fp8_kvcache=True,
        indices=slots_TI[:, None],
    )  # fmt: skip
    return _state(out_T1HC[:, 0], lse_TH1[:, :, 0])


def _state(out_THC: Tensor, lse_TH: Tensor) -> AttentionState:
    """A state whose empty rows have lse -inf instead of the library's +inf.  The given lse is changed in place."""
    lse_TH = lse_TH.contiguous()
    return AttentionState(out_THC, torch.nan_to_num_(lse_TH, nan=math.nan, posinf=-math.inf, neginf=-math.inf))


@torch.inference_mode()
def check_conventions(q_THL: Tensor, view: LatentView, like: Segment) -> None:
    """Asks the library for two results that are known: that lse is a natural log, and that a row without keys is empty.

    The check's call has the dtype and heads of q, and is of the kind of `like`.  Raises RuntimeError if the installed
    library answers otherwise.
    """
    (_, H, L), device, scale, keys = q_THL.shape, q_THL.device, 1 / 64, 3
    ones_XL, lens_R = torch.ones(PAGE, L, dtype=q_THL.dtype, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    lens_R[0] = keys
    n, P, width = min(like.max_seqlen_q, 8), like.pages.page_size, 1 if like.pages.page_size == PAGE else like.pages.capacity
    table_RW = (torch.arange(2 * width, dtype=torch.int32, device=device) % (PAGE // P)).view(2, width)
    segment = Segment(PageTable(table_RW, P), lens_R, uniform_cu_seqlens(2, n, device), n, like.causal)
    q_THL = torch.ones(2 * n, H, L, dtype=q_THL.dtype, device=device)
    if isinstance(view, Fp8LatentView):
        state = byte_rows_state(q_THL, Fp8LatentView(quantise_latents(ones_XL, RANK), RANK), segment, scale, new_schedule())
    elif P == PAGE:
        state = pages_state(q_THL, MLAView(ones_XL, RANK), segment, scale, new_schedule())
    else:
        state = rows_state(q_THL, MLAView(ones_XL, RANK), segment, scale)
    want, got = L * scale + math.log(keys), float(state.lse_TH[n - 1, 0])  # the row's last query reads all keys
    empty = (float(state.lse_TH[n:].max()), float(state.out_THD[n:].abs().max()))
    if abs(got - want) > 1e-2 * want or empty != (-math.inf, 0.0):
        raise RuntimeError(
            f"flashmla: the installed library answers lse {got:.4f} where the natural log is {want:.4f}, and lse, output "
            f"{empty} where no key is read; expected (-inf, 0.0).  Nearest setting that works: attention='triton'"
        )
