"""Tiny random targets with MTP layers of every family that has some, written by hand in the published names."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from specdec import SpecConfig, SpecDecoder
from toolkit.checkpoints.mixtures import MIXTURES, save_mixture
from toolkit.deepseek import need_transformers, save_deepseek, save_sparse
from toolkit.families import eager, save_family
from toolkit.models import Zoo, random_tensors, randomise
from toolkit.mtp_layers.oracle import DENSE, MIMO_V2, names_of
from toolkit.unlike.targets import save_unlike

COUNT = "num_nextn_predict_layers"
GLM4 = dict(
    moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, n_group=2, topk_group=1,
    first_k_dense_replace=1, num_hidden_layers=3, routed_scaling_factor=1.5, partial_rotary_factor=0.5,
)  # fmt: skip
# name: how the target is made: its family's name in the other zoos, and what differs from it
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("v3", {}),
    "v3-two": ("v3", {COUNT: 2}),
    "v3-plain-queries": ("v3-no-q-lora", {}),
    "v3-dense-tied": ("v3-dense-tied", dict(n_group=4, topk_group=2)),
    "v32": ("v32", {}),
    "glm-dsa": ("glm", {}),
    "glm4-lite": ("glm4-lite", {}),
    "glm4": ("glm4_moe", dict(attention_bias=True)),
    "glm4-three-normed": ("glm4_moe", dict(use_qk_norm=True, **{COUNT: 3})),
    "mimo": ("mimo", {}),
    "hy3": ("hy3", {}),
    "hy3-biased-two": ("hy3-biased", {COUNT: 2}),
    "ernie": ("ernie", {}),
    "ernie-tied": ("ernie-tied", {}),
    "mimo-two": ("mimo", {COUNT: 2}),
    "mimo-v2": ("mimo_v2", {COUNT: 1}),
    "mimo-v2-three": ("mimo_v2", {COUNT: 3}),
}
UNCOUNTED = ("mimo-v2-three",)  # whose config does not say how many there are, as MiMo-V2-Flash's


def save_mtp_target(folder: Path, name: str, **changes: Any) -> Path:
    """A random target of that name, its MTP layers included."""
    family, own = TARGETS[name]
    own = {COUNT: 1, **own, **changes}
    if family == "mimo":
        _save_mimo(folder, own)
    elif family == "glm4_moe":
        save_family(folder, family, 31, **{**GLM4, **own})
    elif family == "mimo_v2":
        save_unlike(folder, "mimo", **{key: value for key, value in own.items() if key != COUNT})
    elif family in MIXTURES:
        save_mixture(folder, family, **own)
    elif family in ("v32", "glm"):
        save_sparse(folder, family, **own)
    else:
        save_deepseek(folder, family, **own)
    raw = json.loads((folder / "config.json").read_text())
    if name not in UNCOUNTED:
        raw[COUNT] = own[COUNT]
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    for index in range(own[COUNT]):
        tensors |= mtp_tensors(raw, index, tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _save_mimo(folder: Path, own: dict[str, Any]) -> None:
    sizes = dict(
        vocab_size=40, hidden_size=64, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, bos_token_id=0, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
        head_dim=16, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 640000.0},
    )  # fmt: skip
    model = Qwen2ForCausalLM(Qwen2Config(**{**sizes, **{key: value for key, value in own.items() if key != COUNT}}))
    randomise(model, 78)
    model.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "use_mrope": False,
        "attention_bias": True,
    }
    (folder / "config.json").write_text(json.dumps(raw))


def mtp_tensors(raw: dict[str, Any], index: int, target: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of one MTP layer.  target: the model's own, of which DeepSeek and GLM repeat two."""
    H, family = raw["hidden_size"], raw["model_type"]
    prefix, *parts = names_of(family, index, raw["num_hidden_layers"] + index)
    *norms, join = (name for name in (*parts[:2], parts[3], parts[2]) if name != "model.norm")
    norms += [f"{prefix}.{name}_layernorm" for name in ("input", "pre_mlp" if family == MIMO_V2 else "post_attention")]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (H,) for name in norms} | {f"{join}.weight": (H, 2 * H)}
    attention = _latent(raw) if "kv_lora_rank" in raw else _windowed(raw) if family == MIMO_V2 else _heads(raw)
    shapes |= {f"{prefix}.self_attn.{name}": shape for name, shape in attention.items()}
    mlp = _mlp("mlp", H, raw["intermediate_size"]) if family in DENSE else _experts(raw)
    shapes |= {f"{prefix}.{name}": shape for name, shape in mlp.items()}
    tensors = random_tensors(shapes, 90 + index)
    for name, x in tensors.items():
        if "norm.weight" in name and x.mean() > 0.5:  # every norm far from the others, so that an exchange shows
            x.add_(0.5 * torch.linspace(-1, 1, len(x)).roll(hash_of(name)))
    if family not in (*DENSE, "hy_v3"):
        table = target["model.embed_tokens.weight"]
        tensors[f"{prefix}.embed_tokens.weight"] = table.clone()
        tensors[f"{prefix}.shared_head.head.weight"] = target.get("lm_head.weight", table).clone()
    return tensors


def hash_of(name: str) -> int:
    return sum(name.encode())


def _experts(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    H, size = raw["hidden_size"], raw["moe_intermediate_size"]
    router, correction, shared, count = "gate.weight", "gate.e_score_correction_bias", "shared_experts", "n_shared_experts"
    if raw["model_type"] == "hy_v3":
        router, correction, shared, count = "router.gate.weight", "expert_bias", "shared_mlp", "num_shared_experts"
    E = raw["num_experts" if "num_experts" in raw else "n_routed_experts"]
    shapes: dict[str, tuple[int, ...]] = {f"mlp.{router}": (E, H), f"mlp.{correction}": (E,)}
    for expert in range(E):
        shapes |= _mlp(f"mlp.experts.{expert}", H, size)
    both = _mlp(f"mlp.{shared}", H, size * raw[count])
    if raw.get("mlp_bias"):
        both |= {name.replace("weight", "bias"): shape[:1] for name, shape in both.items()}
    return shapes | both


def _heads(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    H, D = raw["hidden_size"], raw["head_dim"]
    outs = {"q": raw["num_attention_heads"] * D, "k": raw["num_key_value_heads"] * D, "v": raw["num_key_value_heads"] * D}
    shapes: dict[str, tuple[int, ...]] = {f"{letter}_proj.weight": (out, H) for letter, out in outs.items()}
    if raw.get("attention_bias"):
        shapes |= {f"{letter}_proj.bias": (out,) for letter, out in outs.items()}
        shapes |= {"o_proj.bias": (H,)} if raw["model_type"] == "hy_v3" else {}
    if raw.get("use_qk_norm") or raw["model_type"] == "hy_v3":
        shapes |= {"q_norm.weight": (D,), "k_norm.weight": (D,)}
    return shapes | {"o_proj.weight": (H, outs["q"])}


def _windowed(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of MiMo-V2's windowed layers, with twice as many kv heads as its full ones."""
    H, D, E, Q = (raw[key] for key in ("hidden_size", "head_dim", "v_head_dim", "num_attention_heads"))
    K = 2 * raw["num_key_value_heads"]
    return {
        "q_proj.weight": (Q * D, H), "k_proj.weight": (K * D, H), "v_proj.weight": (K * E, H), "o_proj.weight": (H, Q * E),
        "attention_sink_bias": (Q,),
    }  # fmt: skip


def _latent(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    keys = ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
    (hidden, H, q, C, R, N), V = (raw[key] for key in keys), raw["v_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (C + R, hidden), "kv_a_layernorm.weight": (C,), "kv_b_proj.weight": (H * (N + V), C),
        "o_proj.weight": (hidden, H * V),
    }  # fmt: skip
    biased = raw.get("attention_bias")
    if q is None:
        shapes["q_proj.weight"] = (H * (N + R), hidden)
    else:
        shapes |= {"q_a_proj.weight": (q, hidden), "q_a_layernorm.weight": (q,), "q_b_proj.weight": (H * (N + R), q)}
        shapes |= {"q_a_proj.bias": (q,)} if biased else {}
    shapes |= {"kv_a_proj_with_mqa.bias": (C + R,), "o_proj.bias": (hidden,)} if biased else {}
    if "index_topk" in raw:
        J, I = raw["index_n_heads"], raw["index_head_dim"]
        shapes |= {
            "indexer.wq_b.weight": (J * I, q), "indexer.wk.weight": (I, hidden), "indexer.weights_proj.weight": (J, hidden),
            "indexer.k_norm.weight": (I,), "indexer.k_norm.bias": (I,),
        }  # fmt: skip
    return shapes


def _mlp(at: str, hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    sizes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
    return {f"{at}.{name}_proj.weight": shape for name, shape in sizes.items()}


class MtpZoo(Zoo):
    """The Zoo with these targets, whose draft is "mtp"."""

    def target(self, name: str) -> Path:
        folder = self.root / name
        return folder if folder.is_dir() else save_mtp_target(folder, name)

    def hf(self, name: str) -> PreTrainedModel:
        """The target alone, as transformers computes it; it knows no MiMo, whose own layers are Qwen2's."""
        if name not in self._models:
            folder = self.target(name)
            raw = json.loads((folder / "config.json").read_text())
            if raw["model_type"] == "mimo":
                self._models[name] = self._qwen2(folder, raw)
            else:
                need_transformers(raw["model_type"])
                self._models[name] = eager(folder)
        return self._models[name]

    def _qwen2(self, folder: Path, raw: dict[str, Any]) -> PreTrainedModel:
        keys = {key: value for key, value in raw.items() if key not in ("model_type", "architectures", COUNT, "use_mrope")}
        model = Qwen2ForCausalLM(Qwen2Config(**keys)).eval()
        own = {name: x for name, x in load_file(folder / "model.safetensors").items() if "mtp_layers" not in name}
        model.load_state_dict(own)
        return model

    def decoder(self, target: str, kind: str | None = None, spec: SpecConfig | None = None, **settings: Any) -> SpecDecoder:
        defaults = {"device": "cpu", "dtype": "float32", "max_seq_len": 128, "smoke": False}
        return SpecDecoder.from_pretrained(self.target(target), kind, spec, **{**defaults, **settings})
