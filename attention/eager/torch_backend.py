"""The `torch` attention backend, for any device and any float type: gathered keys, a mask, and one call for all queries.

It converts a plan once a pass.  Inside a CUDA graph it makes no host reads, except for ragged batches of prompts, which it
never sees there.

Shapes: T queries, H heads, K kv heads, G = H/K, D head dim, E value dim, B sequences, Q queries per sequence, R rows, W keys
per row, N keys per sequence over all segments.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.int8_keys import queries_as_read
from specdec.attention.caches.layout import KVView
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.segment import AttentionPlan, Segment, uniform_cu_seqlens
from specdec.attention.state import AttentionState

MAX_SCORES = 2**28  # scores of queries and keys that are in memory at once: 1 GiB in float32


@dataclass(frozen=True)
class DenseBlock:
    """B sequences of Q queries each, starting at query `start`; a sequence's queries read its N gathered slots under a mask."""

    start: int
    batch: int
    queries: int
    slots_BN: Tensor
    mask_BQN: Tensor | None  # bool; None: every query reads every key
    has_empty_rows: bool  # some query may read no key: its output must be 0, not NaN
    distance_BQN: Tensor | None = None  # int32, each key's position minus the query's; None: no layer has slopes
    _additive: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def additive_mask(self, group: int, dtype: torch.dtype) -> Tensor | None:
        """[B, 1, Q * G, N] of 0 and -inf, for queries x heads of a group.  All layers share one copy."""
        if self.mask_BQN is None:
            return None
        if (group, dtype) not in self._additive:
            hidden = self.mask_BQN.logical_not().repeat_interleave(group, dim=1)[:, None]
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._additive[group, dtype] = zeros.masked_fill_(hidden, -torch.inf)
        return self._additive[group, dtype]

    def alibi(self, scoring: Scoring, group: int, gqa_M: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, K, M, N]: ALiBi's biases, for M of the queries x heads of a group; gqa_M: which."""
        assert scoring.slopes_H is not None
        assert self.distance_BQN is not None, "slopes need a plan for layers of a kind with alibi"
        slopes_KM = scoring.slopes_H.to(dtype).view(-1, group)[:, gqa_M % group]
        return scoring.alibi(slopes_KM[..., None], self.distance_BQN[:, None, gqa_M // group].to(dtype))


class TorchBackend(Backend):
    """Gathers keys and values, builds a mask, and computes dense attention."""

    name = "torch"

    def prepare(self, plan: AttentionPlan) -> list[DenseBlock]:
        """The blocks of a plan: one for each prompt of a ragged batch with a query, else one for the whole plan."""
        first = plan.parts[0]
        if len(plan.parts) == 1 and first.ragged:
            blocks = [_prompt_block(first, row) for row in range(first.rows)]
            return [block for block in blocks if block.queries]  # a block without queries has no state
        sequences = (plan.segments or plan.parts)[-1].rows  # a shared prefix comes before the sequences' own segment
        return [_joined_block(tuple(_spread(part, sequences) for part in plan.parts))]

    def attend(self, q_THD: Tensor, view: KVView, prepared: list[DenseBlock], scoring: Scoring = PLAIN) -> AttentionState:
        states = [_block_state(q_THD, view, block, scoring) for block in prepared]
        out_THE, lse_TH = states[0] if len(states) == 1 else map(torch.cat, zip(*states, strict=True))
        return AttentionState(out_THE.to(q_THD.dtype), lse_TH)

    def run(self, q_THD: Tensor, view: KVView, segment: Segment, scoring: Scoring = PLAIN) -> AttentionState:
        return self.attend(q_THD, view, self.prepare(AttentionPlan((segment,))), scoring)


def _row_slots(pages: PageTable, width: int) -> Tensor:
    """[R, width] int64 slots of each row's keys.  Entries past a row's length are junk, and the mask hides them."""
    if pages.page_size == 1:
        return pages.table[:, :width].long()
    P = pages.page_size
    pages_RW = pages.table[:, : -(-width // P)].long()
    offsets = torch.arange(min(P, width), dtype=torch.int64, device=pages_RW.device)
    return (pages_RW[:, :, None] * P + offsets).flatten(1)[:, :width]


def _prompt_block(segment: Segment, row: int) -> DenseBlock:
    """One prompt of a ragged batch: its Q queries against its row's keys, of which the last Q are their own if causal."""
    start, end = int(segment.cu_seqlens_q[row]), int(segment.cu_seqlens_q[row + 1])
    length, queries = int(segment.cache_seqlens[row]), end - start
    row_table = segment.pages._replace(table=segment.pages.table[row : row + 1])
    device = segment.pages.table.device
    keys = torch.arange(max(1, length), dtype=torch.int64, device=device)  # an empty row's one key is masked
    later_Q1 = torch.arange(queries - 1, -1, -1, dtype=torch.int64, device=device)[:, None]  # queries after each
    visible_QN = keys < length - ((later_Q1 - segment.window_right).clamp(min=0) if segment.causal else 0 * later_Q1)
    if segment.starts_T is not None:
        visible_QN &= keys >= segment.starts_T[start:end, None]
    has_empty_rows = not bool(visible_QN.any(-1).all())
    slots_BN = _only_seen(_row_slots(row_table, keys.shape[0]), visible_QN[None])
    distance_BQN = None if segment.alibi_positions_T is None else (keys - segment.alibi_positions_T[start:end, None])[None]
    return DenseBlock(start, 1, queries, slots_BN, visible_QN[None], has_empty_rows, distance_BQN)


def _only_seen(slots_BN: Tensor, mask_BQN: Tensor) -> Tensor:
    """Replaces slots that no query reads by a slot that some query reads.

    A masked key still enters the products, and 0 * NaN is NaN: an unread slot may hold NaN, a read one does not.
    """
    seen_BN = mask_BQN.any(1)
    anchor_B1 = slots_BN.gather(1, seen_BN.byte().argmax(1, keepdim=True))
    return torch.where(seen_BN, slots_BN, anchor_B1)


def _spread(segment: Segment, sequences: int) -> Segment:
    """A shared prefix, whose one row holds the queries of all sequences, as a row for each sequence; others as they are.

    Each sequence then multiplies by its own keys and the shared ones alone.  In one product over the keys of all sequences, a
    NaN among the keys of one would reach the others, although the mask hides it: 0 * NaN is NaN.
    """
    if segment.rows >= sequences:
        return segment
    assert segment.rows == 1 and not segment.causal and segment.max_seqlen_q % sequences == 0
    queries = segment.max_seqlen_q // sequences
    return replace(
        segment,
        pages=segment.pages._replace(table=segment.pages.table.expand(sequences, -1)),
        cache_seqlens=segment.cache_seqlens.expand(sequences),
        cu_seqlens_q=uniform_cu_seqlens(sequences, queries, segment.pages.table.device),
        max_seqlen_q=queries,
    )


def _joined_block(segments: tuple[Segment, ...]) -> DenseBlock:
    """All parts of a plan side by side, where every row holds equally many queries: a sequence's queries see the union of its
    rows' keys, under a mask.
    """
    batch = segments[0].rows
    queries = segments[0].max_seqlen_q
    slots, masks, distances = zip(*(_segment_keys(segment, batch, queries) for segment in segments), strict=True)
    slots_BN = slots[0] if len(slots) == 1 else torch.cat(slots, dim=1)
    mask_BQN = masks[0] if len(masks) == 1 else torch.cat(masks, dim=2)
    slots_BN = _only_seen(slots_BN, mask_BQN)
    assert len({distance is None for distance in distances}) == 1, "either all parts have positions of queries, or none has"
    distance_BQN = None if distances[0] is None else torch.cat(distances, dim=2)
    on_host = mask_BQN.device.type == "cpu"
    if on_host and bool(mask_BQN.all()):
        return DenseBlock(0, batch, queries, slots_BN, None, False, distance_BQN)
    has_empty_rows = not (on_host and bool(mask_BQN.any(-1).all()))
    return DenseBlock(0, batch, queries, slots_BN, mask_BQN, has_empty_rows, distance_BQN)


def _segment_keys(segment: Segment, batch: int, queries: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Slots [B, n * W], mask [B, Q, n * W] and distances of that shape (see DenseBlock) of a segment that gives each sequence
    n rows of Q / n queries.
    """
    assert segment.rows % batch == 0 and segment.rows * segment.max_seqlen_q == batch * queries
    rows, device = segment.rows // batch, segment.pages.table.device
    on_host = device.type == "cpu"
    capacity = segment.pages.capacity  # not max_keys: a window may lie anywhere in the row
    width = max(1, int(segment.cache_seqlens.max())) if on_host else capacity
    slots_BN = _row_slots(segment.pages, width).reshape(batch, rows * width)
    keys_W = torch.arange(width, dtype=torch.int64, device=device)
    lens_BR11 = segment.cache_seqlens.view(batch, rows, 1, 1)
    if segment.causal:
        n = segment.max_seqlen_q
        lens_BR11 = (
            lens_BR11 - (n - 1 - segment.window_right - torch.arange(n, dtype=torch.int64, device=device)).clamp(min=0)[:, None]
        )
    visible_BRQW = (keys_W < lens_BR11).expand(batch, rows, segment.max_seqlen_q, width)
    if segment.starts_T is not None:
        visible_BRQW = visible_BRQW & (keys_W >= segment.starts_T.view(batch, rows, -1, 1))
    distance = None
    if segment.alibi_positions_T is not None:  # positions are counted from each row's own key 0; other rows' keys are masked
        distance = keys_W.repeat(rows) - segment.alibi_positions_T.view(batch, queries, 1)
    if rows == 1:
        return slots_BN, visible_BRQW[:, 0], distance
    own_row = torch.eye(rows, dtype=torch.bool, device=device)[:, None, :, None]
    mask = (visible_BRQW[:, :, :, None, :] & own_row).reshape(batch, queries, rows * width)
    return slots_BN, mask, distance


def _gathered(q_THD: Tensor, view: KVView, block: DenseBlock, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, K, Q*G, D], queries x heads of a group (packed GQA); k [B, K, N, D]; v [B, K, N, E]."""
    B, Q, N = block.batch, block.queries, block.slots_BN.shape[1]
    k, v = (x.unflatten(0, (B, N)).transpose(1, 2) for x in view.read(block.slots_BN.flatten(), dtype))
    q = queries_as_read(view, q_THD[block.start : block.start + B * Q]).to(dtype).view(B, Q, k.shape[1], -1, q_THD.shape[2])
    return q.transpose(1, 2).reshape(B, k.shape[1], -1, q_THD.shape[2]), k, v


def _unpack(out: Tensor, block: DenseBlock) -> Tensor:
    """[B, K, Q*G, X] back to [B*Q, H, X]."""
    B, K, _, X = out.shape
    return out.view(B, K, block.queries, -1, X).transpose(1, 2).reshape(B * block.queries, -1, X)


def _block_state(q_THD: Tensor, view: KVView, block: DenseBlock, scoring: Scoring) -> AttentionState:
    """The state of one block: by torch's fused attention where it returns an lse too, which it does on a CPU.

    The fused one takes keys and values of one width only.
    """
    q, k, v = _gathered(q_THD, view, block, q_THD.dtype)
    if q_THD.is_cuda or scoring.softcap is not None or scoring.slopes_H is not None or k.shape[3] != v.shape[3]:
        return _dense_state(q, k, v, block, scoring)
    mask = block.additive_mask(q.shape[2] // block.queries, q.dtype)
    # scaled_dot_product_attention calls this operator too, and drops the lse.
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scoring.scale)
    return _unpacked(out, lse, mask, block)


def _dense_state(q: Tensor, k: Tensor, v: Tensor, block: DenseBlock, scoring: Scoring) -> AttentionState:
    """The state of one block by its definition, in float32 at least: softcaps and states lose too much precision in 16 bits.

    A few queries are computed at a time, so that the scores of a long prompt fit in memory.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[2] // block.queries
    mask = block.additive_mask(group, dtype)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    size = max(1, MAX_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    outs, lses = [], []
    for start in range(0, q.shape[2], size):
        scores = scoring.capped(q[:, :, start : start + size] @ k.transpose(-1, -2) * scoring.factor(q.shape[-1]))
        if scoring.slopes_H is not None:
            gqa_M = torch.arange(start, start + scores.shape[2], dtype=torch.int64, device=q.device)
            scores = scores + block.alibi(scoring, group, gqa_M, dtype)
        if mask is not None:
            scores = scores + mask[:, :, start : start + size]
        lse = scores.logsumexp(-1, keepdim=True)
        outs.append((scores - torch.where(lse == -torch.inf, 0.0, lse)).exp() @ v)
        lses.append(lse[..., 0])
    return _unpacked(torch.cat(outs, 2), torch.cat(lses, 2), mask, block)


def _unpacked(out: Tensor, lse: Tensor, mask: Tensor | None, block: DenseBlock) -> AttentionState:
    """out [B, K, Q*G, E] and lse [B, K, Q*G] as a state of the block's queries; what saw no key is empty."""
    if block.has_empty_rows and mask is not None:
        empty = mask.amax(-1) < 0
        out, lse = torch.where(empty[..., None], 0.0, out), torch.where(empty, -torch.inf, lse)
    return AttentionState(_unpack(out, block), _unpack(lse[..., None], block)[..., 0])
