"""P-EAGLE heads of SpecForge: an EAGLE-3 head's parts as `layers.*`, a trained embedding, and `mask_hidden`.

Its trainer keeps the mask token's id outside of the config; without the id in the config such a head is refused.
"""

from __future__ import annotations

from typing import Any

from specdec.draft.block.formats.common import block_meanings, mask_id
from specdec.draft.eagle.formats.common import AUX, DEFAULT, eagle3_reading, nested_config, three_layers
from specdec.draft.eagle.formats.specforge import NESTED
from specdec.draft.formats.body import aux_layers_of, check_features, check_nested, head_layers
from specdec.draft.formats.reading import HeadFiles, ParsedHead, PartNames
from specdec.draft.formats.spec import BlockSpec
from specdec.models.checkpoints.config_values import flag, mapping
from specdec.models.config import ModelConfig

NAME, ARCHITECTURE = "specforge", "PEagleDraftModel"
OWN_KEYS = frozenset(
    ("draft_vocab_size", "eagle_config", "target_hidden_size", "norm_before_residual", "dflash_config", "mask_token_id")
)


def read(files: HeadFiles, target: ModelConfig | None) -> ParsedHead:
    raw, where = files.raw, files.where
    check_features(target, where)
    if raw.get("architectures") != [ARCHITECTURE]:
        raise ValueError(f"{where}: architectures must be ['{ARCHITECTURE}'], got {raw.get('architectures')!r}")
    model = head_layers(raw, OWN_KEYS, target, where)
    if model.rope.kind != "default":
        raise ValueError(f"{where}: rope must be unscaled: this layout's trainer reads rope_theta alone, got {model.rope.kind}")
    ids = nested_config(raw, NESTED, where).get(AUX)
    aux_layers = aux_layers_of(ids, target, where)
    three_layers(ids, aux_layers, where)
    before = flag(raw, "norm_before_residual", where)
    block = BlockSpec(0, _mask_id(raw, model, where), (True,) * model.num_layers)
    meanings = {
        AUX: f"absent: {DEFAULT}" if ids is None else f"{ids}: 0-based outputs of layers",
        "norm_before_residual": f"{before}: the residual is the {'normed' if before else 'raw'} feature",
        **block_meanings(model, block),
    }
    return eagle3_reading(
        files, model, target, aux_layers, PartNames.numbered(model.num_layers), meanings, t2d="must", full="must", format=NAME,
        kind="p-eagle", norm_before_residual=before, own_embeddings=True, own_lm_head=True, block=block,
    )  # fmt: skip


def _mask_id(raw: dict[str, Any], model: ModelConfig, where: str) -> int:
    nested = mapping(raw, "dflash_config", where)
    check_nested(nested, {"mask_token_id": ()}, where, "dflash_config")
    told = [part for part in (raw, nested) if part.get("mask_token_id") is not None]
    if not told:
        raise ValueError(
            f"{where} lacks mask_token_id, the token that stands for unknown ones; this layout's trainer chooses it and may "
            "not write it down; nearest thing that works: add it to config.json"
        )
    if len({mask_id(part, model, where) for part in told}) > 1:
        raise ValueError(f"{where}: mask_token_id and dflash_config.mask_token_id differ")
    return mask_id(told[0], model, where)
