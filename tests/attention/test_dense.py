"""Dense attention (training, the near-tie check) equals the definition over a paged cache, for every kind of layer."""

import pytest
import torch
from toolkit.oracles.reference import ReferenceBackend
from torch import Tensor

from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.eager.dense import DenseAttention
from specdec.attention.inputs import HeadInputs
from specdec.attention.kinds import FULL, LayerKind, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment
from specdec.attention.segment import AttentionPlan
from specdec.ops.rope import HeadPrep

B, T, Q, K, D = 2, 21, 4, 2, 8
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("kind", [FULL, LayerKind(window=1), LayerKind(window=6), LayerKind(chunk=8)], ids=str)
@pytest.mark.parametrize(
    "scoring",
    [Scoring(), Scoring(scale=0.7), Scoring(softcap=1.5), Scoring(sinks_H=SINKS), Scoring(0.7, 1.5, SINKS)],
    ids=range(5),
)
def test_dense_equals_paged(kind: LayerKind, scoring: Scoring) -> None:
    """Keeps out: a near-tie check, or a head in training, that reads other keys than the runtime, or scores them otherwise."""
    qkv = randn(B * T, Q + 2 * K, D)
    cache = KVCache(HeadsLayout(K, D, torch.float64), [FULL, kind], B * T)
    table = torch.arange(B, dtype=torch.int32)[:, None]
    plan = AttentionPlan((causal_segment(PageTable(table, T), torch.full((B,), T, dtype=torch.int32), T),))
    paged = PagedAttention(ReferenceBackend(), cache, PassTables(plan, torch.arange(B * T)))
    want = paged(1, HeadInputs(qkv.clone(), HeadPrep(None, K)), None, scoring)
    dense = DenseAttention(cache.kinds, B)
    torch.testing.assert_close(dense(1, HeadInputs(qkv.clone(), HeadPrep(None, K)), None, scoring), want)
    rows = torch.tensor([3, T + 5])
    torch.testing.assert_close(dense(1, HeadInputs(qkv.clone(), HeadPrep(None, K)), rows, scoring), want[rows])


def test_a_cache_that_rounds() -> None:
    """Keeps out: a check that reads exact keys where the runtime read rounded ones, and so calls their difference an error."""
    qkv = randn(T, Q + 2 * K, D)
    rounded = qkv.clone()
    rounded[:, Q:] = rounded[:, Q:].round()
    as_stored = DenseAttention([FULL], 1, lambda layer, kv: kv.round())
    want = DenseAttention([FULL])(0, HeadInputs(rounded, HeadPrep(None, K)))
    torch.testing.assert_close(as_stored(0, HeadInputs(qkv, HeadPrep(None, K))), want)
