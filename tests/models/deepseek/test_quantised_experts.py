"""DeepSeek targets whose matrices, experts' among them, are stored in 8 bits."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from toolkit.deepseek import save_deepseek
from toolkit.oracles.quantised import SCHEMES, as_quantised

from specdec.attention.eager.dense import DenseAttention
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import fill_stack
from specdec.models.linear import Linear, LinearStack
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.models.registry import choose_target, load_chosen
from specdec.models.schemes.config import parse_quantization
from specdec.parallel.shard import Shard


def logits(folder: Path, tokens: int) -> tuple[CausalLM, torch.Tensor]:
    model = load_chosen(choose_target(folder), folder, 64, torch.device("cpu"), torch.float32, False)
    assert isinstance(model, CausalLM)
    ids = torch.randint(0, 40, (tokens,), generator=torch.Generator().manual_seed(tokens))
    with torch.inference_mode():
        attn = DenseAttention(model.config.layer_kinds)
        return model, model.logits(model(ids, torch.arange(tokens), attn).hidden_TH)


@pytest.mark.parametrize(("name", "scheme"), [("v3", "deepseek fp8"), ("v2-lite", "fp8 channel")])
def test_quantised_experts_and_latents(tmp_path: Path, name: str, scheme: str) -> None:
    """Few tokens, for which single experts' numbers are computed, and more.

    Keeps out: an expert under another one's scales, rows of heads that move without their scales, latents expanded by
    quantised values.
    """
    plain = save_deepseek(tmp_path / "plain", name, n_routed_experts=16)
    quantised = as_quantised(plain, tmp_path / "quantised", SCHEMES[scheme])
    for tokens in (1, 7):
        (model, got), (_, want) = logits(quantised, tokens), logits(plain, tokens)
        torch.testing.assert_close(got, want, atol=1e-5 * float(want.abs().max()), rtol=1e-5)
    experts = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    assert experts and all(each.gate_up_proj.quantised and each.down_proj.quantised for each in experts)
    expanding = [module for place, module in model.named_modules() if place.endswith("kv_b_proj")]
    assert all(isinstance(module, Linear) and module.quantised is None for module in expanding)


def test_experts_in_act_order_are_refused(tmp_path: Path) -> None:
    """Keeps out: experts whose columns are sorted by groups and multiplied with others; weights read before that."""
    scheme = SCHEMES["w4a16 g32 asym in act order"]
    tensors, _ = scheme.write(8, 64, torch.Generator().manual_seed(0))
    named = {f"m.{index}.down_proj.{ending}": tensor.clone() for index in "01" for ending, tensor in tensors.items()}
    save_file(named, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, quantization=parse_quantization(scheme.config, "config.json"))
    stack = LinearStack(2, 64, {"down_proj": 8}, Shard(0, 1), "row")
    with pytest.raises(ValueError, match="m: experts in act order .* nearest thing that works: a checkpoint without act order"):
        fill_stack(stack, checkpoint.headers(), "m")
