"""What configs of DFlash2 heads say beyond those of DFlash heads: their convolutions, and their choice among candidates.

z-lab's class has no defaults for these keys; those of NeMo and speculators have the same ones.  In SGLang 0 or no key is a head
without convolutions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from specdec.draft.formats.reading import HeadFiles
from specdec.draft.formats.spec import Selection, SlotConvolution
from specdec.models.checkpoints.config_values import whole
from specdec.models.config import ModelConfig

KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
MAX_TAPS, MAX_RANK, MAX_CANDIDATES = 256, 65536, 256
TABLES = ("predecessor_codebook", "successor_codebook")


class Defaults(NamedTuple):
    """What absent keys mean.  None: they must be there."""

    taps: int | None = None
    group: int | None = None
    rank: int | None = None
    candidates: int | None = None


ZLAB, NEMO, SGLANG = Defaults(), Defaults(2, 16, 256, 16), Defaults(taps=0, group=0)
SPECULATORS = NEMO


def has_selector(files: HeadFiles) -> bool:
    return any(name.startswith("candidate_selector.") for name in files.checkpoint.names())


def selection_of(
    raw: dict[str, Any], model: ModelConfig, size: int, where: str, defaults: Defaults, at: str = ""
) -> dict[str, Any]:
    """The fields of a BlockSpec.  raw: the object that holds the keys, which is called `at` in errors.  size: of the block."""
    for key, default in zip(KEYS, defaults, strict=True):
        if raw.get(key) is None and default is None:
            raise ValueError(f"{where} lacks {at}{key}, for which this layout has no default; expected a whole number")
    taps = whole(raw, KEYS[0], where, defaults.taps, least=0, most=MAX_TAPS)
    group = whole(raw, KEYS[1], where, defaults.group, least=0)
    rank = whole(raw, KEYS[2], where, defaults.rank, most=MAX_RANK)
    candidates = whole(raw, KEYS[3], where, defaults.candidates, most=MAX_CANDIDATES)
    if bool(taps) != bool(group):
        raise ValueError(f"{where}: {at}{KEYS[0]} and {KEYS[1]} must both be above 0, or both be 0, got {taps} and {group}")
    if taps > size:
        raise ValueError(f"{where}: {at}{KEYS[0]} must be at most the block's {size} rows, got {taps}; nearest: {size}")
    if group and model.hidden_size % group:
        nearest = next(each for each in range(group, 0, -1) if model.hidden_size % each == 0)
        raise ValueError(f"{where}: {at}{KEYS[1]} must divide hidden_size {model.hidden_size}, got {group}; nearest: {nearest}")
    if candidates > model.vocab_size:
        raise ValueError(
            f"{where}: {at}{KEYS[3]} must be at most the vocabulary, {model.vocab_size}, got {candidates}; nearest: "
            f"{model.vocab_size}"
        )
    return {"convolution": SlotConvolution(taps, group) if taps else None, "selection": Selection(candidates, rank)}


def refuse_suffixed_tables(files: HeadFiles) -> None:
    """ValueError for tables with names that a reader who skips unknown tensors leaves at zero."""
    for table in TABLES:
        if f"candidate_selector.{table}.weight" in files.checkpoint:
            raise ValueError(
                f"{files.folder}: tensor 'candidate_selector.{table}.weight' must be called 'candidate_selector.{table}', as "
                "in all published files: only in memory z-lab's class has the longer name; nearest thing that works: rename it"
            )


def refuse_keys(raw: dict[str, Any], where: str, at: str = "") -> None:
    """ValueError for keys of a DFlash2 head in a head without a selector."""
    if found := next((key for key in KEYS if raw.get(key)), None):
        raise ValueError(f"{where}: {at}{found} is a key of a DFlash2 head, but the tensors of candidate_selector are missing")
