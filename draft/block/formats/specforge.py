"""P-EAGLE heads of SpecForge: an EAGLE-3 head's parts as `layers.*`, a trained embedding, and `mask_hidden`.

Its trainer keeps the mask token's id outside of the config; without the id in the config such a head is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.draft.block.formats.common import block_meanings, mask_id
from specdec.draft.eagle.formats.safeailab import AUX, nested_config, vocabulary_tensors
from specdec.draft.eagle.formats.specforge import FEATURES, NESTED
from specdec.draft.formats.body import (
    aux_layers_of,
    check_features,
    layer_count,
    parse_body,
    parse_head_rope,
    width_of_features,
    windows_of,
)
from specdec.draft.formats.reading import HeadFiles, Names, Reading
from specdec.draft.formats.spec import BlockSpec, HeadSpec
from specdec.draft.formats.vocabulary import read_draft_ids
from specdec.models.checkpoints.config_values import flag, mapping, whole
from specdec.models.config import ModelConfig

NAME, ARCHITECTURE = "specforge", "PEagleDraftModel"
OWN_KEYS = frozenset(
    ("draft_vocab_size", "eagle_config", "target_hidden_size", "norm_before_residual", "dflash_config", "mask_token_id")
)


def read(files: HeadFiles, target: ModelConfig | None) -> Reading:
    raw, where = files.raw, files.where
    check_features(target, where)
    if raw.get("architectures") != [ARCHITECTURE]:
        raise ValueError(f"{where}: architectures must be ['{ARCHITECTURE}'], got {raw.get('architectures')!r}")
    model = parse_body(raw, OWN_KEYS, target, where)
    count = layer_count(raw, where, None)
    rope = parse_head_rope(raw, target, where, silent=False)
    if rope.kind != "default":
        raise ValueError(f"{where}: rope must be unscaled: this layout's trainer reads rope_theta alone, got {rope.kind}")
    model = replace(model, num_layers=count, rope=rope, layer_kinds=windows_of(raw, count, where))
    ids = nested_config(raw, NESTED, where).get(AUX)
    aux_layers = aux_layers_of(ids, target, where)
    if aux_layers and len(aux_layers) != FEATURES:
        raise ValueError(f"{where}: {AUX} must name {FEATURES} layers, got {ids}")
    draft_size = whole(raw, "draft_vocab_size", where, most=model.vocab_size)
    before = flag(raw, "norm_before_residual", where)
    block = BlockSpec(0, _mask_id(raw, model, where), (True,) * count)
    spec = HeadSpec(
        model,
        "p-eagle",
        aux_layers,
        width_of_features(raw, model.hidden_size, target, where),
        draft_size,
        norm_before_residual=before,
        own_embeddings=True,
        draft_ids=read_draft_ids(files, draft_size, model.vocab_size, t2d="must", full="must"),
        format=NAME,
        block=block,
    )
    meanings = {
        AUX: "absent: 1, N//2 - 1 and N - 4" if ids is None else f"{ids}: 0-based outputs of layers",
        "norm_before_residual": f"{before}: the residual is the {'normed' if before else 'raw'} feature",
        **block_meanings(model, block),
    }
    names = Names("layers.0", tuple(f"layers.{index}" for index in range(1, count)))
    return Reading(spec, names, vocabulary_tensors(files), meanings)


def _mask_id(raw: dict[str, Any], model: ModelConfig, where: str) -> int:
    nested = mapping(raw, "dflash_config", where)
    if unknown := sorted(set(nested) - {"mask_token_id"}):
        raise ValueError(f"{where}: unknown key dflash_config.{unknown[0]}; it may change what the head computes")
    told = [part for part in (raw, nested) if part.get("mask_token_id") is not None]
    if not told:
        raise ValueError(
            f"{where} lacks mask_token_id, the token that stands for unknown ones; this layout's trainer chooses it and may "
            "not write it down; nearest thing that works: add it to config.json"
        )
    if len({mask_id(part, model, where) for part in told}) > 1:
        raise ValueError(f"{where}: mask_token_id and dflash_config.mask_token_id differ")
    return mask_id(told[0], model, where)
