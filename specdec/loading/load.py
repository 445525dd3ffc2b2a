"""Loads both models from their folders onto their device.

Before the weights are read, resolve.py decides what the options mean on this machine and for these models.  Afterwards build.py
makes an engine of the models.
"""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

from specdec.config import SpecConfig
from specdec.draft.drafter import DraftModel
from specdec.draft.kinds import find_drafter
from specdec.loading.resolve import EngineSettings, choose_attention, resolve_settings
from specdec.loading.threads import allowed_threads, threads_for, use_threads
from specdec.models.checkpoints.checkpoint import resolve_folder
from specdec.models.registry import choose_target, load_chosen
from specdec.models.target import Target
from specdec.options import EngineOptions
from specdec.parallel.group import ALONE, Group
from specdec.startup import STARTUP


def load_pair(
    target: str | Path, draft: str | Path | None, spec: SpecConfig, options: EngineOptions, group: Group = ALONE
) -> tuple[Target, DraftModel | None, EngineSettings, Path]:
    """Both models on their device, the settings that they run with, and the target's folder (for its tokenizer).

    target, draft: folders or hub ids, or the name of a drafter without a checkpoint; draft None: no drafter is loaded, and
        spec is not used.
    group: the ranks of which each loads a share of both.

    TypeError if spec is no SpecConfig.  ValueError if a folder, a checkpoint or a combination of options won't do.
    """
    require_spec(spec)
    STARTUP.lap("imports")
    folder = resolve_folder(target, "target")
    load_drafter = find_drafter(draft, options, folder)
    chosen = choose_target(folder, options.backend, options.quantize)
    settings = resolve_settings(options, spec if draft is not None else None, chosen.config, chosen.backend, chosen.reason)
    device, dtype = settings.device, settings.dtype
    max_positions = settings.max_seq_len + settings.lookahead
    model = load_chosen(chosen, folder, max_positions, device, dtype, bool(settings.cuda_graphs), group)
    set_threads(model, settings)
    STARTUP.lap("target")
    head = None if load_drafter is None else load_drafter(model, max_positions, device, dtype)
    if head is not None:
        choice = choose_attention(settings, chosen.config, *head.needs.models)
        settings = replace(settings, attention_backend=choice).with_drafter(head)
    STARTUP.lap("draft")
    return model, head, settings, folder


def require_spec(spec: SpecConfig) -> None:
    """TypeError for anything else."""
    if not isinstance(spec, SpecConfig):
        raise TypeError(
            f"spec must be a SpecConfig, got {spec!r} of type {type(spec).__name__}; nearest setting that works: "
            f"spec=SpecConfig({', '.join(map(repr, astuple(SpecConfig())))})"
        )


def set_threads(model: Target, settings: EngineSettings) -> None:
    """Tells torch how many CPU threads to use, for the whole process; does nothing for a decoder on a GPU."""
    if settings.device.type != "cpu":
        return
    threads = settings.options.threads
    if threads == "auto":
        weights = {weight.data_ptr(): weight.nbytes for weight in model.parameters()}  # tied ones are read once
        threads = threads_for(sum(weights.values()), model.config.num_layers, allowed_threads())
    use_threads(threads)
