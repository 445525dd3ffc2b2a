"""MTP layers from their tensors alone: dense attention, no cache, float64.  The oracle of every MTP test, next to transformers.

Shapes: T pairs, H hidden or heads, N part of a head that is not rotated, R rotated part, V value dim, E experts.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from specdec.attention.kinds import Scoring
from toolkit.oracles.attention import causal_mask, dense_attention
from toolkit.oracles.heads import linear, rms_norm, rotate

# The prefix of a layer's decoder layer; then norms of embedding and state, the join and the final norm.  {0}: the number of the
# layer among MTP layers, {1}: among all.
PREFIX, FINAL = "model.layers.{1}", "model.layers.{1}.final_layernorm"
USUAL = tuple(f"{PREFIX}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
MIMO_V2, _V2 = "mimo_v2_flash", "model.mtp.layers.{0}"
_MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
NAMES = {
    "mimo": ("model.mtp_layers.{0}", *(f"model.mtp_layers.{{0}}.{name}" for name in _MIMO)),
    "hy_v3": (PREFIX, *USUAL[:3], FINAL),
    MIMO_V2: (_V2, *(f"{_V2}.{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm"))),
    "ernie4_5_moe": (
        "model.mtp_block.{0}", "model.mtp_emb_norm.{0}", "model.mtp_hidden_norm.{0}", "model.mtp_linear_proj.{0}", "model.norm",
    ),
}  # fmt: skip


DENSE = ("mimo", "ernie4_5_moe", MIMO_V2)  # families whose layers have no experts


def names_of(model_type: str, layer: int, number: int) -> list[str]:
    """A layer's prefix, and the names of its parts."""
    return [name.format(layer, number) for name in NAMES.get(model_type, (PREFIX, *USUAL))]


class DenseMtp:
    """A target's folder, and the target in transformers in float64, which lends its rope, its scale and its two tables."""

    def __init__(self, folder: Path, target: PreTrainedModel) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = {name: x.double() for name, x in load_file(folder / "model.safetensors").items()}
        self.family = self.config["model_type"]
        self.is_mimo, self.is_windowed = self.family == "mimo", self.family == MIMO_V2
        self.chains = not self.is_windowed
        self.eps = self.config.get("rms_norm_eps", self.config.get("layernorm_epsilon"))
        self.embed, self.lm_head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
        self.target = target

    @property
    def layers(self) -> int:
        if self.is_windowed:  # whose config need not say it
            return sum(name.startswith("model.mtp.layers.") and name.endswith(".enorm.weight") for name in self.tensors)
        return self.config["num_nextn_predict_layers"]

    def features(self, target: PreTrainedModel, ids: list[int]) -> Tensor:
        """[T, H]: the target's states after its final norm."""
        with torch.no_grad():
            return target.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def hidden(self, ids: Tensor, fused: Tensor, layer: int = 0) -> Tensor:
        """[T, H] over pairs: pair i is (embedding of ids[i], feature i), and stands after all pairs before it."""
        prefix, *parts = names_of(self.family, layer, self.config["num_hidden_layers"] + layer)
        embed_norm, hidden_norm, join, norm = (self.tensors[f"{part}.weight"] for part in parts)
        w = _Below(self.tensors, prefix)
        embedded = self.embed[ids].detach().clone()
        if self.is_mimo:
            embedded[0] = 0.0  # of the text's first pair
        embedded, state = rms_norm(embedded, embed_norm, self.eps), rms_norm(fused, hidden_norm, self.eps)
        x = linear(torch.cat((state, embedded) if self.is_mimo else (embedded, state), -1), join)
        attention = self._latent if "kv_lora_rank" in self.config else self._windowed if self.is_windowed else self._heads
        x = x + attention(w, rms_norm(x, w["input_layernorm"], self.eps))
        normed = rms_norm(x, w["pre_mlp_layernorm" if self.is_windowed else "post_attention_layernorm"], self.eps)
        x = x + (_mlp(w, "mlp", normed) if self.family in DENSE else self._experts(w, normed))
        return rms_norm(x, norm, self.eps)

    def log_probs(self, hidden: Tensor) -> dict[int, float]:
        return dict(enumerate(linear(hidden, self.lm_head.detach()).log_softmax(-1).tolist()))

    def _heads(self, w: "_Below", x: Tensor) -> Tensor:
        T, D = x.shape[0], self.config["head_dim"]
        q, k, v = (linear(x, w[f"self_attn.{n}_proj"], w.get(f"self_attn.{n}_proj.bias")).view(T, -1, D) for n in "qkv")
        if self.config.get("use_qk_norm") or self.family == "hy_v3":
            q, k = rms_norm(q, w["self_attn.q_norm"], self.eps), rms_norm(k, w["self_attn.k_norm"], self.eps)
        inv_freq = self.target.model.rotary_emb.inv_freq.float()
        R = 2 * len(inv_freq)
        if self.family == "ernie4_5_moe":
            q, k = _paired(q), _paired(k)
        q, k = (torch.cat((rotate(heads[..., :R], inv_freq), heads[..., R:]), -1) for heads in (q, k))
        return linear(
            dense_attention(q, k, v, causal_mask(T, T))[0].reshape(T, -1), w["self_attn.o_proj"], w.get("self_attn.o_proj.bias")
        )

    def _windowed(self, w: "_Below", x: Tensor) -> Tensor:
        """Keys of one width and scaled values of another, of the last tokens alone, with sinks: MiMo-V2's windowed layers."""
        c, T = self.config, x.shape[0]
        D, E, turned = c["head_dim"], c["v_head_dim"], c["rope_parameters"]["sliding_attention"]
        q, k, v = (
            linear(x, w[f"self_attn.{n}_proj"], w.get(f"self_attn.{n}_proj.bias")).view(T, -1, width)
            for n, width in (("q", D), ("k", D), ("v", E))
        )
        R = int(D * turned["partial_rotary_factor"])
        inv_freq = turned["rope_theta"] ** (-torch.arange(0, R, 2) / R)
        q, k = (torch.cat((rotate(heads[..., :R], inv_freq), heads[..., R:]), -1) for heads in (q, k))
        at_T = torch.arange(T)
        seen_TT = causal_mask(T, T) & (at_T > at_T[:, None] - c["sliding_window"])
        sinks = Scoring(sinks_H=w["self_attn.attention_sink_bias"])
        out = dense_attention(q, k, v * c.get("attention_value_scale", 0.707), seen_TT, sinks)[0]
        return linear(out.reshape(T, -1), w["self_attn.o_proj"])

    def _latent(self, w: "_Below", x: Tensor) -> Tensor:
        """Keys and values expanded for each head, as the paper writes it.  Every key is read: no indexer chooses."""
        c, T = self.config, x.shape[0]
        H, C, R, N = (c[key] for key in ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
        if c["q_lora_rank"] is None:
            q = linear(x, w["self_attn.q_proj"])
        else:
            q = linear(x, w["self_attn.q_a_proj"], w.get("self_attn.q_a_proj.bias"))
            q = linear(rms_norm(q, w["self_attn.q_a_layernorm"], 1e-6), w["self_attn.q_b_proj"])
        latent = linear(x, w["self_attn.kv_a_proj_with_mqa"], w.get("self_attn.kv_a_proj_with_mqa.bias"))
        up = linear(rms_norm(latent[:, :C], w["self_attn.kv_a_layernorm"], 1e-6), w["self_attn.kv_b_proj"]).view(T, H, -1)
        q_THX, rope = q.view(T, H, N + R), self.target.model.rotary_emb
        turn = [
            rotate(_paired(part) if c.get("rope_interleave", True) else part, rope.inv_freq.float()) * rope.attention_scaling
            for part in (q_THX[..., N:], latent[:, None, C:])
        ]
        queries = torch.cat((q_THX[..., :N], turn[0]), -1)
        keys = torch.cat((up[..., :N], turn[1].expand(T, H, R)), -1)
        scoring = Scoring(scale=self.target.model.layers[0].self_attn.scaling)
        out = dense_attention(queries, keys, up[..., N:], causal_mask(T, T), scoring)[0]
        return linear(out.reshape(T, -1), w["self_attn.o_proj"], w.get("self_attn.o_proj.bias"))

    def _experts(self, w: "_Below", x: Tensor) -> Tensor:
        """Every expert computes every token; each token chooses by itself."""
        c, rows = self.config, []
        router, correction, shared = "mlp.gate", "mlp.gate.e_score_correction_bias", "mlp.shared_experts"
        if self.family == "hy_v3":
            router, correction, shared = "mlp.router.gate", "mlp.expert_bias", "mlp.shared_mlp"
            c = c | dict(
                n_routed_experts=c["num_experts"], n_group=1, topk_group=1, routed_scaling_factor=c["router_scaling_factor"]
            )
        E, G = c["n_routed_experts"], c["n_group"]
        outputs_ETH = [_mlp(w, f"mlp.experts.{expert}", x) for expert in range(E)]
        for t, logits_E in enumerate(linear(x, w[router])):
            scores_E = logits_E.sigmoid()
            ranks_GX = (scores_E + w[correction]).view(G, -1)
            best = ranks_GX.topk(2).values.sum(-1).topk(c["topk_group"]).indices.tolist()
            allowed = [e for e in range(E) if e // (E // G) in best]
            chosen = sorted(allowed, key=lambda e: -float(ranks_GX.flatten()[e]))[: c["num_experts_per_tok"]]
            weights = scores_E[chosen]
            if c.get("norm_topk_prob", True):
                weights = weights / weights.sum()
            rows.append(sum(weight * outputs_ETH[expert][t] for weight, expert in zip(weights, chosen, strict=True)))
        return _mlp(w, shared, x) + c["routed_scaling_factor"] * torch.stack(rows)


class MtpPaths:
    """Runs MTP layers alone along any path after a committed text, with the target's true states up to the text's end.

    Layer k reads (token i + k + 1, output k - 1 of pair i) over all of the text's pairs i; its last output drafts level k + 1.
    Layers that don't chain read the target's state of pair i in place of that output.
    Levels beyond the layers are drafted by the last one, whose pairs go on with the path's tokens and its own outputs.
    """

    def __init__(self, head: DenseMtp, target: PreTrainedModel, text: list[int]) -> None:
        """text: all committed tokens, then the bonus token, which has no state yet."""
        self.head, self.text = head, text
        self.fused = head.features(target, text[:-1])
        self._outputs: dict[tuple[tuple[int, ...], int], Tensor] = {}

    def _output(self, path: tuple[int, ...], layer: int) -> Tensor:
        """[L, H]: outputs of a layer over the text's pairs; it needs the first `layer` tokens of the path."""
        key = path[:layer], layer
        if key not in self._outputs:
            before = self._output(path, layer - 1) if layer and self.head.chains else self.fused
            tokens = self.text + list(path)
            self._outputs[key] = self.head.hidden(torch.tensor(tokens[1 + layer :][: len(before)]), before, layer)
        return self._outputs[key]

    def hidden(self, path: tuple[int, ...]) -> Tensor:
        """What the next token after the path is drafted from."""
        M = self.head.layers
        if len(path) < M:
            return self._output(path, len(path))[-1]
        before = self._output(path, M - 2) if M > 1 and self.head.chains else self.fused
        drafted = [self.hidden(path[:level]) for level in range(M - 1, len(path))]
        tokens = torch.tensor(self.text[M:] + list(path))
        return self.head.hidden(tokens, torch.cat((before, torch.stack(drafted))), M - 1)[-1]

    def log_probs(self, path: tuple[int, ...]) -> dict[int, float]:
        return self.head.log_probs(self.hidden(path))


class _Below:
    """A layer's tensors by their names below its prefix; ".weight" may be left out."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str) -> None:
        self._tensors, self._prefix = tensors, prefix

    def get(self, name: str) -> Tensor | None:
        at = f"{self._prefix}.{name}"
        return self._tensors.get(at, self._tensors.get(f"{at}.weight"))

    def __getitem__(self, name: str) -> Tensor:
        found = self.get(name)
        assert found is not None, name
        return found


def _mlp(w: _Below, at: str, x: Tensor) -> Tensor:
    def product(x: Tensor, part: str) -> Tensor:
        return linear(x, w[f"{at}.{part}_proj"], w.get(f"{at}.{part}_proj.bias"))

    gate = product(x, "gate")
    return product(gate * gate.sigmoid() * product(x, "up"), "down")


def _paired(x: Tensor) -> Tensor:
    """Values that are turned in pairs side by side, as two halves."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
