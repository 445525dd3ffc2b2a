"""EAGLE-3 heads of `speculators` (Red Hat, vLLM): `layers.*`, one or more, and a config whose layer sizes are nested.

Its ids of the target's layers count the states of a forward pass, in which state 0 is the embeddings', so id x is the output of
layer x - 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.draft.eagle.formats.safeailab import vocabulary_tensors
from specdec.draft.formats.body import (
    aux_layers_of,
    check_features,
    only_keys,
    parse_body,
    parse_head_rope,
    windows_by_type,
)
from specdec.draft.formats.reading import HeadFiles, Names, Reading
from specdec.draft.formats.spec import FeatureNorm, HeadSpec
from specdec.draft.formats.vocabulary import read_draft_ids
from specdec.models.checkpoints.config_values import flag, mapping, text, whole
from specdec.models.config import ModelConfig

NAME, MARK, AUX = "speculators", "speculators_model_type", "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
OWN_KEYS = frozenset(
    (MARK, "speculators_config", "speculators_version", "transformer_layer_config", "draft_vocab_size", "target_hidden_size")
    + (AUX, "embed_requires_grad", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype", *FLAGS)
)
INNER_TYPES = ("llama", "qwen3")


def read(files: HeadFiles, target: ModelConfig | None) -> Reading:
    return read_eagle3(files, target, "eagle3", OWN_KEYS)


def read_eagle3(files: HeadFiles, target: ModelConfig | None, kind: str, keys: frozenset[str]) -> Reading:
    """The EAGLE-3 head in the files, of which that kind of the layout has those keys."""
    raw, where, checkpoint = files.raw, files.where, files.checkpoint
    check_features(target, where)
    check_top(raw, where, kind, keys)
    if raw.get("norm_before_residual") is None:
        raise ValueError(f"{where} lacks norm_before_residual; expected true or false: runtimes take different defaults")
    flag(raw, "embed_requires_grad", where)
    model = inner_model(raw, target, where)
    flags = {key: flag(raw, key, where) for key in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise ValueError(f"{where}: norm_before_fc and fc_norm must not both be true")
    ids = raw.get(AUX)
    aux_layers = aux_layers_of(ids, target, where, one_based=True)
    if raw.get("target_hidden_size") is not None and whole(raw, "target_hidden_size", where) != model.hidden_size:
        raise ValueError(f"{where}: target_hidden_size must be null or the head's {model.hidden_size}")
    draft_size = whole(raw, "draft_vocab_size", where, most=model.vocab_size)
    norm: FeatureNorm = "joint" if flags["norm_before_fc"] else "each" if flags["fc_norm"] else "none"
    spec = HeadSpec(
        model,
        "eagle3",
        aux_layers,
        model.hidden_size,
        draft_size,
        feature_norm=norm,
        norm_before_residual=flags["norm_before_residual"],
        recycles_normed=flags["norm_output"],
        own_embeddings=True,
        own_lm_head=True,
        draft_ids=read_draft_ids(files, draft_size, model.vocab_size, t2d="must", full="must not"),
        format=NAME,
    )
    count = len(aux_layers) or sum(name.startswith("fc_norm.") for name in checkpoint.names())
    norms = {"none": (), "joint": ("input_norm",), "each": tuple(f"fc_norm.{index}" for index in range(count))}[norm]
    names = Names("layers.0", tuple(f"layers.{index}" for index in range(1, model.num_layers)), feature_norms=norms)
    return Reading(spec, names, vocabulary_tensors(files), _meanings(ids, aux_layers, flags))


def check_top(raw: dict[str, Any], where: str, kind: str, keys: frozenset[str]) -> None:
    """ValueError unless the keys that stand outside of the layers' config are those of that kind of head."""
    if raw.get(MARK) != kind:
        raise ValueError(f"{where}: {MARK} must be {kind!r}, got {raw.get(MARK)!r}")
    only_keys(raw, keys, where)
    version = text(raw, "speculators_version", where)
    if version is not None and version.partition(".")[0] != "0":
        raise ValueError(f"{where}: speculators_version must be 0.x, got {version!r}; its layout may have changed")
    proposals = proposals_of(raw, where)
    if bad := [each for each in proposals if not isinstance(each, dict) or each.get("proposal_type") != "greedy"]:
        raise ValueError(f"{where}: speculators_config.proposal_methods must be of proposal_type greedy, got {bad[0]!r}")


def proposals_of(raw: dict[str, Any], where: str) -> list[Any]:
    proposals = mapping(raw, "speculators_config", where).get("proposal_methods") or []
    return proposals if isinstance(proposals, list) else [proposals]


def inner_model(raw: dict[str, Any], target: ModelConfig | None, where: str) -> ModelConfig:
    """The layers, by the config inside of the config."""
    inner, where = mapping(raw, "transformer_layer_config", where), f"{where}: transformer_layer_config"
    family = inner.get("model_type")
    if family not in INNER_TYPES:
        raise ValueError(f"{where}: model_type must be one of {', '.join(INNER_TYPES)}, got {family!r}")
    if flag(inner, "tie_word_embeddings", where):
        raise ValueError(f"{where}: tie_word_embeddings must be false: a head has a language-model head of its own")
    model = parse_body(inner, (), target, where, family=str(family))
    if target is not None and model.hidden_size != target.hidden_size:
        raise ValueError(f"{where}: hidden_size must be the target's {target.hidden_size}, got {model.hidden_size}")
    rope = parse_head_rope(inner, target, where, silent=False)
    return replace(model, rope=rope, layer_kinds=windows_by_type(inner, model.num_layers, where))


def _meanings(ids: Any, aux_layers: tuple[int, ...], flags: dict[str, bool]) -> dict[str, str]:
    before, output = flags["norm_before_residual"], flags["norm_output"]
    return {
        AUX: "null: 1, N//2 - 1 and N - 4"
        if ids is None
        else f"{ids}: states of a forward pass, so outputs of layers {list(aux_layers)}",
        "norm_before_residual": f"{before}: the residual is the {'normed' if before else 'raw'} feature",
        "norm_before_fc": f"{flags['norm_before_fc']}: a norm over all features side by side before fc, or none",
        "fc_norm": f"{flags['fc_norm']}: a norm of each feature before fc, or none",
        "norm_output": f"{output}: what is recycled is the output {'after' if output else 'before'} the final norm",
    }
