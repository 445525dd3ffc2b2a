"""Which of transformers' model classes a config belongs to, and which pieces its models are split into."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from specdec.models.transformers_backend.encoder_parts import EncoderDecoderParts
from specdec.models.transformers_backend.parts import Parts


def auto_class(config: Any) -> Any:
    """The class whose from_config and from_pretrained make a language model of this config."""
    return AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM


def make_parts(model: Any) -> Parts:
    """The pieces of a language model.  Unsupported says why it can't be a target."""
    return EncoderDecoderParts(model) if getattr(model.config, "is_encoder_decoder", False) else Parts(model)
