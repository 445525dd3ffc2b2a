"""Tiny random DeepSeek targets: V2 and V3 as transformers writes them, V3.2 and GLM-5 written without transformers.

Not every version of transformers has the latter two.  `least_margin` says how clear the choices of their indexers are.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
)

from specdec.attention.latent.limits import Limits
from specdec.models.latent.attention import LatentAttention
from toolkit.models import Zoo, save_random, scaled

YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1,
    mscale=1.0, mscale_all_dim=0.8,
)  # fmt: skip
COMMON = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
    max_position_embeddings=256, bos_token_id=0, eos_token_id=None, pad_token_id=None, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=12, v_head_dim=16, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3,
    first_k_dense_replace=1, rms_norm_eps=1e-5,
)  # fmt: skip
V2, V3 = (DeepseekV2Config, DeepseekV2ForCausalLM), (DeepseekV3Config, DeepseekV3ForCausalLM)
LITE = (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM)
GROUPS = dict(n_group=4, topk_group=2)
# name: (config class, model class), what differs from COMMON
DEEPSEEKS: dict[str, tuple[tuple[Any, Any], dict[str, Any]]] = {
    "v2-lite": (V2, dict(q_lora_rank=None, topk_method="greedy", n_shared_experts=2, norm_topk_prob=False)),
    "v2": (
        V2,
        dict(
            q_lora_rank=20, topk_method="group_limited_greedy", **GROUPS, n_shared_experts=1, routed_scaling_factor=1.7,
            rope_parameters=YARN, norm_topk_prob=False,
        ),
    ),
    "v2-dense-biases": (V2, dict(q_lora_rank=None, first_k_dense_replace=3, attention_bias=True, mlp_bias=True)),
    "v3": (V3, dict(q_lora_rank=20, **GROUPS, routed_scaling_factor=2.5, rope_parameters=YARN, norm_topk_prob=True)),
    "v3-no-q-lora": (
        V3,
        dict(
            q_lora_rank=None, **GROUPS, norm_topk_prob=False, rope_interleave=False, attention_bias=True,
            rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        ),
    ),
    "v3-dense-tied": (
        V3,
        dict(q_lora_rank=20, first_k_dense_replace=3, tie_word_embeddings=True, num_nextn_predict_layers=0),
    ),
    "glm4-lite": (LITE, dict(q_lora_rank=20, **GROUPS, n_shared_experts=2)),
    "v3-wide-latents": (  # wide enough to be kept in 8 bits; dense, because a router turns small errors into large ones
        V3,
        dict(q_lora_rank=20, first_k_dense_replace=3, kv_lora_rank=128, qk_rope_head_dim=6, rope_parameters=YARN),
    ),
    "v3-wide-experts": (
        V3,
        dict(q_lora_rank=20, n_group=1, topk_group=1, kv_lora_rank=128, qk_rope_head_dim=6, rope_parameters=YARN),
    ),
}  # fmt: skip


def save_deepseek(folder: Path, name: str, **changes: Any) -> Path:
    """A random model of that name, as transformers saves it."""
    (config_class, model_class), own = DEEPSEEKS[name]
    model = model_class(config_class(**{**COMMON, **own, **changes}))
    return save_random(model, folder, 50 + list(DEEPSEEKS).index(name))


def use_limits(model: nn.Module, limits: Limits) -> None:
    """Sets from which sizes of a pass on this model's latent attention is computed in another form."""
    layers = [module for module in model.modules() if isinstance(module, LatentAttention)]
    assert layers
    for layer in layers:
        layer.limits = limits


class DeepseekZoo(Zoo):
    """The Zoo with these targets."""

    def target(self, name: str) -> Path:
        folder = self.root / name
        return folder if folder.is_dir() else save_deepseek(folder, name, **self.changes)


# ---- sparse attention ----

TOPK = 6
INDEX = dict(index_topk=TOPK, index_n_heads=16, index_head_dim=16, q_lora_rank=20, n_shared_experts=1)
V32, GLM = dict(INDEX, model_type="deepseek_v32", **GROUPS), dict(INDEX, model_type="glm_moe_dsa", n_group=1, topk_group=1)
MARGIN = 1e-5  # between the scores of the last key chosen and the first one not chosen; below, rounding could decide
# name: what differs from COMMON
SPARSES: dict[str, dict[str, Any]] = {
    "v32": dict(V32, rope_parameters=YARN, routed_scaling_factor=2.5),
    "v32-dense-biases": dict(V32, first_k_dense_replace=3, attention_bias=True, tie_word_embeddings=True, index_head_dim=8),
    "glm": dict(GLM, attention_bias=True),
    "glm-shared": dict(GLM, num_hidden_layers=5, indexer_types=["full", "shared", "full", "shared", "shared"]),
}


def sparse_config(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of that model.  A change to "drop" leaves the key out."""
    raw = {**COMMON, "dtype": "float32", "hidden_act": "silu", "tie_word_embeddings": False, **SPARSES[name], **changes}
    return {key: value for key, value in raw.items() if value != "drop"}


def sparse_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint by name."""
    hidden, H, q, C, R = (
        c[k] for k in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")
    )
    N, V, J, I = (c[k] for k in ("qk_nope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], hidden)

    def mlp(at: str, size: int) -> None:
        shapes.update({f"{at}.{name}_proj.weight": (size, hidden) for name in ("gate", "up")})
        shapes[f"{at}.down_proj.weight"] = (hidden, size)

    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        own = {
            "q_a_proj.weight": (q, hidden), "q_a_layernorm.weight": (q,), "q_b_proj.weight": (H * (N + R), q),
            "kv_a_proj_with_mqa.weight": (C + R, hidden), "kv_a_layernorm.weight": (C,), "kv_b_proj.weight": (H * (N + V), C),
            "o_proj.weight": (hidden, H * V),
        }  # fmt: skip
        if c.get("attention_bias"):
            own.update({"q_a_proj.bias": (q,), "kv_a_proj_with_mqa.bias": (C + R,), "o_proj.bias": (hidden,)})
        if c.get("indexer_types", ["full"] * (layer + 1))[layer] == "full":
            own.update({
                "indexer.wq_b.weight": (J * I, q), "indexer.wk.weight": (I, hidden), "indexer.weights_proj.weight": (J, hidden),
                "indexer.k_norm.weight": (I,), "indexer.k_norm.bias": (I,),
            })  # fmt: skip
        shapes.update({f"{at}.self_attn.{name}": shape for name, shape in own.items()})
        shapes.update({f"{at}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")})
        if layer < c["first_k_dense_replace"]:
            mlp(f"{at}.mlp", c["intermediate_size"])
            continue
        shapes[f"{at}.mlp.gate.weight"] = (c["n_routed_experts"], hidden)
        shapes[f"{at}.mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        for expert in range(c["n_routed_experts"]):
            mlp(f"{at}.mlp.experts.{expert}", c["moe_intermediate_size"])
        mlp(f"{at}.mlp.shared_experts", c["n_shared_experts"] * c["moe_intermediate_size"])
    return shapes


def save_sparse(folder: Path, name: str, **changes: Any) -> Path:
    """A random model of that name."""
    config = sparse_config(name, **changes)
    generator = torch.Generator().manual_seed(70 + list(SPARSES).index(name))
    tensors = {}
    for key, shape in sparse_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        tensors[key] = 0.3 * noise if key.endswith("k_norm.bias") else scaled(key, noise)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def need_transformers(model_type: str) -> None:
    """Skips the test where transformers has no such model."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}, which is the oracle of this test")


class SparseZoo(Zoo):
    """The Zoo with these targets."""

    def target(self, name: str) -> Path:
        folder = self.root / name
        return folder if folder.is_dir() else save_sparse(folder, name)

    def hf(self, name: str) -> transformers.PreTrainedModel:
        need_transformers(SPARSES[name]["model_type"])
        return super().hf(name)


@torch.no_grad()
def least_margin(model: nn.Module, ids: list[int], topk: int = TOPK) -> float:
    """How far apart the score of the last key that an indexer chose and that of the first one that it left are, at least, in
    transformers' pass over these ids.
    """
    margins, before = [float("inf")], torch.Tensor.topk

    def spy(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dim() == 3 and x.shape[1] == x.shape[2] == len(ids):  # an indexer's scores; routers choose among few experts
            for query in range(topk, len(ids)):
                best = before(x[0, query, : query + 1], topk + 1).values
                margins.append(float(best[-2] - best[-1]))
        return before(x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", spy)
        model(torch.tensor([ids]), use_cache=False)
    return min(margins)
