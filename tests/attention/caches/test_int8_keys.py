"""Keys in int8 with values as they are, and queries in int8: what is stored, and what attention over it computes.

Whole engines are in tests/lossless/kv/test_quantised_kv.py, plans of all kinds in tests/attention/kernels/test_triton_kinds.py.
Without a GPU, kernels run under Triton's interpreter.

Shapes: T tokens or queries, N slots, H heads, K kv heads, G = H / K, D head dim.
"""

from dataclasses import replace

import pytest
import torch
from toolkit.attention.answers import attended
from toolkit.kernels import DEVICE, HAS_GPU
from torch import Tensor

from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.int8_keys import Int8KeysLayout, Int8KeysView, queries_as_read
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.quant_cache import QuantLayout, to_int8
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels.rope_store_triton import launch_rope_store
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import FULL, Scoring
from specdec.attention.operators.backend import OperatorBackend
from specdec.attention.segment import AttentionPlan, Segment
from specdec.ops.rope import HeadPrep, Rotation, rotary_table

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if HAS_GPU else [])
SLOTS = 90


def poisoned(K: int, D: int, dtype: torch.dtype, layers: int = 1, int8_queries: bool = False) -> KVCache:
    """A cache in which everything that nobody wrote is NaN, or has NaN for its scale."""
    cache = KVCache(Int8KeysLayout(K, D, dtype, int8_queries), [FULL] * layers, SLOTS, device=DEVICE)
    cache.buffers["kv"].fill_(255)
    cache.buffers["scales"].fill_(torch.nan)
    return cache


def view_of(cache: KVCache, layer: int = 0) -> Int8KeysView:
    view = cache.view(layer)
    assert isinstance(view, Int8KeysView)
    return view


def uneven(T: int, K: int, D: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """[T, 2, K, D]: heads and tokens of different sizes, so that another one's scale shows; and a key of zeros."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-1, 2, (T, 2, K, 1), generator=generator)
    kv_T2KD = torch.randn(T, 2, K, D, generator=generator) * sizes
    kv_T2KD[1, 0, -1] = 0
    return kv_T2KD.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES, torch.bfloat16], ids=str)
@pytest.mark.parametrize("D", [16, 22])
def test_keys_are_within_half_a_step_and_values_are_as_they_were(D: int, dtype: torch.dtype) -> None:
    """Keeps out: a value that is rounded, or read where none was written; a scale of another head or token."""
    kv, slots_T, view = uneven(40, 3, D, dtype), torch.randperm(SLOTS)[:40].to(DEVICE), view_of(poisoned(3, D, dtype))
    view.write(slots_T, kv)
    k, v = view.read(slots_T, dtype)
    step = kv[:, 0].double().abs().amax(-1, keepdim=True) / 127
    rounding = kv[:, 0].double().abs() * torch.finfo(dtype).eps  # of what is read, in that dtype
    assert torch.equal(v, kv[:, 1]) and ((k.double() - kv[:, 0].double()).abs() <= step * 0.50001 + rounding).all()
    assert torch.equal(view.as_stored(kv), torch.stack((k, v), dim=1))
    view.write(slots_T[5:6], kv[5:6])  # alone, in place of together with others
    assert torch.equal(view.read(slots_T, dtype)[0], k)


@pytest.mark.parametrize("D", [22, 64])
def test_bytes_of_a_token(D: int) -> None:
    """Keeps out: a pool that takes other bytes than it counts, and heads whose keys or values are not aligned."""
    layout = Int8KeysLayout(8, D, torch.bfloat16)
    taken = KVCache(layout, [FULL] * 3, 10).bytes
    assert taken == 30 * layout.layer_bytes(0)
    if D % 32 == 0:
        assert layout.layer_bytes(0) == 8 * (D + 4 + 2 * D) == 0.75 * HeadsLayout(8, D, torch.bfloat16).layer_bytes(0) + 8 * 4
    for x in view_of(KVCache(layout, [FULL], 10)).heads:
        assert all(place * x.itemsize % 32 == 0 for place in (x.data_ptr() // x.itemsize, *x.stride()[:2]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("Q", "K", "D", "rotates"), [(5, 3, 24, True), (2, 2, 40, False)])
def test_the_kernel_stores_the_very_bytes_of_the_definition(dtype: torch.dtype, Q: int, K: int, D: int, rotates: bool) -> None:
    """Keeps out: prefill by one way and rounds by another; a scale from half of a head; values rounded to steps, or queries."""
    T, want, got = 70, view_of(poisoned(K, D, dtype)), view_of(poisoned(K, D, dtype))
    slots_T, kv = torch.randperm(SLOTS)[:T].to(DEVICE), uneven(T, K, D, dtype)
    q_TQD = torch.randn(T, Q, D).to(DEVICE, dtype)
    rotation = None
    if rotates:  # by quarter turns, which round nothing
        table = torch.zeros(50, 2, D, device=DEVICE, dtype=dtype)
        table[::2, 0], table[1::2, 1, : D // 2], table[1::2, 1, D // 2 :] = 1, -1, 1
        rotation = Rotation(table, torch.randint(50, (T,)).to(DEVICE))
    qkv_TXD = torch.cat((q_TQD, kv.flatten(1, 2)), dim=1)
    prep = HeadPrep(rotation, K)
    want_q, want_kv = prep.apply_(qkv_TXD.clone())
    want.write(slots_T, want_kv)
    for c in (slice(0, 3), slice(3, None)):  # in two calls, for the kernel's two grids
        part = HeadPrep(None if rotation is None else Rotation(rotation.table_P2D, rotation.positions_T[c]), K)
        got_q = launch_rope_store(qkv_TXD[c].clone(), got, slots_T[c], part)
        torch.testing.assert_close(got_q, want_q[c], rtol=0, atol=0)
    assert torch.equal(got.kv, want.kv) and torch.equal(got.scales_NK.view(torch.int32), want.scales_NK.view(torch.int32))


def test_the_kernel_norms_and_rotates_before_it_rounds() -> None:
    """Keeps out: a scale of the raw projection, and values that are normed or rotated."""
    Q, K, D, T = 2, 2, 16, 9
    table = rotary_table(10000.0 ** -(torch.arange(0, D, 2) / D), 50).to(DEVICE)
    prep = HeadPrep(Rotation(table, torch.arange(T, device=DEVICE)), K, 1 + torch.rand(Q + K, D, device=DEVICE), 1e-5)
    qkv_TXD = torch.cat((torch.randn(T, Q, D, device=DEVICE), uneven(T, K, D, torch.float32).flatten(1, 2)), dim=1)
    want_q, want_kv = prep.apply_(qkv_TXD.double().clone())
    view, slots_T = view_of(poisoned(K, D, torch.float32)), torch.arange(T, device=DEVICE) + 2
    got_q = launch_rope_store(qkv_TXD.clone(), view, slots_T, prep)
    torch.testing.assert_close(got_q.double(), want_q, rtol=1e-5, atol=1e-5)
    k, v = view.read(slots_T, torch.float64)
    torch.testing.assert_close(v, want_kv[:, 1], rtol=1e-6, atol=1e-6)
    assert ((k - want_kv[:, 0]).abs() <= want_kv[:, 0].abs().amax(-1, keepdim=True) / 127 * 0.502 + 1e-9).all()
    untouched = torch.ones(SLOTS, dtype=torch.bool, device=DEVICE).index_fill(0, slots_T, False)
    assert view.scales_NK[untouched].isnan().all() and (view.kv[untouched] == 255).all()


def test_moves_take_keys_values_and_scales_along() -> None:
    """Keeps out: tokens that arrive without their scales or values, in any layer."""
    K, D, cache = 3, 22, poisoned(3, 22, torch.float32, layers=2)
    slots = torch.randperm(SLOTS)[:14].view(2, 7).to(DEVICE)
    for layer in range(2):
        view_of(cache, layer).write(slots.flatten(), uneven(14, K, D, torch.float32, layer))
    path = torch.tensor([[0, 2, 5, 6], [0, 1, 2, 4]], device=DEVICE)
    want = [view_of(cache, layer).read(slots.gather(1, path).flatten(), torch.float32) for layer in range(2)]
    cache.move(slots, path)
    for layer in range(2):
        got = view_of(cache, layer).read(slots[:, :4].flatten(), torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(got, want[layer], strict=True))


# ---- queries in int8 ----


def integer_attention(q_THD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float) -> Tensor:
    """Every query reads every key: products of integers, whose scales are multiplied in float64 afterwards."""
    (q, q_scales_TH), (k, k_scales_NK) = to_int8(q_THD), to_int8(k_NKD)
    G = q.shape[1] // k.shape[1]
    products = torch.einsum("thd,nhd->htn", q.long(), k.long().repeat_interleave(G, dim=1)).double()
    scales = q_scales_TH.double().t()[:, :, None] * k_scales_NK.double().t().repeat_interleave(G, dim=0)[:, None]
    weights = (products * scales * scale).softmax(-1)
    return torch.einsum("htn,nhd->thd", weights, v_NKD.double().repeat_interleave(G, dim=1))


@pytest.mark.parametrize("make", [TorchBackend, lambda: TritonBackend(40)], ids=["torch", "triton"])
@pytest.mark.parametrize("suffix", [False, True], ids=["prefix", "suffix"])
def test_queries_in_int8_are_multiplied_as_integers(make: type, suffix: bool) -> None:
    """Keeps out: a query's scale that is another query's or head's, a scale taken twice, queries that are not rounded, and
    rounding that differs between prefix and suffix.
    """
    dtype, (K, G, D), T, N = torch.float32, (2, 3, 24), 5, 20
    view = view_of(poisoned(K, D, dtype, int8_queries=True))
    slots_N, kv = torch.randperm(SLOTS)[:N].to(DEVICE), uneven(N, K, D, dtype)
    view.write(slots_N, kv)
    sizes = 10.0 ** torch.randint(-2, 2, (T, K * G, 1), generator=torch.Generator().manual_seed(3))
    q_THD = (torch.randn(T, K * G, D) * sizes).to(DEVICE)
    q_THD[2, 1] = 0
    counts = [torch.full((T,), n, dtype=torch.int32, device=DEVICE) for n in ((0, N) if suffix else (N,))]
    parts = [Segment.of_slots(slots_N.int().expand(T, N).contiguous(), count) for count in counts]
    plan = AttentionPlan((parts[0],), suffix=parts[1] if suffix else None)
    want = integer_attention(q_THD, kv[:, 0], kv[:, 1], 0.3)
    got = attended(make(), q_THD, view, plan, Scoring(0.3))
    torch.testing.assert_close(got.double(), want, rtol=3e-4, atol=3e-4)  # float32 logits of sizes up to some thousands
    exact = attended(make(), q_THD, replace(view, int8_queries=False), plan, Scoring(0.3))
    assert (exact.double() - want).abs().max() > 1e-3, "rounding shows"


@pytest.mark.parametrize("suffix", [False, True], ids=["prefix", "suffix"])
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_what_is_not_finite_stays_so(bad: float, suffix: bool) -> None:
    """Keeps out: a broken activation that comes out of a kernel as a plausible number, because a maximum leaves NaN out."""
    K, D, T = 2, 16, 4
    view, slots_T = view_of(poisoned(K, D, torch.float32, int8_queries=True)), torch.arange(T, device=DEVICE)
    qkv_TXD = torch.randn(T, 3 * K, D).to(DEVICE)
    qkv_TXD[1, K, 3] = bad  # a key of head 0
    launch_rope_store(qkv_TXD, view, slots_T, HeadPrep(None, K))
    finite = view.read(slots_T, torch.float32)[0].isfinite().all(-1)
    assert not finite[1, 0] and finite.sum() == T * K - 1
    view.write(slots_T, torch.randn(T, 2, K, D).to(DEVICE))
    q_THD = torch.randn(2, K, D).to(DEVICE)
    q_THD[0, 1, 5] = bad
    counts = [torch.full((2,), n, dtype=torch.int32, device=DEVICE) for n in ((0, T) if suffix else (T,))]
    parts = [Segment.of_slots(slots_T.int().expand(2, T).contiguous(), count) for count in counts]
    plan = AttentionPlan((parts[0],), suffix=parts[1] if suffix else None)
    out = attended(TritonBackend(40), q_THD, view, plan, Scoring(0.3)).isfinite().all(-1)
    assert not out[0, 1] and out.sum() == 3


def test_rounded_queries_are_within_half_a_step() -> None:
    """Keeps out: queries rounded over an int8 cache that did not ask for it, and truncation."""
    q_THD = torch.randn(7, 4, 16, dtype=torch.float64)
    for layout in (Int8KeysLayout(2, 16, torch.float64), QuantLayout("int8", 2, 16)):
        assert torch.equal(queries_as_read(KVCache(layout, [FULL], 3).view(0), q_THD), q_THD)
        rounded = queries_as_read(KVCache(replace(layout, int8_queries=True), [FULL], 3).view(0), q_THD)
        assert ((rounded - q_THD).abs() <= q_THD.abs().amax(-1, keepdim=True) / 127 * 0.5001).all() and (rounded != q_THD).any()


def test_operators_refuse_what_they_would_leave_out() -> None:
    """Keeps out: a traced pass whose queries are not rounded although the cache asks for it."""
    q_THD, cache = torch.zeros(1, 2, 16), KVCache(QuantLayout("int8", 2, 16, int8_queries=True), [FULL], 4)
    segment = Segment.of_slots(torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    with pytest.raises(TypeError, match="know no int8_queries: it must be False, got True"):
        OperatorBackend().run(q_THD, cache.view(0), segment)
    with pytest.raises(TypeError, match="got Int8KeysView"):
        OperatorBackend().run(q_THD, KVCache(Int8KeysLayout(2, 16, torch.float32), [FULL], 4).view(0), segment)
