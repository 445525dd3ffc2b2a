"""What is said of weights in 8 and 4 bits where they make decoding slower."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.oracles.quantised import SCHEMES, save_quantised

from specdec import SpecConfig, SpecDecoder, shipped
from specdec.loading.plan import plan_memories
from specdec.models.schemes.slow import GROUPS, slowness
from specdec.ops.products import quantised as linear
from specdec.ops.products.formats.quantised import Kind, quantise
from specdec.ops.products.gpus import H200, GpuMatch
from specdec.ops.products.numerics import FAST
from specdec.options import EngineOptions

TARGET, DRAFT = shipped.target_folder(), shipped.draft_folder()


def said(what: Any) -> list[str]:
    """The warnings of a call that are about slow weights."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        what()
    return [str(each.message) for each in found if "decode slower" in str(each.message)]


def load(target: Path = TARGET, draft: Path | None = DRAFT, **options: Any) -> None:
    spec = [] if draft is None else [SpecConfig(2, 2, 4)]
    SpecDecoder.from_pretrained(target, draft, *spec, device="cpu", max_batch_size=1, max_seq_len=64, **options).close()


@pytest.mark.parametrize(
    ("options", "whose", "nearest"),
    [
        ({"quantize": "fp8"}, "the target's weights in fp8", "quantize='none'"),
        ({"quantize": "int4", "dtype": "bfloat16"}, "the target's weights in int4", "quantize='none'"),
        ({"draft_quantize": "int4"}, "the draft head's weights in int4", "draft_quantize='none'"),
    ],
)
def test_a_cpu_says_that_quantised_weights_are_slow(options: dict[str, Any], whose: str, nearest: str) -> None:
    """Keeps out: `quantize` that makes decoding on a CPU 15 times as slow without a word."""
    (warning,) = said(lambda: load(**options))
    assert warning.startswith(whose) and "on a CPU" in warning and warning.endswith(f"nearest that is faster: {nearest}")


def test_ordinary_numbers_are_not_warned_of() -> None:
    """Keeps out: a warning that everybody gets, and nobody reads."""
    assert said(load) == []


@pytest.mark.parametrize("name", ["fp8 block", "awq"])
def test_a_quantised_checkpoint_is_warned_of(name: str, tmp_path: Path) -> None:
    """Keeps out: a checkpoint in 8 or 4 bits, for which nobody gave a setting, that is slow without a word."""
    quantised, _ = save_quantised(tmp_path, SCHEMES[name])
    (warning,) = said(lambda: load(quantised, None))
    assert "on a CPU" in warning and warning.endswith("an unquantised checkpoint")


def test_a_plan_is_for_a_gpu() -> None:
    """Keeps out: a plan for a GPU that warns of the CPU on which it is made, and one that says nothing of an old GPU."""
    options = EngineOptions(max_seq_len=64, max_batch_size=1, quantize="fp8")
    plan = partial(plan_memories, TARGET, DRAFT, SpecConfig(2, 2, 4), options, (10**10,))
    assert said(plan) == []
    (warning,) = said(lambda: plan(capability=lambda: (8, 0)))
    assert "compute capability 8.0" in warning


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "group"), [("e4m3", 0), ("e4m3", 128), ("int4", 128), ("int8", 64), ("int4", 32)])
def test_the_rule_is_that_of_the_products(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, kind: Kind, group: int
) -> None:
    """Keeps out: a warning where a kernel reads quantised values, and none where no kernel does: products say which."""
    monkeypatch.setattr(linear, "use_kernels", lambda _: True)
    monkeypatch.setattr(linear, "has_pdl", lambda _: capability >= (9, 0))
    monkeypatch.setattr(linear, "match_of", lambda _: GpuMatch(H200, "", capability == (9, 0)))
    weight = quantise(torch.randn(256, 512), kind, group)
    has_kernel = linear.QuantisedWeight(weight)._tiles(torch.zeros(1, 512, dtype=dtype), False, FAST) is not None
    why, helps = slowness({group}, capability, dtype)
    assert has_kernel == ("anew" not in why)
    assert not helps or slowness({0}, capability, torch.bfloat16) == ("", "")
    assert (why == GROUPS) == (has_kernel and group == 32)
