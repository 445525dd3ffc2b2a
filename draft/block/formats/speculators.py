"""P-EAGLE, DFlash and DSpark heads of `speculators` (Red Hat, vLLM): a config whose layer sizes are nested.

Ids of the target's layers count the states of a forward pass, so id x is the output of layer x - 1.  In a DFlash or DSpark head
full layers read their block in both directions always; layers with a window are causal unless `sliding_window_non_causal`, and
all rows of a block read back to the same token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.draft.block.formats.common import (
    MARKOV_KEYS,
    Correction,
    block_meanings,
    block_reading,
    block_size,
    check_switch,
    check_windows,
    correction_of,
    features_of,
    mask_id,
)
from specdec.draft.eagle.formats.safeailab import vocabulary_tensors
from specdec.draft.eagle.formats.speculators import MARK, NAME, OWN_KEYS, check_top, inner_model, proposals_of, read_eagle3
from specdec.draft.formats.reading import HeadFiles, Reading
from specdec.draft.formats.spec import BlockSpec
from specdec.draft.formats.vocabulary import read_draft_ids
from specdec.models.checkpoints.config_values import flag, mapping, whole
from specdec.models.config import ModelConfig

KINDS = ("peagle", "dflash", "dspark")
AUX = "aux_hidden_state_layer_ids"
BLOCK_KEYS = frozenset(
    (MARK, "speculators_config", "speculators_version", "transformer_layer_config", "draft_vocab_size", "target_hidden_size")
    + ("architectures", "auto_map", "transformers_version", "dtype", "torch_dtype", AUX, "block_size", "mask_token_id")
    + ("sliding_window_non_causal", "sample_from_anchor")
)


def read(files: HeadFiles, target: ModelConfig | None) -> Reading:
    return _read_peagle(files, target) if files.raw[MARK] == "peagle" else _read_block(files, target)


def _read_peagle(files: HeadFiles, target: ModelConfig | None) -> Reading:
    reading = read_eagle3(files, target, "peagle", OWN_KEYS | {"mask_token_id"})
    model = reading.spec.model
    depths = {whole(each, "speculative_tokens", files.where) for each in proposals_of(files.raw, files.where)}
    block = BlockSpec(max(depths, default=0), mask_id(files.raw, model, files.where), (True,) * model.num_layers)
    meanings = {key: value for key, value in reading.meanings.items() if key != "norm_output"}  # nothing is recycled
    spec = replace(reading.spec, kind="p-eagle", block=block, recycles_normed=False)
    return replace(reading, spec=spec, meanings={**meanings, **block_meanings(model, block)})


def _read_block(files: HeadFiles, target: ModelConfig | None) -> Reading:
    raw, where, is_dspark = files.raw, files.where, files.raw[MARK] == "dspark"
    check_top(raw, where, "dspark" if is_dspark else "dflash", BLOCK_KEYS | (MARKOV_KEYS if is_dspark else set()))
    for key in ("sample_from_anchor", "sliding_window_non_causal"):
        if raw.get(key) is None:
            raise ValueError(f"{where} lacks {key}; expected true or false: runtimes take different defaults")
    model = inner_model(raw, target, where)
    check_switch(mapping(raw, "transformer_layer_config", where), model, where)
    size, windowed = block_size(raw, where), [kind.window is not None for kind in model.layer_kinds]
    check_windows(model, size, where)
    kinds = [replace(kind, window=kind.window + size) if kind.window else kind for kind in model.layer_kinds]
    model = replace(model, layer_kinds=tuple(kinds), qk_norm=True)  # whatever family the sizes are called after
    causal = tuple(each and not flag(raw, "sliding_window_non_causal", where) for each in windowed)
    skips = not flag(raw, "sample_from_anchor", where)
    found = correction_of(raw, where, None, None, None) if is_dspark else Correction()
    if skips and found.markov == "rnn":
        raise ValueError(f"{where}: markov_head_type rnn with sample_from_anchor false can't be run yet")
    block = BlockSpec(
        size, mask_id(raw, model, where), causal, skips, any(windowed), found.markov, found.rank, found.confidence
    )
    draft_size = whole(raw, "draft_vocab_size", where, most=model.vocab_size)
    own: dict[str, Any] = {
        "draft_vocab_size": draft_size,
        "draft_ids": read_draft_ids(files, draft_size, model.vocab_size, t2d="must", full="must not"),
        "own_lm_head": draft_size != model.vocab_size,
    }
    features = features_of(raw, AUX, target, model.num_layers, where, one_based=True)
    meanings = {
        AUX: f"{raw[AUX]}: states of a forward pass, so outputs of layers {list(features)}",
        "sample_from_anchor": f"{not skips}",
    }
    reading = block_reading(files, model, block, features, target, NAME, meanings, **own)
    return replace(reading, beside=vocabulary_tensors(files))
