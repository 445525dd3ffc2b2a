"""The operators of latent attention (MLA): rotate and store latents, and attention of absorbed queries over pages of latents.

Shapes: T tokens or queries, H heads, C latent rank, R rotated dim, L = C + R, N slots, P positions, W table width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.attention.caches.fp8_latent import Fp8LatentView
from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.kinds import Scoring
from specdec.attention.latent.mla import store_latent
from specdec.attention.latent.prep import LatentPrep
from specdec.attention.operators.heads import backend_for
from specdec.attention.pages import PageTable
from specdec.attention.segment import Segment
from specdec.ops.operator import define, nothing_fake
from specdec.ops.rope import Rotation


def latents_of(view: LatentView) -> Tensor:
    """The tensor of a cache of latents: latents, or rows of 8-bit latents (uint8)."""
    if isinstance(view, Fp8LatentView):
        return view.rows
    assert isinstance(view, MLAView), view
    return view.latent


def latent_view(latent: Tensor, rank: int) -> LatentView:
    """The counterpart of `latents_of`."""
    return Fp8LatentView(latent, rank) if latent.dtype == torch.uint8 else MLAView(latent, rank)


def latent_store(
    q_THR: Tensor,
    fresh_TL: Tensor,
    latent: Tensor,
    out_THR: Tensor,
    slots_T: Tensor,
    positions_T: Tensor,
    table_P2R: Tensor,
    norm_C: Tensor,
    eps: float,
) -> None:
    """Norms and rotates fresh latents into their slots (int64), and rotates queries into out; q and fresh stay as they are.

    latent: see `latents_of`; latents are converted to its format.
    """
    prep = LatentPrep(Rotation(table_P2R, positions_T), norm_C, eps)
    if not latent.is_cuda:  # the definition works in place
        q_THR, fresh_TL = q_THR.clone(), fresh_TL.clone()
    store_latent(latent_view(latent, norm_C.shape[0]), q_THR, fresh_TL, slots_T, prep, out_THR)


def latent_attention(
    q_THL: Tensor,
    latent: Tensor,
    rank: int,
    table_RW: Tensor,
    lens_R: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    page_size: int,
    causal: bool,
    scale: float,
    starts_T: Tensor | None = None,
    span: int | None = None,
    ragged: bool = False,
) -> tuple[Tensor, Tensor]:
    """The state of every absorbed query over the latents of its row: out [T, H, C], and lse [T, H] in float32, natural log.

    latent: see `latents_of`.  rank: C.  The arguments after it are those of `heads.paged_attention`.
    """
    segment = Segment(
        PageTable(table_RW, page_size), lens_R, cu_seqlens_q, max_seqlen_q, causal, ragged, starts_T=starts_T, span=span
    )
    state = backend_for(q_THL).run(q_THL, latent_view(latent, rank), segment, Scoring(scale))
    return state.out_THD, state.lse_TH.float()


def latent_attention_fake(q_THL: Tensor, latent: Tensor, rank: int, *_: object) -> tuple[Tensor, Tensor]:
    """The state of absorbed queries: values are as wide as the rank."""
    shape = q_THL.shape[:2]
    return q_THL.new_empty(*shape, rank), q_THL.new_empty(shape, dtype=torch.float32)


LATENT_STORE = define(
    "latent_store(Tensor q, Tensor fresh, Tensor(a!) latent, Tensor(b!) out, Tensor slots, Tensor positions, Tensor table, "
    "Tensor norm, float eps) -> ()",
    latent_store,
    nothing_fake,
)
LATENT_ATTENTION = define(
    "latent_attention(Tensor q, Tensor latent, SymInt rank, Tensor table, Tensor lens, Tensor cu_seqlens_q, "
    "SymInt max_seqlen_q, SymInt page_size, bool causal, float scale, Tensor? starts=None, SymInt? span=None, "
    "bool ragged=False) -> (Tensor, Tensor)",
    latent_attention,
    latent_attention_fake,
)
