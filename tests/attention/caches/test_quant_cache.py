"""KV in 8 bits: read values are near the stored ones, and attention is exact over the values that are read.

test_quant_triton.py beside it holds the kernels against these definitions, lossless/kv/test_quantised_kv.py whole engines.

Shapes: B sequences, T tokens, H heads, K kv heads, G = H/K, D head dim, N tree nodes.
"""

import pytest
import torch
from toolkit.attention.answers import attended
from toolkit.attention.caches import Scattered
from toolkit.oracles.attention import dense_attention
from toolkit.oracles.reference import ReferenceBackend
from toolkit.trees import random_masks
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.quant_cache import (
    FP8_MAX,
    HEADROOM,
    MIN_FP8_SCALE,
    QuantLayout,
    QuantView,
    fp8_scale,
    to_fp8,
    to_int8,
)
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kinds import FULL
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment

K, G, D = 3, 2, 16
KINDS = ["fp8", "int8"]
NAN_BYTE = 0x7F  # of float8_e4m3fn


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uneven(tokens: int, seed: int = 0) -> Tensor:
    """[T, 2, K, D] whose heads differ in size by powers of ten: a scale that is another head's, or the key's, shows."""
    sizes = torch.tensor([[0.1, 100.0, 3.0], [30.0, 1.0, 0.3]])
    return rand(tokens, 2, K, D, seed=seed) * sizes[:, :, None]


def poisoned(kind: str, slots: int, layers: int = 1) -> KVCache:
    """A cache in which everything that nobody wrote reads as NaN (fp8), or as a NaN's scale (int8)."""
    cache = KVCache(QuantLayout(kind, K, D), [FULL] * layers, slots)
    cache.buffers["kv"].view(torch.uint8).fill_(NAN_BYTE)
    if "scales" in cache.buffers:
        cache.buffers["scales"].fill_(torch.nan)
    return cache


def read(view: QuantView, slots: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack(view.read(slots, dtype), dim=1)


# ---- values ----


def test_int8_is_within_half_a_step_of_every_value() -> None:
    """Keeps out: truncation, a scale of the wrong token or head, one that does not reach the largest value."""
    view, slots = poisoned("int8", 60).view(0), torch.randperm(60)[:40]
    kv = uneven(40) * torch.rand(40, 2, K, 1)
    view.write(slots, kv)
    step = kv.abs().amax(-1, keepdim=True) / 127
    assert ((read(view, slots) - kv).abs() <= step * 0.50001).all()
    largest = kv.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(read(view, slots).gather(-1, largest), kv.gather(-1, largest))


def test_fp8_is_within_a_sixteenth_of_every_value() -> None:
    """Keeps out: rounding toward zero, the coarser e5m2, scales that push small values out of the range."""
    view, slots = poisoned("fp8", 60).view(0), torch.randperm(60)[:40]
    kv = uneven(40)
    view.write(slots, kv)
    scale = view.scale_2K[:, :, None]
    smallest = scale * 2.0**-6  # of the normal numbers; below, steps are even
    assert ((read(view, slots) - kv).abs() <= kv.abs().maximum(smallest) / 16).all()
    assert (kv.abs() > smallest).float().mean() > 0.995, "the test should live in the range of normal numbers"


def test_nothing_overflows() -> None:
    """Keeps out: fp8's NaN, which follows its largest number, and an int8 that wraps around."""
    for kind in KINDS:
        view, slots = poisoned(kind, 9).view(0), torch.arange(2)
        view.write(slots, uneven(2))
        view.write(slots, uneven(2, seed=1) * 1e6)
        assert read(view, slots).isfinite().all()
    scale_2K = torch.tensor([[0.5, 1, 2], [1, 1, 1]])
    beyond = torch.tensor([-torch.inf, -1e30, 300.0, torch.inf]).expand(1, 2, K, 4)
    assert to_fp8(beyond, scale_2K)[0, 0, 0].tolist() == [-FP8_MAX, -FP8_MAX, FP8_MAX, FP8_MAX]


def test_heads_of_zeros_stay_zeros() -> None:
    """Keeps out: 0 / 0."""
    for kind in KINDS:
        view, slots, kv = poisoned(kind, 9).view(0), torch.tensor([4, 2]), uneven(2)
        kv[0, 1, 2] = kv[1, 0, 0] = 0
        view.write(slots, kv)
        got = read(view, slots)
        assert got.isfinite().all() and (got[0, 1, 2] == 0).all() and (got[1, 0, 0] == 0).all() and (got != 0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_of_a_token_does_not_depend_on_its_company(kind: str) -> None:
    """Keeps out: a scale over a whole pass, by which one token is stored differently in drafts and in plain decoding."""
    together, alone = poisoned(kind, 20).view(0), poisoned(kind, 20).view(0)
    kv, slots = uneven(12), torch.randperm(20)[:12]
    if kind == "fp8":
        alone.set_scale(kv)
    together.write(slots, kv)
    for token in range(12):
        alone.write(slots[token : token + 1], kv[token : token + 1])
    assert torch.equal(read(together, slots), read(alone, slots))


# ---- fp8's scale ----


def test_the_first_pass_sets_the_scale_and_no_other() -> None:
    """Keeps out: a scale that moves under tokens that are stored, and a new tensor that kernels and graphs do not read."""
    view = poisoned("fp8", 20).view(0)
    tensor = view.scale_2K
    kv = uneven(5)
    view.write(torch.arange(5), kv)
    torch.testing.assert_close(view.scale_2K, (kv.abs().amax((0, 3)) * HEADROOM / FP8_MAX).clamp(min=MIN_FP8_SCALE))
    before, stored = view.scale_2K.clone(), read(view, torch.arange(5))
    view.write(torch.arange(5, 10), uneven(5, seed=1) * 50)
    assert view.scale_2K is tensor and torch.equal(tensor, before) and torch.equal(read(view, torch.arange(5)), stored)


def test_a_broken_first_request_does_not_spoil_the_scale() -> None:
    """Keeps out: one request's NaN in every later request's keys."""
    kv = uneven(6)
    broken = kv.clone()
    broken[2, 0, 1, 3], broken[4, 1, 2, 0] = torch.nan, torch.inf
    clean = fp8_scale(broken)
    assert clean.isfinite().all() and (clean > 0).all() and (clean <= fp8_scale(kv)).all()


def test_given_scales_are_used_and_missing_ones_are_computed() -> None:
    """Keeps out: a checkpoint's scale that the first prompt replaces, and layers that take each other's."""
    given = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    cache = KVCache(QuantLayout("fp8", K, D, scales=[None, given, None]), [FULL] * 3, 8)
    for layer in range(3):
        cache.view(layer).write(torch.arange(8), uneven(8))
    computed = fp8_scale(uneven(8))
    assert torch.equal(cache.view(1).scale_2K, given)
    assert all(torch.equal(cache.view(layer).scale_2K, computed) for layer in (0, 2))


# ---- attention and moves ----


def tree_plan(lens: list[int], nodes: int, page_size: int) -> tuple[AttentionPlan, list[Tensor], Tensor, Tensor]:
    """(plan of prefix and suffix, slots of each sequence's keys [L + N], tree mask [B, N, N], fresh slots [B, N])."""
    pages, mask = Scattered(lens, page_size, extra=nodes, seed=4), random_masks(len(lens), nodes, seed=4)
    suffix, fresh = Segment.empty(len(lens) * nodes, nodes, 1), pages.fresh_slots()
    fill_tree_suffix(suffix, fresh, mask)
    every = [pages.slots(row, 0, n + nodes) for row, n in enumerate(lens)]
    return (
        AttentionPlan((prefix_segment(PageTable(pages.table_BW, page_size), pages.lens_B, nodes),), suffix=suffix),
        every,
        mask,
        fresh,
    )


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("backend", [ReferenceBackend(), TorchBackend()], ids=lambda b: b.name)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cascade_is_dense_attention_over_the_dequantised_values(kind: str, backend: Backend, page_size: int) -> None:
    """Keeps out: a suffix read with the prefix's scales, a key's scale on values, a head's on its neighbour, poison.

    In float64: nothing but the stored numbers is rounded, so the two must be equal to 12 digits.
    """
    lens, N = [23, 0, 7], 6
    plan, slots, mask, fresh = tree_plan(lens, N, page_size)
    view = poisoned(kind, 400).view(0)
    for b, length in enumerate(lens):  # prefixes in one pass each, then the tree in another
        if length:
            view.write(slots[b][:length], uneven(length, seed=b) * (1 + b))
    view.write(fresh.flatten(), uneven(fresh.numel(), seed=9) * 2)
    q_THD = rand(len(lens) * N, K * G, D, seed=7).double()
    got = attended(backend, q_THD, view, plan).view(len(lens), N, K * G, D)
    for b, length in enumerate(lens):
        visible = torch.cat((torch.ones(N, length, dtype=torch.bool), mask[b]), dim=1)
        q_NHD = q_THD.view(len(lens), N, K * G, D)[b]
        want, _ = dense_attention(q_NHD, *view.read(slots[b], torch.float64), visible)
        torch.testing.assert_close(got[b], want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_near_that_over_the_values_themselves(kind: str) -> None:
    """Keeps out: values that are right by themselves, but are read in another order or from another place."""
    lens = [64, 40]
    table = torch.arange(2 * 4).view(2, 4).int()
    segment = causal_segment(PageTable(table, 16), torch.tensor(lens, dtype=torch.int32), 1)
    view, kv = poisoned(kind, 128).view(0), rand(128, 2, K, D)
    view.write(torch.arange(128), kv)
    q_THD = rand(2, K * G, D, seed=1)
    state = ReferenceBackend().run(q_THD, view, segment)
    for b, length in enumerate(lens):
        k, v = (kv[b * 64 : b * 64 + length, i].repeat_interleave(G, dim=1) for i in (0, 1))
        weights = (torch.einsum("hd,nhd->hn", q_THD[b], k) * D**-0.5).softmax(-1)
        want = torch.einsum("hn,nhd->hd", weights, v)
        error = (state.out_THD[b] - want).norm() / want.norm()
        assert 0 < error < {"fp8": 0.05, "int8": 0.015}[kind], error


@pytest.mark.parametrize("kind", KINDS)
def test_moved_tokens_keep_their_scales(kind: str) -> None:
    """Keeps out: int8 values that arrive without their scales, in any layer; scales that are read after they were written."""
    cache = poisoned(kind, 40, layers=3)
    slots = torch.randperm(40)[:14].view(2, 7)
    for layer in range(3):
        cache.view(layer).write(slots.flatten(), uneven(14, seed=layer) * torch.arange(1, 15).view(14, 1, 1, 1))
    path = torch.tensor([[0, 2, 5, 6], [0, 1, 2, 4]])
    want = [read(cache.view(layer), slots.gather(1, path).flatten()) for layer in range(3)]
    rest = [read(cache.view(layer), slots[:, 4:].flatten()) for layer in range(3)]
    cache.move(slots, path)
    for layer in range(3):
        assert torch.equal(read(cache.view(layer), slots[:, :4].flatten()), want[layer])
        assert torch.equal(read(cache.view(layer), slots[:, 4:].flatten()), rest[layer])


# ---- sizes and settings ----


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_token_are_what_the_cache_takes(kind: str) -> None:
    """Keeps out: a pool that forgets the scales, and so takes more memory than there is."""
    layout = QuantLayout(kind, 8, 128)
    taken = KVCache(layout, [FULL] * 4, 10).bytes
    assert taken == 10 * 4 * layout.layer_bytes(0)
    half = 4 * HeadsLayout(8, 128, torch.bfloat16).layer_bytes(0) / 2
    assert half <= taken / 10 <= half * (1 + 4 / 128)


def test_int8_scales_are_float32_whatever_comes_in() -> None:
    """Keeps out: bfloat16 scales, whose own rounding would be as large as the steps."""
    stored, scales = to_int8(uneven(3).bfloat16())
    assert scales.dtype == torch.float32 and stored.dtype == torch.int8 and stored.abs().amax(-1).eq(127).all()
