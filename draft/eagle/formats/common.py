"""What EAGLE-3 heads share in all layouts, and P-EAGLE heads with them: `eagle_config`, features, what is their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.draft.formats.body import check_nested, width_of_features
from specdec.draft.formats.reading import HeadFiles, ParsedHead, PartNames
from specdec.draft.formats.spec import HeadSpec
from specdec.draft.formats.vocabulary import Presence, read_draft_ids
from specdec.models.checkpoints.config_values import flag, mapping, whole
from specdec.models.config import ModelConfig

AUX = "eagle_aux_hidden_state_layer_ids"
DEFAULT = "1, N//2 - 1 and N - 4"  # the layers that are read where a config names none


def eagle3_reading(
    files: HeadFiles,
    model: ModelConfig,
    target: ModelConfig | None,
    aux_layers: tuple[int, ...],
    names: PartNames,
    meanings: Mapping[str, str],
    *,
    draft_size: int | None = None,
    t2d: Presence = "may",
    full: Presence = "may",
    **others: Any,
) -> ParsedHead:
    """What readers return.

    draft_size: where draft_vocab_size is absent; None: it must be there.  t2d, full: as of `read_draft_ids`.
    others: fields of the spec that are not those of a head whose tensors say what it brings.
    """
    raw, where, checkpoint = files.raw, files.where, files.checkpoint
    size = whole(raw, "draft_vocab_size", where, draft_size, most=model.vocab_size)
    width = width_of_features(raw, model.hidden_size, target, where)
    ids = read_draft_ids(files, size, model.vocab_size, t2d=t2d, full=full)
    told = {"kind": "eagle3", "draft_ids": ids, "own_embeddings": "embed_tokens.weight" in checkpoint, **others}
    if "own_lm_head" not in told:
        told["own_lm_head"] = own_lm_head(files, size, model.vocab_size)
    spec = HeadSpec(model, aux_layers=aux_layers, target_hidden_size=width, draft_vocab_size=size, **told)
    return ParsedHead(spec, names, vocabulary_tensors(files), meanings)


def refuse_bias(raw: dict[str, Any], where: str) -> None:
    if flag(raw, "bias", where):
        raise ValueError(f"{where}: bias must be absent or false: fc has none in an EAGLE-3 head")


def nested_config(raw: dict[str, Any], known: Mapping[str, Sequence[Any]], where: str) -> dict[str, Any]:
    """eagle_config, all of whose keys are known and have a value that is computed."""
    eagle = mapping(raw, "eagle_config", where)
    check_nested(eagle, known, where, "eagle_config")
    return eagle


def three_layers(ids: Any, aux_layers: tuple[int, ...], where: str) -> None:
    """ValueError if a layout whose heads read three layers names others."""
    if aux_layers and len(aux_layers) != 3:
        raise ValueError(f"{where}: {AUX} must name 3 layers, got {ids}")


def own_lm_head(files: HeadFiles, draft_size: int, vocab_size: int) -> bool:
    """Whether the head brings its language-model head; only with the target's whole vocabulary may it have none."""
    if files.checkpoint.has_matrix("lm_head"):
        return True
    if draft_size != vocab_size:
        raise ValueError(
            f"{files.folder}: draft_vocab_size {draft_size} (of {vocab_size}) needs an lm_head.weight of {draft_size} rows in "
            "the checkpoint"
        )
    return False


def vocabulary_tensors(files: HeadFiles) -> dict[str, str]:
    """The tensors that `read_draft_ids` has read."""
    made = {"d2t": "the target's id of each draft id, by offsets", "t2d": "held against d2t"}
    return {name: what for name, what in made.items() if name in files.checkpoint}
