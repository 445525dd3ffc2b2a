"""Assistants for the tiny Gemma 4 targets, which the zoo has by name once this is imported; and what one says along a path.

Shapes: H hidden, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
)
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm, Gemma4TextScaledWordEmbedding

from toolkit.models import MORE_HEADS, Zoo, scaled

LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
Model = TypeVar("Model", bound=PreTrainedModel)
SHARED = "vocab_size", "num_attention_heads", "sliding_window", "attention_k_eq_v", "max_position_embeddings", "rope_parameters"


def assistant_config(target: Gemma4TextConfig, layers: list[str] = LAYERS, **changes: Any) -> Gemma4AssistantConfig:
    """That of an assistant for such a target.  changes: of text_config, or of the keys beside it."""
    if (by_layer := getattr(target, "per_layer_config", None)) is None:  # 5.17
        kv = target.num_key_value_heads, target.num_global_key_value_heads or target.num_key_value_heads
        sizes = list(zip((target.head_dim, target.global_head_dim), kv, strict=True))
    else:
        own_layers = (by_layer[target.layer_types.index(kind)] for kind in LAYERS[:2])
        sizes = [(each.head_dim, each.num_key_value_heads) for each in own_layers]
    (windowed_dim, windowed_kv), (full_dim, full_kv) = sizes
    own = {name: getattr(target, name) for name in SHARED} | dict(
        hidden_size=24, intermediate_size=40, num_hidden_layers=len(layers), layer_types=layers, num_kv_shared_layers=0,
        head_dim=windowed_dim, num_key_value_heads=windowed_kv, global_head_dim=full_dim,
        num_global_key_value_heads=full_kv if target.attention_k_eq_v else None,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, bos_token_id=0, eos_token_id=None, pad_token_id=None,
        tie_word_embeddings=True,
    )  # fmt: skip
    beside = {"use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k", "backbone_hidden_size"} & changes.keys()
    outer = {"backbone_hidden_size": target.hidden_size} | {name: changes.pop(name) for name in beside}
    return Gemma4AssistantConfig(text_config=Gemma4TextConfig(**own | changes), **outer)


def empty_assistant(config: Gemma4AssistantConfig) -> Gemma4AssistantForCausalLM:
    """All of its layers share keys: transformers' class of assistants asks for that, and 5.23's class of configs refuses it."""
    text = config.text_config
    text.num_kv_shared_layers = 0
    model = Gemma4AssistantForCausalLM(config).eval()
    text.num_kv_shared_layers = text.num_hidden_layers
    for layer in model.model.layers:
        own = layer.self_attn
        own.is_kv_shared_layer, own.store_full_length_kv = True, False
        for name in ("k_proj", "v_proj", "k_norm", "v_norm"):
            delattr(own, name)
    return model


def save_assistant(folder: Path, target: Path, seed: int = 5, **changes: Any) -> Path:
    """A random assistant, whose every weight matters."""
    model = empty_assistant(assistant_config(AutoConfig.from_pretrained(target), **changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        scalars = [(name, b) for name, b in model.named_buffers() if name.endswith("layer_scalar")]
        for part, weight in (*model.named_parameters(), *scalars):
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if part.endswith("layer_scalar") else scaled(part, noise))
        if (lists := model.masked_embedding) is not None:
            lists.token_ordering.copy_(torch.randperm(model.vocab_size, generator=generator))
    model.save_pretrained(folder)
    return folder


def without_float32(model: Model) -> Model:
    """The model, whose norms and embeddings' scale transformers would compute in float32."""
    for part in model.modules():
        if isinstance(part, Gemma4RMSNorm):
            weight = part.weight if part.with_scale else None
            part.forward = partial(norm, weight=weight, eps=part.eps)
        if isinstance(part, Gemma4TextScaledWordEmbedding):
            part.embed_scale = torch.tensor(part.scalar_embed_scale, dtype=torch.float64)
    return model


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


class AloneAssistant:
    """An assistant in transformers along any path after a committed text, in the words of `PathDrafter`.

    text: all committed tokens, then the bonus token.  Of windowed layers it is given the last keys that one window holds.
    """

    def __init__(self, model: Gemma4AssistantForCausalLM, target: PreTrainedModel, text: list[int]) -> None:
        self.model, self.embed, self.text = model, target.get_input_embeddings(), text
        for kind in LAYERS[:2]:  # the last layer of a kind that has keys; where none shares, transformers hands none on
            stored = [each.self_attn for each in target.model.layers if each.self_attn.layer_type == kind]
            [each for each in stored if not each.is_kv_shared_layer][-1].store_full_length_kv = True
        with torch.no_grad():
            seen = target.model(torch.tensor([text[:-1]]), use_cache=False, return_shared_kv_states=True)
        window = target.config.sliding_window
        self.keys = {
            kind: tuple(x[:, :, -window:] if kind == "sliding_attention" else x for x in kv)
            for kind, kv in seen.shared_kv_states.items()
        }
        self.feature = seen.last_hidden_state[:, -1:]
        self._states: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}

    @classmethod
    def of(cls, zoo: Zoo, target: str, kind: str, text: list[int]) -> AloneAssistant:
        """In float64."""
        own = empty_assistant(Gemma4AssistantConfig.from_pretrained(zoo.head(target, kind))).double()
        unread = own.load_state_dict(load_file(zoo.head(target, kind) / "model.safetensors"), strict=False)
        assert unread.missing_keys in ([], ["lm_head.weight"]) and not unread.unexpected_keys  # which is the table
        whole = AutoModelForCausalLM.from_pretrained(zoo.target(target), dtype=torch.float64, experts_implementation="eager")
        return cls(without_float32(own), without_float32(whole.eval()), text)

    @torch.no_grad()
    def _at(self, path: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """(the state that the output layer reads [H], the recycled state, logits [V]) after the path's last token."""
        if path not in self._states:
            hidden = self._at(path[:-1])[1] if path else self.feature
            token = torch.tensor([[path[-1] if path else self.text[-1]]])
            read = list[Tensor]()
            hook = self.model.model.register_forward_hook(lambda _, __, out: read.append(out.last_hidden_state[0, 0]))
            out = self.model(
                inputs_embeds=torch.cat((self.embed(token), hidden), dim=-1), shared_kv_states=self.keys,
                position_ids=torch.tensor([[len(self.text) - 1]]), use_cache=False,
            )  # fmt: skip
            hook.remove()
            self._states[path] = read[0], out.last_hidden_state, out.logits[0, 0]
        return self._states[path]

    def state(self, path: tuple[int, ...]) -> Tensor:
        return self._at(path)[0]

    def log_probs(self, path: tuple[int, ...]) -> dict[int, float]:
        """Of all tokens; of an output layer that computes some, of these alone."""
        logits_V = self._at(path)[2]
        if self.model.masked_embedding is not None:
            logits_V = torch.where(logits_V > logits_V.min(), logits_V, -torch.inf)
        return dict(enumerate(logits_V.log_softmax(-1).tolist()))


ASSISTANTS = {
    "assistant": save_assistant,
    "assistant-ordered": partial(save_assistant, use_ordered_embeddings=True, num_centroids=10, centroid_intermediate_top_k=4),
    "assistant-small": partial(save_assistant, layers=["full_attention"], hidden_size=16),
}
MORE_HEADS |= ASSISTANTS
