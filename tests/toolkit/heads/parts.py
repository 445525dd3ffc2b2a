"""A head as options and tensors by names of our own, made at random, and computed in float64 by the definition.

Writers (`writers.py`) put it into a layout; what a reader makes of the files must compute the same.

Shapes: T pairs, H hidden, F features side by side, V target vocabulary.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec import shipped
from specdec.attention.kinds import LayerKind
from toolkit.models import kept_ids
from toolkit.oracles.attention import causal_mask, dense_attention, of_kind
from toolkit.oracles.heads import linear, rms_norm, rotate

Tensors = dict[str, Tensor]
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}


class Latents(NamedTuple):
    """Sizes of latent attention (MLA).  q: rank of the queries' latent; None: they have none.  kv: rank of the shared latent.

    nope, rope, value: of each head.  interleaved: whether rotated pairs lie side by side.
    """

    q: int | None = 20
    kv: int = 16
    nope: int = 6
    rope: int = 4
    value: int = 8
    interleaved: bool = True


@dataclass(frozen=True)
class Options:
    """What varies between heads.  aux: 0-based outputs of the target's layers, ascending; empty: an EAGLE-1 head."""

    aux: tuple[int, ...] = (0, 1, 2)
    layers: int = 1
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    mlp: int = 40
    target_hidden: int = 32
    vocab: int = 40
    draft_vocab: int = 26
    eps: float = 1e-5
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 3000.0})
    window: int | None = None
    max_position: int = 64
    feature_norm: Literal["none", "each", "joint"] = "none"
    before_residual: bool = False
    recycles_normed: bool = False
    norms_logits: bool = True
    qk_norm: bool = False
    bias: bool = False
    fc_bias: bool = True
    own_embeddings: bool = False
    own_lm_head: bool = True
    latent: Latents | None = None


@dataclass(frozen=True)
class Parts:
    """tensors: by name, with layers.0 and on.  draft_ids: the target's id of each draft id; None: one vocabulary."""

    options: Options
    tensors: Tensors
    draft_ids: Tensor | None

    def changed(self, **changes: Any) -> Parts:
        """The same weights under other options."""
        return replace(self, options=replace(self.options, **changes))

    def features(self, states: list[Tensor], final: Tensor) -> Tensor:
        """What the head reads.  states: the output of each of the target's layers."""
        return torch.cat([states[layer] for layer in self.options.aux], -1) if self.options.aux else final

    def fuse(self, features: Tensor) -> Tensor:
        o, w = self.options, self.tensors
        if not o.aux:
            return features
        if o.feature_norm == "joint":
            features = rms_norm(features, w["feature_norm.0"], o.eps)
        if o.feature_norm == "each":
            each = features.split(o.target_hidden, -1)
            features = torch.cat([rms_norm(x, w[f"feature_norm.{i}"], o.eps) for i, x in enumerate(each)], -1)
        return linear(features, w["fc.weight"])

    def hidden(self, ids: Tensor, fused: Tensor, embed: Tensor) -> Tensor:
        """[T, H]: what the next step reads in place of the feature.  embed: the target's table."""
        o, w = self.options, self.tensors
        embedded = w.get("embed_tokens.weight", embed)[ids]
        if not o.aux:
            x = linear(torch.cat((embedded, fused), -1), w["fc.weight"], w.get("fc.bias"))
            x = self._block(0, x, x)
        else:
            normed = rms_norm(fused, w["layers.0.hidden_norm"], o.eps)
            embedded = rms_norm(embedded, w["layers.0.input_layernorm"], o.eps)
            x = self._block(0, normed if o.before_residual else fused, torch.cat((embedded, normed), -1))
        for layer in range(1, o.layers):
            x = self._block(layer, x, rms_norm(x, w[f"layers.{layer}.input_layernorm"], o.eps))
        return rms_norm(x, w["norm"], o.eps) if o.recycles_normed else x

    def logits(self, hidden: Tensor, lm_head: Tensor) -> Tensor:
        o, w = self.options, self.tensors
        if o.aux and o.norms_logits and not o.recycles_normed:
            hidden = rms_norm(hidden, w["norm"], o.eps)
        return linear(hidden, w.get("lm_head.weight", lm_head))

    def _block(self, layer: int, residual: Tensor, x: Tensor) -> Tensor:
        w, at = self.tensors, f"layers.{layer}"
        x = residual + self._attention(f"{at}.self_attn", x)
        normed = rms_norm(x, w[f"{at}.post_attention_layernorm"], self.options.eps)
        gate, up = (linear(normed, w[f"{at}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return x + linear(gate * gate.sigmoid() * up, w[f"{at}.mlp.down_proj.weight"])

    def _latent_attention(self, at: str, x: Tensor, latent: Latents) -> Tensor:
        """By the definition: every head has keys and values of its own, and one scale for all layers."""
        o, w, T = self.options, self.tensors, x.shape[0]
        if latent.q is None:
            q = linear(x, w[f"{at}.q_proj.weight"])
        else:
            q = linear(
                rms_norm(linear(x, w[f"{at}.q_a_proj.weight"]), w[f"{at}.q_a_layernorm"], o.eps), w[f"{at}.q_b_proj.weight"]
            )
        q_nope, q_rope = q.view(T, o.heads, -1).split([latent.nope, latent.rope], -1)
        kv, k_rope = linear(x, w[f"{at}.kv_a_proj_with_mqa.weight"]).split([latent.kv, latent.rope], -1)
        kv = linear(rms_norm(kv, w[f"{at}.kv_a_layernorm"], o.eps), w[f"{at}.kv_b_proj.weight"]).view(T, o.heads, -1)
        k_nope, v = kv.split([latent.nope, latent.value], -1)
        turned = [
            y if not latent.interleaved else torch.cat((y[..., ::2], y[..., 1::2]), -1) for y in (q_rope, k_rope[:, None])
        ]
        frequencies, factor = _rope(o)
        q_rope, k_rope = (rotate(y, frequencies) * factor for y in turned)
        q, k = torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope.expand(-1, o.heads, -1)), -1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * latent_scale(o)
        weights = scores.masked_fill(~causal_mask(T, T), -torch.inf).softmax(-1)
        return linear(torch.einsum("hqk,khd->qhd", weights, v).reshape(T, -1), w[f"{at}.o_proj.weight"])

    def _attention(self, at: str, x: Tensor) -> Tensor:
        if self.options.latent is not None:
            return self._latent_attention(at, x, self.options.latent)
        o, w, T = self.options, self.tensors, x.shape[0]
        q, k, v = (linear(x, w[f"{at}.{n}_proj.weight"], w.get(f"{at}.{n}_proj.bias")).view(T, -1, o.head_dim) for n in "qkv")
        if o.qk_norm:
            q, k = (rms_norm(y, w[f"{at}.{n}_norm"], o.eps) for n, y in (("q", q), ("k", k)))
        frequencies, factor = _rope(o)
        q, k = (rotate(y, frequencies) * factor for y in (q, k))
        kind = LayerKind(window=o.window)
        seen = causal_mask(T, T) & of_kind(kind, torch.arange(T), torch.arange(T))
        out = dense_attention(q, k, v, seen)[0].reshape(T, -1)
        return linear(out, w[f"{at}.o_proj.weight"], w.get(f"{at}.o_proj.bias"))


def latent_scale(o: Options) -> float:
    """Of the softmax, in which YaRN's temperature is squared, as of DeepSeek's own code."""
    assert o.latent is not None
    scale, all_dim = (o.latent.nope + o.latent.rope) ** -0.5, o.rope.get("mscale_all_dim", 0)
    return scale * (0.1 * all_dim * math.log(o.rope["factor"]) + 1) ** 2 if all_dim else scale


def _rope(o: Options) -> tuple[Tensor, float]:
    """(angles per position, factor on cosines and sines), as transformers computes them."""
    D = o.head_dim if o.latent is None else o.latent.rope
    if o.rope["rope_type"] == "default":
        return 1.0 / o.rope["rope_theta"] ** (torch.arange(0, D, 2).float() / D), 1.0
    config = LlamaConfig(
        hidden_size=o.heads * D, num_attention_heads=o.heads, head_dim=D, rope_parameters=o.rope,
        max_position_embeddings=o.max_position,
    )  # fmt: skip
    return ROPE_INIT_FUNCTIONS[o.rope["rope_type"]](config, "cpu")


def random_parts(options: Options, seed: int = 0) -> Parts:
    """Random weights in which every part matters."""
    o, shapes = options, dict[str, tuple[int, ...]]()
    H, D = o.hidden, o.head_dim
    outs = {"q": o.heads * D, "k": o.kv_heads * D, "v": o.kv_heads * D}
    for layer in range(o.layers):
        at, width = f"layers.{layer}", 2 * H if o.aux and not layer else H
        if o.latent is not None:
            shapes |= {f"{at}.self_attn.{name}": shape for name, shape in latent_shapes(o.latent, o.heads, width, H).items()}
        else:
            shapes |= {f"{at}.self_attn.{n}_proj.weight": (out, width) for n, out in outs.items()}
            shapes[f"{at}.self_attn.o_proj.weight"] = (H, o.heads * D)
        if o.bias:
            shapes |= {f"{at}.self_attn.{n}_proj.bias": (out,) for n, out in {**outs, "o": H}.items()}
        if o.qk_norm:
            shapes |= {f"{at}.self_attn.{n}_norm": (D,) for n in "qk"}
        shapes |= {f"{at}.mlp.{n}_proj.weight": (o.mlp, H) for n in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (H, o.mlp)
        shapes |= {f"{at}.input_layernorm": (H,)} if o.aux or layer else {}
        shapes |= {f"{at}.post_attention_layernorm": (H,), f"{at}.hidden_norm": (H,)}
        if layer or not o.aux:
            del shapes[f"{at}.hidden_norm"]
    F = o.target_hidden * len(o.aux)
    shapes["fc.weight"] = (H, F if o.aux else H + o.target_hidden)
    if not o.aux:
        shapes |= {"fc.bias": (H,)} if o.fc_bias else {}
    else:
        shapes["norm"] = (H,)
        shapes |= {"lm_head.weight": (o.draft_vocab, H)} if o.own_lm_head else {}
    norms = {"none": 0, "joint": 1, "each": len(o.aux)}[o.feature_norm]
    shapes |= {f"feature_norm.{i}": (F // norms,) for i in range(norms)}
    shapes |= {"embed_tokens.weight": (o.vocab, H)} if o.own_embeddings else {}
    made = torch.Generator().manual_seed(seed)
    tensors = {name: _scaled(name, torch.randn(shape, generator=made, dtype=torch.float64)) for name, shape in shapes.items()}
    if not o.aux:
        tensors["fc.weight"] *= 0.3  # no norm tames what a step feeds to the next
    pruned = bool(o.aux) and o.draft_vocab != o.vocab
    return Parts(options, tensors, kept_ids(o.vocab, o.draft_vocab) if pruned else None)


def latent_shapes(latent: Latents, heads: int, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """The tensors of latent attention over inputs of that width."""
    queries = heads * (latent.nope + latent.rope)
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (latent.kv + latent.rope, width), "kv_a_layernorm": (latent.kv,),
        "kv_b_proj.weight": (heads * (latent.nope + latent.value), latent.kv), "o_proj.weight": (hidden, heads * latent.value),
    }  # fmt: skip
    if latent.q is None:
        return shapes | {"q_proj.weight": (queries, width)}
    return shapes | {
        "q_a_proj.weight": (latent.q, width), "q_a_layernorm": (latent.q,), "q_b_proj.weight": (queries, latent.q),
    }  # fmt: skip


def _scaled(name: str, x: Tensor) -> Tensor:
    if "norm" in name:
        return 1 + 0.3 * x
    return 0.3 * x if x.dim() == 1 else x * 1.5 / x.shape[1] ** 0.5


def shipped_parts() -> Parts:
    """The trained head that ships with specdec, with the embeddings of its target as its own."""
    raw = json.loads((shipped.draft_folder() / "config.json").read_text())
    held = load_file(shipped.draft_folder() / "model.safetensors")
    embed = load_file(shipped.target_folder() / "model.safetensors")["model.embed_tokens.weight"]
    options = Options(
        aux=tuple(raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]), hidden=96, target_hidden=96, heads=3, kv_heads=1,
        head_dim=32, mlp=512, vocab=raw["vocab_size"], draft_vocab=raw["draft_vocab_size"], eps=raw["rms_norm_eps"],
        rope={"rope_type": "default", "rope_theta": 10000.0}, max_position=512, own_embeddings=True,
    )  # fmt: skip
    ids = held.pop("d2t") + torch.arange(options.draft_vocab)
    del held["t2d"]
    tensors = {"embed_tokens.weight": embed.double()}
    for name, tensor in held.items():
        name = name.replace("midlayer.", "layers.0.")
        tensors[name.removesuffix(".weight") if "norm" in name else name] = tensor.double()
    return Parts(options, tensors, ids)
