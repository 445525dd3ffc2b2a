"""DSpark heads as DeepSeek publishes them (DeepSpec), and those of NeMo; with markov_rank 0 what DeepSpec calls a DFlash head.

All keys stand at the top, beside those of the target's config.  Every row drafts the token after its place, also without a
Markov head.  Copies of the target's embeddings and language-model head are part of the files.
"""

from __future__ import annotations

from dataclasses import replace

from specdec.draft.block.formats.common import (
    MARKOV_KEYS,
    block_model,
    block_reading,
    block_size,
    correction_of,
    features_of,
    mask_id,
)
from specdec.draft.formats.reading import HeadFiles, HeadFormat, ParsedHead
from specdec.draft.formats.spec import BlockSpec
from specdec.models.checkpoints.config_values import whole
from specdec.models.config import ModelConfig

NAME, ARCHITECTURE = "deepspec", "Qwen3DSparkModel"
# What training alone reads stands here too.
OWN_KEYS = MARKOV_KEYS | frozenset(
    "target_layer_ids mask_token_id block_size num_anchors num_target_layers target_model_name_or_path draft_num_hidden_layers "
    "ce_loss_alpha l1_loss_alpha confidence_head_alpha loss_decay_gamma".split()
)


def read(files: HeadFiles, target: ModelConfig | None) -> ParsedHead:
    raw, where = files.raw, files.where
    if raw.get("architectures") != [ARCHITECTURE]:
        raise ValueError(f"{where}: architectures must be ['{ARCHITECTURE}'], got {raw.get('architectures')!r}")
    model = block_model(raw, OWN_KEYS, target, where)
    if raw.get("draft_num_hidden_layers") is not None and whole(raw, "draft_num_hidden_layers", where) != model.num_layers:
        raise ValueError(f"{where}: draft_num_hidden_layers must be num_hidden_layers, {model.num_layers}")
    if any(kind.window for kind in model.layer_kinds):
        raise ValueError(f"{where}: layer_types must be all full_attention: what windows mean to this layout's blocks is open")
    found = correction_of(raw, where, None, None, None)
    causal = (False,) * model.num_layers
    block = BlockSpec(block_size(raw, where), mask_id(raw, model, where), causal, **found)
    features = features_of(raw, "target_layer_ids", target, model.num_layers, where)
    meanings = {"target_layer_ids": f"{raw.get('target_layer_ids')}: 0-based outputs of layers"}
    parsed = block_reading(files, model, block, features, target, NAME, meanings, own_embeddings=True, own_lm_head=True)
    return replace(parsed, copies=True)


FORMAT = HeadFormat(NAME, "DeepSpec (DeepSeek), NeMo", "DSpark, DFlash", read)
