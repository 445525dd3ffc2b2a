"""Tiny random targets whose layers have mixtures under ordinary heads, as transformers writes them, with every rule toggled."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from toolkit.families import COMMON, eager
from toolkit.models import Zoo, save_random

SMALL = dict(num_hidden_layers=3, moe_intermediate_size=24, num_experts_per_tok=3)
QWEN = dict(SMALL, num_experts=8)
GLM = dict(SMALL, n_routed_experts=8, n_shared_experts=1)
ERNIE = dict(num_hidden_layers=3, moe_intermediate_size=24, moe_k=3, moe_num_experts=8)
OLMOE = dict(num_hidden_layers=3, num_experts=8, num_experts_per_tok=3, hidden_size=64)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
HALF = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
# name: (model_type, what differs from COMMON)
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("qwen3_moe", dict(QWEN, norm_topk_prob=True, mlp_only_layers=[1])),
    "qwen3-moe-tied": (
        "qwen3_moe",
        dict(
            QWEN, tie_word_embeddings=True, attention_bias=True, decoder_sparse_step=2, use_sliding_window=True,
            sliding_window=8, rope_parameters=YARN,
        ),
    ),
    "qwen2-moe": (
        "qwen2_moe",
        dict(QWEN, shared_expert_intermediate_size=20, use_sliding_window=True, sliding_window=8, max_window_layers=2),
    ),
    "qwen2-moe-normed": (
        "qwen2_moe",
        dict(QWEN, shared_expert_intermediate_size=28, norm_topk_prob=True, mlp_only_layers=[0], qkv_bias=False),
    ),
    "mixtral": ("mixtral", dict(num_hidden_layers=3, num_local_experts=4, num_experts_per_tok=2)),
    "mixtral-window": ("mixtral", dict(num_hidden_layers=3, num_local_experts=6, num_experts_per_tok=3, sliding_window=8)),
    "glm4-moe": ("glm4_moe", dict(GLM, n_group=4, topk_group=2, use_qk_norm=True, routed_scaling_factor=1.5)),
    "glm4-moe-biased": (
        "glm4_moe",
        dict(GLM, n_shared_experts=2, attention_bias=True, first_k_dense_replace=2, norm_topk_prob=False,
             partial_rotary_factor=0.25),
    ),
    "ernie": ("ernie4_5_moe", dict(ERNIE, moe_norm_min=0.6)),
    "ernie-tied": (
        "ernie4_5_moe",
        dict(ERNIE, num_hidden_layers=4, tie_word_embeddings=True, moe_num_shared_experts=0,
             moe_layer_start_index=1, moe_layer_interval=2, moe_layer_end_index=2),
    ),
    "dots1": (
        "dots1",
        dict(GLM, n_group=2, topk_group=1, norm_topk_prob=True, first_k_dense_replace=1, sliding_window=8, max_window_layers=1),
    ),
    "minimax": (  # transformers 5.17 reads no rotary_dim, so the config says the same twice
        "minimax_m2",
        dict(num_hidden_layers=3, num_local_experts=8, num_experts_per_tok=3, rotary_dim=8, rope_parameters=HALF),
    ),
    "olmoe": ("olmoe", dict(OLMOE, attention_bias=True, norm_topk_prob=True)),
    "hy3": ("hy_v3", dict(QWEN, num_shared_experts=1)),
    "hy3-biased": (
        "hy_v3",
        dict(QWEN, num_shared_experts=2, attention_bias=True, mlp_bias=True, router_scaling_factor=1.5,
             mlp_layer_types=["sparse", "dense", "sparse"], enable_moe_fp32_combine=False),
    ),
}  # fmt: skip


def save_mixture(folder: Path, name: str, **changes: Any) -> Path:
    """A random model of that name, as transformers saves it: each expert's matrices are tensors of their own."""
    model_type, own = MIXTURES[name]
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**COMMON, **own, **changes}), dtype=torch.float32)
    return save_random(model, folder, 110 + list(MIXTURES).index(name))


def fuse(folder: Path, to: Path) -> Path:
    """The same model with all experts of a projection in one tensor, as transformers 5 computes with them, scales too."""
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    own: dict[str, Tensor] = {}
    experts: dict[tuple[str, str], dict[tuple[str, int], Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.replace("block_sparse_moe", "mlp")
        for old, new in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            name = name.replace(f".{old}.", f".{new}.")
        prefix, found, rest = name.partition(".experts.")
        if not found:
            own[name] = tensor
            continue
        number, part, ending = rest.split(".")
        experts.setdefault((f"{prefix}.experts", ending.removeprefix("weight")), {})[part, int(number)] = tensor
    for (prefix, ending), held in experts.items():
        gate, up, down = (
            torch.stack([held[part, number] for number in range(len(held) // 3)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        own |= {f"{prefix}.gate_up_proj{ending}": torch.cat((gate, up), dim=1), f"{prefix}.down_proj{ending}": down}
    save_file(own, to / "model.safetensors", metadata={"format": "pt"})
    return to


class MixtureZoo(Zoo):
    """The Zoo with these targets."""

    def target(self, name: str) -> Path:
        folder = self.root / name
        return folder if folder.is_dir() else save_mixture(folder, name)

    def hf(self, name: str) -> PreTrainedModel:
        """In float32, with transformers' own eager attention and experts."""
        if name not in self._models:
            self._models[name] = eager(self.target(name))
        return self._models[name]
