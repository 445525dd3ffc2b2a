"""Decode passes of targets whose layer kinds have heads of their own: exported, against the runtime's pass and transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.operators.passes import PAGE, check, directly, inputs, load
from toolkit.unlike.targets import save_unlike

from specdec.operators import DecodePass, export_decode

SHALLOW: dict[str, dict[str, Any]] = {  # few layers: more only take longer to trace
    "gemma": dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]),
    "mimo": dict(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]),
    "gemma-small": dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2),
}


@pytest.mark.slow_cases(keep=1)
@pytest.mark.parametrize(("name", "dtype"), [("gemma", "auto"), ("mimo", "auto"), ("gemma", "int8"), ("gemma-small", "auto")])
def test_one_exported_program_serves_all_shapes(tmp_path: Path, name: str, dtype: str) -> None:
    """Keeps out: a layer stored in the widths of another kind, values without their norm, keys in place of values."""
    decode = DecodePass(load(save_unlike(tmp_path / name, name, **SHALLOW[name])), PAGE, dtype)
    program = export_decode(decode).module()
    for lens, N in (([5, 0, 9], 1), ([1, 30], 4)):
        check(decode, program, inputs(decode, lens, N))


def test_fp8_takes_each_kind_s_own_scales(tmp_path: Path) -> None:
    """Keeps out: scales of one kind's number of heads for another's, and scales that no first pass sets."""
    decode = DecodePass(load(save_unlike(tmp_path / "gemma", "gemma", **SHALLOW["gemma"])), PAGE, "fp8")
    tokens_BN, table_BW, lens_B, cache = inputs(decode, [0, 0], 6)
    heads = [decode.target.config.heads_of(layer).num_kv_heads for layer in range(2)]
    assert len(set(heads)) == 2 and [layer["scale"].shape[1] for layer in cache] == heads
    for layer in cache:
        layer["scale"].fill_(torch.nan)
    with torch.no_grad():
        logits = decode.set_scales(tokens_BN, table_BW, lens_B, cache)
        assert logits.isfinite().all() and all(layer["scale"].isfinite().all() for layer in cache)
        given = torch.zeros(2, 1, dtype=torch.int64), table_BW, lens_B + 6, cache
        torch.testing.assert_close(decode(*given), directly(decode, given), rtol=1e-4, atol=1e-4)


@pytest.mark.slow_cases(keep=1)
@pytest.mark.parametrize("name", SHALLOW)
def test_a_compiled_pass_computes_the_same(tmp_path: Path, name: str) -> None:
    """Keeps out: a part of the pass that torch.compile can't trace, of trees too."""
    decode = DecodePass(load(save_unlike(tmp_path / name, name, **SHALLOW[name])), PAGE)
    compiled = torch.compile(decode, fullgraph=True, backend="eager")
    check(decode, compiled, inputs(decode, [5, 0, 9], 2))
