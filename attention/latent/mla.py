"""Multi-head latent attention (MLA, arXiv 2405.04434) over a paged cache of latents.

There are two ways to compute the same result (vLLM calls them forward_mqa and forward_mha).
- Absorbed, for passes of few queries a row (decode, chains, trees, short prompts): the projection from latents to keys is
  applied to the queries, which can then be multiplied with latents as they lie in the cache; the projection from latents to
  values is applied to attention's output.
- Expanded, for long prompts: every head gets keys and values of its own.  This takes less arithmetic for each pair of query and
  key, and a fixed amount of work for each key.  Both forms round differently, so an invariant policy never takes it.

A pass is expanded if some row has more queries than a limit (limits.py).  Layers do not choose; the plan decides.  Tokens of a
long prompt that were cached before (by an earlier chunk, or as a cached prefix) are expanded a few at a time, and the
states are merged.  A cache in 8 bits is read as it is by passes of few queries a row, and converted first for others
(upconvert.py).

Shapes: T tokens, H heads, C latent rank, R rotated dim, N not rotated dim, V value dim, L = C + R, Q = N + R, X = N + V, B
rows, W keys of a row at a time, E expanded keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.latent_view import LatentView
from specdec.attention.inputs import DenseHeads, LayerCall, LayerInputs
from specdec.attention.kinds import Scoring
from specdec.attention.latent.limits import Limits
from specdec.attention.latent.prep import LatentPrep
from specdec.attention.latent.upconvert import Workspace
from specdec.attention.pages import PageTable
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.state import AttentionState, merge_states
from specdec.ops.launch import has_pdl, use_kernels
from specdec.ops.operator import is_traced, use_operator
from specdec.ops.products.numerics import FAST, Numerics
from specdec.ops.products.stacked import each_linear_into
from specdec.ops.products.tiles.experts import each_tiles
from specdec.parallel.group import ALONE, Group


@dataclass
class LatentInputs(LayerInputs):
    """The inputs of a layer of latent attention.

    q_THQ: queries, whose last R elements are to be rotated and are not rotated yet.
    latent_TL: latents, neither normed nor rotated: kv_a_proj's output, which vLLM calls kv_c and k_pe.
    up_HXC: each head's projection from latents to keys (first N rows) and values (last V rows): kv_b_proj, or W_UK and W_UV.
    numerics: the policy that chooses the form, and the products with up_HXC.
    limits: from which sizes on which form is chosen.
    """

    q_THQ: Tensor
    latent_TL: Tensor
    up_HXC: Tensor
    prep: LatentPrep
    numerics: Numerics  # no defaults: torch.compile of torch 2.11 can't make one that is an object
    limits: Limits

    @property
    def nope_dim(self) -> int:
        """N."""
        return self.q_THQ.shape[2] - (self.latent_TL.shape[1] - self.up_HXC.shape[2])

    def paged(self, call: LayerCall) -> Tensor:
        view = call.view
        assert isinstance(view, LatentView), f"layers of latent attention need a cache of latents, got {type(view).__name__}"
        return self.over(call, view)

    def over(self, call: LayerCall, view: LatentView) -> Tensor:
        """`paged`, over this view instead of the call's own."""
        q_THQ, up_HXC, N = self.q_THQ, self.up_HXC, self.nope_dim
        whole = call.rows_R is None and call.kind.reads_all
        may_expand = whole and not self.numerics.is_invariant
        prompt = call.once("expanded prompt", partial(ExpandedPrompt.of, limits=self.limits)) if may_expand else None
        if prompt is not None:
            store_latent(view, q_THQ[..., N:], self.latent_TL, call.slots_T, self.prep)
            return call.finish(prompt.state(call.backend, view, call.slots_T, q_THQ, up_HXC, call.scoring)).out_THD
        q_RHL, workspace = self.absorbed(call, view), None
        if whole and call.plan.context_parallel is None:
            workspace = call.once("workspace", lambda plan: Workspace.of_plan(plan, view, q_THQ.dtype, self.limits))
        if workspace is None:
            return absorbed_values(call.attend(q_RHL, view), up_HXC[:, N:], self.numerics)
        state = call.finish(workspace.state(call.backend, q_RHL, view, call.scoring))
        return absorbed_values(state.out_THD, up_HXC[:, N:], self.numerics)

    def absorbed(self, call: LayerCall, view: LatentView) -> Tensor:
        """Stores the latents, and returns the asked-for queries [R, H, L], which can be multiplied with latents."""
        q_THQ, up_HXC, N, L = self.q_THQ, self.up_HXC, self.nope_dim, self.latent_TL.shape[1]
        by_head = call.plan.context_parallel is not None  # as they travel between ranks
        if call.rows_R is None:
            q_THL = absorbed_queries(q_THQ[..., :N], up_HXC, L, by_head, self.numerics)
            store_latent(view, q_THQ[..., N:], self.latent_TL, call.slots_T, self.prep, out_THR=q_THL[..., view.rank :])
            return q_THL
        store_latent(view, q_THQ[..., N:], self.latent_TL, call.slots_T, self.prep)
        q_RHQ = call.asked(q_THQ)
        q_RHL = absorbed_queries(q_RHQ[..., :N], up_HXC, L, by_head, self.numerics)
        q_RHL[..., view.rank :] = q_RHQ[..., N:]
        return q_RHL

    def dense(self) -> DenseHeads:
        return self.dense_as_stored(lambda latent_TL: latent_TL)

    def dense_as_stored(self, as_stored: Callable[[Tensor], Tensor]) -> DenseHeads:
        N = self.nope_dim
        kv_T2HQ = expand(as_stored(self.prep.apply_(self.q_THQ[..., N:], self.latent_TL)), self.up_HXC, N)
        return DenseHeads(self.q_THQ, kv_T2HQ[:, 0], kv_T2HQ[:, 1, :, : self.up_HXC.shape[1] - N])


def store_latent(
    view: LatentView,
    q_THR: Tensor,
    latent_TL: Tensor,
    slots_T: Tensor,
    prep: LatentPrep,
    out_THR: Tensor | None = None,
) -> None:
    """Norms and rotates latents into their slots (int64), and rotates queries into out_THR, or in place if that is None.

    If a slot occurs twice (padding tokens share one), it ends up with either latent.  The inputs may be changed.
    """
    if use_operator(latent_TL):
        from specdec.attention.operators.latent import LATENT_STORE, latents_of

        rope, into, out_THR = prep.rotation, latents_of(view), q_THR if out_THR is None else out_THR
        LATENT_STORE(q_THR, latent_TL, into, out_THR, slots_T, rope.positions_T, rope.table_P2D, prep.norm_C, prep.eps)
        return
    if use_kernels(latent_TL):
        from specdec.attention.latent.mla_store_triton import launch_store_latent

        launch_store_latent(view, q_THR, latent_TL, slots_T, prep, q_THR if out_THR is None else out_THR)
        return
    view.put(slots_T, prep.apply_(q_THR, latent_TL))
    if out_THR is not None:
        out_THR.copy_(q_THR)


def absorbed_queries(q_THN: Tensor, up_HXC: Tensor, width: int, by_head: bool = False, numerics: Numerics = FAST) -> Tensor:
    """[T, H, width]: queries that can be multiplied with latents.  Only their first C elements are set; the caller sets the
    rest.

    by_head: whether all queries of a head lie together in memory, instead of all heads of a query.
    """
    T, H, N = q_THN.shape
    q_THL = q_THN.new_empty(H, T, width).transpose(0, 1) if by_head else q_THN.new_empty(T, H, width)
    _multiply(q_THN, up_HXC[:, :N].transpose(1, 2), q_THL[..., : up_HXC.shape[2]], numerics)
    return q_THL


def absorbed_values(out_THC: Tensor, up_HVC: Tensor, numerics: Numerics = FAST) -> Tensor:
    """[T, H, V]: each head's values, projected from the average of latents that the head attended to."""
    T, H, _ = out_THC.shape
    out_THV = out_THC.new_empty(T, H, up_HVC.shape[1])
    _multiply(out_THC, up_HVC, out_THV, numerics)
    return out_THV


def _multiply(x_THI: Tensor, weight_HOI: Tensor, out_THO: Tensor, numerics: Numerics) -> None:
    """Each head's product, written to `out`, which need not be contiguous: torch.compile can't trace that as bmm's `out`."""
    if numerics.is_invariant:
        each_linear_into(x_THI, weight_HOI, out_THO)
        return
    if use_kernels(x_THI) and has_pdl(x_THI.device) and (tiles := each_tiles(x_THI.shape[0])):
        each_linear_into(x_THI, weight_HOI, out_THO, tiles)
        return
    a, b = x_THI.transpose(0, 1), weight_HOI.transpose(1, 2)
    if is_traced(a):
        out_THO.copy_(torch.bmm(a, b).transpose(0, 1))
    else:
        torch.bmm(a, b, out=out_THO.transpose(0, 1))


def expand(latent_EL: Tensor, up_HXC: Tensor, N: int) -> Tensor:
    """[E, 2, H, Q]: every head's keys and values of these latents.  Values have V elements; the rest up to Q is junk."""
    E, (H, _, C) = latent_EL.shape[0], up_HXC.shape
    both_EHX = F.linear(latent_EL[:, :C], up_HXC.flatten(0, 1)).view(E, H, -1)
    kv_E2HQ = latent_EL.new_empty(E, 2, H, N + latent_EL.shape[1] - C)
    kv_E2HQ[:, 0, :, :N] = both_EHX[..., :N]
    kv_E2HQ[:, 0, :, N:] = latent_EL[:, None, C:]
    kv_E2HQ[:, 1, :, : both_EHX.shape[2] - N] = both_EHX[..., N:]
    return kv_E2HQ


@dataclass(frozen=True)
class ExpandedPrompt:
    """The plan of a long prompt, for expanded heads.

    own: each row's queries over the row's own new keys only, which lie one row after the other like the queries.
    cached: the segment of the keys before them, over the cache: those that this rank keeps.
    lens_DB: int32, how many of these keys each rank keeps.  group: the ranks.
    max_expanded: cached latents that are expanded at once, over all rows.
    """

    own: Segment
    cached: Segment
    lens_DB: Tensor
    group: Group
    max_expanded: int

    @classmethod
    def of(cls, plan: AttentionPlan, limits: Limits) -> ExpandedPrompt | None:
        """The expanded form of a plan; None if the pass is absorbed.

        Only prompts have so many queries a row that they are expanded, and a prompt's plan is one causal segment.  With
        context parallelism, absorbed queries of all heads would travel between ranks: there the queries of all rows count.
        """
        prompt, sharded = plan.parts[0], plan.context_parallel
        queries = prompt.max_seqlen_q
        if sharded is not None and plan.positions_T is not None:
            queries = plan.positions_T.shape[0]
        if len(plan.parts) > 1 or not prompt.causal or queries <= limits.expand_above or prompt.starts_T is not None:
            return None
        lens_B = prompt.cu_seqlens_q.diff()
        slots_BW = prompt.cu_seqlens_q[:-1, None] + _count(prompt.max_seqlen_q, lens_B)
        own = Segment(PageTable(slots_BW), lens_B, prompt.cu_seqlens_q, prompt.max_seqlen_q, causal=True, ragged=prompt.ragged)
        cached, group = (prompt, ALONE) if sharded is None else (sharded.own, sharded.group)
        kept_B = prompt.cache_seqlens - lens_B if sharded is None else cached.cache_seqlens
        return cls(own, cached, group.all_gather(kept_B), group, limits.expanded_tokens)

    def state(
        self, backend: Backend, view: LatentView, slots_T: Tensor, q_THQ: Tensor, up_HXC: Tensor, scoring: Scoring
    ) -> AttentionState:
        """The state [T, H, V] of the prompt's own tokens causally, merged with chunks of the tokens that were cached before."""
        assert scoring.scale is not None, "the scale can't be derived from the width of absorbed queries"
        N = q_THQ.shape[2] - (view.width - view.rank)
        own = MHAView(expand(view.latents(slots_T, q_THQ.dtype), up_HXC, N))
        state = backend.run(q_THQ, own, self.own, scoring)
        for slots_E, segments in self.chunks():
            latents_DEL = self.group.all_gather(view.latents(slots_E, q_THQ.dtype))
            for latent_EL, segment in zip(latents_DEL, segments, strict=True):
                chunk = MHAView(expand(latent_EL, up_HXC, N))
                state = merge_states(state, backend.run(q_THQ, chunk, segment, scoring))
        return state._replace(out_THD=state.out_THD[..., : up_HXC.shape[1] - N])

    def chunks(self) -> Iterator[tuple[Tensor, list[Segment]]]:
        """For each chunk of the cached tokens: (slots of the latents that this rank keeps, the segments that read each rank's).

        All ranks have equally many chunks of one size.
        """
        cached, (pages_BW, P), (D, B) = self.cached, self.cached.pages, self.lens_DB.shape
        max_cached = cached.max_cached
        assert max_cached is not None, "a long prompt's plan must say how much of it is cached"
        size = max(1, self.max_expanded // (B * D))
        for start in range(0, max_cached, size):
            W = min(size, max_cached - start)
            lens_DB = (self.lens_DB - start).clamp(min=0, max=W)
            place_W = _count(W, lens_DB)
            slots_BW = pages_BW[:, (start + place_W) // P].long() * P + (start + place_W) % P
            here_BW = place_W < lens_DB[self.group.rank][:, None]
            slots_BW = torch.where(here_BW, slots_BW, 0)  # entries past a row's pages are junk
            expanded = PageTable(_count(B * W, lens_DB).view(B, W))
            rows = (cached.cu_seqlens_q, cached.max_seqlen_q)
            yield slots_BW.flatten(), [Segment(expanded, lens_B, *rows, ragged=cached.ragged) for lens_B in lens_DB]


def _count(n: int, like: Tensor) -> Tensor:
    """0 to n - 1, int32, on the device of `like`."""
    return torch.arange(n, dtype=torch.int32, device=like.device)
