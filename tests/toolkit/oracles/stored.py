"""The text of a target over a cache that rounds what it keeps: one dense forward that rounds as the cache does."""

import torch

from specdec import SpecDecoder
from specdec.attention.caches.int8_keys import rounded_queries
from specdec.attention.caches.quant_cache import as_stored
from specdec.attention.eager.dense import DenseAttention
from specdec.bench.near_tie import LOGIT_NOISE
from specdec.generation import Generation
from toolkit.driver import Driver


@torch.inference_mode()
def is_clearly_the_oracle_s_text(decoder: SpecDecoder, out: Generation) -> bool:
    """Asserts that every token is the best one after the tokens before it, or near the best.

    Returns whether no other token was near the best at any position.
    """
    model, cache = decoder.model, Driver(decoder).cache("target")
    device = decoder.settings.device
    ids_T = torch.tensor([*out.prompt_token_ids, *out.token_ids[:-1]], device=device)
    queries = rounded_queries if decoder.settings.options.int8_queries else None
    attn = DenseAttention(model.config.layer_kinds, as_stored=as_stored(cache), queries_as_read=queries)
    logits_TV = model.logits(model(ids_T, torch.arange(len(ids_T), device=device), attn).hidden_TH)
    logits_TV = logits_TV[len(out.prompt_token_ids) - 1 :]
    noise = LOGIT_NOISE[decoder.settings.options.kv_cache_dtype] * logits_TV.std()
    best, second = logits_TV.topk(2).values.unbind(-1)
    below = best - logits_TV.gather(1, torch.tensor(out.token_ids, device=device)[:, None])[:, 0]
    assert (below <= noise).all(), (below.tolist(), noise)
    return bool((best - second > noise).all())
