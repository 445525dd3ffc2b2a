"""Splits a transformers causal LM into the pieces of a target: the decoder, its layers, and the computation of logits.

This file knows how transformers builds models; it does not know attention.

Shapes: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from specdec.models.transformers_backend.own_attention.forwards import call_our_attention
from specdec.ops.launch import KERNEL_DTYPES


class Unsupported(Exception):
    """The reason why a transformers model can't be a target."""


class ModelParts:
    """The pieces of a transformers causal LM.

    decoder: the model without its language-model head.  layers: the decoder's layers.
    head: the causal LM itself, whose decoder is replaced by a module that returns the hidden states it is given.  The head's
    forward pass then computes logits alone.

    Unsupported is raised for a model that is not one decoder with a list of num_hidden_layers layers.
    """

    decoder: PreTrainedModel
    layers: nn.ModuleList
    head: Any

    def __init__(self, model: Any) -> None:
        decoders = {name: child for name, child in model.named_children() if isinstance(child, PreTrainedModel)}
        if len(decoders) != 1:
            raise Unsupported(f"expected a causal LM around one decoder, got {type(model).__name__} around {list(decoders)}")
        (name,) = decoders
        self.decoder = decoders[name]
        count = model.config.num_hidden_layers
        lists = [m for m in self.decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
        if not lists:
            raise Unsupported(f"expected a list of {count} decoder layers in {type(self.decoder).__name__}, found none")
        self.layers = lists[0]
        call_our_attention(self.decoder, model.config)
        freeze_rope(self.decoder)
        _freeze_cutoffs(self.decoder)
        _guard_per_layer_table(self.decoder)
        setattr(model, name, _PassThroughDecoder())
        self.head = model

    def on_layers(self, see: Callable[[int, Tensor], object]) -> None:
        """Makes every later forward pass call see(layer number, layer output); the output is the residual stream [1, T, H]."""

        def show(number: int) -> Callable[..., None]:
            def hook(_module: nn.Module, _args: Any, out: Tensor | tuple[Tensor, ...]) -> None:
                see(number, out[0] if isinstance(out, tuple) else out)

            return hook

        for number, layer in enumerate(self.layers):
            layer.register_forward_hook(show(number))

    def hidden(self, ids_T: Tensor, positions_T: Tensor, **more: Any) -> Tensor:
        """The hidden states [T, H] after the final norm.  more: further keyword arguments of the decoder."""
        out = self.decoder(input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False, return_dict=True, **more)
        return out.last_hidden_state[0]

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """The logits [T, V], by everything that the causal LM computes after its decoder, caps and scales included."""
        return self.head(inputs_embeds=hidden_TH[None], use_cache=False, return_dict=True).logits[0]


class CountedTokens:
    """Says how many tokens came before, as transformers' caches do, and holds none.

    Some models (Llama 4, encoder-decoders) take a token's position in the text to be that count plus its place in the pass: so
    the count differs by token.
    """

    def __init__(self, positions_T: Tensor) -> None:
        self.before_T = positions_T - torch.arange(positions_T.shape[0], dtype=torch.int64, device=positions_T.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        return self.before_T

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        return key, value


def freeze_rope(decoder: nn.Module) -> None:
    """Switches off rotary scalings that transformers recomputes from the largest position of each pass.

    The rotary table keeps its values for texts of up to max_position tokens, and specdec runs no longer ones.  Otherwise one
    text of a batch would change the rotation of the others, and the host would read the device in every pass.
    """
    for module in decoder.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            module.rope_type = dict.fromkeys(kind, "default")  # type: ignore[assignment]
        elif isinstance(kind, str):
            module.rope_type = "default"  # type: ignore[assignment]


def _freeze_cutoffs(decoder: nn.Module) -> None:
    """Makes MLPs with sparse activations (Gemma 3n) keep the number of deviations that their sparsity stands for.

    transformers computes that number anew in each pass, from a tensor that it copies from the host and then reads back: a CUDA
    graph can't record either.
    """
    for module in decoder.modules():
        sparsity = getattr(module, "activation_sparsity", 0.0)
        if hasattr(module, "_gaussian_topk") and sparsity > 0:
            share = torch.tensor(sparsity, dtype=torch.float32, device="cpu")
            exact = torch.erfinv(2 * share - 1) * math.sqrt(2)
            deviations = {
                dtype: exact.to(dtype).item() for dtype in (*KERNEL_DTYPES, torch.float64)
            }  # rounded first, as transformers does
            module._gaussian_topk = partial(_above_cutoff, deviations=deviations)  # type: ignore[assignment]


def _above_cutoff(inputs: Tensor, deviations: dict[torch.dtype, float]) -> Tensor:
    """How far each input lies above its row's mean plus so many standard deviations; 0 below.

    deviations: how many, by the inputs' dtype.
    """
    number = deviations[inputs.dtype]
    cutoff = inputs.mean(dim=-1, keepdim=True) + inputs.std(dim=-1, keepdim=True, unbiased=False) * number
    return F.relu(inputs - cutoff)


def _guard_per_layer_table(decoder: nn.Module) -> None:
    """Gives tokens that a table of per-layer embeddings (Gemma 3n) has no row for the first row.

    The table may have fewer rows than the vocabulary.  transformers 5.23 does the same, and 5.17 reads after the
    table's end, which on a GPU ends the process.
    """
    table = getattr(decoder, "embed_tokens_per_layer", None)
    if isinstance(table, nn.Embedding):
        table.register_forward_pre_hook(_within_table)


def _within_table(table: nn.Embedding, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    ids, *rest = args
    return torch.where(ids < table.num_embeddings, ids, 0), *rest


@dataclass
class _DecoderOutput(MoeModelOutputWithPast):
    """A decoder's output with all the fields that any causal LM in transformers reads."""

    cross_attentions: None = None
    shared_kv_states: None = None


class _PassThroughDecoder(nn.Module):
    """Takes the decoder's place inside the causal LM and returns the hidden states that it is given."""

    @property
    def decoder(self) -> _PassThroughDecoder:  # OPT's causal LM calls the decoder of its decoder
        return self

    def forward(self, *_: None, inputs_embeds: Tensor, **__: Any) -> _DecoderOutput:
        return _DecoderOutput(last_hidden_state=inputs_embeds)
