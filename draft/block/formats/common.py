"""What the configs of DFlash and DSpark heads share in all layouts: a Qwen3's layers, a block, features, a Markov head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from specdec.draft.formats.body import aux_layers_of, check_features, head_layers, width_of_features
from specdec.draft.formats.reading import HeadFiles, ParsedHead, PartNames
from specdec.draft.formats.spec import BlockSpec, HeadSpec, MarkovKind
from specdec.models.checkpoints.config_values import flag, number, whole
from specdec.models.config import ModelConfig

MAX_BLOCK, MAX_RANK = 256, 65536
MARKOV_KEYS = frozenset(("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"))


def block_model(raw: dict[str, Any], own: Iterable[str], target: ModelConfig | None, where: str) -> ModelConfig:
    """The head's layers with their rope, and with a window where layer_types says so."""
    if raw.get("model_type") != "qwen3":
        raise ValueError(f"{where}: model_type must be qwen3, whose layers such a head has, got {raw.get('model_type')!r}")
    model = head_layers(raw, own, target, where, family="qwen3", by_type=True)
    check_switch(raw, model, where)
    return model


def check_switch(raw: dict[str, Any], model: ModelConfig, where: str) -> None:
    """ValueError where the switch of windows is on and no layer has one."""
    if flag(raw, "use_sliding_window", where) and not any(kind.window for kind in model.layer_kinds):
        raise ValueError(f"{where}: use_sliding_window is true, but no layer of layer_types is a sliding_attention")


def check_windows(model: ModelConfig, size: int, where: str) -> None:
    """ValueError for a window that ends within the block, where layouts disagree on which rows it hides."""
    windows = [kind.window for kind in model.layer_kinds if kind.window]
    if windows and min(windows) < size:
        raise ValueError(f"{where}: sliding_window must be at least the block's {size} rows, got {min(windows)}")


def block_size(raw: dict[str, Any], where: str) -> int:
    return whole(raw, "block_size", where, least=2, most=MAX_BLOCK)


def mask_id(raw: dict[str, Any], model: ModelConfig, where: str) -> int:
    return whole(raw, "mask_token_id", where, least=0, most=model.vocab_size - 1)


def features_of(
    raw: dict[str, Any],
    key: str,
    target: ModelConfig | None,
    layers: int,
    where: str,
    *,
    one_based: bool = False,
    reads_last: bool = False,
    may_be_absent: bool = False,
) -> tuple[int, ...]:
    """The target's layers that the head reads.

    layers: of the head.  reads_last: whether the layout's trainer reads the last layer's output before the final norm.
    may_be_absent: whether the layout has a default; empty where it is asked for and the target is not known.
    """
    check_features(target, where)
    count = raw.get("num_target_layers")
    if count is not None and target is not None and whole(raw, "num_target_layers", where) != target.num_layers:
        raise ValueError(f"{where}: num_target_layers must be the target's {target.num_layers}, got {count}")
    ids = raw.get(key)
    if ids is None and may_be_absent:
        return () if target is None else default_features(target.num_layers, layers, where)
    if isinstance(ids, list) and -1 in ids:
        raise ValueError(f"{where}: {key} names the embeddings by -1, which no head can read yet, got {ids}")
    found = aux_layers_of([] if ids is None else ids, target, where, one_based=one_based, key=key)
    if target is not None and found[-1] == target.num_layers - 1 and not reads_last:
        raise ValueError(
            f"{where}: {key} names the last layer, {found[-1]}, of which this layout's trainer reads the state after the final "
            "norm; no head can read that beside other layers yet"
        )
    return found


def default_features(num_layers: int, head_layers: int, where: str) -> tuple[int, ...]:
    """Where a config names no layers: as many as the head has layers, evenly from 1 to N - 3."""
    if head_layers == 1:
        return (num_layers // 2,)
    found = tuple(round(1 + index * (num_layers - 4) / (head_layers - 1)) for index in range(head_layers))
    if len(set(found)) < head_layers or found[0] < 0:
        raise ValueError(f"{where}: a target of {num_layers} layers has no {head_layers} default layers; name them")
    return found


def correction_of(
    raw: dict[str, Any], where: str, rank: int | None, confident: bool | None, beside: bool | None
) -> dict[str, Any]:
    """The fields of a BlockSpec that say its Markov head and its estimate, by their keys.

    rank, confident, beside: defaults; None: the key must be there.
    """
    r = whole(raw, "markov_rank", where, rank, least=0, most=MAX_RANK)
    is_confident = _told(raw, "enable_confidence_head", where, confident)
    kind = raw.get("markov_head_type", "vanilla" if rank is not None or r == 0 else None)
    if kind not in get_args(MarkovKind)[1:]:
        raise ValueError(f"{where}: markov_head_type must be vanilla, gated or rnn, got {kind!r}")
    if r == 0:
        if is_confident:
            raise ValueError(f"{where}: an estimate of acceptance without a Markov head (markov_rank 0) can't be run yet")
        return {}
    with_token = is_confident and _told(raw, "confidence_head_with_markov", where, beside)
    confidence = "none" if not is_confident else "markov" if with_token else "hidden"
    return {"markov": kind, "markov_rank": r, "confidence": confidence}


def _told(raw: dict[str, Any], key: str, where: str, default: bool | None) -> bool:
    if default is None and raw.get(key) is None:
        raise ValueError(f"{where} lacks {key}; expected true or false")
    return flag(raw, key, where, bool(default))


def block_reading(
    files: HeadFiles,
    model: ModelConfig,
    block: BlockSpec,
    features: tuple[int, ...],
    target: ModelConfig | None,
    name: str,
    meanings: Mapping[str, str],
    **own: Any,
) -> ParsedHead:
    """What readers return.  own: fields of the spec that are not those of a head that shares all with its target."""
    check_windows(model, block.size, files.where)
    kind = "dflash2" if block.selection else "dflash" if block.markov == "none" else "dspark"
    spec = HeadSpec(
        model,
        kind,
        features,
        width_of_features(files.raw, model.hidden_size, target, files.where),
        **{"draft_vocab_size": model.vocab_size, "own_lm_head": False, "format": name, "block": block, **own},
    )
    names = PartNames.numbered(model.num_layers)
    return ParsedHead(spec, names, {}, {**meanings, **block_meanings(model, block)})


def numbers_of(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of a BlockSpec that scale embeddings and logits.  A softcap of null or 0 is none."""
    capped = {"final_logit_softcapping": 0.0, **{key: value for key, value in raw.items() if value is not None}}
    softcap = number(capped, "final_logit_softcapping", where, or_zero=True)
    return {
        "embedding_scale": number(raw, "input_embedding_scale", where, 1.0),
        "logit_scale": number(raw, "output_multiplier", where, 1.0), "softcap": softcap or None,
    }  # fmt: skip


def block_meanings(model: ModelConfig, block: BlockSpec) -> dict[str, str]:
    """How the block is read, for users."""
    causal = {True: "rows up to itself", False: "all rows"}
    kinds = sorted({(kind.window or 0, causal[own]) for kind, own in zip(model.layer_kinds, block.causal, strict=True)})
    reach = "; ".join(f"{f'layers with window {window}' if window else 'full layers'}: {seen}" for window, seen in kinds)
    counted = "the block's first row" if block.anchored_windows else "each row"
    drafts = "its own place, and the first row drafts nothing" if block.skips_anchor else "the place after it"
    meanings = {"rows of the block": f"a row drafts the token of {drafts}", "read of the block": reach}
    if block.embedding_scale != 1:
        meanings["input_embedding_scale"] = f"{block.embedding_scale}: factor of all rows of the block, as they are embedded"
    return meanings | ({"windows": f"counted back from {counted}"} if any(k.window for k in model.layer_kinds) else {})
