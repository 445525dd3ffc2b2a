"""Cross attention: the queries of a plan's rows read an encoder's texts, against transformers' BART and one dense softmax.

Texts lie in pages of their own, whose unread slots hold NaN.  Shapes: B rows, N queries of each, S tokens of a text, Q query
heads, K kv heads, D head dim.
"""

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.oracles.attention import dense_attention
from torch import Tensor
from transformers import BartConfig
from transformers.models.bart.modeling_bart import BartAttention

from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.int8_keys import INT8_KEYS, Int8KeysLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.layout import CacheLayout
from specdec.attention.caches.quant_cache import QuantLayout
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.encoder.encoder_texts import EncoderTexts
from specdec.attention.encoder.inputs import CrossInputs
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import FULL, PLAIN, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment
from specdec.attention.segment import AttentionPlan

LENS, LONGEST, N = [0, 37, 70, 1], 70, 3
BACKENDS = {"torch": (TorchBackend, torch.float64), "triton": (lambda: TritonBackend(40), torch.float32)}


class World:
    """Rows whose texts lie in pages in another order; the last page is a finished request's, and holds NaN."""

    def __init__(self, K: int, D: int, dtype: torch.dtype, kept: str = "auto") -> None:
        self.generator, pages = torch.Generator().manual_seed(K), len(LENS) + 1
        layout: CacheLayout = Int8KeysLayout(K, D, dtype)
        if kept != INT8_KEYS:
            layout = HeadsLayout(K, D, dtype) if kept == "auto" else QuantLayout(kept, K, D, DEVICE)
        self.own = KVCache(HeadsLayout(K, D, dtype), (FULL, FULL), len(LENS) * N, device=DEVICE)
        self.cache = KVCache(layout, (FULL, FULL), pages * LONGEST, device=DEVICE)
        for buffer in self.cache.buffers.values():
            buffer.view(torch.uint8).fill_(0xFF) if buffer.dtype.itemsize == 1 else buffer.fill_(torch.nan)
        self.page_B = torch.randperm(len(LENS), generator=self.generator).int()
        self.encoder_texts = EncoderTexts(self.page_B.to(DEVICE), torch.tensor(LENS, dtype=torch.int32, device=DEVICE), LONGEST)

    def randn(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(DEVICE, dtype)

    def slots(self, row: int) -> Tensor:
        return int(self.page_B[row]) * LONGEST + torch.arange(LENS[row], device=DEVICE)

    def attention(self, backend: TorchBackend | TritonBackend, ragged: bool) -> tuple[PagedAttention, list[int]]:
        """The attention of a pass, and how many queries each row has."""
        own = causal_segment(PageTable(torch.arange(len(LENS), device=DEVICE).int()[:, None], N), self.encoder_texts.lens_B, N)
        counts = [2, 0, 3, 1] if ragged else [N] * len(LENS)
        cu = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32).to(DEVICE)
        cross = self.encoder_texts.read_by_rows_of(cu, N, ragged=True) if ragged else self.encoder_texts.read_by(N)
        rows = AttentionPlan((own,), cross=self.encoder_texts.read_by(1))
        tables = PassTables(AttentionPlan((own,), cross=cross), torch.arange(sum(counts), device=DEVICE), rows)
        return PagedAttention(backend, self.own, tables, encoder_cache=self.cache), counts


@pytest.mark.parametrize("kept", ["auto", "int8", INT8_KEYS])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_every_query_reads_its_rows_text(name: str, ragged: bool, kept: str) -> None:
    """Keeps out: a text of another row or page, a query that reads only part of it, NaN after a text's end, and a row without a
    text that comes back as NaN; the asked-for rows' queries answered by the plan of all.
    """
    (make, dtype), K, D = BACKENDS[name], 2, 16
    w = World(K, D, dtype, kept)
    scoring = Scoring(0.3, 4.0, w.randn(3 * K, dtype=torch.float32)) if ragged else PLAIN
    attn, counts = w.attention(make(), ragged)
    for row in range(len(LENS)):
        w.cache.view(1).write(w.slots(row), w.randn(LENS[row], 2, K, D, dtype=dtype))
    q_TQD = w.randn(sum(counts), 3 * K, D, dtype=dtype)
    got = attn(1, CrossInputs(q_TQD.clone()), None, scoring)
    wants, start, bound = [], 0, 1e-9 if dtype == torch.float64 else 3e-5
    for row, count in enumerate(counts):
        k, v = w.cache.view(1).read(w.slots(row), torch.float64)
        wants.append(dense_attention(q_TQD[start : start + count], k, v, None, scoring)[0])
        start += count
    want = torch.cat(wants)
    torch.testing.assert_close(got.double(), want, atol=bound, rtol=bound)
    if not ragged:
        rows_R = torch.arange(len(LENS), device=DEVICE) * N + 1
        some = attn(1, CrossInputs(q_TQD.clone()), rows_R, scoring)
        torch.testing.assert_close(some.double(), want[rows_R], atol=bound, rtol=bound)


@torch.no_grad()
def test_equals_bart() -> None:
    """Keeps out: heads split or scaled otherwise than the family's own cross attention does."""
    Q, D = 4, 8
    config = BartConfig(d_model=Q * D)
    config._attn_implementation = "eager"
    module, w = BartAttention(Q * D, Q, config=config).eval(), World(Q, D, torch.float32)
    attn, counts = w.attention(TorchBackend(), False)
    module, x = module.to(DEVICE), w.randn(sum(counts), Q * D, dtype=torch.float32)
    texts = [w.randn(length, Q * D, dtype=torch.float32) for length in LENS]
    for row, text in enumerate(texts):
        kv = torch.stack((module.k_proj(text), module.v_proj(text)), 1).unflatten(2, (Q, D))
        w.cache.view(0).write(w.slots(row), kv)
    out = attn(0, CrossInputs(module.q_proj(x).unflatten(1, (Q, D))), None, Scoring(module.scaling))
    got = module.out_proj(out.flatten(1)).unflatten(0, (len(LENS), N))
    for row, text in enumerate(texts):
        if LENS[row]:
            want = module(x.unflatten(0, (len(LENS), N))[row][None], key_value_states=text[None])[0][0]
            torch.testing.assert_close(got[row], want, atol=1e-5, rtol=1e-5)
    assert bool((out.unflatten(0, (len(LENS), N))[0] == 0).all()), "a row without a text reads nothing"


@pytest.mark.gpu
@pytest.mark.parametrize("kept", ["auto", "int8", "fp8", INT8_KEYS])
def test_bfloat16(kept: str) -> None:
    """Keeps out: a tile, a layout or a precision that is wrong only in compiled code."""
    w, K, D = World(16, 64, torch.bfloat16, kept), 16, 64
    attn, counts = w.attention(TritonBackend(), False)
    for row, length in enumerate(LENS):
        if length:
            w.cache.view(1).write(w.slots(row), w.randn(length, 2, K, D, dtype=torch.bfloat16))
    q_TQD = w.randn(sum(counts), K, D, dtype=torch.bfloat16)
    got = attn(1, CrossInputs(q_TQD.clone())).unflatten(0, (len(LENS), N)).double()
    for row in range(len(LENS)):
        k, v = w.cache.view(1).read(w.slots(row), torch.float64)
        want = dense_attention(q_TQD.unflatten(0, (len(LENS), N))[row], k, v)[0]
        assert float((got[row] - want).norm()) <= 1e-2 * float(want.norm())
