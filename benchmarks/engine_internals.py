"""What the experiments of this folder change or read inside a running engine, which no user can.

This is the only script here that touches the engine's parts.  It knows nothing of what is measured.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from specdec.attention.attend import PagedAttention
from specdec.attention.caches.kv_cache import KVCache
from specdec.batch.tree import DraftTree
from specdec.decoder import SpecDecoder
from specdec.verify.tables import tree_tables

# ---- caches ----


def target_cache(decoder: SpecDecoder) -> KVCache:
    return decoder.engine.verifier.cache


def caches(decoder: SpecDecoder) -> list[KVCache]:
    """The target's, and the draft's if there is one."""
    drafter: Any = decoder.engine.drafter
    return [decoder.engine.verifier.cache] + ([drafter.cache] if drafter else [])


def num_pages(decoder: SpecDecoder) -> int:
    """Pages of the KV pool."""
    return decoder.engine.pool.num_pages


def without_prefill(decoder: SpecDecoder) -> None:
    """From now on prompts enter as though they had been prefilled: the keys and values in their pages are there already."""

    def run(verifier: Any, drafter: Any, state: Any, *rest: Any) -> Tensor:
        state.bonus_B.random_(1000, 100000)
        state.level1_tokens_BK.random_(1000, 90000)
        state.level1_hidden_BH.normal_()
        return state.bonus_B

    decoder.engine.prefills.run = run  # type: ignore[method-assign]


# ---- shared prefixes ----


def set_sharing(decoder: SpecDecoder, shared: bool, in_every_pass: bool) -> None:
    """Whether rows that name the same pages read them once.  in_every_pass: in passes of many queries too, which must be said
    before anything is captured."""
    sharing = decoder.engine.sharing
    assert sharing is not None
    sharing.least_saved = 0 if shared else math.inf
    if in_every_pass:
        sharing.shared = sharing.shared._replace(most_queries=10**6)


def is_shared(decoder: SpecDecoder) -> bool:
    """Whether the last round's rows read pages together."""
    sharing = decoder.engine.sharing
    assert sharing is not None and sharing.group is not None
    return bool(sharing.group.rows)


def give_copies(decoder: SpecDecoder) -> None:
    """Every row but the first gets the shared pages as copies of its own, as without prefix caching."""
    engine = decoder.engine
    state, size, pool = engine.state, engine.pool.page_size, engine.pool
    fixed = [engine.admission.fixed_pages(request) for request in engine.running]
    count = next(i for i, page in enumerate(fixed[0]) if page != fixed[1][i])
    for row in range(1, len(engine.running)):
        pages = torch.tensor(pool.admit(("copy", row), count * size), device=state.lens_B.device)
        offsets = torch.arange(size, device=pages.device)
        old = (state.page_table_BW[row, :count].long()[:, None] * size + offsets).flatten()
        new = (pages[:, None] * size + offsets).flatten()
        for cache in caches(decoder):
            for layer in cache.kv:  # type: ignore[attr-defined]
                layer[new] = layer[old]
        state.page_table_BW[row, :count] = pages.int()


def take_copies(decoder: SpecDecoder, rows: int) -> None:
    """Gives the pages of `give_copies` back to the pool."""
    for row in range(1, rows):
        decoder.engine.pool.release(("copy", row))


@torch.inference_mode()
def sharing_difference(decoder: SpecDecoder, rows: int, num_heads: int, head_dim: int) -> float:
    """How far one layer's attention, shared, is from the same attention unshared: ||a - b|| / ||b||, both in bf16."""
    engine = decoder.engine
    state, device = engine.state.narrow(rows), engine.state.lens_B.device
    assert engine.sharing is not None
    tree = DraftTree.chain(torch.zeros(rows, 6, dtype=torch.int64, device=device))
    q = torch.randn(rows * 6, num_heads, head_dim, dtype=torch.bfloat16, device=device)
    outs = []
    for each in (state, state.sharing(engine.sharing.shared)):
        tables = tree_tables(each, tree, engine.pool.page_size)
        cache, backend = engine.verifier.cache, engine.verifier.backend
        attn = PagedAttention(backend, cache, tables.plan, tables.slots_BN.flatten())
        torch.cuda.synchronize()  # attention reads its tables before it waits: in a model they are much older
        outs.append(backend.attend(q, cache.view(3), attn.prepared[cache.kinds[3]]).double())
    return float((outs[1] - outs[0]).norm() / outs[0].norm())
