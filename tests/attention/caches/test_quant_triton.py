"""The kernels that store and move 8-bit KV, held against `quant_cache.py` on fresh numbers.

Without a GPU they run under Triton's interpreter, whose conversion to float8 forgets the carry from mantissa to exponent: there
fp8 gets only values that need no rounding (slots, scales and saturation are tested all the same), on a GPU any.

Shapes: T tokens, Q query heads, K kv heads, X = Q + 2K, D head dim.
"""

import pytest
import torch
from toolkit.driver import Driver
from toolkit.kernels import DEVICE, HAS_GPU
from toolkit.models import Zoo
from torch import Tensor

from specdec import SamplingParams, SpecConfig
from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.move_triton import launch_move
from specdec.attention.caches.quant_cache import QuantLayout, QuantView, fp8_scale
from specdec.attention.kernels.rope_store_triton import launch_rope_store
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import FULL
from specdec.ops.rope import HeadPrep, Rotation, rotary_table

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if HAS_GPU else [])
KINDS = ["fp8", "int8"]
SLOTS = 90


def poisoned(kind: str, heads: int, dim: int, layers: int = 1) -> KVCache:
    cache = KVCache(QuantLayout(kind, heads, dim, DEVICE), [FULL] * layers, SLOTS, device=DEVICE)
    cache.buffers["kv"].view(torch.uint8).fill_(0x7F)
    if "scales" in cache.buffers:
        cache.buffers["scales"].fill_(torch.nan)
    return cache


def bytes_of(view: QuantView) -> Tensor:
    return view.kv.view(torch.uint8).cpu()


def uneven(T: int, Q: int, K: int, D: int, dtype: torch.dtype) -> Tensor:
    """[T, X, D]: heads of different sizes, and some of zeros."""
    qkv_TXD = torch.randn(T, Q + 2 * K, D) * 10.0 ** torch.randint(-1, 2, (Q + 2 * K, 1))
    qkv_TXD[1, -1], qkv_TXD[0, Q] = 0, 0
    return qkv_TXD.to(DEVICE, dtype)


def store(view: QuantView, qkv_TXD: Tensor, slots_T: Tensor, prep: HeadPrep) -> Tensor:
    """In two calls, for the kernel's two grids."""
    cuts = (slice(0, 3), slice(3, None))
    norm, turn = prep.norm_HD, prep.rotation
    preps = [
        HeadPrep(None if turn is None else Rotation(turn.table_P2D, turn.positions_T[c]), prep.num_kv_heads, norm, prep.eps)
        for c in cuts
    ]
    parts = [launch_rope_store(qkv_TXD[c], view, slots_T[c], p) for c, p in zip(cuts, preps, strict=True)]
    return torch.cat(parts)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("Q", "K", "D", "rotates", "normed"), [(5, 3, 24, True, False), (4, 1, 16, False, True)])
def test_int8_store_equals_the_definition(dtype: torch.dtype, Q: int, K: int, D: int, rotates: bool, normed: bool) -> None:
    """Keeps out: a head's scale from half of it or from its neighbour, scales of other slots, queries rounded to steps."""
    T = 70
    table = rotary_table(10000.0 ** -(torch.arange(0, D, 2) / D), 50).to(DEVICE, dtype)
    rotation = Rotation(table, torch.randint(50, (T,)).to(DEVICE)) if rotates else None
    norm = (1 + torch.rand(Q + K, D)).to(DEVICE, dtype) if normed else None
    prep = HeadPrep(rotation, K, norm, 1e-5)
    qkv_TXD, slots_T = uneven(T, Q, K, D, dtype), torch.randperm(SLOTS)[:T].to(DEVICE)
    exact = HeadPrep(
        None if rotation is None else Rotation(table.double(), rotation.positions_T), K,
        None if norm is None else norm.double(), 1e-5,
    )  # fmt: skip
    want_q, want_kv = exact.apply_(qkv_TXD.double().clone())
    view = poisoned("int8", K, D).view(0)
    got_q = store(view, qkv_TXD.clone(), slots_T, prep)
    rounding = max(torch.finfo(dtype).eps, 1e-5)  # of the queries, which stay in the models' own dtype
    torch.testing.assert_close(got_q.double(), want_q, rtol=rounding, atol=1e-5)
    step = want_kv.abs().amax(-1, keepdim=True) / 127
    kv = torch.stack(view.read(slots_T, torch.float64), dim=1)
    assert ((kv - want_kv).abs() <= step * 0.502 + 1e-12).all()
    torch.testing.assert_close(view.scales_N2K[slots_T].double(), step[..., 0], rtol=1e-5, atol=0)
    untouched = torch.ones(SLOTS, dtype=torch.bool).index_fill(0, slots_T.cpu(), False)
    assert view.scales_N2K.cpu()[untouched].isnan().all() and (bytes_of(view)[untouched] == 0x7F).all()


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_stores_the_very_steps_of_the_definition(dtype: torch.dtype) -> None:
    """Keeps out: prefill by one way and rounds by another, which would store a token differently."""
    Q, K, D, T = 2, 2, 40, 70
    qkv_TXD, slots_T = uneven(T, Q, K, D, dtype), torch.randperm(SLOTS)[:T].to(DEVICE)
    got, want = poisoned("int8", K, D).view(0), poisoned("int8", K, D).view(0)
    store(got, qkv_TXD.clone(), slots_T, HeadPrep(None, K))
    want.write(slots_T, qkv_TXD[:, Q:].reshape(T, 2, K, D))
    assert torch.equal(bytes_of(got), bytes_of(want))
    assert torch.equal(got.scales_N2K[slots_T], want.scales_N2K[slots_T])


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_stores_the_very_numbers_of_the_definition(dtype: torch.dtype) -> None:
    """Keeps out: another head's scale, a key's scale on values, halves swapped, NaN for what is too large."""
    Q, K, D, T = 3, 2, 24, 70
    scale_2K = torch.tensor([[0.5, 2.0], [0.25, 1.0]], device=DEVICE)
    qkv_TXD, slots_T = uneven(T, Q, K, D, dtype), torch.randperm(SLOTS)[:T].to(DEVICE)
    if not HAS_GPU:  # numbers of float8 times powers of two, and some beyond its range
        eighths = torch.randint(8, 16, qkv_TXD.shape) / 8 * 2.0 ** torch.randint(-4, 9, qkv_TXD.shape)
        qkv_TXD = (eighths * (torch.randint(0, 2, qkv_TXD.shape) * 2 - 1)).to(dtype)
    qkv_TXD[4] = torch.randn(Q + 2 * K, D).sign() * 3e4  # too large for any of the scales
    views = [poisoned("fp8", K, D).view(0) for _ in range(2)]
    for view in views:
        view.scale_2K.copy_(scale_2K)
        view.needs_scale = False
    got_q = store(views[0], qkv_TXD.clone(), slots_T, HeadPrep(None, K))
    views[1].write(slots_T, qkv_TXD[:, Q:].reshape(T, 2, K, D))
    assert torch.equal(bytes_of(views[0]), bytes_of(views[1])) and torch.equal(got_q, qkv_TXD[:, :Q])
    assert (views[0].kv.float().abs() == 448).any(), "nothing was saturated"


def test_the_first_store_sets_fp8_s_scale_from_normed_and_rotated_keys() -> None:
    """Keeps out: a scale of the raw projection, queries rotated twice by the pass that measures."""
    Q, K, D, T = 2, 2, 16, 5
    table = rotary_table(10000.0 ** -(torch.arange(0, D, 2) / D), 50).to(DEVICE)
    prep = HeadPrep(Rotation(table, torch.arange(T, device=DEVICE)), K, 3 * torch.ones(Q + K, D, device=DEVICE), 1e-5)
    qkv_TXD = uneven(T, Q, K, D, torch.float32)
    want_q, want_kv = prep.apply_(qkv_TXD.clone())
    view = poisoned("fp8", K, D).view(0)
    got_q = launch_rope_store(qkv_TXD.clone(), view, torch.arange(T, device=DEVICE), prep)
    assert not view.needs_scale
    torch.testing.assert_close(view.scale_2K, fp8_scale(want_kv))
    torch.testing.assert_close(got_q, want_q)


def test_a_cache_in_the_models_own_dtype_needs_no_rotation_either() -> None:
    """Keeps out: a table that is read where there is none."""
    Q, K, D, T = 3, 2, 24, 6
    qkv_TXD = uneven(T, Q, K, D, torch.float32)
    view = MHAView(torch.full((SLOTS, 2, K, D), torch.nan, device=DEVICE))
    got_q = launch_rope_store(qkv_TXD.clone(), view, torch.arange(T, device=DEVICE) + 3, HeadPrep(None, K))
    assert torch.equal(got_q, qkv_TXD[:, :Q]) and torch.equal(view.kv[3:9], qkv_TXD[:, Q:].reshape(T, 2, K, D))
    assert view.kv.isfinite().all(-1).sum() == T * 2 * K


@pytest.mark.parametrize("kind", KINDS)
def test_moves_equal_the_definition(kind: str) -> None:
    """Keeps out: scales that are not moved, and bytes converted to numbers on the way (a NaN must stay the same byte)."""
    K, D, layers = 2, 24, 2
    got = poisoned(kind, K, D, layers)
    got.buffers["kv"].view(torch.uint8).copy_(torch.randint(0, 256, got.buffers["kv"].shape))
    scales = got.buffers.get("scales")
    if scales is not None:
        scales.copy_(torch.rand(scales.shape))
    want = [got.buffers["kv"].view(torch.uint8).cpu().clone(), None if scales is None else scales.cpu().clone()]
    slots, path = torch.randperm(SLOTS)[:18].view(2, 9), torch.tensor([[0, 3, 4, 7], [0, 1, 5, 3]])
    source, target = slots.gather(1, path).flatten(), slots[:, :4].flatten()
    for tensor, moved in ((got.buffers["kv"].view(torch.uint8), want[0]), (scales, want[1])):
        if tensor is not None:
            moved[:, target] = moved[:, source].clone()
            launch_move(tensor, slots.to(DEVICE), path.to(DEVICE))
            assert torch.equal(tensor.cpu(), moved)


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="the interpreter's turn: the decoder is on the CPU")
@pytest.mark.parametrize("shape", [(2, 1, 3), (2, 2, 4)], ids=str)
def test_rounds_through_the_kernels_write_the_torch_backend_s_text(zoo: Zoo, shape: tuple[int, int, int]) -> None:
    """Keeps out: a store and a load that each agree with their tests, but not with each other."""
    texts = []
    for backend in (None, TritonBackend(programs=2)):
        decoder = zoo.decoder("tiny-vocab", "eagle3", SpecConfig(*shape), page_size=4, kv_cache_dtype="int8")
        if backend is not None:
            Driver(decoder).replace_backend(backend)
        prompts = [[3, 1, 4, 1, 5]]
        texts.append([out.token_ids for out in decoder.generate(prompts, SamplingParams(max_tokens=4))])
    assert texts[0] == texts[1]
