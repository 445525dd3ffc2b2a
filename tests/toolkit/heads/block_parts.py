"""A head of one pass as options and tensors by names of our own, made at random, and computed in float64 by the definition.

Every block is computed alone, from the text before it, row by row of the mask: no code is shared with the heads.

Shapes: T tokens of a text, B rows of a block, H hidden, F features side by side, V vocabulary, r rank.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from toolkit.models import kept_ids
from toolkit.oracles.heads import linear, rms_norm

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class BlockOptions:
    """What varies.  aux: 0-based outputs of the target's layers.  causal: for each layer; None: of none.

    windows: for each layer its window by the layout's own rule; None: full.  rule: where windows are counted from: "own" for
    the row's own position, "anchor" for the block's first row, before which all rows read so many tokens.
    more, nested: what z-lab's writer adds to the config, and to its dflash_config.
    """

    kind: Literal["p-eagle", "dflash", "dflash2", "dspark"] = "dflash"
    aux: tuple[int, ...] = (0, 1, 2)
    layers: int = 2
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    mlp: int = 40
    target_hidden: int = 32
    vocab: int = 40
    draft_vocab: int = 40
    eps: float = 1e-5
    theta: float = 3000.0
    max_position: int = 64
    size: int = 4
    mask: int = 7
    causal: tuple[bool, ...] | None = None
    windows: tuple[int | None, ...] | None = None
    rule: Literal["own", "anchor"] = "own"
    skips: bool = True
    bias: bool = False
    qk_norm: bool = True
    before_residual: bool = False
    feature_norm: Literal["none", "each", "joint"] = "none"
    markov: Literal["none", "vanilla", "gated", "rnn"] = "none"
    rank: int = 0
    confidence: Literal["none", "hidden", "markov"] = "none"
    taps: int = 2
    group: int = 8
    candidates: int = 6
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    own_embeddings: bool = False
    own_lm_head: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    nested: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BlockParts:
    """tensors: by name.  draft_ids: the target's id of each draft id; None: one vocabulary."""

    options: BlockOptions
    tensors: Tensors
    draft_ids: Tensor | None

    def drafts(self, features_TF: Tensor, ids: list[int], anchor: int, steps: int, embed: Tensor) -> Tensor:
        """[steps, H]: what logits read, of the tokens after the one at position `anchor`.  embed: the target's table."""
        embed = self.tensors.get("embed_tokens.weight", embed)
        draw = self._peagle if self.options.kind == "p-eagle" else self._dflash
        return draw(features_TF[:anchor], ids, anchor, steps, embed)

    def logits(self, hidden: Tensor, lm_head: Tensor, before: list[int]) -> Tensor:
        """[steps, W].  before: the token before each one that is drafted."""
        o, w = self.options, self.tensors
        logits = linear(hidden, w.get("lm_head.weight", lm_head)) * o.logit_scale
        if o.softcap:
            logits = (logits / o.softcap).tanh() * o.softcap
        if o.kind == "dflash2":
            return torch.stack([self._selected(*each) for each in zip(hidden, logits, before, strict=True)])
        if o.markov == "none":
            return logits
        state, rows = torch.zeros(o.rank, dtype=torch.float64), []
        for h, token in zip(hidden, before, strict=True):
            e = w["markov.w1.weight"][token]
            z = e
            if o.markov == "gated":
                z = linear(torch.cat((h, e)), w["markov.gate.weight"], w["markov.gate.bias"]).sigmoid() * e
            if o.markov == "rnn":
                g, c, out = linear(torch.cat((state, e, h)), w["markov.joint.weight"], w["markov.joint.bias"]).chunk(3)
                state, z = g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh(), out.tanh()
            rows.append(linear(z, w["markov.w2.weight"]))
        return logits + torch.stack(rows)

    def confidences(self, hidden: Tensor, before: list[int]) -> Tensor:
        w = self.tensors
        read = torch.cat((hidden, w["markov.w1.weight"][before]), -1) if self.options.confidence == "markov" else hidden
        return linear(read, w["confidence.weight"], w["confidence.bias"])[:, 0]

    def _selected(self, h: Tensor, logits: Tensor, before: int) -> Tensor:
        """The scores of one row: -inf for tokens that are no candidates."""
        w, scores = self.tensors, torch.full_like(logits, -torch.inf)
        gate = linear(h, w["selector.hidden.weight"])
        for token in logits.sort(descending=True, stable=True).indices[: self.options.candidates].tolist():
            both = w["selector.predecessor"][before] * gate * w["selector.successor"][token]
            scores[token] = logits[token] + both.sum()
        return scores

    def _convolved(self, name: str, side: int, read: Tensor, x: Tensor) -> Tensor:
        """x, convolved with the kernels that come of `read`, row by row of one block."""
        o, w = self.options, self.tensors
        if o.kind != "dflash2" or not o.taps:
            return x
        own = linear(read, w[f"{name}_conv.projection.weight"]).view(len(x), 2, o.taps, o.hidden // o.group)
        rows = []
        for i in range(len(x)):
            row = torch.zeros(o.hidden, dtype=x.dtype)
            for t in range(min(o.taps, i + 1)):
                shared = torch.stack([own[i, side, t, c // o.group] for c in range(o.hidden)])
                row = row + (w[f"{name}_conv.base"][side, t] + shared) * x[i - t]
            rows.append(row)
        return torch.stack(rows)

    def _dflash(self, features: Tensor, ids: list[int], s: int, steps: int, embed: Tensor) -> Tensor:
        o, w, B = self.options, self.tensors, self.options.size
        context = rms_norm(linear(features, w["fc.weight"]), w["hidden_norm"], o.eps)
        x = embed[torch.tensor([ids[s]] + [o.mask] * (B - 1))] * o.embedding_scale
        positions = torch.arange(s + B)
        for layer in range(o.layers):
            seen = torch.ones(B, s + B, dtype=torch.bool)
            for k in range(B):
                if o.causal and o.causal[layer]:
                    seen[k, s + k + 1 :] = False
                if o.windows and (window := o.windows[layer]):
                    seen[k, : max(0, s - window if o.rule == "anchor" else s + k - (window - 1))] = False
            u = rms_norm(x, w[f"layers.{layer}.input_layernorm"], o.eps)
            name, read = f"layers.{layer}.attention", self._convolved(f"layers.{layer}.attention", 0, u, u)
            found = self._attention(layer, read, torch.cat((context, read)), positions[s:], positions, seen)
            x = x + self._convolved(name, 1, u, found)
            name, u = f"layers.{layer}.mlp", rms_norm(x, w[f"layers.{layer}.post_attention_layernorm"], o.eps)
            x = x + self._convolved(name, 1, u, self._mlp(layer, self._convolved(name, 0, u, u)))
        first = int(o.skips)
        return rms_norm(x, w["norm"], o.eps)[first : first + steps]

    def _peagle(self, features: Tensor, ids: list[int], s: int, steps: int, embed: Tensor) -> Tensor:
        o, w = self.options, self.tensors
        unknown = steps - 1
        tokens = torch.tensor(ids[1 : s + 1] + [o.mask] * unknown)
        f = self._fused(torch.cat((features, w["mask_hidden"].expand(unknown, -1))))
        n = rms_norm(f, w["layers.0.hidden_norm"], o.eps)
        u = torch.cat((rms_norm(embed[tokens], w["layers.0.input_layernorm"], o.eps), n), -1)
        x, at = n if o.before_residual else f, torch.arange(s + unknown)
        for layer in range(o.layers):
            if layer:
                u = rms_norm(x, w[f"layers.{layer}.input_layernorm"], o.eps)
            seen = at[:, None] >= at
            if o.windows and (window := o.windows[layer]):
                seen = seen & (at > at[:, None] - window)
            x = x + self._attention(layer, u, u, at, at, seen)
            x = x + self._mlp(layer, rms_norm(x, w[f"layers.{layer}.post_attention_layernorm"], o.eps))
        return rms_norm(x, w["norm"], o.eps)[s - 1 :]

    def _fused(self, features: Tensor) -> Tensor:
        o, w = self.options, self.tensors
        if o.feature_norm == "joint":
            features = rms_norm(features, w["feature_norm.0"], o.eps)
        if o.feature_norm == "each":
            each = features.split(o.target_hidden, -1)
            features = torch.cat([rms_norm(x, w[f"feature_norm.{i}"], o.eps) for i, x in enumerate(each)], -1)
        return linear(features, w["fc.weight"])

    def _attention(self, layer: int, u: Tensor, read: Tensor, at_q: Tensor, at_k: Tensor, seen: Tensor) -> Tensor:
        o, w, at = self.options, self.tensors, f"layers.{layer}.self_attn"
        q, k, v = (
            linear(y, w[f"{at}.{n}_proj.weight"], w.get(f"{at}.{n}_proj.bias")).view(len(y), -1, o.head_dim)
            for n, y in (("q", u), ("k", read), ("v", read))
        )
        if o.qk_norm:
            q, k = rms_norm(q, w[f"{at}.q_norm"], o.eps), rms_norm(k, w[f"{at}.k_norm"], o.eps)
        q, k = self._rotate(q, at_q), self._rotate(k, at_k)
        k, v = (y.repeat_interleave(o.heads // o.kv_heads, 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / o.head_dim**0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v).reshape(len(u), -1)
        return linear(out, w[f"{at}.o_proj.weight"], w.get(f"{at}.o_proj.bias"))

    def _rotate(self, x: Tensor, at: Tensor) -> Tensor:
        o = self.options
        angles = torch.outer(at.float(), 1.0 / o.theta ** (torch.arange(0, o.head_dim, 2).float() / o.head_dim))[:, None]
        turn = torch.complex(angles.cos().double(), angles.sin().double())
        turned = torch.complex(x[..., : o.head_dim // 2], x[..., o.head_dim // 2 :]) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    def _mlp(self, layer: int, normed: Tensor) -> Tensor:
        w, at = self.tensors, f"layers.{layer}"
        gate, up = (linear(normed, w[f"{at}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return linear(gate * gate.sigmoid() * up, w[f"{at}.mlp.down_proj.weight"])


def random_block_parts(options: BlockOptions, seed: int = 0) -> BlockParts:
    """Random weights in which every part matters."""
    made = torch.Generator().manual_seed(seed)
    tensors = {name: _scaled(name, torch.randn(shape, generator=made, dtype=torch.float64)) for name, shape in _shapes(options)}
    pruned = options.draft_vocab != options.vocab
    return BlockParts(options, tensors, kept_ids(options.vocab, options.draft_vocab) if pruned else None)


def with_copies(parts: BlockParts, target: Path) -> BlockParts:
    """The head with its target's embeddings and language-model head as its own, where it has its own."""
    held = load_file(target / "model.safetensors")
    named = {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    copies = {name: held[its].double() for name, its in named.items() if name in parts.tensors}
    return replace(parts, tensors={**parts.tensors, **copies})


def _shapes(o: BlockOptions) -> list[tuple[str, tuple[int, ...]]]:
    H, D, F, r, shapes = o.hidden, o.head_dim, o.target_hidden * len(o.aux), o.rank, dict[str, tuple[int, ...]]()
    outs = {"q": o.heads * D, "k": o.kv_heads * D, "v": o.kv_heads * D}
    for layer in range(o.layers):
        at, width = f"layers.{layer}", 2 * H if o.kind == "p-eagle" and not layer else H
        shapes |= {f"{at}.self_attn.{n}_proj.weight": (out, width) for n, out in outs.items()}
        shapes[f"{at}.self_attn.o_proj.weight"] = (H, o.heads * D)
        if o.bias:
            shapes |= {f"{at}.self_attn.{n}_proj.bias": (out,) for n, out in {**outs, "o": H}.items()}
        shapes |= {f"{at}.self_attn.{n}_norm": (D,) for n in "qk"} if o.qk_norm else {}
        shapes |= {f"{at}.mlp.{n}_proj.weight": (o.mlp, H) for n in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (H, o.mlp), f"{at}.input_layernorm": (H,)}
        shapes[f"{at}.post_attention_layernorm"] = (H,)
    shapes |= {"fc.weight": (H, F), "norm": (H,)}
    if o.kind == "p-eagle":
        shapes |= {"layers.0.hidden_norm": (H,), "mask_hidden": (F,)}
        norms = {"none": 0, "joint": 1, "each": len(o.aux)}[o.feature_norm]
        shapes |= {f"feature_norm.{i}": (F // norms,) for i in range(norms)}
    else:
        shapes["hidden_norm"] = (H,)
    if o.kind == "dflash2":
        for layer, each in itertools.product(range(o.layers if o.taps else 0), ("attention", "mlp")):
            shapes[f"layers.{layer}.{each}_conv.base"] = (2, o.taps, H)
            shapes[f"layers.{layer}.{each}_conv.projection.weight"] = (2 * o.taps * (H // o.group), H)
        shapes |= {f"selector.{each}": (o.vocab, r) for each in ("predecessor", "successor")}
        shapes["selector.hidden.weight"] = (r, H)
    if o.own_embeddings:
        shapes["embed_tokens.weight"] = (o.vocab, H)
    if o.own_lm_head:
        shapes["lm_head.weight"] = (o.draft_vocab, H)
    if o.markov != "none":
        shapes |= {"markov.w1.weight": (o.vocab, r), "markov.w2.weight": (o.draft_vocab, r)}
    shapes |= {"markov.gate.weight": (r, H + r), "markov.gate.bias": (r,)} if o.markov == "gated" else {}
    shapes |= {"markov.joint.weight": (3 * r, 2 * r + H), "markov.joint.bias": (3 * r,)} if o.markov == "rnn" else {}
    if o.confidence != "none":
        shapes |= {"confidence.weight": (1, H + (r if o.confidence == "markov" else 0)), "confidence.bias": (1,)}
    return list(shapes.items())


def _scaled(name: str, x: Tensor) -> Tensor:
    if "norm" in name:
        return 1 + 0.3 * x
    if name == "mask_hidden":
        return x
    if name.endswith("_conv.base"):  # near to what leaves rows as they are
        return 0.3 * x + torch.tensor([1.0] + [0.0] * (x.shape[1] - 1))[None, :, None]
    if "_conv." in name:
        return 0.4 * x / x.shape[1] ** 0.5
    return 0.3 * x if x.dim() == 1 else x * 1.5 / x.shape[1] ** 0.5
