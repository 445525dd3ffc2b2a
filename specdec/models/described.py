"""What a target's folder says of it: the object of its config.json, of a wrapper the text model's alone.  Reads no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.config import read_json
from specdec.models.gguf.config import config_of
from specdec.models.gguf.file import is_gguf, open_gguf
from specdec.models.keys.wrapper_table import WRAPPERS
from specdec.models.keys.wrappers import TIED, Unwrapped, unwrapped
from specdec.models.schemes.config import SIDECAR, read_sidecar


def described(place: Path) -> Unwrapped:
    """The target's config.json, or what a GGUF file's keys say in its words.

    With what ModelOpt's older files say of weights beside it, in hf_quant_config.json.  Of a wrapper, the text model's:
    where the two configs disagree about the output layer, the embeddings are it if the folder holds none, as in transformers.
    ValueError if two places say something and contradict each other.
    """
    if is_gguf(place):
        return Unwrapped(config_of(open_gguf(place)))
    path, beside = place / "config.json", place / SIDECAR
    raw = read_json(path)
    if beside.is_file() and (scheme := read_sidecar(read_json(beside), raw, str(beside), str(path))) is not None:
        raw["quantization_config"] = scheme
    found = unwrapped(raw, str(path))
    if not found.wrapper or found.is_tied is not None:
        return found
    wrapper = WRAPPERS[found.wrapper]
    is_tied = not any(wrapper.own(name).startswith("lm_head.") for name in Checkpoint(place).names())
    return found._replace(config={**found.config, TIED: is_tied}, is_tied=is_tied)


def target_json(place: Path) -> dict[str, Any]:
    """The object alone."""
    return described(place).config
