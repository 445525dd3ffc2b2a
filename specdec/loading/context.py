"""Refuses settings of decode context parallelism and of the audit that do not fit the target.  Knows options and configs."""

from __future__ import annotations

import os
from pathlib import Path

from specdec.models.config import ModelConfig
from specdec.options import AUDIT, EngineOptions

NAME = "decode_context_parallel_size"


def check_audit(options: EngineOptions, target: ModelConfig, drafts: bool) -> None:
    """ValueError if answers of that target can't be compared, or a setting would do nothing."""
    for name in AUDIT if not options.audit else ():
        if (value := getattr(options, name)) != (usual := EngineOptions.__dataclass_fields__[name].default):
            nearest = f"nearest settings that work: {name}={usual!r}, or audit=0.001 beside it"
            raise ValueError(f"{name}={value!r} does nothing without audit; {nearest}")
    if options.audit and target.encoder is not None:
        raise ValueError(
            f"audit is for decoder-only targets, got a {target.family} model: the reference reads one model's text, not "
            "what an encoder read besides; nearest setting that works: audit=0"
        )
    if options.audit_stop and not drafts:
        raise ValueError("audit_stop would do nothing without a drafter; nearest setting that works: audit_stop=False")
    if options.audit and (fault := _unwritable(Path(options.audit_folder))):
        raise ValueError(
            f"audit_folder must be a folder in which files can be made, got {str(options.audit_folder)[:200]!r}: {fault}; "
            "nearest setting that works: audit_folder='specdec-audit'"
        )


def check_context(options: EngineOptions, target: ModelConfig, target_backend: str) -> None:
    """ValueError, with the nearest setting that works, if ranks can't divide this target's keys and values as asked."""
    size, ranks, run = options.decode_context_parallel_size, options.tensor_parallel_size, options.context_interleave
    if run is not None and size == 1:
        raise ValueError(
            f"context_interleave says how {NAME} above 1 divides sequences, got {run} with {NAME}=1; nearest setting that "
            "works: leave context_interleave out"
        )
    if size == 1:
        return
    if not isinstance(options.page_size, int):
        raise ValueError(
            f"{NAME} above 1 divides each page among processes, got {NAME}={size} with page_size={options.page_size!r}; "
            "nearest setting that works: page_size=16"
        )
    if run is not None and options.page_size % run:
        fits = next(fit for fit in range(run, 0, -1) if options.page_size % fit == 0)
        raise ValueError(
            f"context_interleave must divide page_size={options.page_size}, got {run}; nearest setting that works: "
            f"context_interleave={fits}"
        )
    if problem := _problem(target):
        raise ValueError(f"{NAME} must be 1 {problem}, got {size}; nearest setting that works: {NAME}=1")
    holders = target.kv_holders(ranks) if target_backend == "native" else ranks  # through transformers' code each has the whole
    if holders % size:
        fits = next(fit for fit in range(size, 0, -1) if holders % fit == 0)
        held = "one process holds" if holders == 1 else f"{holders} processes hold"
        raise ValueError(
            f"{NAME} must divide the number of processes that hold the same keys and values: with "
            f"tensor_parallel_size={ranks}, {held} each key/value head of this target, got {size}; "
            f"nearest setting that works: {NAME}={fits}"
        )


def _problem(target: ModelConfig) -> str:
    """What of the target can't be context-parallel at all; empty if nothing is."""
    if target.encoder is not None:
        return "for a target with an encoder"
    if target.recurrent is not None:
        return "for recurrent layers, whose states are of whole sequences"
    if any(kind.alibi for kind in target.layer_kinds):
        return "for layers with ALiBi, whose distances need whole sequences"
    return ""


def _unwritable(folder: Path) -> str:
    """Why no file can be made there, as far as one sees without making one; empty if one can."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    if not there.is_dir():
        return f"{there} is a file"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} may not be written"
