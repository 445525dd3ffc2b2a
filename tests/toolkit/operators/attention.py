"""The operators of attention, and arguments for each: heads and latents in every format of a cache, windows, ragged rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import specdec.attention.operators.heads as heads
import specdec.attention.operators.latent as latent
from specdec.attention.caches.fp8_latent import quantise_latents
from specdec.attention.caches.kv_cache import MOVE
from specdec.ops.rope import rotary_table

H, K, D, P, SLOTS = 4, 2, 16, 4, 64
RANK, ROPE = 16, 8
WIDE = 128  # a rank that 8 bits can hold
SCALE = 0.3


def rand(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device)


def ints(device: str, *values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def cache(device: str, kind: str = "") -> tuple[Tensor, Tensor | None]:
    """Keys and values of one layer, and their scales; slots from 40 on hold NaN, and no test's query may read them."""
    kv = rand(device, SLOTS, 2, K, D)
    if kind == "int8":
        return torch.randint(-127, 128, kv.shape, device=device).to(torch.int8), torch.rand(SLOTS, 2, K, device=device) / 100
    if kind == "fp8":
        return kv.to(torch.float8_e4m3fn), torch.rand(2, K, device=device) + 0.5
    kv[40:] = torch.nan
    return kv, None


def table(device: str) -> Tensor:
    return ints(device, [3, 0, 5], [7, 9, 15])  # the last page of row 1 holds NaN


def store_args(device: str, kind: str = "", norm: bool = False, rotates: bool = True) -> tuple[Any, ...]:
    kv, scales = cache(device, kind)
    turn = (
        (ints(device, 3, 9, 0, dtype=torch.int64), rotary_table(torch.rand(D // 2), 12).to(device)) if rotates else (None, None)
    )
    eps = (rand(device, H + K, D), 1e-5) if norm else (None, 0.0)
    scales = (None, scales) if kind == "int8" else (scales, None)
    return rand(device, 3, H + 2 * K, D), kv, ints(device, 5, 17, 2, dtype=torch.int64), *turn, *eps, *scales


def paged_args(device: str, kind: str = "", queries: int = 2, local: bool = False, paired: bool = False) -> tuple[Any, ...]:
    kv, scales = cache(device, kind)
    starts, span = (ints(device, 1, 2, 0, 3)[: 2 * queries], 6) if local else (None, None)
    rows = (table(device), ints(device, 9, 6), ints(device, 0, queries, 2 * queries), queries, P, queries > 1)
    return rand(device, 2 * queries, H, D), kv, scales, paired, *rows, SCALE, 2.0 if local else None, starts, span


def ragged_args(device: str) -> tuple[Any, ...]:
    rows = (table(device), ints(device, 9, 6), ints(device, 0, 3, 4), 3, P, True)
    return rand(device, 4, H, D), *cache(device), False, *rows, SCALE, None, None, None, True


def paged_alibi_args(device: str, queries: int = 2, roots: bool = False) -> tuple[Any, ...]:
    positions = ints(device, *[7, 8, 4, 5] if queries == 2 else [8, 5])
    return *paged_args(device, queries=queries), False, rand(device, H).abs(), positions, roots


def suffix_alibi_args(device: str, roots: bool = False) -> tuple[Any, ...]:
    return *suffix_args(device), rand(device, H).abs(), ints(device, 1, 0, 0), roots


def rows(device: str) -> Tensor:
    """Keys and then values of half their width, a row a token; slots from 40 on hold NaN."""
    kept = rand(device, SLOTS, K * (D + D // 2))
    kept[40:] = torch.nan
    return kept


def rows_store_args(device: str) -> tuple[Any, ...]:
    turn = ints(device, 3, 9, 0, dtype=torch.int64), rotary_table(torch.rand(D // 2), 12).to(device)
    own = rand(device, 3, (H + K) * D + K * D // 2), rows(device), ints(device, 5, 17, 2, dtype=torch.int64)
    return *own, K, D, *turn, rand(device, H + K, D), 1e-5, False, 0.5


def paged_rows_args(device: str) -> tuple[Any, ...]:
    q, _, *others = paged_args(device)
    return q, rows(device), *others, False, None, None, False, K


def suffix_rows_args(device: str) -> tuple[Any, ...]:
    q, _, scales, paired, slots, lens, before, *others = suffix_args(device)
    return q, rows(device), scales, paired, slots, lens, before[..., : D // 2].contiguous(), *others, None, None, False, K


def rope_args(device: str) -> tuple[Any, ...]:
    return rand(device, 3, H, D), ints(device, 3, 9, 0, dtype=torch.int64), rotary_table(torch.rand(D // 2), 12).to(device)


def suffix_args(device: str, kind: str = "", local: bool = False, paired: bool = False) -> tuple[Any, ...]:
    kv, scales = cache(device, kind)
    own = (ints(device, [8, 9, 63], [30, 63, 63], [31, 30, 8]), ints(device, 2, 1, 0))
    lse = rand(device, 3, H)
    lse[0, 1] = -torch.inf
    more = (2.0, ints(device, 1, 0, 0)) if local else (None, None)
    before = rand(device, 3, H, 2 * D if paired else D)
    return rand(device, 3, H, D), kv, scales, paired, *own, before, lse, SCALE, *more


def latents(device: str, rank: int, kind: str = "") -> Tensor:
    """A cache of latents, or of latents in 8 bits; slots from 40 on hold NaN."""
    kept = rand(device, SLOTS, rank + ROPE)
    kept[40:] = torch.nan
    return quantise_latents(kept, rank) if kind == "fp8" else kept


def latent_store_args(device: str, wide_out: bool = False, kind: str = "") -> tuple[Any, ...]:
    rank = WIDE if kind else RANK
    q, out = rand(device, 3, H, 24)[..., -ROPE:], rand(device, 3, H, ROPE)
    out = rand(device, 3, H, rank + ROPE)[..., rank:] if wide_out else out
    fixed = (rotary_table(torch.rand(ROPE // 2), 12).to(device), rand(device, rank), 1e-6)
    at = (ints(device, 5, 17, 2, dtype=torch.int64), ints(device, 3, 9, 0, dtype=torch.int64))
    return q, rand(device, 3, rank + ROPE), latents(device, rank, kind), out, *at, *fixed


def latent_args(device: str, queries: int = 2, kind: str = "") -> tuple[Any, ...]:
    rank = WIDE if kind else RANK
    rows = (table(device), ints(device, 9, 6), ints(device, 0, queries, 2 * queries), queries, P, queries > 1)
    return rand(device, 2 * queries, H, rank + ROPE), latents(device, rank, kind), rank, *rows, SCALE


def selected_args(device: str) -> tuple[Any, ...]:
    """Each query reads slots of its own, as an indexer selects them."""
    rows = (ints(device, [8, 9, 63], [30, 63, 63], [31, 30, 8]), ints(device, 2, 1, 3), ints(device, 0, 1, 2, 3), 1, 1, False)
    return rand(device, 3, H, RANK + ROPE), latents(device, RANK), RANK, *rows, SCALE


def move_args(device: str) -> tuple[Any, ...]:
    slots = ints(device, [3, 4, 5, 6], [10, 11, 20, 21], dtype=torch.int64)
    return rand(device, 3, SLOTS, 2, K, D), slots, ints(device, [0, 2, 3], [0, 3, 2], dtype=torch.int64)


CASES: dict[str, tuple[Any, Callable[[str], tuple[Any, ...]]]] = {
    "store": (heads.ROPE_STORE, store_args),
    "store norm": (heads.ROPE_STORE, lambda d: store_args(d, norm=True)),
    "store unrotated": (heads.ROPE_STORE, lambda d: store_args(d, rotates=False)),
    "store int8": (heads.ROPE_STORE, lambda d: store_args(d, "int8")),
    "store fp8": (heads.ROPE_STORE, lambda d: store_args(d, "fp8")),
    "rope": (heads.ROPE, rope_args),
    "rows store": (heads.ROWS_STORE, rows_store_args),
    "paged rows": (heads.PAGED_ATTENTION, paged_rows_args),
    "suffix rows": (heads.SUFFIX_MERGE, suffix_rows_args),
    "paged pairs": (heads.PAGED_ATTENTION, lambda d: paged_args(d, paired=True)),
    "suffix pairs": (heads.SUFFIX_MERGE, lambda d: suffix_args(d, paired=True)),
    "paged decode": (heads.PAGED_ATTENTION, lambda d: paged_args(d, queries=1)),
    "paged causal": (heads.PAGED_ATTENTION, paged_args),
    "paged local": (heads.PAGED_ATTENTION, lambda d: paged_args(d, local=True)),
    "paged ragged": (heads.PAGED_ATTENTION, ragged_args),
    "paged int8": (heads.PAGED_ATTENTION, lambda d: paged_args(d, "int8")),
    "paged fp8": (heads.PAGED_ATTENTION, lambda d: paged_args(d, "fp8")),
    "suffix": (heads.SUFFIX_MERGE, suffix_args),
    "suffix local": (heads.SUFFIX_MERGE, lambda d: suffix_args(d, local=True)),
    "suffix int8": (heads.SUFFIX_MERGE, lambda d: suffix_args(d, "int8")),
    "suffix fp8": (heads.SUFFIX_MERGE, lambda d: suffix_args(d, "fp8")),
    "paged alibi": (heads.PAGED_ATTENTION, paged_alibi_args),
    "paged alibi decode": (heads.PAGED_ATTENTION, lambda d: paged_alibi_args(d, queries=1)),
    "suffix alibi": (heads.SUFFIX_MERGE, suffix_alibi_args),
    "paged alibi roots": (heads.PAGED_ATTENTION, lambda d: paged_alibi_args(d, roots=True)),
    "suffix alibi roots": (heads.SUFFIX_MERGE, lambda d: suffix_alibi_args(d, roots=True)),
    "latent store": (latent.LATENT_STORE, latent_store_args),
    "latent store into queries": (latent.LATENT_STORE, lambda d: latent_store_args(d, wide_out=True)),
    "latent decode": (latent.LATENT_ATTENTION, lambda d: latent_args(d, queries=1)),
    "latent causal": (latent.LATENT_ATTENTION, latent_args),
    "latent store fp8": (latent.LATENT_STORE, lambda d: latent_store_args(d, kind="fp8")),
    "latent decode fp8": (latent.LATENT_ATTENTION, lambda d: latent_args(d, queries=1, kind="fp8")),
    "latent selected": (latent.LATENT_ATTENTION, selected_args),
    "move": (MOVE, move_args),
}
