"""What a reader of a layout is given and what it returns, and what holds in every layout.  Knows no layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specdec.draft.formats.spec import HeadSpec
from specdec.draft.formats.stored import Shapes, beside_quantised, expect_shapes, formats_of, stored_tensors
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import expect_quantised
from specdec.models.config import ModelConfig


class HeadFiles(NamedTuple):
    """A head's folder, opened: config.json, and the headers of the weight files.  where: the config's path, for errors."""

    folder: Path
    raw: dict[str, Any]
    checkpoint: Checkpoint

    @property
    def where(self) -> str:
        return str(self.folder / "config.json")


@dataclass(frozen=True)
class PartNames:
    """How a layout calls the parts of a head.

    first: the first layer.  layers: the layers after it.  input_norm: of the layers after the first one.
    fc: the matrix that fuses what the head reads.
    feature_norms: the norms before `fc`.
    markov: what stands before the names of a Markov head's parts.
    confidence: the matrix that estimates acceptance.
    """

    first: str
    layers: tuple[str, ...] = ()
    input_norm: str = "input_layernorm"
    fc: str = "fc"
    feature_norms: tuple[str, ...] = ()
    markov: str = "markov_head."
    confidence: str = "confidence_head.proj"

    @classmethod
    def numbered(cls, count: int, **others: Any) -> PartNames:
        """Layers that are called by their number."""
        first, *layers = (f"layers.{index}" for index in range(count))
        return cls(first, tuple(layers), **others)


@dataclass(frozen=True)
class ParsedHead:
    """A head as its reader understood it.

    beside: tensors that are no weights of the head, each with what is made of it.
    meanings: what each key of the config that runtimes read differently, or that is absent, was taken to mean.
    copies: whether embeddings and language-model head of the files are copies of the target's, and must equal them.
    """

    spec: HeadSpec
    names: PartNames
    beside: Mapping[str, str]
    meanings: Mapping[str, str]
    copies: bool = False


class HeadFormat(NamedTuple):
    """A published layout.  kinds: the heads that are read.  read: the second argument is the target; None: it is not known."""

    name: str
    title: str
    kinds: str
    read: Callable[[HeadFiles, ModelConfig | None], ParsedHead]


def check_tensors(files: HeadFiles, parsed: ParsedHead, wanted: Shapes, matrices: Collection[str]) -> None:
    """ValueError for a tensor that is missing, not part of the head, of another shape, or of the wrong kind of numbers.

    wanted: what the head needs, unquantised.  matrices: those of it that may be in 8 or 4 bits, without an ending.
    Reads headers alone: nothing was allocated yet.
    """
    checkpoint = files.checkpoint
    formats, held = formats_of(checkpoint, matrices), set(checkpoint.names())
    for name, format in formats.items():
        expect_quantised(checkpoint, name, format)
    stored = stored_tensors(checkpoint, wanted, formats)
    known = {*stored, *parsed.beside, *beside_quantised(formats)}
    spare = sorted(name for name in held - known if not may_be_read(name))
    missing = sorted(set(stored) - held)
    if missing:
        instead = f"; it holds {', '.join(spare[:4])}, which no part of such a head is called" if spare else ""
        raise ValueError(
            f"{files.folder}: tensor {missing[0]!r} is missing for a head of the layout {parsed.spec.format}{instead}"
        )
    if spare:
        raise ValueError(
            f"{files.folder}: {len(spare)} tensors are not part of this architecture: {', '.join(spare[:8])} "
            f"(layout {parsed.spec.format})"
        )
    expect_shapes(checkpoint, wanted, formats, _keys_of)


_SIZES = (  # the keys of config.json from which a tensor's shape follows, by a part of its name
    ("markov_w", "vocab_size, draft_vocab_size and markov_rank"),
    ("mask_hidden", "the width of fc"),
    ("codebook", "vocab_size and selector_rank"),
    ("hidden_projection", "selector_rank and hidden_size"),
    ("_conv.", "conv_kernel_size, conv_group_size and hidden_size"),
    ("fc.", "hidden_size, target_hidden_size and the ids of the target's layers"),
    ("lm_head", "draft_vocab_size and hidden_size"),
    ("embed_tokens", "vocab_size and hidden_size"),
    ("q_a_proj", "q_lora_rank and hidden_size"),
    ("q_b_proj", "q_lora_rank, num_attention_heads, qk_nope_head_dim and qk_rope_head_dim"),
    ("kv_a_proj", "kv_lora_rank, qk_rope_head_dim and hidden_size"),
    ("kv_b_proj", "kv_lora_rank, num_attention_heads, qk_nope_head_dim and v_head_dim"),
    ("q_a_layernorm", "q_lora_rank"),
    ("kv_a_layernorm", "kv_lora_rank"),
    ("q_proj", "num_attention_heads, head_dim and hidden_size"),
    ("k_proj", "num_key_value_heads, head_dim and hidden_size"),
    ("v_proj", "num_key_value_heads, head_dim and hidden_size"),
    ("mlp.", "intermediate_size and hidden_size"),
)


def _keys_of(name: str) -> str:
    return next((keys for part, keys in _SIZES if part in name), "hidden_size")


def may_be_read(name: str) -> bool:
    """Scales of fp8 keys and values, which the layer's loader takes; and buffers that follow from the config."""
    return name.endswith(("_scale", "rotary_emb.inv_freq"))
