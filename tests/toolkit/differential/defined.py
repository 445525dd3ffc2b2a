"""A DiffLlama by its definition (arXiv 2410.05258) in float64, with the options that transformers' class does not have.

Everything is computed for a whole text at once, head by head of the checkpoint's own order, without a cache.

Shapes: T tokens, H query heads, K key heads, D head dim.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from toolkit.models import Zoo, save_target

NORM = "subln.weight"
OPTIONS: dict[str, dict[str, Any]] = {  # by name, the arguments of `save_with_options`
    "plain": dict(family="diffllama-gqa"),
    "norm": dict(family="diffllama-gqa", norm=True),
    "windows": dict(family="diffllama-gqa", attention_windows=[None, 5, 2, None]),
    "all windows": dict(family="diffllama-mha", attention_windows=[7, 7, 7, 7]),
    "softcap": dict(family="diffllama", attention_softcap=3.0),
    "shared": dict(family="diffllama-gqa", sources=[0, 1, 1, 1]),
    "shared pairs": dict(family="diffllama-mha", sources=[0, 0, 2, 2], attention_windows=[None, None, 6, 6], norm=True),
    "shared, capped": dict(family="diffllama", sources=[0, 1, 0, 1], attention_softcap=3.0),
    "alibi": dict(family="diffllama-mha", attention_alibi="linear"),
    "alibi, many": dict(
        family="diffllama-gqa",
        sources=[0, 1, 1, 3],
        norm=True,
        attention_alibi="sqrt",
        attention_softcap=5.0,
        attention_windows=[None, 6, 6, None],
    ),
    "all options": dict(family="diffllama-mha", norm=True, attention_windows=[None, 6, 6, None], attention_softcap=4.0),
}


def save_with_options(folder: Path, family: str, sources: list[int] | None = None, norm: bool = False, **config: Any) -> Path:
    """A random DiffLlama of toolkit.models with these keys in its config.json besides.

    sources: its kv_source; the tensors that sharing layers lack are dropped.  norm: whether norms have learnt weights.
    """
    save_target(folder, family)
    path, weights = folder / "config.json", folder / "model.safetensors"
    raw, tensors = json.loads(path.read_text()), load_file(weights)
    if norm:
        generator = torch.Generator().manual_seed(11)
        width = 2 * (raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"])
        for layer in range(raw["num_hidden_layers"]):
            tensors[f"model.layers.{layer}.self_attn.{NORM}"] = 1 + 0.3 * torch.randn(width, generator=generator)
    raw["rope_parameters"] = None if "attention_alibi" in config else {"rope_type": "default", "rope_theta": 700.0}
    path.write_text(json.dumps(raw | config))
    save_file(tensors, weights, metadata={"format": "pt"})
    return share(folder, sources) if sources else folder


def share(folder: Path, sources: list[int]) -> Path:
    """Gives the folder's config.json that kv_source, and drops the tensors that sharing layers lack."""
    path, weights, tensors = folder / "config.json", folder / "model.safetensors", load_file(folder / "model.safetensors")
    for layer, source in enumerate(sources):
        if layer != source:
            gone = tuple(f"model.layers.{layer}.self_attn.{part}." for part in ("k_proj", "v_proj"))
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(gone)}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kv_source": sources}))
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


class DefinedModel:
    """The model of a folder."""

    def __init__(self, folder: Path) -> None:
        self.raw = json.loads((folder / "config.json").read_text())
        self.tensors = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.H, self.K = self.raw["num_attention_heads"], self.raw["num_key_value_heads"]
        self.D = self.raw.get("head_dim") or self.raw["hidden_size"] // self.H

    def logits(self, ids: list[int]) -> Tensor:
        """[T, vocabulary]."""
        x, kept = self.tensors["model.embed_tokens.weight"][ids], dict[int, tuple[Tensor, Tensor]]()
        for layer in range(self.raw["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            x = x + self._attention(layer, self._normed(x, f"{prefix}.input_layernorm.weight"), kept)
            y = self._normed(x, f"{prefix}.post_attention_layernorm.weight")
            gate, up = (self._linear(f"{prefix}.mlp.{name}_proj", y) for name in ("gate", "up"))
            x = x + self._linear(f"{prefix}.mlp.down_proj", torch.nn.functional.silu(gate) * up)
        head = "model.embed_tokens.weight" if self.raw["tie_word_embeddings"] else "lm_head.weight"
        return self._normed(x, "model.norm.weight") @ self.tensors[head].T

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The tokens that follow, the likeliest each time."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

    def _attention(self, layer: int, x: Tensor, kept: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        prefix, H, K = f"model.layers.{layer}.self_attn", self.H, self.K
        q = self._rotated(self._linear(f"{prefix}.q_proj", x).unflatten(1, (H, -1)))
        source = (self.raw.get("kv_source") or range(layer + 1))[layer]
        if source == layer:
            k, v = (self._linear(f"{prefix}.{letter}_proj", x).unflatten(1, (K, -1)) for letter in "kv")
            kept[layer] = self._rotated(k), v
        k, v = kept[source]
        vectors = [self.tensors[f"{prefix}.lambda_{name}"] for name in ("q1", "k1", "q2", "k2")]
        initial = 0.8 - 0.6 * math.exp(-0.3 * layer)
        factor = (vectors[0] @ vectors[1]).exp() - (vectors[2] @ vectors[3]).exp() + initial
        heads = []
        for head in range(H // 2):  # of the two softmaxes, the checkpoint holds the second H / 2 heads later
            both, keys = (head, head + H // 2), (head * K // H, (head + H // 2) * K // H)
            value = torch.cat([v[:, key] for key in keys], dim=-1)
            first, second = (self._weights(layer, q[:, h], k[:, key], head) @ value for h, key in zip(both, keys))
            difference = first - factor * second
            eps = self.raw.get("rms_norm_eps", 1e-5)
            normed = difference / (difference.square().mean(-1, keepdim=True) + eps).sqrt()
            heads.append((1 - initial) * normed * self.tensors.get(f"{prefix}.{NORM}", torch.ones(())))
        return self._linear(f"{prefix}.o_proj", torch.cat(heads, dim=-1))

    def _weights(self, layer: int, q: Tensor, k: Tensor, head: int) -> Tensor:
        """[T, T]: one softmax.  head: which of the H / 2 differences it is for."""
        T, raw = len(q), self.raw
        scores = q @ k.T * self.D**-0.5
        if cap := raw.get("attention_softcap"):
            scores = cap * (scores / cap).tanh()
        at = torch.arange(T)
        distance = at - at[:, None]
        seen = distance <= 0
        if alibi := raw.get("attention_alibi"):
            slope = build_alibi_tensor(torch.ones(1, 2), self.H // 2, torch.float64)[head, 0, 1]
            scores = scores + slope * (-distance.neg().clamp(min=0).double().sqrt() if alibi == "sqrt" else distance)
        if raw.get("attention_windows") and raw["attention_windows"][layer]:
            seen &= distance > -raw["attention_windows"][layer]
        return scores.masked_fill(~seen, -torch.inf).softmax(-1)

    def _rotated(self, x: Tensor) -> Tensor:
        """[T, heads, D], with rotary positions, unless distances take their place."""
        if self.raw.get("attention_alibi"):
            return x
        T, half = len(x), self.D // 2
        angles = torch.arange(T).double()[:, None] * self.raw["rope_parameters"]["rope_theta"] ** -(
            torch.arange(half).double() / half
        )
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        low, high = x.split(half, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out = x @ self.tensors[f"{name}.weight"].T
        return out + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else out

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.raw.get("rms_norm_eps", 1e-5)).sqrt() * self.tensors[name]


class OptionsZoo(Zoo):
    """The Zoo with these targets."""

    def target(self, name: str) -> Path:
        folder = self.root / name
        if not folder.is_dir() and name in OPTIONS:
            return save_with_options(folder, **OPTIONS[name])
        return super().target(name)

    def defined(self, name: str) -> DefinedModel:
        return DefinedModel(self.target(name))
