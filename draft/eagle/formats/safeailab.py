"""Heads as the authors of EAGLE publish them (SafeAILab; "yuhuili" on the hub): EAGLE-1/2 and EAGLE-3, and heads trained here.

EAGLE-3 has `midlayer.*`, EAGLE-1/2 has `layers.*` without the first input norm.  The config is a Llama's.  A nested
`eagle_config`, which others have added to this layout, may name the target's layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.draft.eagle.formats.common import AUX, DEFAULT, eagle3_reading, nested_config
from specdec.draft.formats.body import aux_layers_of, check_features, head_layers, width_of_features
from specdec.draft.formats.reading import HeadFiles, HeadFormat, ParsedHead, PartNames
from specdec.draft.formats.spec import HeadSpec
from specdec.models.checkpoints.config_values import flag
from specdec.models.config import ModelConfig

NAME = "safeailab"
EAGLE3_KEYS = ("draft_vocab_size", AUX, "eagle_config")
OWN_KEYS = frozenset(("bias", "target_hidden_size", *EAGLE3_KEYS))
NESTED_KEYS: Mapping[str, Sequence[Any]] = {  # of eagle_config: the values that mean what we compute; empty: any
    AUX: (),
    "norm_before_residual": (True, False),
    "use_aux_hidden_state": (True,),
    "norm_output": (False, None),  # runtimes disagree on what True means
    "norm_before_fc": (False, None),
}


def read(files: HeadFiles, target: ModelConfig | None) -> ParsedHead:
    """An EAGLE-3 head if there is a norm of the feature, else an EAGLE-1/2 head."""
    raw, where = files.raw, files.where
    is_eagle3 = "midlayer.hidden_norm.weight" in files.checkpoint
    has_bias = flag(raw, "bias", where, True)
    silent = not any(raw.get(key) for key in ("rope_theta", "rope_parameters", "rope_scaling"))
    model = head_layers(raw, OWN_KEYS, target, where, expected=1 if is_eagle3 else None, silent=True)
    meanings = {"rope": "absent: the target's"} if silent else {}
    if is_eagle3:
        return _eagle3(files, model, target, meanings)
    return _eagle1(files, model, width_of_features(raw, model.hidden_size, target, where), has_bias, meanings)


def _eagle1(files: HeadFiles, model: ModelConfig, width: int, has_bias: bool, meanings: dict[str, str]) -> ParsedHead:
    where = files.where
    if model.hidden_size != width:
        raise ValueError(f"{where}: hidden_size must be the target's {width}, got {model.hidden_size}")
    if only := [key for key in EAGLE3_KEYS if files.raw.get(key) is not None]:
        raise ValueError(f"{where}: {', '.join(only)} belong to EAGLE-3, but the tensors are an EAGLE-1/2 head's")
    spec = HeadSpec(model, "eagle1", (), width, model.vocab_size, has_bias, own_lm_head=False, format=NAME)
    names = PartNames.numbered(model.num_layers)
    beside = {"embed_tokens.weight": "not read: the target's are used, as EAGLE-1/2 never trains them"}
    held = {name: what for name, what in beside.items() if name in files.checkpoint}
    return ParsedHead(spec, names, held, {**meanings, "bias": f"fc has {'a' if has_bias else 'no'} bias"})


def _eagle3(files: HeadFiles, model: ModelConfig, target: ModelConfig | None, meanings: dict[str, str]) -> ParsedHead:
    raw, where = files.raw, files.where
    check_features(target, where)
    eagle = nested_config(raw, NESTED_KEYS, where)
    ids = _layer_ids(raw.get(AUX), eagle.get(AUX), where)
    before = flag(eagle, "norm_before_residual", f"{where}: eagle_config")
    meanings = {
        **meanings,
        AUX: f"absent: {DEFAULT}" if ids is None else f"{ids}: 0-based outputs of layers, in any order",
        "norm_before_residual": f"{before}: the residual is the {'normed' if before else 'raw'} feature",
        "recycled": "the output before the final norm",
    }
    aux_layers = aux_layers_of(ids, target, where, any_order=True)
    return eagle3_reading(
        files, model, target, aux_layers, PartNames("midlayer"), meanings, draft_size=model.vocab_size, format=NAME,
        norm_before_residual=before,
    )  # fmt: skip


def _layer_ids(top: Any, nested: Any, where: str) -> Any:
    """The list of layers, which either place may hold; None: neither does."""
    if top is not None and nested is not None and top != nested:
        raise ValueError(f"{where}: {AUX} is {top} at the top and {nested} in eagle_config; expected one list")
    return top if nested is None else nested


FORMAT = HeadFormat(NAME, "SafeAILab (the EAGLE authors)", "EAGLE-1, EAGLE-2, EAGLE-3", read)
