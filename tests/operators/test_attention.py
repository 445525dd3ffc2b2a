"""The operators of attention: schema, fake and results, on a CPU, on a GPU, and with kernels in Triton's interpreter."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import specdec.attention.operators.heads as heads
import specdec.attention.operators.latent as latent
from specdec.attention.attend import make_backend
from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.kv_cache import MOVE, move_slots
from specdec.attention.caches.split_cache import SplitView
from specdec.attention.kinds import Scoring
from specdec.attention.operators.backend import _OTHER_SCORING, OperatorBackend
from specdec.attention.segment import Segment
from specdec.ops.rope import rotary_table

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
H, K, D, P, SLOTS = 4, 2, 16, 4, 64
RANK, ROPE = 16, 8
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


def latent_store_args(device: str, wide_out: bool = False) -> tuple[Any, ...]:
    q, out = rand(device, 3, H, 24)[..., -ROPE:], rand(device, 3, H, ROPE)
    out = rand(device, 3, H, RANK + ROPE)[..., RANK:] if wide_out else out
    fixed = (rotary_table(torch.rand(ROPE // 2), 12).to(device), rand(device, RANK), 1e-6)
    at = (ints(device, 5, 17, 2, dtype=torch.int64), ints(device, 3, 9, 0, dtype=torch.int64))
    return q, rand(device, 3, RANK + ROPE), rand(device, SLOTS, RANK + ROPE), out, *at, *fixed


def latent_args(device: str, queries: int = 2) -> tuple[Any, ...]:
    latents = rand(device, SLOTS, RANK + ROPE)
    latents[40:] = torch.nan
    rows = (table(device), ints(device, 9, 6), ints(device, 0, queries, 2 * queries), queries, P, queries > 1)
    return rand(device, 2 * queries, H, RANK + ROPE), latents, RANK, *rows, SCALE


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
    "latent store": (latent.LATENT_STORE, latent_store_args),
    "latent store into queries": (latent.LATENT_STORE, lambda d: latent_store_args(d, wide_out=True)),
    "latent decode": (latent.LATENT_ATTENTION, lambda d: latent_args(d, queries=1)),
    "latent causal": (latent.LATENT_ATTENTION, latent_args),
    "move": (MOVE, move_args),
}


FP8_CHECKS = ("test_autograd_registration", "test_faketensor")  # the others multiply float8 to compare it, which torch can't


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_an_operator_is_what_its_schema_and_fake_say(name: str, device: str) -> None:
    """Keeps out: a cache that changes undeclared, a result that shares memory with an argument, wrong strides of a fake."""
    operator, make = CASES[name]
    torch.manual_seed(0)
    opcheck(operator, make(device), **({"test_utils": FP8_CHECKS} if "fp8" in name else {}))


def test_an_undeclared_change_is_seen() -> None:
    """Keeps out: a check that would pass for a store whose schema hides that the cache changes."""
    schema = "hidden_store(Tensor qkv, Tensor kv, Tensor slots) -> ()"
    with torch.library._scoped_library("specdec_test", "DEF") as library:
        library.define(schema)
        library.impl("hidden_store", heads.rope_store, "CPU")
        with pytest.raises(torch.testing._internal.optests.OpCheckError, match="kv is not defined as mutable but was mutated"):
            opcheck(torch.ops.specdec_test.hidden_store.default, store_args("cpu")[:3], test_utils="test_schema")


def changed(operator: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """The operator's results, and all of its tensors after the call; of qkv only the queries, as rope_store says."""
    args = tuple(x.clone() if isinstance(x, Tensor) else x for x in args)
    results = operator(*args)
    if operator is heads.ROPE_STORE:
        args = (args[0][:, :H], *args[1:])
    return [*(results or ()), *(x for x in args if isinstance(x, Tensor))]


@pytest.mark.parametrize("name", [name for name in CASES if name != "store fp8"])  # the interpreter rounds float8 wrongly
def test_kernels_compute_what_the_cpu_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: arguments that reach the kernels in another order, and an operator's kernel that leaves a result unwritten."""
    kernels = pytest.importorskip("toolkit.kernels")
    operator, make = CASES[name]
    torch.manual_seed(0)
    args = tuple(x.to(kernels.DEVICE) if isinstance(x, Tensor) else x for x in make("cpu"))
    expected = changed(operator, tuple(x.cpu() if isinstance(x, Tensor) else x for x in args))
    launches = kernels.use_kernels_everywhere(monkeypatch)
    asked: list[Tensor] = []
    for module in (heads, latent):
        monkeypatch.setattr(module, "backend_for", lambda x: asked.append(x) or make_backend("triton"))
    got = changed(operator, args)
    assert asked or launches
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x.cpu().float(), y.float(), rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CASES if "8" not in name])
def test_bfloat16_on_a_gpu_is_near_float64(name: str) -> None:
    """Keeps out: tensor-core paths of an operator that read slots which hold NaN, or that round more than bf16 does."""
    operator, make = CASES[name]
    torch.manual_seed(0)
    args = tuple(x.bfloat16() if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in make("cpu"))
    lse = 7 if "suffix" in name else None  # the one float tensor that is float32 everywhere
    args = tuple(x.float() if i == lse else x for i, x in enumerate(args))
    exact = changed(operator, tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args))
    got = changed(operator, tuple(x.cuda() if isinstance(x, Tensor) else x for x in args))
    for x, y in zip(got, exact, strict=True):
        torch.testing.assert_close(x.cpu().double(), y.double(), rtol=2e-2, atol=2e-2, equal_nan=True)


def test_a_traced_move_changes_its_cache() -> None:
    """Keeps out: a commit that a compiled program drops, because nothing reads what it returns."""
    torch.manual_seed(0)
    cache, slots, path = move_args("cpu")
    want, got = cache.clone(), cache.clone()
    torch._dynamo.reset()
    with torch.no_grad():
        move_slots(want, slots, path)
        torch.compile(move_slots, fullgraph=True, backend="aot_eager")(got, slots, path)
    assert torch.equal(want, got) and not torch.equal(want, cache)


def test_what_operators_would_leave_out_is_refused() -> None:
    """Keeps out: an option of a segment or of a scoring that a traced pass ignores, and a cache format read as another."""
    backend, (q_THD, kv, *_) = OperatorBackend(), paged_args("cpu")
    segment = Segment.of_slots(table("cpu"), ints("cpu", 1, 2))
    backend.run(q_THD[:2], MHAView(kv), segment)

    @dataclass(frozen=True)
    class Warped(Scoring):
        warp: float | None = None

    for scoring, known in ((Warped(), True), (Warped(warp=0.5), False)):
        others = (*_OTHER_SCORING, ("warp", None))
        with pytest.MonkeyPatch.context() as patch, nullcontext() if known else pytest.raises(TypeError, match="know no warp"):
            patch.setattr("specdec.attention.operators.backend._OTHER_SCORING", others)
            backend.run(q_THD[:2], MHAView(kv), segment, scoring)
    with pytest.raises(TypeError, match="read a cache by MHAView, QuantView, PairedView or MLAView, got SplitView"):
        backend.run(q_THD[:2], SplitView(kv[:, 0], kv[:, 1]), segment)
