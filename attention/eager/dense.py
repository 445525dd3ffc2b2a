"""Attention over whole rows without a cache: for training, and for checks that must not depend on the paged code they check.

This module knows no pages, plans or attention backends.  The result is differentiable with respect to the inputs.

Shapes: B rows of T tokens each, N = B * T, Q query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.attention.inputs import DenseHeads, LayerInputs
from specdec.attention.kinds import PLAIN, LayerKind, Scoring

StoreFn = Callable[[int, Tensor], Tensor]  # (layer, what it keeps of N tokens) -> what a cache gives back of it


class DenseAttention:
    """Implements the models' AttentionFn.

    kinds: each layer's kind.
    batch: B.
    as_stored: rounds what layers keep as an 8-bit cache would; None: the cache keeps it as it is.
    kv_layers: as in KVCache; left out: every layer reads its own keys and values.
    queries_as_read: rounds queries as attention over such a cache would; None: they are multiplied as they are.
    kept_layers: those whose keys and values stay in `kept` after the pass, beside those that later layers read.
    """

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        batch: int = 1,
        as_stored: StoreFn | None = None,
        kv_layers: Sequence[int] = (),
        queries_as_read: Callable[[Tensor], Tensor] | None = None,
        kept_layers: Collection[int] = (),
    ) -> None:
        self.kinds, self.batch, self.as_stored, self.queries_as_read = kinds, batch, as_stored, queries_as_read
        self._selected: Tensor | None = None  # by the last layer that selects keys
        self.kv_layers = kv_layers or range(len(kinds))
        self.kept_layers = kept_layers
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values by layer, from this pass

    def __call__(self, layer: int, inputs: LayerInputs, rows_R: Tensor | None = None, scoring: Scoring = PLAIN) -> Tensor:
        if (out := inputs.whole_rows(self.batch)) is not None:
            return out if rows_R is None else out.index_select(0, rows_R)
        heads = self._with_keys(layer, inputs, rows_R)
        if self.queries_as_read is not None:
            heads = heads._replace(q_TQD=self.queries_as_read(heads.q_TQD))
        q, k, v = (per_row(x, self.batch) for x in heads)
        selected = inputs.select(self.batch, self._selected)
        self._selected = self._selected if selected is None else selected
        out = inputs.finish(attend_rows(q, k, v, self.kinds[layer], scoring, selected).transpose(1, 2).flatten(0, 1))
        return out if rows_R is None else out.index_select(0, rows_R)

    def _with_keys(self, layer: int, inputs: LayerInputs, rows_R: Tensor | None) -> DenseHeads:
        """A layer's heads with keys and values as it reads them: its own as stored, or those of its source."""
        source = self.kv_layers[layer]
        if layer != source or self.as_stored is None:
            heads = inputs.dense()
        else:
            heads = inputs.dense_as_stored(partial(self.as_stored, layer))
        if layer == source:
            if layer in self.kv_layers[layer + 1 :] or layer in self.kept_layers:
                self.kept[layer] = heads.k_TKD, heads.v_TKE
            return heads
        k_TKD, v_TKE = self.kept[source]
        q = heads.q_TQD
        if rows_R is not None:  # queries of these tokens alone; the others' attention is computed and not used
            q = q.new_zeros(len(k_TKD), *q.shape[1:]).index_copy(0, rows_R, q)
        return DenseHeads(q, k_TKD, v_TKE)


class KeptKeys:
    """The attention of a later pass over one row, whose layers have queries alone: an AttentionFn.

    Query t reads keys up to number t.  kinds: by layer.  kept: keys and values by layer, of an earlier pass.
    """

    def __init__(self, kinds: Sequence[LayerKind], kept: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self.kinds, self.kept = kinds, kept

    def __call__(self, layer: int, inputs: LayerInputs, rows_R: Tensor | None = None, scoring: Scoring = PLAIN) -> Tensor:
        assert rows_R is None
        q, k, v = (per_row(x, 1) for x in (inputs.dense().q_TQD, *self.kept[layer]))
        return attend_rows(q, k, v, self.kinds[layer], scoring).transpose(1, 2).flatten(0, 1)


def per_row(x_NHD: Tensor, batch: int) -> Tensor:
    """[B * T, H, D] to [B, H, T, D]."""
    return x_NHD.view(batch, -1, *x_NHD.shape[1:]).transpose(1, 2)


def attend_rows(
    q_BQTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, kind: LayerKind, scoring: Scoring, selected_BTT: Tensor | None = None
) -> Tensor:
    """[B, Q, T, E]: every token attends to its row's tokens up to itself, as far back as the kind allows.

    selected_BTT: bool; if given, to those of them alone for which it is True.
    """
    plain = scoring.softcap is None and scoring.sinks_H is None and scoring.slopes_H is None
    if plain and kind.reads_all and selected_BTT is None:
        return F.scaled_dot_product_attention(q_BQTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=True, scale=scoring.scale)
    mask_TT = visible(q_BQTD.shape[2], kind, q_BQTD.device)
    if selected_BTT is not None:
        mask_TT = mask_TT & selected_BTT[:, None]
    if plain:
        return F.scaled_dot_product_attention(q_BQTD, k_BKTD, v_BKTD, mask_TT, enable_gqa=True, scale=scoring.scale)
    dtype = torch.promote_types(q_BQTD.dtype, torch.float32)
    group = q_BQTD.shape[1] // k_BKTD.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k_BKTD, v_BKTD))
    scores = scoring.capped(q_BQTD.to(dtype) @ k.transpose(-1, -2) * scoring.factor(q_BQTD.shape[-1]))
    if scoring.slopes_H is not None:
        at_T = torch.arange(q_BQTD.shape[2], dtype=torch.int64, device=q_BQTD.device)
        scores = scores + scoring.alibi(scoring.slopes_H.to(dtype)[:, None, None], (at_T - at_T[:, None]).to(dtype))
    scores = scores.masked_fill(~mask_TT, -torch.inf)
    if scoring.sinks_H is None:
        return (scores.softmax(-1) @ v).to(q_BQTD.dtype)
    sinks = scoring.sinks_H.to(dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return (torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ v).to(q_BQTD.dtype)


def visible(tokens: int, kind: LayerKind, device: torch.device) -> Tensor:
    """[T, T] bool: entry [q, k] says whether token q reads token k."""
    keys = torch.arange(tokens, dtype=torch.int64, device=device)
    mask = keys <= keys[:, None]
    return mask if kind.reads_all else mask & (keys >= kind.first_keys(keys)[:, None])
