"""The operators of attention: results, on a CPU, on a GPU, and with kernels in Triton's interpreter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from toolkit.operators import attention, indexer
from toolkit.operators.attention import D, H, ints, move_args, paged_args, table
from torch import Tensor

import specdec.attention.operators.heads as heads
import specdec.attention.operators.latent as latent
from specdec.attention.attend import make_backend
from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.kv_cache import move_slots
from specdec.attention.caches.split_cache import SplitView
from specdec.attention.operators.backend import OperatorBackend
from specdec.attention.segment import Segment

CASES = {**attention.CASES, **indexer.CASES}
FLOAT32 = "lse", "slopes"  # arguments that are float32 whatever the queries are


def changed(operator: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """The operator's results, and all of its tensors after the call; of qkv only the queries, as rope_store says."""
    args = tuple(x.clone() if isinstance(x, Tensor) else x for x in args)
    results = operator(*args)
    if operator is heads.ROPE_STORE:
        args = (args[0][:, :H], *args[1:])
    if operator is heads.ROWS_STORE:
        args = (args[0][:, : H * D], *args[1:])
    results = (results,) if isinstance(results, Tensor) else results or ()
    return [*results, *(x for x in args if isinstance(x, Tensor))]


@pytest.mark.slow_cases(keep=6)
@pytest.mark.parametrize("name", [name for name in CASES if "store fp8" not in name])  # the interpreter rounds float8 wrongly
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
@pytest.mark.parametrize("name", [name for name in CASES if "8" not in name and not name.startswith("select ")])
def test_bfloat16_on_a_gpu_is_near_float64(name: str) -> None:
    """Keeps out: tensor-core paths of an operator that read slots which hold NaN, or that round more than bf16 does."""
    operator, make = CASES[name]
    torch.manual_seed(0)
    args = tuple(
        x.bfloat16() if isinstance(x, Tensor) and x.dtype == torch.float32 and argument.name not in FLOAT32 else x
        for argument, x in zip(operator._schema.arguments, make("cpu"))  # the last arguments have defaults
    )
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
    with pytest.raises(TypeError, match="know no window_right: it must be 0, got 2"):
        backend.run(q_THD[:2], MHAView(kv), replace(segment, window_right=2))
    with pytest.raises(TypeError, match="PairedView, SplitView of rows or LatentView, got SplitView"):
        backend.run(q_THD[:2], SplitView(kv[:, 0], kv[:, 1]), segment)
