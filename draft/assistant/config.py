"""The config.json of an assistant, read strictly, and what of a target it reads.  Knows no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.models.checkpoints.config_values import flag, mapping, whole
from specdec.models.config import ModelConfig
from specdec.models.gemma4.config import GemmaConfig, parse_gemma4
from specdec.models.keys.shared import EVERYWHERE, refuse_unknown
from specdec.models.keys.wrappers import OF_ALL, SETTINGS
from specdec.models.mixtures.keys import only

MODEL_TYPE, TEXT_TYPE = "gemma4_assistant", "gemma4_text"
SHARED_LAYERS = "num_kv_shared_layers"
_KEYS = frozenset("backbone_hidden_size centroid_intermediate_top_k num_centroids text_config use_ordered_embeddings".split())


@dataclass(frozen=True)
class CentroidSizes:
    """Of an output layer that computes the logits of some tokens alone.

    count: the vocabulary lies in so many lists of equally many tokens.  top_k: how many lists' tokens get logits.
    """

    count: int
    top_k: int


@dataclass(frozen=True)
class AssistantConfig:
    """model: its layers, as if each stored keys and values; none does.  target_size: hidden_size of its target.

    centroids: None: every token gets a logit.
    """

    model: GemmaConfig
    target_size: int
    centroids: CentroidSizes | None = None


def parse_assistant(raw: dict[str, Any], where: str) -> AssistantConfig:
    """ValueError names `where` (the file), the key, what was expected and what was found."""
    refuse_unknown(raw, _KEYS | OF_ALL | EVERYWHERE | SETTINGS, where)
    only(raw, where, tie_word_embeddings=True, quantization_config=None, compression_config=None)
    inside, said = f"{where}: text_config", mapping(raw, "text_config", where)
    if not said:
        raise ValueError(f"{where} lacks text_config, of which an assistant's layers are made")
    if said.get("model_type") != TEXT_TYPE:
        raise ValueError(f"{inside}: model_type must be {TEXT_TYPE!r}, got {said.get('model_type')!r}")
    only(said, inside, enable_moe_block=False, use_double_wide_mlp=False, attention_bias=False, tie_word_embeddings=True)
    layers = whole(said, "num_hidden_layers", inside)
    if (shared := said.get(SHARED_LAYERS)) not in (None, 0, layers):
        raise ValueError(
            f"{inside}: {SHARED_LAYERS} must be num_hidden_layers {layers}, or 0, since no layer of an assistant has keys of "
            f"its own, got {shared!r}"
        )
    if size := whole(said, "hidden_size_per_layer_input", inside, 256, least=0):
        raise ValueError(f"{inside}: hidden_size_per_layer_input must be 0, as in every assistant, got {size}")
    own = {key: value for key, value in said.items() if key not in EVERYWHERE | SETTINGS}
    model = parse_gemma4(own | {SHARED_LAYERS: 0, "tie_word_embeddings": True}, inside)
    target_size = whole(raw, "backbone_hidden_size", where, 1536)
    return AssistantConfig(model, target_size, _centroids(raw, model.vocab_size, where))


def _centroids(raw: dict[str, Any], vocab_size: int, where: str) -> CentroidSizes | None:
    if not flag(raw, "use_ordered_embeddings", where):
        return None
    count, top_k = whole(raw, "num_centroids", where, 2048), whole(raw, "centroid_intermediate_top_k", where, 32)
    if vocab_size % count:
        raise ValueError(f"{where}: num_centroids must divide vocab_size {vocab_size}, got {count}")
    if top_k > count:
        raise ValueError(f"{where}: centroid_intermediate_top_k must be at most num_centroids {count}, got {top_k}")
    return CentroidSizes(count, top_k)


def layers_read(own: AssistantConfig, target: ModelConfig, where: str) -> tuple[int, ...]:
    """For each layer of an assistant the target's layer that it reads: the last one of its kind that stores keys and values.

    ValueError says why the assistant can't draft for that target.
    """
    if why := refusal_by_target(target):
        raise ValueError(f"{where}: an assistant can't draft for this target: {why}")
    model = own.model
    if own.target_size != target.hidden_size:
        raise ValueError(
            f"{where}: backbone_hidden_size must be the target's hidden_size {target.hidden_size}, got {own.target_size}"
        )
    if model.vocab_size != target.vocab_size:
        raise ValueError(f"{where}: text_config: vocab_size must be the target's {target.vocab_size}, got {model.vocab_size}")
    found = list[int]()
    for index, kind in enumerate(model.layer_kinds):
        stored = [layer for layer in sorted(set(target.kv_source)) if target.layer_kinds[layer] == kind]
        if not stored:
            kinds = ", ".join(map(str, dict.fromkeys(target.layer_kinds)))
            raise ValueError(f"{where}: text_config: layer {index} is {kind}, and the target has no such layer; it has {kinds}")
        ours, theirs = model.heads_of(index), target.heads_of(stored[-1])
        if (ours.num_kv_heads, ours.head_dim) != (theirs.num_kv_heads, theirs.head_dim):
            raise ValueError(
                f"{where}: text_config: layers that are {kind} read {ours.num_kv_heads} key/value heads of {ours.head_dim}, "
                f"and the target's have {theirs.num_kv_heads} of {theirs.head_dim}"
            )
        found.append(stored[-1])
    return tuple(found)


def refusal_by_target(target: ModelConfig) -> str:
    """Why no assistant drafts for a target; empty if one can."""
    if isinstance(target, GemmaConfig):
        return ""
    return f"it reads keys and values of a {TEXT_TYPE} target that specdec's own modules compute, got {target.family}"
