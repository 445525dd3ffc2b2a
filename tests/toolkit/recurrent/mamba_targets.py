"""Tiny random targets with Mamba-2 layers, written to disk by transformers itself.

Heads are more than groups, states are wider than heads, and weights make every part matter: skips D lie off 1, biases off 0,
and multipliers off 1.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
)

from toolkit.models import MORE_TARGETS, scaled

COMMON: dict[str, Any] = dict(
    vocab_size=40, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    bos_token_id=0, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
MAMBA: dict[str, Any] = dict(
    mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=8
)
GRANITE: dict[str, Any] = MAMBA | dict(
    num_hidden_layers=4, layer_types=["mamba", "mamba", "attention", "mamba"], intermediate_size=16,
    shared_intermediate_size=24, embedding_multiplier=1.5, logits_scaling=0.5, residual_multiplier=0.7,
    attention_multiplier=0.4, position_embedding_type="nope", tie_word_embeddings=False,
)  # fmt: skip
# With a floor of steps that no step reaches: transformers has it for prompts, and not for single tokens.
NEMOTRON: dict[str, Any] = dict(
    layers_block_type=["mamba", "moe", "attention", "mlp", "mamba"], head_dim=8, intermediate_size=48, time_step_min=1e-30,
    mamba_num_heads=4, mamba_head_dim=8, n_groups=2, ssm_state_size=12, conv_kernel=4, chunk_size=8, n_routed_experts=6,
    num_experts_per_tok=2, moe_intermediate_size=16, moe_shared_expert_intermediate_size=24, moe_latent_size=16,
    routed_scaling_factor=1.5,
)  # fmt: skip
FALCON: dict[str, Any] = MAMBA | dict(
    num_hidden_layers=3, head_dim=8, intermediate_size=48, mamba_d_ssm=48, mamba_d_head=12, embedding_multiplier=1.4,
    lm_head_multiplier=0.6, key_multiplier=0.7, attention_in_multiplier=1.1, attention_out_multiplier=0.9,
    mlp_multipliers=[0.8, 0.6], ssm_in_multiplier=1.25, ssm_multipliers=[0.5, 0.9, 0.8, 1.5, 0.7], ssm_out_multiplier=0.8,
)  # fmt: skip
# Names of targets: (config class, class of the model, what differs from COMMON)
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "granitemoehybrid": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        GRANITE | dict(num_local_experts=6, num_experts_per_tok=2),
    ),
    "granite dense": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        GRANITE | dict(num_local_experts=0, position_embedding_type="rope", tie_word_embeddings=True),
    ),
    "bamba": (BambaConfig, BambaForCausalLM, MAMBA | dict(num_hidden_layers=3, intermediate_size=48, attn_layer_indices=[1])),
    "falcon_h1": (FalconH1Config, FalconH1ForCausalLM, FALCON),
    "nemotron_h": (NemotronHConfig, NemotronHForCausalLM, NEMOTRON),
}
SEEDS = {family: seed for seed, family in enumerate(FAMILIES)}  # where a target's gives near-ties, another


def tiny_mamba(folder: Path, family: str, seed: int | None = None, **changes: Any) -> Path:
    """The folder with a random model of that name, as transformers saves it.  changes: of its config."""
    mamba_model(family, seed, **changes).save_pretrained(folder)
    return folder


# Of the least widths that kernels take.  With these seeds best logits lie 0.011 above second ones in texts.PROMPTS and 24
# tokens after each.  transformers 5.17, with which these run on a GPU, norms all of Granite's channels together: one group.
WIDE: dict[str, tuple[int, dict[str, Any]]] = {
    "granitemoehybrid": (41, dict(mamba_d_state=16, mamba_n_groups=1)),
    "falcon_h1": (44, dict(mamba_d_ssm=64, mamba_d_head=16, mamba_d_state=16)),
    "nemotron_h": (63, dict(mamba_head_dim=16, ssm_state_size=16)),
}
MORE_TARGETS |= {family: partial(tiny_mamba, family=family) for family in FAMILIES}
MORE_TARGETS |= {
    f"{family} wide": partial(tiny_mamba, family=family, seed=seed, **changes) for family, (seed, changes) in WIDE.items()
}


def mamba_model(family: str, seed: int | None = None, **changes: Any) -> PreTrainedModel:
    """The random model itself, in float32."""
    config_class, model_class, own = FAMILIES[family]
    model: PreTrainedModel = model_class(config_class(**{**COMMON, **own, **changes})).float().eval()
    generator = torch.Generator().manual_seed(SEEDS[family] if seed is None else seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weight_of(name, torch.randn(weight.shape, generator=generator)))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def with_mtp(folder: Path, seed: int = 11) -> Path:
    """Adds MTP to a Nemotron that `tiny_mamba` saved: a block of attention and one of a mixture, a join, three norms."""
    own = mtp_tensors(seed)
    save_file(load_file(folder / "model.safetensors") | own, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def mtp_tensors(seed: int) -> dict[str, Tensor]:
    with TemporaryDirectory() as place:
        tiny_mamba(Path(place), "nemotron_h", seed, layers_block_type=["attention", "moe"])
        blocks = load_file(Path(place) / "model.safetensors")
    own = {name.replace("backbone.", "mtp.", 1): x for name, x in blocks.items() if ".layers." in name}
    own["mtp.layers.1.final_layernorm.weight"] = blocks["backbone.norm_f.weight"]
    H, generator = len(blocks["backbone.norm_f.weight"]), torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"enorm": (H,), "hnorm": (H,), "eh_proj": (H, 2 * H)}
    for name, shape in shapes.items():
        own[f"mtp.layers.0.{name}.weight"] = weight_of(name, torch.randn(shape, generator=generator))
    return own


def weight_of(name: str, noise: Tensor) -> Tensor:
    """Noise made into a weight of that name."""
    if name.endswith("A_log"):  # decays of a token from little to almost all
        return noise.clamp(-2, 1)
    if name.endswith("conv1d.weight"):
        return noise / 2
    if name.endswith(".D"):
        return 1 + 0.3 * noise
    return scaled(name, noise)
