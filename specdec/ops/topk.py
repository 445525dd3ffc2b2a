"""The best tokens of rows of logits, always ordered by value and then by lower id.

The fixed order of ties matters: neither trees nor greedy text may depend on how a library breaks ties.  On a CPU and under
autograd the definitions here run.  On a GPU each function is two launches of topk_triton.py: one scans every row in slices, the
other merges the slices' best tokens.

Shapes: R rows, V vocabulary, k best.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.ops.launch import use_kernels
from specdec.ops.noise.gumbel import Noise, perturb
from specdec.ops.operator import define, use_operator

_SORT_UP_TO = 256  # threshold in values: up to this many, one stable sort is faster than making keys


def stable_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest along the last dim: (values, int64 indices), ties to the lower index.  values: float32, no NaN."""
    V = values.shape[-1]
    if V <= _SORT_UP_TO:
        top, indices = values.sort(dim=-1, descending=True, stable=True)
        return top[..., :k], indices[..., :k]
    keys = ranked(values, torch.arange(V, dtype=torch.int64, device=values.device))
    indices = places_of(keys.topk(k, dim=-1).values)
    return values.gather(-1, indices), indices


def ranked(values: Tensor, places: Tensor) -> Tensor:
    """int64 keys, of which the larger is the better: by value, and then by lower place.  They never tie, so any library's top-k
    gives the one right answer.

    values: float32, no NaN.  places: of any integers, below 2**31; broadcast to the values.
    """
    # A float's bits, with the magnitude's bits flipped for negatives, order like the float itself.
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0: the two are equal, their bits are not
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (0x7FFFFFFF - places.long())


def places_of(keys: Tensor) -> Tensor:
    """int64: the places in such keys."""
    return 0x7FFFFFFF - (keys & 0xFFFFFFFF)


def top_tokens(
    logits: Tensor,
    k: int,
    offsets_V: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    noise: Noise | None = None,
) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of [..., V], best first: (float32 log-probabilities, int64 ids), [..., k] each.

    Tokens are ordered by logit, so rounding in the log-probabilities makes no new ties.  Log-probabilities are never above 0.
    offsets_V: int64, added to each id (from a draft vocabulary to the target's).
    out: memory for the two results.  noise: the logits are those of `gumbel.perturb`; rows [R, V] only.
    """
    if use_operator(logits) and out is None and noise is None:
        return TOP_TOKENS(logits, k, offsets_V)
    if use_kernels(logits):
        from specdec.ops.topk_triton import launch_top_tokens, noisy_scan

        return launch_top_tokens(logits, k, offsets_V, out, noisy_scan(noise, offsets_V))
    logits = logits.float() if noise is None else perturb(logits, noise, offsets_V)
    top, ids = stable_topk(logits, k)
    best = top[..., :1]
    logp = (top - best) - (logits - best).exp().sum(-1, keepdim=True).log()
    ids = with_offsets(ids, offsets_V)
    if out is None:
        return logp, ids
    return out[0].copy_(logp), out[1].copy_(ids)


def best_logprobs(logits_RV: Tensor) -> Tensor:
    """[R, 1] float32: the log-probability of each row's most likely token.

    On a GPU its sum has one order for each V, and that of `top_tokens` another for other numbers of rows, other k and dtypes.
    """
    if use_kernels(logits_RV):
        from specdec.ops.topk_triton import launch_best_logprobs

        return launch_best_logprobs(logits_RV)
    logits_RV = logits_RV.float()
    return -(logits_RV - logits_RV.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True).log()


def greedy_tokens(
    logits: Tensor, offsets_V: Tensor | None = None, *, finite: bool = False, noise: Noise | None = None
) -> Tensor:
    """[...] int64: the most likely token of each row of [..., V].

    Ties go to the lowest id and NaN counts as the largest value, as in torch's argmax.  offsets_V: as in `top_tokens`.
    finite: a row gives -1 instead where its largest logit is not a finite number: where it holds a NaN or +inf, or -inf alone.
    noise: as in `top_tokens`.
    """
    if use_operator(logits) and noise is None:
        return GREEDY_TOKENS(logits, offsets_V, finite)
    if use_kernels(logits):
        from specdec.ops.topk_triton import launch_greedy_tokens, noisy_scan

        return launch_greedy_tokens(logits, offsets_V, finite, noisy_scan(noise, offsets_V))
    if noise is not None:
        logits = perturb(logits, noise, offsets_V)
    ids = logits.argmax(-1)
    if finite:
        return torch.where(logits.gather(-1, ids[..., None])[..., 0].isfinite(), with_offsets(ids, offsets_V), -1)
    return with_offsets(ids, offsets_V)


def with_offsets(ids: Tensor, offsets_V: Tensor | None) -> Tensor:
    """Draft ids plus their offsets; the ids themselves without offsets."""
    return ids if offsets_V is None else ids + offsets_V[ids]


def _top_tokens_fake(logits: Tensor, k: int, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def _greedy_tokens_fake(logits: Tensor, offsets: Tensor | None = None, finite: bool = False) -> Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=torch.int64)


def _greedy_tokens(logits: Tensor, offsets_V: Tensor | None = None, finite: bool = False) -> Tensor:
    return greedy_tokens(logits, offsets_V, finite=finite)


TOP_TOKENS = define("top_tokens(Tensor logits, int k, Tensor? offsets=None) -> (Tensor, Tensor)", top_tokens, _top_tokens_fake)
GREEDY_TOKENS = define(
    "greedy_tokens(Tensor logits, Tensor? offsets=None, bool finite=False) -> Tensor", _greedy_tokens, _greedy_tokens_fake
)
