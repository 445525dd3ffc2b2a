"""Whether two outputs part at a near-tie: a place where both tokens are the target's best within rounding error.

The check asks the target directly, in one plain forward with dense attention.  No page, tree, cache or kernel of specdec takes
part in it, so that a fault in one of them can't excuse itself.

Three passes round on their own, in every layer: the passes of the two outputs, and this check's.  So the best token of this
check need not be the best of the others, three tokens may tie, and a score may differ by a few ulps from what either pass saw.
A logic error moves scores by whole units.

Over 8-bit KV the forward rounds keys and values as the cache does.  But a value within an ulp of the border between two steps
may be rounded to either of them.  That moves the next layer's values by more than an ulp, more of those change their step, and
so on.  After many layers two passes may differ as much as rounding KV changes logits at all, in float32 too.  So the bound is
larger there, by a measured share of the logits' standard deviation.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from specdec.attention.caches.fp8_latent import FP8_LATENTS
from specdec.attention.caches.int8_keys import INT8_KEYS, rounded_queries
from specdec.attention.eager.dense import DenseAttention
from specdec.batch.choose import scores_after
from specdec.bench.measurement import Divergence
from specdec.bench.session import Session
from specdec.config import SamplingParams

NEAR_TIE_ULPS = 4  # of the top logit, in the dtype the model computes in
# How far KV in 8 bits moves logits, in standard deviations: benchmarks/kv_quant.py; of latents: benchmarks/latent_quality.py.
LOGIT_NOISE = {"fp8": 2.0**-6, "int8": 2.0**-8, INT8_KEYS: 2.0**-8, FP8_LATENTS: 2.0**-8}


def first_divergence(ids_a: Sequence[int], ids_b: Sequence[int]) -> int | None:
    """Index of the first place where the two differ; None if they are equal."""
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids_a, ids_b)))
    return None if common == len(ids_a) == len(ids_b) else common


def explain_divergence(
    session: Session,
    prompt: int,
    prompt_ids: Sequence[int],
    ids_a: Sequence[int],
    ids_b: Sequence[int],
    sampling: SamplingParams,
) -> Divergence | None:
    """Where baseline ids_a and speculative ids_b part, and whether both went on with one of the equally good tokens.

    At a near-tie the worse of the two tokens scores at most NEAR_TIE_ULPS ulps below the best.  In float32 nothing is a
    near-tie, unless KV is kept in 8 bits.
    prompt: the prompt's number.  sampling: as it ran, with a seed if it samples.  None if the outputs are equal.
    """
    assert isinstance(session, Session), session
    index = first_divergence(ids_a, ids_b)
    if index is None:
        return None
    if index >= min(len(ids_a), len(ids_b)):  # one goes on where the other ends: no two tokens to compare
        return Divergence(prompt, index, next(iter(ids_a[index:]), None), next(iter(ids_b[index:]), None))
    logits_V = _last_logits(session, [*prompt_ids, *ids_a[:index]])
    dtype, noise = session.settings.dtype, LOGIT_NOISE.get(session.settings.options.kv_cache_dtype, 0.0)
    bound = NEAR_TIE_ULPS * (_ulp(logits_V.max().item(), dtype) + noise * logits_V.std().item())
    choice = session.choice(prompt_ids, sampling)
    scores_V = scores_after(logits_V, *choice, len(prompt_ids), ids_a[:index])
    if sampling.temperature > 0:
        bound /= sampling.temperature
    a, b = ids_a[index], ids_b[index]
    rank_a, rank_b = (int((scores_V > scores_V[token]).sum()) + 1 for token in (a, b))
    margin = (scores_V.max() - scores_V[[a, b]].min()).item()  # infinite where top-k or top-p left one of them out
    is_tie = (dtype in (torch.float16, torch.bfloat16) or noise > 0) and margin <= bound
    shown = margin if math.isfinite(margin) else None
    return Divergence(prompt, index, a, b, rank_a, rank_b, shown, bound, "near-tie" if is_tie else "DIVERGED")


@torch.inference_mode()
def _last_logits(session: Session, ids: list[int]) -> Tensor:
    """[V] float32 logits after the ids, computed in the model's own dtype, with keys and values as the cache keeps them.

    Queries are rounded as our own kernels round them; what flash-attn rounds over fp8 is not.
    """
    model, device = session.model, session.settings.device
    ids_T = torch.tensor(ids, device=device)
    attn = DenseAttention(
        model.config.layer_kinds,
        as_stored=session.as_stored,
        sources=model.config.kv_source,
        queries_as_read=rounded_queries if session.settings.options.int8_queries else None,
    )
    out = model(ids_T, torch.arange(len(ids), device=device), attn)
    return model.logits(out.hidden_TH[-1:])[0].float()


def _ulp(value: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring floats of that dtype around the value."""
    if value == 0 or not math.isfinite(value):
        return torch.finfo(dtype).tiny
    return 2.0 ** math.floor(math.log2(abs(value))) * torch.finfo(dtype).eps
