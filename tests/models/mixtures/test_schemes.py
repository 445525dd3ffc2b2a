"""Mixtures in 8 and 4 bits: the same numbers as the dense weights that they stand for, and as many bytes as a plan says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.checkpoints.gpt_oss import save_gpt_oss
from toolkit.checkpoints.mixtures import fuse, save_mixture
from toolkit.checkpoints.plans import plan_memory
from toolkit.oracles.quantised import SCHEMES, as_quantised

from specdec.attention.eager.dense import DenseAttention
from specdec.models.causal_lm import CausalLM
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.models.registry import choose_target, load_chosen
from specdec.options import EngineOptions

WIDE: dict[str, Any] = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
EXPERTS = dict(WIDE, moe_intermediate_size=64)
CASES = [
    ("qwen3-moe", "deepseek fp8", EXPERTS | {"mlp_only_layers": [0]}),
    ("qwen2-moe", "gptq4 v1", EXPERTS | {"shared_expert_intermediate_size": 64}),
    ("mixtral", "w4a16 g32 asym", WIDE),
    ("glm4-moe", "nvfp4", EXPERTS | {"num_experts_per_tok": 2}),
]


def load(folder: Path, quantize: str = "none", dtype: torch.dtype = torch.float32) -> CausalLM:
    chosen = choose_target(folder, "native", quantize)
    model = load_chosen(chosen, folder, 64, torch.device("cpu"), dtype, False)
    assert isinstance(model, CausalLM)
    return model


@torch.inference_mode()
def logits(model: CausalLM, tokens: int) -> torch.Tensor:
    ids = torch.randint(0, 40, (tokens,), generator=torch.Generator().manual_seed(tokens))
    return model.logits(model(ids, torch.arange(tokens), DenseAttention(model.config.layer_kinds)).hidden_TH)


def held(model: CausalLM) -> int:
    return sum(x.nbytes for x in (*model.parameters(), *model.buffers())) - model.rotary.table.nbytes


def mixtures(model: CausalLM) -> list[MixtureOfExperts]:
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


@pytest.mark.parametrize(("name", "scheme", "sizes"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_scheme_s_numbers_and_bytes(tmp_path: Path, name: str, scheme: str, sizes: dict[str, Any]) -> None:
    """Few tokens, for which single experts are dequantised, and more.  Keeps out: experts under names that no rule fits."""
    plain = save_mixture(tmp_path / "plain", name, **sizes)
    quantised = as_quantised(plain, tmp_path / "quantised", SCHEMES[scheme])
    few, dense = load(quantised), load(plain)
    for tokens in (1, 7):
        want = logits(dense, tokens)
        torch.testing.assert_close(logits(few, tokens), want, atol=1e-5 * float(want.abs().max()), rtol=1e-5)
    assert mixtures(few) and all(each.gate_up_proj.quantised and each.down_proj.quantised for each in mixtures(few))
    plan = plan_memory(quantised, None, None, EngineOptions(dtype="float32"), 10**10)
    assert plan.parts["weights of the target"] == held(few)


@pytest.mark.parametrize("name", ["ernie", "hy3", "gpt-oss"])
def test_what_stays_in_float32_is_not_rounded(tmp_path: Path, name: str) -> None:
    """Keeps out: a router or a correction that a model in bfloat16 rounds, and transformers does not; and a plan that counts
    two bytes for them."""
    folder = save_gpt_oss(tmp_path)[1] if name == "gpt-oss" else save_mixture(tmp_path / name, name)
    model, wide = (load(folder, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    for own, kept in zip(mixtures(model), mixtures(wide), strict=True):
        kept_float32 = [own.router.bias_E, own.router.correction_E, own.router.weight if name != "hy3" else None]
        as_read = [kept.router.bias_E, kept.router.correction_E, kept.router.weight if name != "hy3" else None]
        assert all(a is b or torch.equal(a, b) for a, b in zip(kept_float32, as_read, strict=True))
    plan = plan_memory(folder, None, None, EngineOptions(dtype="bfloat16"), 10**10)
    assert plan.parts["weights of the target"] == held(model)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_fused_experts_are_rounded_and_counted_as_others(tmp_path: Path, name: str) -> None:
    """Keeps out: tensors of all experts that a plan counts as dense, or that quantize= passes over."""
    apart = save_mixture(tmp_path / "apart", name, **(EXPERTS if name == "qwen3-moe" else WIDE))
    both = [apart, fuse(apart, tmp_path / "fused")]
    models = [load(folder, "int4") for folder in both]
    for (own, a), (_, b) in zip(*(model.state_dict().items() for model in models), strict=True):
        assert torch.equal(a, b), own
    assert all(each.gate_up_proj.quantised for each in mixtures(models[1]))
    for quantize in ("none", "int4"):
        options = EngineOptions(dtype="float32", quantize=quantize)  # type: ignore[arg-type]
        counted = [plan_memory(folder, None, None, options, 10**10).parts["weights of the target"] for folder in both]
        assert counted[0] == counted[1] == held(load(apart, quantize)), quantize


def test_fused_experts_in_fp8_are_the_same(tmp_path: Path) -> None:
    """Keeps out: scales of blocks that are read for other rows than those that they were made for."""
    sizes = EXPERTS | {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 4}
    apart = as_quantised(save_mixture(tmp_path / "plain", "qwen3-moe", **sizes), tmp_path / "apart", SCHEMES["deepseek fp8"])
    models = [load(folder) for folder in (apart, fuse(apart, tmp_path / "fused"))]
    for (own, a), (_, b) in zip(*(model.state_dict().items() for model in models), strict=True):
        assert torch.equal(a, b), own
    assert all(each.gate_up_proj.quantised for each in mixtures(models[1]))
