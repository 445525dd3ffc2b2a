"""EAGLE heads of `speculators` (Red Hat, vLLM), by release: a config whose layer sizes are nested.

EAGLE-3 has `layers.*`, one or more.  Its ids of the target's layers count the states of a forward pass, in which state 0 is the
embeddings', so id x is the output of layer x - 1.  EAGLE-1, which the releases 0.1 to 0.6 have, is one layer, `transformer.*`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.attention.kinds import FULL
from specdec.draft.eagle.formats.common import DEFAULT, eagle3_reading
from specdec.draft.formats.body import (
    aux_layers_of,
    check_features,
    parse_body,
    parse_head_rope,
    width_of_features,
    windows_by_type,
)
from specdec.draft.formats.reading import HeadFiles, ParsedHead, PartNames
from specdec.draft.formats.releases import AUX, VERSION, Release, passed_over, release_of
from specdec.draft.formats.spec import FeatureNorm, HeadSpec
from specdec.models.checkpoints.config_values import flag, mapping
from specdec.models.config import ModelConfig

NAME = "speculators"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
DECODERS = {"llama": "LlamaDecoderLayer", "qwen3": "Qwen3DecoderLayer"}  # the layers of a head, by their config's model_type
CONVERTED = ["Eagle3Speculator"]  # the class that the library's converters save; its trainers have another one
FIRST_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def read(files: HeadFiles, target: ModelConfig | None) -> ParsedHead:
    return read_eagle3(files, target, "eagle3")


def read_eagle3(files: HeadFiles, target: ModelConfig | None, kind: str) -> ParsedHead:
    """The EAGLE-3 head in the files, or what a P-EAGLE head has of one."""
    raw, where, checkpoint = files.raw, files.where, files.checkpoint
    check_features(target, where)
    release = release_of(raw, kind, where)
    check_proposals(raw, where)
    if raw.get("norm_before_residual") is None:
        raise ValueError(f"{where} lacks norm_before_residual; expected true or false: runtimes take different defaults")
    is_converted = raw.get("architectures") == CONVERTED
    model, meanings = _eagle3_layers(files, target, release)
    flags = {key: flag(raw, key, where) for key in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise ValueError(f"{where}: norm_before_fc and fc_norm must not both be true")
    ids = raw.get(AUX)
    aux_layers = aux_layers_of(ids, target, where, one_based=True)
    if release.newest < 7 and ids is not None and len(ids) != 3:
        raise ValueError(f"{where}: {AUX} must name 3 layers, as all heads before speculators 0.7 read, got {ids}")
    width = width_of_features(raw, model.hidden_size, target, where)
    if width != model.hidden_size and not is_converted:
        raise ValueError(f"{where}: target_hidden_size must be null or the head's {model.hidden_size}, got {width}")
    if is_converted and release.oldest <= 4 and release.newest >= 2:
        _refuse_lost_layer(files, model.hidden_size, release)
    is_trained = flag(raw, "embed_requires_grad", where)
    norm: FeatureNorm = "joint" if flags["norm_before_fc"] else "each" if flags["fc_norm"] else "none"
    count = len(aux_layers) or 3  # as many as DEFAULT
    norms = {"none": (), "joint": ("input_norm",), "each": tuple(f"fc_norm.{index}" for index in range(count))}[norm]
    names = PartNames.numbered(model.num_layers, feature_norms=norms)
    has_embeddings = is_trained or release.newest < 2 or "embed_tokens.weight" in checkpoint
    shared = {"embed_tokens": not has_embeddings, "lm_head": not checkpoint.has_matrix("lm_head")}
    meanings |= {name: "absent: the target's" for name, is_shared in shared.items() if is_shared}
    said = {VERSION: release.said, **_meanings(ids, aux_layers, flags), **meanings, **passed_over(raw)}
    return eagle3_reading(
        files, model, target, aux_layers, names, said, t2d="must", full="may" if release.oldest < 5 else "must not",
        format=NAME,
        feature_norm=norm, norm_before_residual=flags["norm_before_residual"], recycles_normed=flags["norm_output"],
        own_embeddings=has_embeddings,
    )  # fmt: skip


def read_eagle1(files: HeadFiles, target: ModelConfig | None) -> ParsedHead:
    """One layer, whatever num_hidden_layers says.  Its rotary embedding is its target's, whatever the config says."""
    raw, where = files.raw, files.where
    release = release_of(raw, "eagle", where)
    check_proposals(raw, where)
    if flag(raw, "layernorms", where):
        raise ValueError(
            f"{where}: layernorms must be false: what such a head feeds back to itself, the state before its last norm or "
            "after it, no release of speculators says; nearest thing that works: an EAGLE-3 head"
        )
    has_bias = flag(raw, "fusion_bias", where)
    inner = mapping(raw, "transformer_layer_config", where)
    model = replace(inner_model(raw, target, where), num_layers=1, layer_kinds=(FULL,), kv_source=(0,))
    wanted = DECODERS[inner["model_type"]]
    if raw.get("transformer_layer_architecture") not in (wanted, "auto"):
        got = raw.get("transformer_layer_architecture")
        raise ValueError(f"{where}: transformer_layer_architecture must be {wanted}, by its config's model_type, got {got!r}")
    own_rope = model.rope
    model = model if target is None else replace(model, rope=target.rope.of_whole_heads)
    spec = HeadSpec(model, "eagle1", (), model.hidden_size, model.vocab_size, has_bias, own_lm_head=False, format=NAME)
    rope = "the target's, as this layout's own code takes it" if target else "as written; with a target, the target's"
    other = f"; the config says another one, {own_rope}" if target is not None and own_rope != model.rope else ""
    meanings = {
        VERSION: release.said,
        "fusion_bias": f"{has_bias}: fc has {'a' if has_bias else 'no'} bias",
        "layernorms": "False: no norm before fc, none at the layer's start, none at the end",
        "num_hidden_layers": f"{inner.get('num_hidden_layers')}: the head has one layer, always",
        "rope": rope + other,
    }
    return ParsedHead(spec, PartNames("transformer", fc="fusion_fc"), {}, {**meanings, **passed_over(raw)})


def check_proposals(raw: dict[str, Any], where: str) -> None:
    """ValueError for a way to propose tokens that asks for other heads."""
    if bad := [
        each for each in proposals_of(raw, where) if not isinstance(each, dict) or each.get("proposal_type") != "greedy"
    ]:
        raise ValueError(f"{where}: speculators_config.proposal_methods must be of proposal_type greedy, got {bad[0]!r}")


def proposals_of(raw: dict[str, Any], where: str) -> list[Any]:
    proposals = mapping(raw, "speculators_config", where).get("proposal_methods") or []
    return proposals if isinstance(proposals, list) else [proposals]


def inner_model(
    raw: dict[str, Any], target: ModelConfig | None, where: str, absent: str | None = None, drops: tuple[str, ...] = ()
) -> ModelConfig:
    """The layers, by the config inside of the config, with windows where that says so.

    absent: the model_type where there is none.  drops: keys of it that this head's code never read.
    """
    said, where = mapping(raw, "transformer_layer_config", where), f"{where}: transformer_layer_config"
    inner = {key: value for key, value in said.items() if key not in drops}
    family = absent if inner.get("model_type") is None else inner["model_type"]
    if not isinstance(family, str) or family not in DECODERS:
        raise ValueError(f"{where}: model_type must be one of {', '.join(DECODERS)}, got {family!r}")
    if flag(inner, "tie_word_embeddings", where):
        raise ValueError(f"{where}: tie_word_embeddings must be false: a head has a language-model head of its own")
    model = parse_body(inner, (), target, where, family=family)
    if target is not None and raw.get("target_hidden_size") is None and model.hidden_size != target.hidden_size:
        raise ValueError(f"{where}: hidden_size must be the target's {target.hidden_size}, got {model.hidden_size}")
    rope = parse_head_rope(inner, target, where, silent=False)
    return replace(model, rope=rope, layer_kinds=windows_by_type(inner, model.num_layers, where))


def obeyed(model: ModelConfig, release: Release, first: int, where: str) -> tuple[ModelConfig, dict[str, str]]:
    """The layers as they were trained, and what is to be said: releases before the `first` one trained all layers full."""
    if not any(kind.window for kind in model.layer_kinds) or release.since(first, "what layer_types mean", where):
        return model, {}
    said = {"layer_types": f"all layers are full: speculators obeys windows of such heads from 0.{first} on"}
    return replace(model, layer_kinds=(FULL,) * model.num_layers), said


def _eagle3_layers(files: HeadFiles, target: ModelConfig | None, release: Release) -> tuple[ModelConfig, dict[str, str]]:
    """The layers, as the release has them, and what is to be said of it."""
    raw, where = files.raw, files.where
    inner, absent = mapping(raw, "transformer_layer_config", where), None
    if inner.get("model_type") is None:
        absent = "qwen3" if release.since(7, "an absent transformer_layer_config.model_type", where) else "llama"
    model = inner_model(raw, target, where, absent, drops=("head_dim",) if release.newest < 2 else ())
    model, meanings = obeyed(model, release, 7, where)
    if any(kind.window for kind in model.layer_kinds):
        meanings["windows"] = "counted back from each pair; in training, from the pair that a draft began at"
    if absent:
        meanings["model_type"] = f"absent: {absent}, as in this release"
    if release.newest < 3:  # the class of these releases makes one, whatever the number says
        meanings["num_hidden_layers"] = f"{model.num_layers}: the head has one layer, always, in this release"
        model = replace(model, num_layers=1, layer_kinds=model.layer_kinds[:1], kv_source=(0,))
    if raw.get("architectures") == CONVERTED and release.newest < 7:
        meanings["rope"] = "as written; converters of this release left a scaling out"
    return model, meanings


def _refuse_lost_layer(files: HeadFiles, size: int, release: Release) -> None:
    """ValueError for a head whose layer a converter of 0.2 to 0.4 has lost: its norms are still as they were made, all 1."""
    names = [f"layers.0.{norm}.weight" for norm in FIRST_NORMS]
    if not all(name in files.checkpoint for name in names):
        return  # which is told as missing tensors
    if all(bool((files.checkpoint.take(name, (size,)) == 1).all()) for name in names):
        raise ValueError(
            f"{files.folder}: all three norms of layers.0 are exactly 1, so that its weights are no trained ones: the "
            f"converters of speculators 0.2 to 0.4 left out tensors called midlayer.*, got {VERSION} {release.text!r}; "
            "nearest thing that works: the head as it was before, which is read too, or one that 0.5 or later converted"
        )


def _meanings(ids: Any, aux_layers: tuple[int, ...], flags: dict[str, bool]) -> dict[str, str]:
    before, output = flags["norm_before_residual"], flags["norm_output"]
    return {
        AUX: f"null: {DEFAULT}" if ids is None else f"{ids}: states of a forward pass, so outputs of layers {list(aux_layers)}",
        "norm_before_residual": f"{before}: the residual is the {'normed' if before else 'raw'} feature",
        "norm_before_fc": f"{flags['norm_before_fc']}: a norm over all features side by side before fc, or none",
        "fc_norm": f"{flags['fc_norm']}: a norm of each feature before fc, or none",
        "norm_output": f"{output}: what is recycled is the output {'after' if output else 'before'} the final norm",
    }
