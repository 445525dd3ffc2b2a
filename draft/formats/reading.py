"""What a reader of a layout is given and what it returns, and what holds in every layout.  Knows no layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specdec.draft.formats.spec import HeadSpec
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


class HeadFiles(NamedTuple):
    """A head's folder, opened: config.json, and the headers of the weight files.  where: the config's path, for errors."""

    folder: Path
    raw: dict[str, Any]
    checkpoint: Checkpoint

    @property
    def where(self) -> str:
        return str(self.folder / "config.json")


@dataclass(frozen=True)
class Names:
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


@dataclass(frozen=True)
class Reading:
    """A head as its reader understood it.

    beside: tensors that are no weights of the head, each with what is made of it.
    meanings: what each key of the config that runtimes read differently, or that is absent, was taken to mean.
    copies: whether embeddings and language-model head of the files are copies of the target's, and must equal them.
    """

    spec: HeadSpec
    names: Names
    beside: Mapping[str, str]
    meanings: Mapping[str, str]
    copies: bool = False


class Format(NamedTuple):
    """A published layout.  kinds: the heads that are read.  read: the second argument is the target; None: it is not known."""

    name: str
    title: str
    kinds: str
    read: Callable[[HeadFiles, ModelConfig | None], Reading]


def wanted_tensors(spec: HeadSpec, names: Names) -> Shapes:
    """Every tensor that a head of that spec needs, but for its vocabulary map, with its shape."""
    H, Ht = spec.model.hidden_size, spec.target_hidden_size
    shapes: Shapes = {}
    if spec.kind == "eagle1":
        shapes[f"{names.fc}.weight"] = (H, H + Ht)
        shapes |= {f"{names.fc}.bias": (H,)} if spec.fc_bias else {}
        shapes |= _layer(names.first, spec.model, H)
        del shapes[f"{names.first}.input_layernorm.weight"]
    elif spec.kind in ("eagle3", "p-eagle"):
        shapes[f"{names.fc}.weight"] = (H, spec.feature_size)
        if spec.feature_norm != "none":
            shapes |= {f"{name}.weight": (spec.feature_size // len(names.feature_norms),) for name in names.feature_norms}
        shapes |= _layer(names.first, spec.model, 2 * H) | {f"{names.first}.hidden_norm.weight": (H,)}
        shapes["norm.weight"] = (H,)
        shapes |= {"mask_hidden": (1, 1, spec.feature_size)} if spec.kind == "p-eagle" else {}
    else:
        shapes[f"{names.fc}.weight"] = (H, spec.feature_size)
        shapes |= {f"{norm}.weight": (H,) for norm in ("hidden_norm", "norm")}
        shapes |= _layer(names.first, spec.model, H) | _correction(spec, names)
    for name in names.layers:
        shapes |= _layer(name, spec.model, H, names.input_norm)
    if spec.own_lm_head and spec.kind != "eagle1":
        shapes["lm_head.weight"] = (spec.draft_vocab_size, H)
    if spec.own_embeddings:
        shapes["embed_tokens.weight"] = (spec.model.vocab_size, H)
    return shapes


def _correction(spec: HeadSpec, names: Names) -> Shapes:
    """What a DSpark head has beside a DFlash head's tensors."""
    block, H = spec.block, spec.model.hidden_size
    assert block is not None
    r, shapes = block.markov_rank, Shapes()
    if block.markov != "none":
        shapes = {"markov_w1.weight": (spec.model.vocab_size, r), "markov_w2.weight": (spec.draft_vocab_size, r)}
    if block.markov == "gated":
        shapes |= {"gate_proj.weight": (r, H + r), "gate_proj.bias": (r,)}
    if block.markov == "rnn":
        shapes |= {"joint_proj.weight": (3 * r, 2 * r + H), "joint_proj.bias": (3 * r,)}
    shapes = {f"{names.markov}{name}": shape for name, shape in shapes.items()}
    if block.confidence != "none":
        width = H + (r if block.confidence == "markov" else 0)
        shapes |= {f"{names.confidence}.weight": (1, width), f"{names.confidence}.bias": (1,)}
    return shapes


def _layer(name: str, model: ModelConfig, in_features: int, input_norm: str = "input_layernorm") -> Shapes:
    H, I, D = model.hidden_size, model.intermediate_size, model.head_dim
    outs = {"q": model.num_heads * D, "k": model.num_kv_heads * D, "v": model.num_kv_heads * D}
    shapes: Shapes = {f"self_attn.{letter}_proj.weight": (out, in_features) for letter, out in outs.items()}
    shapes["self_attn.o_proj.weight"] = (H, model.num_heads * D)
    shapes |= {f"self_attn.{letter}_proj.bias": (out,) for letter, out in outs.items()} if model.qkv_bias else {}
    shapes |= {"self_attn.o_proj.bias": (H,)} if model.o_bias else {}
    shapes |= {f"self_attn.{letter}_norm.weight": (D,) for letter in "qk"} if model.qk_norm else {}
    shapes |= {"mlp.gate_proj.weight": (I, H), "mlp.up_proj.weight": (I, H), "mlp.down_proj.weight": (H, I)}
    shapes |= {"mlp.gate_proj.bias": (I,), "mlp.up_proj.bias": (I,), "mlp.down_proj.bias": (H,)} if model.mlp_bias else {}
    shapes |= {f"{input_norm}.weight": (H,), "post_attention_layernorm.weight": (H,)}
    return {f"{name}.{part}": shape for part, shape in shapes.items()}


def check_tensors(files: HeadFiles, reading: Reading) -> None:
    """ValueError for a tensor that is missing, not part of the head, of another shape, or of the wrong kind of numbers.

    Reads headers alone: nothing was allocated yet.
    """
    checkpoint, wanted = files.checkpoint, wanted_tensors(reading.spec, reading.names)
    held = set(checkpoint.names())
    spare = sorted(name for name in held - set(wanted) - set(reading.beside) if not _may_be_read(name))
    missing = sorted(set(wanted) - held)
    if missing:
        instead = f"; it holds {', '.join(spare[:4])}, which no part of such a head is called" if spare else ""
        raise ValueError(
            f"{files.folder}: tensor {missing[0]!r} is missing for a head of the layout {reading.spec.format}{instead}"
        )
    if spare:
        raise ValueError(
            f"{files.folder}: {len(spare)} tensors are not part of this architecture: {', '.join(spare[:8])} "
            f"(layout {reading.spec.format})"
        )
    for name, shape in wanted.items():
        checkpoint.expect(name, shape, _keys_of(name))
        checkpoint.expect_kind(name, "floating-point numbers")


_SIZES = (  # the keys of config.json from which a tensor's shape follows, by a part of its name
    ("markov_w", "vocab_size, draft_vocab_size and markov_rank"),
    ("mask_hidden", "the width of fc"),
    ("fc.", "hidden_size, target_hidden_size and the ids of the target's layers"),
    ("lm_head", "draft_vocab_size and hidden_size"),
    ("embed_tokens", "vocab_size and hidden_size"),
    ("q_proj", "num_attention_heads, head_dim and hidden_size"),
    ("k_proj", "num_key_value_heads, head_dim and hidden_size"),
    ("v_proj", "num_key_value_heads, head_dim and hidden_size"),
    ("mlp.", "intermediate_size and hidden_size"),
)


def _keys_of(name: str) -> str:
    return next((keys for part, keys in _SIZES if part in name), "hidden_size")


def _may_be_read(name: str) -> bool:
    """Scales of fp8 keys and values, which the layer's loader takes; and buffers that follow from the config."""
    return name.endswith(("_scale", "rotary_emb.inv_freq"))
