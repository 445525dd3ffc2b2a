"""EAGLE heads from their tensors alone: dense attention, no cache, no page, float64.  The oracle of every draft test.

Shapes: T pairs, H hidden, F features side by side, V vocabulary.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from specdec.attention.kinds import FULL, LayerKind
from toolkit.oracles.attention import causal_mask, dense_attention, of_kind


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x @ weight.T if bias is None else x @ weight.T + bias


def rotate(x_THD: Tensor, inv_freq: Tensor) -> Tensor:
    """Position t is row t; the two halves of a head are the real and imaginary parts of one complex number.

    Angles, cosines and sines are float32, as transformers makes them in any precision.
    """
    T, _, D = x_THD.shape
    angles = torch.outer(torch.arange(T).float(), inv_freq)[:, None]
    turn = torch.complex(angles.cos().double(), angles.sin().double())
    turned = torch.complex(x_THD[..., : D // 2], x_THD[..., D // 2 :]) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


class DenseHead:
    """A head folder and the target's transformers model in float64, from which it takes what it does not own."""

    def __init__(self, folder: Path, target: PreTrainedModel) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
        self.is_eagle3 = "midlayer.hidden_norm.weight" in self.tensors
        self.embed = self.tensors.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())
        self.lm_head = self.tensors.get("lm_head.weight", target.get_output_embeddings().weight.detach())
        self.inv_freq = target.model.rotary_emb.inv_freq.float()  # heads here follow their target's rope
        self.eps = self.config["rms_norm_eps"]
        layers = target.config.num_hidden_layers
        ids = self.config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        self.aux_layers = sorted(ids or (1, layers // 2 - 1, layers - 4))

    def features(self, target: PreTrainedModel, ids: list[int]) -> Tensor:
        """[T, F] what this head reads of its target, from transformers."""
        captured: list[Tensor] = []
        hooks = [
            target.model.layers[index].register_forward_hook(lambda _m, _i, out: captured.append(layer_output(out)))
            for index in self.aux_layers
        ]
        with torch.no_grad():
            final = target.model(torch.tensor([ids])).last_hidden_state[0]
        for hook in hooks:
            hook.remove()
        return torch.cat(captured, dim=-1) if self.is_eagle3 else final

    def fuse(self, features: Tensor) -> Tensor:
        return linear(features, self.tensors["fc.weight"]) if self.is_eagle3 else features

    def hidden(self, ids: Tensor, fused: Tensor) -> Tensor:
        """[T, H] over pairs: pair i is (embedding of ids[i], feature i) at position i."""
        w, embedded = self.tensors, self.embed[ids]
        if not self.is_eagle3:
            x = linear(torch.cat((embedded, fused), -1), w["fc.weight"], w.get("fc.bias"))
            for index in range(self.config["num_hidden_layers"]):
                normed = rms_norm(x, w[f"layers.{index}.input_layernorm.weight"], self.eps) if index else x
                x = self.block(f"layers.{index}", x, normed)
            return x
        normed = rms_norm(fused, w["midlayer.hidden_norm.weight"], self.eps)
        embedded = rms_norm(embedded, w["midlayer.input_layernorm.weight"], self.eps)
        before = self.config.get("eagle_config", {}).get("norm_before_residual", False)
        return self.block("midlayer", normed if before else fused, torch.cat((embedded, normed), -1))

    def block(self, prefix: str, residual: Tensor, x: Tensor) -> Tensor:
        w = self.tensors
        x = residual + self.attention(f"{prefix}.self_attn", x)
        normed = rms_norm(x, w[f"{prefix}.post_attention_layernorm.weight"], self.eps)
        gate, up = (linear(normed, w[f"{prefix}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return x + linear(gate * gate.sigmoid() * up, w[f"{prefix}.mlp.down_proj.weight"])

    def attention(self, prefix: str, x: Tensor) -> Tensor:
        w, T, D = self.tensors, x.shape[0], self.config["head_dim"]
        q, k, v = (linear(x, w[f"{prefix}.{letter}_proj.weight"]).view(T, -1, D) for letter in "qkv")
        q, k = rotate(q, self.inv_freq), rotate(k, self.inv_freq)
        window = self.config.get("sliding_window")
        seen = causal_mask(T, T) & of_kind(LayerKind(window=window) if window else FULL, torch.arange(T), torch.arange(T))
        return linear(dense_attention(q, k, v, seen)[0].reshape(T, -1), w[f"{prefix}.o_proj.weight"])

    def log_probs(self, hidden: Tensor) -> dict[int, float]:
        """Log-probability of each target id the head can draft."""
        if self.is_eagle3:
            hidden = rms_norm(hidden, self.tensors["norm.weight"], self.eps)
        logp = linear(hidden, self.lm_head).log_softmax(-1).tolist()
        offsets = self.tensors["d2t"].long().tolist() if "d2t" in self.tensors else [0] * len(logp)
        return {i + offset: value for i, (offset, value) in enumerate(zip(offsets, logp, strict=True))}


def layer_output(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The residual stream that a transformers decoder layer returned, of the one sequence."""
    hidden = out[0] if isinstance(out, tuple) else out
    return hidden[0] if hidden.dim() == 3 else hidden


class PathDrafter:
    """Runs a head alone along any path after a committed text, with the target's true features up to the text's end."""

    def __init__(self, head: DenseHead, target: PreTrainedModel, text: list[int]) -> None:
        """text: all committed tokens, then the bonus token, which has no feature yet."""
        self.head, self.text = head, text
        self.fused = head.fuse(head.features(target, text[:-1]))
        self._hidden: dict[tuple[int, ...], Tensor] = {}

    def hidden(self, path: tuple[int, ...]) -> Tensor:
        """The head's output at the path's last token; the empty path ends at the bonus token."""
        if path not in self._hidden:
            drafted = [self.hidden(path[:i]) for i in range(len(path))]
            ids = torch.tensor(self.text[1:] + list(path))
            fused = torch.cat((self.fused, torch.stack(drafted))) if drafted else self.fused
            self._hidden[path] = self.head.hidden(ids, fused)[-1]
        return self._hidden[path]

    def log_probs(self, path: tuple[int, ...]) -> dict[int, float]:
        return self.head.log_probs(self.hidden(path))
