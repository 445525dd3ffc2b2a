"""Opens a head's folder of any layout: which layout it is, what its reader makes of it, and what holds in every layout.

Nothing but the config and headers is read, and the tensors of the vocabulary map.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from specdec.draft.formats.detect import FORMATS, detect
from specdec.draft.formats.empty import check_by_filling, own_matrices, wanted_tensors
from specdec.draft.formats.reading import HeadFiles, HeadFormat, ParsedHead, check_tensors
from specdec.draft.formats.spec import HeadSpec
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.mistaken import refuse_target_tensors
from specdec.models.checkpoints.unsaid_quantisation import refuse_unsaid_quantisation
from specdec.models.config import ModelConfig, read_json
from specdec.models.keys.wrappers import flattened
from specdec.models.schemes.config import KEYS, SIDECAR, head_to_nearest, quantization_of, read_sidecar
from specdec.models.schemes.rules import Quantization, Rule


class HowToRead(NamedTuple):
    """What a caller says of a head's files.

    format: the layout's name, or "auto".  pickles: whether weights may come from a pickle.
    window: whether no layer reads more tokens back than the head was trained on.
    quantize: what its matrices are rounded to as they are loaded: "fp8", "int4" or "none".
    """

    format: str = "auto"
    pickles: bool = False
    window: bool = False
    quantize: str = "none"


AS_FOUND = HowToRead()


class OpenHead(NamedTuple):
    """A head's folder, understood and checked, of which no weight was read."""

    files: HeadFiles
    format: HeadFormat
    parsed: ParsedHead


def open_head(folder: Path, target: ModelConfig | None, how: HowToRead = AS_FOUND) -> OpenHead:
    """Reads a head's config and headers.

    target: None if it is not known; then nothing is held against it.
    ValueError names any config key or tensor that is unknown, missing or contradicts the target.
    """
    raw, scheme = _own_scheme(folder, how.quantize)
    files = HeadFiles(folder, raw, Checkpoint(folder, how.pickles, scheme))
    refuse_target_tensors(files.checkpoint.names(), folder)
    if scheme is None or scheme.setting:
        refuse_unsaid_quantisation(files.checkpoint)
    if how.format == "auto":
        return _understood(files, detect(files), target, how)
    try:
        return _understood(files, FORMATS[how.format], target, how)
    except ValueError as error:
        if layout := _other_layout(files, target, how):
            raise ValueError(
                f"{error}; nearest setting that works: draft_format={layout!r} (--draft-format {layout}): "
                f"the files are in its layout, not in that of {how.format!r}"
            ) from error
        raise


def _own_scheme(folder: Path, rounds_to: str) -> tuple[dict[str, Any], Quantization | None]:
    """The head's config but for what it says of weights in few bits, and that: the head's own scheme, never its target's.

    rounds_to: what unquantised matrices are rounded to as they are loaded; "none": nothing.
    """
    path, beside = folder / "config.json", folder / SIDECAR
    where = str(path)
    raw = flattened(read_json(path), where)
    if beside.is_file() and (said := read_sidecar(read_json(beside), raw, str(beside), where)) is not None:
        raw["quantization_config"] = said
    scheme = quantization_of(raw, where)
    rest = {key: value for key, value in raw.items() if key not in KEYS}
    if scheme is None:
        return rest, None if rounds_to == "none" else head_to_nearest(rounds_to)
    if rounds_to != "none":
        raise ValueError(
            f"draft_quantize={rounds_to!r} rounds unquantised weights, but {folder} is stored as {scheme}; nearest setting "
            "that works: draft_quantize='none'"
        )
    return rest, scheme


def _other_layout(files: HeadFiles, target: ModelConfig | None, how: HowToRead) -> str:
    """The layout that the files are told by, if it is another one than the caller named and it reads them; else ""."""
    try:
        found = detect(files)
        _understood(files, found, target, how)
    except ValueError:
        return ""
    return found.name if found.name != how.format else ""


def _understood(files: HeadFiles, chosen: HeadFormat, target: ModelConfig | None, how: HowToRead) -> OpenHead:
    """The head as that layout has it, all its tensors checked."""
    folder, parsed = files.folder, chosen.read(files, target)
    if how.window:
        parsed = replace(parsed, spec=windowed(parsed.spec))
    if target is not None and not parsed.spec.own_embeddings and parsed.spec.model.hidden_size != target.hidden_size:
        raise ValueError(
            f"{folder}: a head of hidden_size {parsed.spec.model.hidden_size} needs embed_tokens.weight of its own, "
            f"since the target's is {target.hidden_size} wide"
        )
    if target is not None and not parsed.spec.own_lm_head and parsed.spec.model.hidden_size != target.hidden_size:
        raise ValueError(f"{folder}: a head of another hidden_size than its target's needs an lm_head.weight of its own")
    scheme = files.checkpoint.quantization = _of_kind(files.checkpoint.quantization, parsed.spec)
    check_tensors(files, parsed, wanted_tensors(parsed.spec, parsed.names), own_matrices(parsed.spec, parsed.names))
    if scheme is not None:
        check_by_filling(parsed, files.checkpoint)
        layers = (parsed.names.first, *parsed.names.layers)
        names = tuple((f"{name}.", f"model.layers.{index}.") for index, name in enumerate(layers))
        own = replace(parsed.spec.model, quantization=replace(scheme, names=names))  # so that ranks are held against groups
        parsed = replace(parsed, spec=replace(parsed.spec, model=own))
    return OpenHead(files, chosen, parsed)


def _of_kind(scheme: Quantization | None, spec: HeadSpec) -> Quantization | None:
    """The scheme as a head of that kind means it.

    Runtimes make of a head over blocks of context the seven projections of its layers alone in few bits, whatever `ignore`
    says; so any other matrix is in the scheme where its tensors are.
    """
    if scheme is None or scheme.setting or spec.reads_pairs:
        return scheme
    return replace(scheme, optional=(*scheme.optional, Rule("regex", r"(?!layers\.\d+\.(self_attn|mlp)\.|lm_head)")))


def windowed(spec: HeadSpec) -> HeadSpec:
    """The same head, whose layers read no more tokens back than it was trained on."""
    most = spec.trained_length
    kinds = tuple(replace(kind, window=min(kind.window or most, most)) for kind in spec.model.layer_kinds)
    return replace(spec, model=replace(spec.model, layer_kinds=kinds))
