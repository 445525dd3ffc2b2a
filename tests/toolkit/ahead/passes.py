"""What models of real widths launch, room by room: each function calls dispatches and launchers as a pass does.

Meant for the GPU of machine.py, where tensors hold nothing, so that a weight of any size is free.  A kernel that no function
here launches fails tests/ops/compiling/test_ahead.py.
"""

from __future__ import annotations

from collections.abc import Callable

from toolkit.ahead import attention, products, recurrent, rounds

PASSES: tuple[Callable[[], None], ...] = (
    products.products,
    products.quantised_products,
    products.lossless_products,
    products.coded_mixtures,
    products.dense_mixtures,
    products.many_tokens,
    products.norms_and_rows,
    recurrent.recurrent_layers,
    recurrent.mamba_layers,
    recurrent.kimi_layers,
    attention.heads_attention,
    attention.latent_attention,
    attention.sparse_attention,
    attention.context_parallel_attention,
    attention.caches_that_move,
    attention.flash_queries,
    rounds.sampling,
    rounds.drafting,
    rounds.verifying,
    rounds.losses,
    rounds.exchanges,
)
