"""torch.library.opcheck over every operator of specdec: schema, fake, autograd registration, and traces of symbolic sizes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from toolkit.operators import attention, indexer, products
from torch import Tensor
from torch.library import opcheck

import specdec.operators  # noqa: F401 (imported for the operators that it registers)

CASES = {
    **attention.CASES,
    **indexer.CASES,
    **{name: (operator, lambda d, make=make: make(torch.device(d))) for name, (operator, _, make) in products.CASES.items()},
}


@pytest.mark.slow_cases(keep=6)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", CASES)
def test_an_operator_is_what_its_schema_and_fake_say(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: an argument that changes undeclared, a result that shares memory with an argument, wrong strides of a fake."""
    for compare in ("allclose", "isclose"):
        monkeypatch.setattr(torch, compare, by_bytes(getattr(torch, compare)))
    operator, make = CASES[name]
    torch.manual_seed(0)
    opcheck(operator, make(device))


def by_bytes(compare: Callable[..., Any]) -> Callable[..., Any]:
    """The comparison, with tensors of float8 compared as bytes: it multiplies, which torch can't do in float8."""

    def compared(x: Tensor, y: Tensor, **options: Any) -> Any:
        is_float8 = x.dtype == y.dtype == torch.float8_e4m3fn
        return compare(x.view(torch.uint8), y.view(torch.uint8)) if is_float8 else compare(x, y, **options)

    return compared


def test_every_operator_is_checked() -> None:
    """Keeps out: a new operator that nobody hands to opcheck."""
    defined = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("specdec::")}
    assert {operator._schema.name for operator, _ in CASES.values()} == defined


def test_an_undeclared_change_is_seen() -> None:
    """Keeps out: a check that would pass for a store whose schema hides that the cache changes."""
    schema = "hidden_store(Tensor qkv, Tensor kv, Tensor slots) -> ()"
    with torch.library._scoped_library("specdec_test", "DEF") as library:
        library.define(schema)
        library.impl("hidden_store", attention.heads.rope_store, "CPU")
        with pytest.raises(torch.testing._internal.optests.OpCheckError, match="kv is not defined as mutable but was mutated"):
            opcheck(torch.ops.specdec_test.hidden_store.default, attention.store_args("cpu")[:3], test_utils="test_schema")
