"""What a target or a drafter is, in sizes and switches: what all families have in common, with the answers to what is asked.

Every family's parser makes a `ModelConfig` of a config.json.  Whoever needs a fact of a family asks its config, and nobody asks
which family it is.  This file knows no key of a config.json and no weights; at its end, any JSON file is read strictly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from specdec.attention.kinds import FULL, LayerKind
from specdec.checks import distinct, store
from specdec.models.checkpoints.mistaken import file_hint, folder_hint
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.models.recurrent.sizes import RecurrentConfig
from specdec.models.schemes.rules import Quantization
from specdec.parallel.shard import Shard

NO_ROPE, PROPORTIONAL = "none", "proportional"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: theta, and Llama-3.1's or a linear scaling (`kind`: default | linear | llama3 |
    proportional | none).

    kind none: positions turn nothing (NoPE); tables then hold angles of 0, for kernels that turn heads all the same.

    kind proportional: only the first pairs of a head are turned, `share` of them, and as if all of them were.

    rotated: how many values of a head are turned, where not all are; 0: all.
    interleaved: whether a checkpoint's pairs lie side by side.  In memory they lie as `ops.rope.by_halves` says.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: float = 8192
    rotated: int = 0
    interleaved: bool = False
    share: float = 1.0

    @property
    def of_whole_heads(self) -> RopeConfig:
        """The same angles for heads that are turned as a whole, as those of draft heads are.

        Beside a target that knows no positions, draft heads have the usual angles: their layouts can't say that they have none.
        """
        if self.kind == NO_ROPE:
            return RopeConfig()
        kind = "default" if self.kind == PROPORTIONAL else self.kind
        return replace(self, kind=kind, rotated=0, interleaved=False, share=1.0)


@dataclass(frozen=True)
class EncoderConfig:
    """The encoder in front of a decoder.

    max_tokens: the longest text that it reads.
    start_ids: the tokens that the decoder's text begins with; no prompt says them.
    head_dim: of the encoder's own attention.
    """

    max_tokens: int
    start_ids: tuple[int, ...]
    head_dim: int


@dataclass(frozen=True)
class IndexerConfig:
    """What chooses which keys a query reads (sparse attention).

    heads, head_dim: of the indexer's queries; its one key head has the same head_dim.  topk: the most keys that a query
    reads.

    interleaved: rotated pairs lie side by side in the checkpoint.
    sources: for each layer the layer whose choice it reads: itself, or an earlier one, and then it has no indexer.
    """

    heads: int
    head_dim: int
    topk: int
    interleaved: bool
    sources: tuple[int, ...]

    def has_own(self, layer: int) -> bool:
        """Whether the layer has an indexer."""
        return self.sources[layer] == layer


class OutputNames(NamedTuple):
    """What checkpoints call a layer's matrices whose columns ranks share: of attention, of an MLP, of what keeps a state."""

    attention: str = "self_attn.o_proj"
    mlp: str = "mlp.down_proj"
    recurrent: str = "linear_attn.out_proj"


@dataclass(frozen=True)
class HeadSizes:
    """What heads a layer's attention has: their number, widths and rotary embedding, on one rank.

    value_width: of a value where that is not head_dim; 0: it is.
    attention_scale: of products of queries and keys; None: head_dim ** -0.5.
    has_sinks: whether each query head has a logit more in its softmax.
    values_are_keys: whether keys and values have one projection.
    kv_copies: how many neighbouring ranks hold the same key/value heads.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_width: int = 0
    rope: RopeConfig = field(default_factory=RopeConfig)
    attention_scale: float | None = None
    has_sinks: bool = False
    values_are_keys: bool = False
    kv_copies: int = 1

    @property
    def value_dim(self) -> int:
        """The width of a value."""
        return self.value_width or self.head_dim

    @property
    def group_size(self) -> int:
        """How many query heads read the same key."""
        return self.num_heads // self.num_kv_heads

    def share(self, shard: Shard) -> HeadSizes:
        """What one rank has of the whole layer's heads."""
        heads, kv_heads = shard.share(self.num_heads), shard.share(self.num_kv_heads)
        return replace(self, num_heads=heads, num_kv_heads=kv_heads, kv_copies=shard.copies(self.num_kv_heads))


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder.  Counts are in heads, layers and hidden units.

    num_heads to head_dim, and all else that HeadSizes has: of the layers whose kind is not in unlike_heads.
    unlike_heads: the kinds of layers with other heads, and these heads; `heads_of` answers for any layer.
    qk_norm: whether queries and keys are normed head by head.  norms_all_heads: whether all heads of a token are, together.
    zero_centred_norms: whether norms multiply by 1 + their weight (see RMSNorm), those of heads too.
    layer_kinds: which keys each layer reads; left out: all full.  softcap: whether any layer has one.
    sqrt_alibi: of layers with ALiBi, whether it counts the roots of distances.
    one_block: whether a layer is one block: attention, or one that keeps a state, or an MLP or a mixture.
    embedding_multiplier, logits_multiplier, logits_divisor: what embeddings and logits are multiplied with, or divided by.
    kv_source: for each layer, the layer whose keys and values it reads: its own number, or that of an earlier layer, which
        then stores its own; left out: every layer stores its own.
    features_refusal: why the outputs of this model's layers can't be a draft head's features; empty if they can.
    max_position_why: what of the config sets max_position.
    has_experts: a router chooses among experts.  experts: which, where specdec's own mixture computes them.
    latent_rank: how many numbers of a token's latent are not rotated, where all heads share one (MLA); 0: heads have keys.
    indexer: of sparse attention; None: a query reads all keys.
    recurrent: what the layers of that kind keep of a text; None: there are none.
    differential: whether two heads make one pair, of which one softmax is taken from the other.
    quantization: how matrices are stored in 8 or 4 bits; None: none of them is.
    eos_ids: those that end a text.  ends_by_file: what each file names as ends, that which transformers' generate reads first.
    encoder: of an encoder-decoder model, in which every layer reads the encoder's output too; else None.
    mtp_layers: layers of multi-token prediction in the checkpoint, which the target itself does not compute.
    shard: which rank's share of the model this is; the counts of heads and intermediate_size are then that share's.
    output_names: what checkpoints call the matrices that end a layer's blocks.
    input_size: of what each layer reads of a token beside the residual stream, by the token's id; 0: nothing.
    wrapper: the model_type of the wrapper that this is the text model of; empty: it stands alone.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position: int = 2048
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_all_heads: bool = False
    zero_centred_norms: bool = False
    one_block: bool = False
    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_divisor: float = 1.0
    layer_kinds: tuple[LayerKind, ...] = ()
    kv_source: tuple[int, ...] = ()
    features_refusal: str = ""
    softcap: float | None = None
    has_sinks: bool = False
    sqrt_alibi: bool = False
    eos_ids: tuple[int, ...] = ()
    ends_by_file: tuple[tuple[str, tuple[int, ...]], ...] = ()
    dtype: str | None = None
    max_position_why: str = "max_position_embeddings"
    has_experts: bool = False
    experts: ExpertsConfig | None = None
    latent_rank: int = 0
    indexer: IndexerConfig | None = None
    recurrent: RecurrentConfig | None = None
    differential: bool = False
    value_width: int = 0
    encoder: EncoderConfig | None = None
    mtp_layers: int = 0
    quantization: Quantization | None = None
    shard: Shard = Shard()
    kv_copies: int = 1
    attention_scale: float | None = None
    values_are_keys: bool = False
    unlike_heads: tuple[tuple[LayerKind, HeadSizes], ...] = ()
    output_names: OutputNames = OutputNames()
    input_size: int = 0
    wrapper: str = ""

    def __post_init__(self) -> None:
        if set(self.layer_kinds) <= {FULL}:  # a copy of another config may have another number of layers
            store(self, layer_kinds=(FULL,) * self.num_layers)
        assert len(self.layer_kinds) == self.num_layers, (self.layer_kinds, self.num_layers)
        if self.kv_source == tuple(range(len(self.kv_source))):  # the same holds here
            store(self, kv_source=tuple(range(self.num_layers)))
        assert len(self.kv_source) == self.num_layers, (self.kv_source, self.num_layers)
        if not self.recurrent_layers:  # nor need it have such layers
            store(self, recurrent=None)
        assert self.recurrent is not None or not self.recurrent_layers, self.layer_kinds

    @property
    def heads(self) -> HeadSizes:
        """The heads of all layers whose kind has no others."""
        return HeadSizes(*(getattr(self, each.name) for each in fields(HeadSizes)))

    def heads_of(self, layer: int) -> HeadSizes:
        """The heads of that layer's attention."""
        return dict(self.unlike_heads).get(self.layer_kinds[layer], self.heads)

    @property
    def all_heads(self) -> tuple[HeadSizes, ...]:
        """The heads that layers of attention have, each once."""
        return tuple(dict.fromkeys(map(self.heads_of, self.key_layers)))

    def with_heads_of(self, layer: int) -> ModelConfig:
        """The config of a layer's modules, in which that layer's heads are those of all layers."""
        if not self.unlike_heads:
            return self
        own = self.heads_of(layer)
        return replace(self, unlike_heads=(), **{each.name: getattr(own, each.name) for each in fields(HeadSizes)})

    @property
    def key_layers(self) -> tuple[int, ...]:
        """The numbers of the layers of attention."""
        return tuple(layer for layer, kind in enumerate(self.layer_kinds) if kind.attends)

    @property
    def reads_ids(self) -> bool:
        """Whether layers read token ids themselves, and not their embeddings alone."""
        return bool(self.input_size)

    @property
    def logits_scale(self) -> float:
        """What a product with the language-model head is multiplied with, to be logits."""
        return self.logits_multiplier / self.logits_divisor

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that keep a state by row."""
        return tuple(layer for layer, kind in enumerate(self.layer_kinds) if kind.recurrent)

    @property
    def key_sources(self) -> tuple[int, ...]:
        """For each layer of attention, the layer whose keys and values it reads."""
        return tuple(source for source, kind in zip(self.kv_source, self.layer_kinds, strict=True) if kind.attends)

    @property
    def key_kinds(self) -> tuple[LayerKind, ...]:
        """Which keys the layers of attention read."""
        return tuple(kind for kind in self.layer_kinds if kind.attends)

    @property
    def first_sharing_layer(self) -> int:
        """The first layer of the model's end in which no layer keeps anything of a token; num_layers if the last one does."""
        return max(self.kv_source) + 1

    def first_of_rows(self, aux_layers: Sequence[int]) -> int:
        """The first layer that needs only the rows of a pass that somebody reads; num_layers or more if there is none.

        No layer from there on stores keys and values, nor is its output captured (aux_layers) for all tokens.
        """
        return max(self.first_sharing_layer, *(layer + 1 for layer in aux_layers), 0)

    @property
    def keeps_latents(self) -> bool:
        """Whether a token's keys and values are one latent that all heads share (multi-head latent attention, MLA)."""
        return self.latent_rank > 0

    @property
    def max_read(self) -> int | None:
        """The most keys that a query reads where an indexer chooses them (sparse attention); None: nothing is chosen."""
        return None if self.indexer is None else self.indexer.topk

    @property
    def key_operations(self) -> float:
        """How many more operations a query takes in attention for each key that comes before it, over all layers.

        Layers that read all keys take two for each head and dimension of keys and of values.  Where an indexer chooses the
        keys, only its scores grow: two for each of its heads and dimensions.  Layers with a window cost the same everywhere.
        """
        if (index := self.indexer) is not None:
            return 2.0 * index.heads * index.head_dim * len(set(index.sources))
        growing = [self.heads_of(layer) for layer in self.key_layers if self.layer_kinds[layer].span is None]
        return float(sum(2 * heads.num_heads * (heads.head_dim + heads.value_dim) for heads in growing))

    @property
    def mlp_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have an MLP or a mixture."""
        kinds = enumerate(self.layer_kinds)
        return tuple(layer for layer, kind in kinds if not (self.one_block and (kind.attends or kind.recurrent)))

    @property
    def dense_mlp_layers(self) -> tuple[int, ...]:
        """Of these, those whose MLP is no mixture."""
        return tuple(layer for layer in self.mlp_layers if self.experts is None or layer in self.experts.dense_layers)

    @property
    def width_of_mlp(self) -> float:
        """Of the MLPs that a token passes in a layer together, on average over the layers."""
        if self.experts is None:
            return self.intermediate_size * len(self.mlp_layers) / self.num_layers
        chosen = self.experts.router.top_k * self.experts.intermediate_size + self.experts.shared_size
        dense = len(self.dense_mlp_layers)
        return (dense * self.intermediate_size + (len(self.mlp_layers) - dense) * chosen) / self.num_layers

    @property
    def split_widths(self) -> tuple[int, ...]:
        """The widths of values that are not as wide as their keys, as wide as two heads if differential."""
        if self.differential:
            return (2 * self.head_dim,)
        return tuple(dict.fromkeys(heads.value_width for heads in self.all_heads if heads.value_width))

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Of all attention with heads of its own, the encoder's included; none for latent attention."""
        own = () if self.keeps_latents else tuple(dict.fromkeys(heads.head_dim for heads in (self.all_heads or (self.heads,))))
        return own if self.encoder is None else (*own, self.encoder.head_dim)

    @property
    def heads_a_key(self) -> int:
        """How many query heads read the same key at most: all of them with latent attention, else the size of a GQA group."""
        if self.keeps_latents:
            return self.num_heads
        return max((heads.group_size for heads in self.all_heads), default=self.heads.group_size)

    @property
    def attention_widths(self) -> tuple[int, ...]:
        """The columns of layers' output projections: the values of all heads."""
        return tuple(dict.fromkeys(heads.num_heads * heads.value_dim for heads in self.all_heads or (self.heads,)))

    def kv_holders(self, ranks: int) -> int:
        """How many of `ranks` ranks that share the whole model hold the same keys and values of a token, in every layer."""
        if self.keeps_latents:
            return ranks
        return math.gcd(*(max(1, ranks // heads.num_kv_heads) for heads in self.all_heads or (self.heads,)))

    def row_lengths(self, ranks: int) -> tuple[int, ...]:
        """The lengths of the rows of its matrices, of which so many ranks hold a share each."""
        shared = [self.intermediate_size, *self.attention_widths, self.recurrent.outputs if self.recurrent else 0]
        shared += [] if self.experts is None else [self.experts.shared_size]
        return (self.hidden_size, *(size // ranks for size in shared if size))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.  ValueError, with the path, if there is none, or if one of its keys stands there twice."""
    if not path.is_file():
        hint = folder_hint(path.parent)
        raise ValueError(f"{path} does not exist; expected a Hugging Face model folder holding {path.name}{hint}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=distinct)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:  # a ValueError also for a number of thousands of digits
        hint = file_hint(path)
        raise ValueError(f"{path} is not valid JSON: {error}{hint and '; '}{hint}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data
