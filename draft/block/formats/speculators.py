"""P-EAGLE, DFlash, DFlash2 and DSpark heads of `speculators` (Red Hat, vLLM), by release: configs with nested layer sizes.

Ids of the target's layers count the states of a forward pass, so id x is the output of layer x - 1.  In heads over blocks of
context full layers read their block in both directions always; layers with a window are causal unless
`sliding_window_non_causal`, and all rows of a block read back to the same token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.draft.block.formats import dflash2
from specdec.draft.block.formats.common import (
    block_meanings,
    block_reading,
    block_size,
    check_switch,
    check_windows,
    correction_of,
    features_of,
    mask_id,
)
from specdec.draft.eagle.formats.common import vocabulary_tensors
from specdec.draft.eagle.formats.speculators import NAME, check_proposals, inner_model, obeyed, proposals_of, read_eagle3
from specdec.draft.formats.reading import HeadFiles, ParsedHead
from specdec.draft.formats.releases import MARK, VERSION, Release, passed_over, release_of
from specdec.draft.formats.spec import BlockSpec
from specdec.draft.formats.vocabulary import read_draft_ids
from specdec.models.checkpoints.config_values import flag, mapping, whole
from specdec.models.config import ModelConfig

AUX = "aux_hidden_state_layer_ids"
COPIES_END = 8  # the release from which on files have no copies of what is the target's


def read(files: HeadFiles, target: ModelConfig | None) -> ParsedHead:
    return _read_peagle(files, target) if files.raw[MARK] == "peagle" else _read_block(files, target)


def _read_peagle(files: HeadFiles, target: ModelConfig | None) -> ParsedHead:
    raw, where = files.raw, files.where
    parsed = read_eagle3(files, target, "peagle")
    model, release = parsed.spec.model, release_of(raw, "peagle", where)
    if parsed.spec.feature_norm == "joint" and release.oldest < 7:
        raise ValueError(
            f"{where}: norm_before_fc must be false: speculators 0.6 has that norm in a P-EAGLE head and never applies it, "
            f"later releases do, got {VERSION} {release.text!r}"
        )
    meanings = {key: value for key, value in parsed.meanings.items() if key != "norm_output"}  # nothing is recycled
    depths = {whole(each, "speculative_tokens", where) for each in proposals_of(raw, where)}
    if raw.get("num_depths") is not None:  # what the head was trained for; proposals may ask for fewer
        depths = {whole(raw, "num_depths", where)}
        meanings["num_depths"] = f"{raw['num_depths']}: tokens that a pass was trained to draft"
    block = BlockSpec(max(depths, default=0), mask_id(raw, model, where), (True,) * model.num_layers)
    check_windows(model, block.size, where)  # in training each pair reads all pairs of its block, whatever the window
    spec = replace(parsed.spec, kind="p-eagle", block=block, recycles_normed=False)
    return replace(parsed, spec=spec, meanings={**meanings, **block_meanings(model, block)})


def _read_block(files: HeadFiles, target: ModelConfig | None) -> ParsedHead:
    raw, where, kind = files.raw, files.where, files.raw[MARK]
    release = release_of(raw, kind, where)
    check_proposals(raw, where)
    for key, first in (("sample_from_anchor", 7), ("sliding_window_non_causal", 6)):
        if raw.get(key) is None and release.oldest >= first:
            raise ValueError(f"{where} lacks {key}; expected true or false: runtimes take different defaults")
    model = inner_model(raw, target, where, absent="qwen3")
    check_switch(mapping(raw, "transformer_layer_config", where), model, where)
    model, meanings = obeyed(model, release, 6, where)
    size, windowed = block_size(raw, where), [kind.window is not None for kind in model.layer_kinds]
    check_windows(model, size, where)
    kinds = [replace(kind, window=kind.window + size) if kind.window else kind for kind in model.layer_kinds]
    model = replace(model, layer_kinds=tuple(kinds), qk_norm=True)  # whatever family the sizes are called after
    causal = tuple(each and not flag(raw, "sliding_window_non_causal", where) for each in windowed)
    skips = not flag(raw, "sample_from_anchor", where)
    found = correction_of(raw, where, None, None, None) if kind == "dspark" else {}
    if kind == "dflash2":
        dflash2.refuse_suffixed_tables(files)
        found = dflash2.selection_of(raw, model, size, where, dflash2.SPECULATORS)
    if skips and found.get("markov") == "rnn":
        raise ValueError(f"{where}: markov_head_type rnn with sample_from_anchor false can't be run yet")
    block = BlockSpec(size, mask_id(raw, model, where), causal, skips, any(windowed), **found)
    draft_size = whole(raw, "draft_vocab_size", where, most=model.vocab_size)
    if kind == "dflash2" and draft_size != model.vocab_size:
        raise ValueError(
            f"{where}: draft_vocab_size of a DFlash2 head must be the whole vocabulary, {model.vocab_size}, got {draft_size}"
        )
    own: dict[str, Any] = {
        "draft_vocab_size": draft_size,
        "draft_ids": read_draft_ids(files, draft_size, model.vocab_size, t2d="must", full="must not"),
        "own_embeddings": _is_kept("embed_tokens.weight" in files.checkpoint, release),
        "own_lm_head": draft_size != model.vocab_size or _is_kept(files.checkpoint.has_matrix("lm_head"), release),
    }
    features = features_of(raw, AUX, target, model.num_layers, where, one_based=True)
    absent = "" if "sample_from_anchor" in raw else ", as heads of this release, which has no such key, were trained"
    meanings = {
        VERSION: release.said,
        AUX: f"{raw[AUX]}: states of a forward pass, so outputs of layers {list(features)}",
        "sample_from_anchor": f"{not skips}{absent}",
        **meanings,
        **passed_over(raw),
    }
    parsed = block_reading(files, model, block, features, target, NAME, meanings, **own)
    return replace(parsed, beside=vocabulary_tensors(files))


def _is_kept(is_there: bool, release: Release) -> bool:
    """Whether the files have a copy of what is the target's."""
    return is_there if release.oldest < COPIES_END <= release.newest else release.newest < COPIES_END
