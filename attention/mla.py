"""Multi-head latent attention (MLA, arXiv 2405.04434) in front of a paged cache of latents.

A pass of few queries a row (decode, chains, trees, short prompts) is *absorbed*: the projection from latent to keys goes into
the queries, so that they meet the latents as they lie in the cache, and the one to values comes behind attention.  A long
prompt is *expanded*: heads get keys and values of their own, as many numbers as the model says, which is less arithmetic a
pair of query and key, and a fixed amount a key more.  The rule: more than EXPAND_ABOVE queries in some row.  Both give the
same numbers.  Layers do not ask; the plan says.

What a prompt finds in the cache (an earlier chunk of it, a cached prefix) is expanded EXPANDED_TOKENS at a time, and the
states are merged.

Shapes: T tokens, H heads, C latent rank, R rotated dim, N not rotated dim, V value dim, L = C + R, Q = N + R, X = N + V,
B rows, W keys of a row at a time, E expanded keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.attention.attend import PagedAttention
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.kv_cache import MHAView
from specdec.attention.mla_cache import MLAView
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.state import merge_states
from specdec.ops.launch import use_kernels
from specdec.ops.rope import HeadPrep, Rotation
from specdec.ops.rows import select_rows

# Absorbed, a pair of query and key costs a head 2C + R products, expanded N + R + V, and every key 1/H of expanding it: with
# DeepSeek's dims they meet at 170 queries a row.  But the absorbed kernel is closer to the GPU's limit: on an H100 a pass of
# 1500 and 700 tokens took 1.65 ms a layer expanded and 2.0 absorbed; by those rates they meet between 400 and 700.
# Captured prompts (at most 256 tokens) must stay below: how many chunks the cached part of a row makes is the host's
# knowledge, and would be frozen in a graph.
EXPAND_ABOVE = 512
EXPANDED_TOKENS = 4096  # of cached latents at once, over all rows: with 128 heads 400 MB in bf16


@dataclass(frozen=True)
class LatentPrep:
    """What a layer wants done to its fresh queries and latents: norm_C and eps of the latent; the rotation of the rest."""

    rotation: Rotation
    norm_C: Tensor
    eps: float

    def apply_(self, q_THR: Tensor, latent_TL: Tensor) -> Tensor:
        """Rotates queries where they lie, and gives back the latents normed and rotated.  Both inputs are changed."""
        C = self.norm_C.shape[0]
        normed_TC = F.rms_norm(latent_TL[:, :C], (C,), self.norm_C, self.eps)
        self.rotation.rotate_(latent_TL[:, None, C:])
        self.rotation.rotate_(q_THR)
        return torch.cat((normed_TC, latent_TL[:, C:]), dim=1)


class ExpandedHeads:
    """Latent attention by an attention that keeps no latents (dense, in checks): every head with keys of its own."""

    def __init__(self, attn: Callable[..., Tensor]) -> None:
        self.attn = attn

    def __call__(
        self,
        layer: int,
        q_THQ: Tensor,
        latent_TL: Tensor,
        up_HXC: Tensor,
        prep: LatentPrep,
        rows_R: Tensor | None = None,
        scoring: Scoring = PLAIN,
    ) -> Tensor:
        """As MLAttention's."""
        H, X, C = up_HXC.shape
        N = q_THQ.shape[2] - (latent_TL.shape[1] - C)
        kv_T2HQ = expand(prep.apply_(q_THQ[..., N:], latent_TL), up_HXC, N).kv
        qkv_TXQ = torch.cat((q_THQ, kv_T2HQ.flatten(1, 2)), dim=1)
        return self.attn(layer, qkv_TXQ, HeadPrep(None, H), rows_R, scoring)[..., : X - N]


class MLAttention:
    """One forward pass's latent attention, called by each layer:
    `attn(layer, q_THQ, latent_TL, up_HXC, prep) -> out_THV`, of rows_R only if they are given.

    q_THQ: queries, the rotated part last, not rotated yet; changed.  latent_TL: neither normed nor rotated.  up_HXC: from
    latents to each head's keys (first N rows) and values.
    """

    def __init__(self, attn: PagedAttention) -> None:
        self.attn = attn
        self.prompt = ExpandedPrompt.of(attn.plan) if is_expanded(attn.plan) else None

    def __call__(
        self,
        layer: int,
        q_THQ: Tensor,
        latent_TL: Tensor,
        up_HXC: Tensor,
        prep: LatentPrep,
        rows_R: Tensor | None = None,
        scoring: Scoring = PLAIN,
    ) -> Tensor:
        attn = self.attn
        view, kind = attn.cache.view(layer), attn.cache.kinds[layer]
        assert isinstance(view, MLAView), f"layers of latent attention need a cache of latents, got {type(view).__name__}"
        C, N = view.rank, q_THQ.shape[2] - (latent_TL.shape[1] - view.rank)
        if rows_R is None and self.prompt is None:
            q_THL = absorbed_queries(q_THQ[..., :N], up_HXC, latent_TL.shape[1])
            store_latent(view, q_THQ[..., N:], latent_TL, attn.slots_T, prep, out_THR=q_THL[..., C:])
            return absorbed_values(attn.backend.attend(q_THL, view, attn.prepared[kind], scoring), up_HXC[:, N:])
        store_latent(view, q_THQ[..., N:], latent_TL, attn.slots_T, prep)
        if rows_R is None:
            assert self.prompt is not None and kind.span is None and scoring.sinks_H is None
            return self.prompt.attend(attn, view, q_THQ, up_HXC, scoring)
        assert attn.rows_prepared is not None, "rows need a plan of their own"
        q_RHQ = select_rows(q_THQ.flatten(1), rows_R).unflatten(1, q_THQ.shape[1:])
        q_RHL = absorbed_queries(q_RHQ[..., :N], up_HXC, latent_TL.shape[1])
        q_RHL[..., C:] = q_RHQ[..., N:]
        return absorbed_values(attn.backend.attend(q_RHL, view, attn.rows_prepared[kind], scoring), up_HXC[:, N:])


def is_expanded(plan: AttentionPlan) -> bool:
    """The rule.  Only prompts have so many queries a row, and a prompt is one causal segment."""
    first = plan.segments[0]
    return len(plan.segments) == 1 and first.causal and first.max_seqlen_q > EXPAND_ABOVE and first.starts_T is None


def store_latent(
    view: MLAView,
    q_THR: Tensor,
    latent_TL: Tensor,
    slots_T: Tensor,
    prep: LatentPrep,
    out_THR: Tensor | None = None,
) -> None:
    """Norms and rotates latents into their slots (int64), and rotates queries into out_THR (None: where they lie).

    Slots that occur twice (padding) get either latent.  The inputs may be changed.
    """
    if use_kernels(latent_TL):
        from specdec.attention.mla_store_triton import launch_store_latent

        launch_store_latent(view.latent, q_THR, latent_TL, slots_T, prep, q_THR if out_THR is None else out_THR)
        return
    view.latent.index_copy_(0, slots_T, prep.apply_(q_THR, latent_TL))
    if out_THR is not None:
        out_THR.copy_(q_THR)


def absorbed_queries(q_THN: Tensor, up_HXC: Tensor, width: int) -> Tensor:
    """[T, H, width]: queries that meet latents; what lies behind their first C numbers is left to the caller."""
    T, H, N = q_THN.shape
    q_THL = q_THN.new_empty(T, H, width)
    torch.bmm(q_THN.transpose(0, 1), up_HXC[:, :N], out=q_THL[..., : up_HXC.shape[2]].transpose(0, 1))
    return q_THL


def absorbed_values(out_THC: Tensor, up_HVC: Tensor) -> Tensor:
    """[T, H, V]: each head's values out of the latents that it attended to."""
    T, H, _ = out_THC.shape
    out_THV = out_THC.new_empty(T, H, up_HVC.shape[1])
    torch.bmm(out_THC.transpose(0, 1), up_HVC.transpose(1, 2), out=out_THV.transpose(0, 1))
    return out_THV


def expand(latent_EL: Tensor, up_HXC: Tensor, N: int) -> MHAView:
    """Every head's keys and values of latents, as slots 0 .. E - 1; values are padded to the keys' dim with junk."""
    E, (H, _, C) = latent_EL.shape[0], up_HXC.shape
    both_EHX = F.linear(latent_EL[:, :C], up_HXC.flatten(0, 1)).view(E, H, -1)
    kv_E2HQ = latent_EL.new_empty(E, 2, H, N + latent_EL.shape[1] - C)
    kv_E2HQ[:, 0, :, :N] = both_EHX[..., :N]
    kv_E2HQ[:, 0, :, N:] = latent_EL[:, None, C:]
    kv_E2HQ[:, 1, :, : both_EHX.shape[2] - N] = both_EHX[..., N:]
    return MHAView(kv_E2HQ)


@dataclass(frozen=True)
class ExpandedPrompt:
    """The plan of a long prompt, for expanded heads.  prompt: as given.  own: each row's queries over their own keys, which
    lie one behind the other like the queries.
    """

    prompt: Segment
    own: Segment

    @classmethod
    def of(cls, plan: AttentionPlan) -> ExpandedPrompt:
        prompt = plan.segments[0]
        lens_B = prompt.cu_seqlens_q.diff()
        table_BW = prompt.cu_seqlens_q[:-1, None] + _count(prompt.max_seqlen_q, lens_B)
        own = Segment(table_BW, lens_B, prompt.cu_seqlens_q, prompt.max_seqlen_q, True, 1, prompt.ragged)
        return cls(prompt, own)

    def attend(self, attn: PagedAttention, view: MLAView, q_THQ: Tensor, up_HXC: Tensor, scoring: Scoring) -> Tensor:
        """[T, H, V]: own tokens causally, then chunks of what was cached before, merged."""
        assert scoring.scale is not None, "the dims of absorbed queries do not tell the scale"
        N = q_THQ.shape[2] - (view.latent.shape[1] - view.rank)
        own = expand(view.latent.index_select(0, attn.slots_T), up_HXC, N)
        state = attn.backend.run(q_THQ, own, self.own, scoring)
        for slots_E, segment in self.cached():
            chunk = expand(view.latent.index_select(0, slots_E), up_HXC, N)
            state = merge_states(state, attn.backend.run(q_THQ, chunk, segment, scoring))
        return state.out_THD[..., : up_HXC.shape[1] - N]

    def cached(self) -> Iterator[tuple[Tensor, Segment]]:
        """(slots of the latents to expand, who reads them) for each part of the rows that was cached before this pass."""
        prompt, P = self.prompt, self.prompt.page_size
        B = prompt.rows
        most = prompt.max_cached
        assert most is not None, "a long prompt's plan must say how much of it is cached"
        cached_B = prompt.cache_seqlens - self.own.cache_seqlens
        size = max(1, EXPANDED_TOKENS // B)
        for start in range(0, most, size):
            W = min(size, most - start)
            lens_B = (cached_B - start).clamp(min=0, max=W)
            place_W = _count(W, lens_B)
            slots_BW = prompt.page_table[:, (start + place_W) // P].long() * P + (start + place_W) % P
            slots_BW = torch.where(place_W < lens_B[:, None], slots_BW, 0)  # entries behind a row's pages are junk
            table_BW = _count(B * W, lens_B).view(B, W)
            rows = (prompt.cu_seqlens_q, prompt.max_seqlen_q)
            yield slots_BW.flatten(), Segment(table_BW, lens_B, *rows, ragged=prompt.ragged)


def _count(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, dtype=torch.int32, device=like.device)
