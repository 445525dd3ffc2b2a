"""deterministic=True is refused by name wherever some part would still depend on the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec import SpecDecoder
from specdec.attention.kinds import LayerKind
from specdec.loading.resolve import EngineSettings, check_deterministic, resolve_settings
from specdec.models.config import IndexerConfig, ModelConfig, RopeConfig
from specdec.models.latent.config import LatentConfig
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.models.schemes.config import round_to_nearest
from specdec.ops.products.numerics import FAST, INVARIANT
from specdec.ops.products.routing import RouterRule
from specdec.options import EngineOptions
from specdec.shipped import draft_folder, target_folder

SIZES: dict[str, Any] = {
    "family": "llama", "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "vocab_size": 100, "rms_norm_eps": 1e-5, "rope": RopeConfig(1e4), "max_position": 512,
}  # fmt: skip
LLAMA = ModelConfig(**SIZES)
HOPPER = (9, 0)


def settings(**options: Any) -> EngineSettings:
    plain = resolve_settings(EngineOptions(device="cpu"), None, LLAMA)
    return replace(plain, options=EngineOptions(deterministic=True, **options), dtype=torch.bfloat16)


def refusal(asked: EngineSettings, target: ModelConfig = LLAMA, architecture: tuple[int, int] = HOPPER) -> str:
    with pytest.raises(ValueError, match="^deterministic=True ") as info:
        check_deterministic(asked, target, architecture)
    return str(info.value)


def test_what_fits_is_accepted() -> None:
    """Keeps out: a refusal of everything, and a policy that the option does not choose."""
    check_deterministic(settings(), LLAMA, HOPPER)
    check_deterministic(settings(tensor_parallel_size=4), LLAMA, HOPPER)
    assert settings().numerics is INVARIANT
    assert resolve_settings(EngineOptions(device="cpu"), None, LLAMA).numerics is FAST


def test_a_cpu_is_refused_at_construction() -> None:
    """Keeps out: torch's products on a CPU, whose sums depend on the number of rows, behind a promise that they don't."""
    with pytest.raises(
        ValueError, match=r"deterministic=True .*9\.x.*got cpu; nearest setting that works: deterministic=False"
    ):
        SpecDecoder.from_pretrained(target_folder(), draft_folder(), device="cpu", deterministic=True)


def test_weights_of_few_bits_are_refused() -> None:
    """Keeps out: kernels whose order of sums depends on the batch, under a promise that it doesn't."""
    with pytest.raises(ValueError, match="unquantised, got fp8, a scale for each row .*deterministic=False"):
        check_deterministic(settings(), replace(LLAMA, quantization=round_to_nearest("fp8")), HOPPER)


def test_other_gpus_are_refused() -> None:
    """Keeps out: a GPU whose tensor cores have not been looked at."""
    assert "of 8.0; nearest" in refusal(settings(), architecture=(8, 0))


@pytest.mark.parametrize(
    ("options", "nearest"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='auto'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='auto'"),
        ({"decode_context_parallel_size": 2, "tensor_parallel_size": 2}, "decode_context_parallel_size=1"),
    ],
)
def test_options_that_depend_on_the_batch(options: dict[str, Any], nearest: str) -> None:
    """Keeps out: scales taken from the first chunk, states that ranks merge, with the promise of equal bits."""
    name, value = next(iter(options.items()))
    text = refusal(settings(**options))
    assert f"got {name}={value!r}" in text and text.endswith(f"nearest setting that works: {nearest}")


def test_targets_that_depend_on_the_batch() -> None:
    """Keeps out: float32, whose products have no invariant kernel; other families' layers; transformers' code; odd sizes."""
    assert refusal(replace(settings(), dtype=torch.float32)).endswith("dtype='bfloat16'")
    assert "backend='transformers'" in refusal(replace(settings(), target_backend="transformers"))
    check_deterministic(settings(), ModelConfig(**SIZES, differential=True), HOPPER)
    slopes = (LayerKind(alibi=True),) * SIZES["num_layers"]
    assert "without ALiBi" in refusal(settings(), ModelConfig(**SIZES, differential=True, layer_kinds=slopes))
    latents: dict[str, Any] = {**SIZES, "latent_rank": 64, "q_rank": 40, "nope_dim": 16, "value_dim": 24}
    experts = ExpertsConfig(8, 24, RouterRule(2, "softmax"), shared_size=24)
    check_deterministic(settings(), LatentConfig(**latents, experts=experts), HOPPER)
    biased = replace(experts, biased=True, kept_float32=True)
    check_deterministic(settings(), LatentConfig(**latents, experts=biased), HOPPER)
    assert "up to 256 numbers, or of an even number up to 512, got 640" in refusal(
        settings(), LatentConfig(**latents | {"latent_rank": 640})
    )
    assert "64 and 40 and 96 and 96 and 12" in refusal(
        settings(), LatentConfig(**latents, experts=replace(experts, shared_size=12))
    )
    text = refusal(settings(tensor_parallel_size=2), replace(LLAMA, num_heads=7, head_dim=8))
    assert "64 and 48 and 28" in text and text.endswith("tensor_parallel_size=1")
    check_deterministic(settings(), LatentConfig(**latents, indexer=IndexerConfig(2, 16, 8, True, (0, 1))), HOPPER)
    assert "multiples of 8 numbers, got 64 and 100 and 64" in refusal(settings(), replace(LLAMA, intermediate_size=100))
