"""pack_weights=True is refused by name wherever no product would read the copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from toolkit.checkpoints.plans import plan_memory
from toolkit.models import Zoo
from torch import nn

from specdec import SpecConfig, SpecDecoder
from specdec.loading.load import pack_pair
from specdec.loading.resolve import EngineSettings, check_packing, check_packing_here, resolve_settings
from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.linear import Linear
from specdec.options import EngineOptions
from specdec.shipped import draft_folder, target_folder

LLAMA = ModelConfig(
    family="llama", hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    vocab_size=100, rms_norm_eps=1e-5, rope=RopeConfig(1e4), max_position=512,
)  # fmt: skip


def settings(dtype: torch.dtype = torch.bfloat16, backend: str = "native", **options: Any) -> EngineSettings:
    plain = resolve_settings(EngineOptions(device="cpu"), None, LLAMA)
    given = EngineOptions(pack_weights=True, **options)
    return replace(plain, options=given, dtype=dtype, target_backend=backend, target_backend_reason="asked for")


def test_a_cpu_is_refused_at_construction() -> None:
    """Keeps out: copies on a CPU, which take memory and which nothing reads; and a nearest setting that is refused in turn."""
    message = r"pack_weights=True needs .*9\.0.*got cpu; nearest setting that works: pack_weights=False"
    for options in ({}, {"dtype": "bfloat16"}):
        with pytest.raises(ValueError, match=message):
            SpecDecoder.from_pretrained(target_folder(), draft_folder(), device="cpu", pack_weights=True, **options)


@pytest.mark.parametrize("architecture", [(8, 0), (10, 0), (12, 0)])
def test_other_gpus_are_refused(architecture: tuple[int, int]) -> None:
    """Keeps out: GPUs on which the kernels for Hopper do not run."""
    with pytest.raises(ValueError, match=rf"cuda:0 of {architecture[0]}\.0; nearest"):
        check_packing_here(torch.device("cuda", 0), architecture, True)


def test_a_hopper_gpu_needs_gluon() -> None:
    """Keeps out: an import error of the first pass in place of a refusal."""
    check_packing_here(torch.device("cuda", 0), (9, 0), True)
    with pytest.raises(ValueError, match="without Triton's Gluon"):
        check_packing_here(torch.device("cuda", 0), (9, 0), False)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (settings(torch.float16), "got dtype='float16'; nearest setting that works: dtype='bfloat16'"),
        (settings(torch.float32), "got dtype='float32'; nearest"),
        (settings(backend="transformers"), "got backend='transformers' .*; nearest setting that works: pack_weights=False"),
        (settings(deterministic=True), "got deterministic=True; nearest setting that works: pack_weights=False"),
        (settings(torch.float16, deterministic=True), "nearest setting that works: pack_weights=False"),
        (settings(torch.float32, backend="transformers"), "nearest setting that works: pack_weights=False"),
    ],
)
def test_what_can_t_read_copies_is_refused(asked: EngineSettings, words: str) -> None:
    """Keeps out: an option that does nothing: products in other dtypes, transformers' modules, sums in one order; and a nearest
    setting that is refused in turn.
    """
    check_packing(settings())
    with pytest.raises(ValueError, match=words):
        check_packing(asked)


def test_a_pair_without_such_matrices_is_refused(zoo: Zoo) -> None:
    """Keeps out: an option that changes nothing, in silence; a plan of a pair that a decoder does not take."""
    message = "found none; nearest setting that works: pack_weights=False"
    with pytest.raises(ValueError, match=message):
        pack_pair(nn.ModuleList([Linear(72, 8).to(torch.bfloat16)]), None)  # type: ignore[arg-type]
    asked = EngineOptions(pack_weights=True, dtype="bfloat16", max_batch_size=2, max_seq_len=128)
    with pytest.raises(ValueError, match=message):  # its widths are 32 and 48
        plan_memory(zoo.target("llama"), zoo.head("llama", "eagle3"), SpecConfig(), asked, 10**9)


def test_a_plan_counts_the_copies() -> None:
    """Keeps out: memory that a plan forgets, matrices without a copy counted, and options that `plan` takes and a decoder does
    not.  Numbers far from the others are not foreseen: they take less than a hundredth.
    """
    asked = EngineOptions(pack_weights=True, dtype="bfloat16", max_batch_size=2, max_seq_len=128)
    plan = plan_memory(target_folder(), draft_folder(), SpecConfig(), asked, 10**9)
    options = dict(device="cpu", dtype="bfloat16", max_batch_size=2, max_seq_len=128)
    with SpecDecoder.from_pretrained(target_folder(), draft_folder(), **options) as decoder:
        pack_pair(decoder.model, decoder.head)
        matrices = {id(m): m for part in (decoder.model, decoder.head) for m in part.modules() if isinstance(m, Linear)}
        taken = sum(matrix.lossless.weight.num_bytes for matrix in matrices.values() if matrix.lossless is not None)
    assert 0 <= taken - plan.parts["lossless copies of weights"] < taken / 100
    with pytest.raises(ValueError, match="got dtype='float16'"):
        plan_memory(target_folder(), draft_folder(), SpecConfig(), replace(asked, dtype="float16"), 10**9)
