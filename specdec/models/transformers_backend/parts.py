"""The pieces of a transformers causal LM that a target is made of: its decoder, the decoder's layers, the way to logits.

Knows how transformers builds models, not what attention is.

Shapes: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast


class Unsupported(Exception):
    """Why a model can't be a target."""


class Parts:
    """The pieces of a transformers causal LM: its decoder without the head, the decoder's layers, and the way to logits."""

    def __init__(self, model: Any) -> None:
        decoders = {name: child for name, child in model.named_children() if isinstance(child, PreTrainedModel)}
        if len(decoders) != 1:
            raise Unsupported(f"expected a causal LM around one decoder, got {type(model).__name__} around {list(decoders)}")
        ((name, self.decoder),) = decoders.items()
        count = model.config.num_hidden_layers
        lists = [m for m in self.decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
        if not lists:
            raise Unsupported(f"expected a list of {count} decoder layers in {type(self.decoder).__name__}, found none")
        self.layers = lists[0]
        _freeze_rope(self.decoder)
        setattr(model, name, _GivenStates())
        self.head = model

    def on_layers(self, see: Callable[[int, Tensor], object]) -> None:
        """From now on every layer's output, the residual stream [1, T, H], is shown to `see` with the layer's number."""

        def show(number: int) -> Callable[..., None]:
            def hook(_module: nn.Module, _args: Any, out: Tensor | tuple[Tensor, ...]) -> None:
                see(number, out[0] if isinstance(out, tuple) else out)

            return hook

        for number, layer in enumerate(self.layers):
            layer.register_forward_hook(show(number))

    def hidden(self, ids_T: Tensor, positions_T: Tensor, **more: Any) -> Tensor:
        """[T, H] after the final norm."""
        out = self.decoder(input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False, return_dict=True, **more)
        return out.last_hidden_state[0]

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """[T, V] by all that the causal LM's own forward does after its decoder: caps and scales included."""
        return self.head(inputs_embeds=hidden_TH[None], use_cache=False, return_dict=True).logits[0]


def _freeze_rope(decoder: nn.Module) -> None:
    """Scalings that follow the longest text of a pass keep what they have for texts up to max_position, the longest here.

    Otherwise the texts of a batch would turn each other's positions, and the host would read the device in every pass.
    """
    for module in decoder.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            module.rope_type = dict.fromkeys(kind, "default")  # type: ignore[assignment]
        elif isinstance(kind, str):
            module.rope_type = "default"  # type: ignore[assignment]


@dataclass
class _Given(MoeModelOutputWithPast):
    """With all that any model reads of its decoder's output."""

    cross_attentions: None = None


class _GivenStates(nn.Module):
    """Stands where the decoder was and hands back its input: what is left of the model's forward is the way to logits."""

    @property
    def decoder(self) -> _GivenStates:  # OPT's causal LM calls the decoder of its decoder
        return self

    def forward(self, *_: None, inputs_embeds: Tensor, **__: Any) -> _Given:
        return _Given(last_hidden_state=inputs_embeds)
