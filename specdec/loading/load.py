"""Finds both models in their folders, refuses what can't run before a weight is read, and loads them onto their device.

`check_pair` refuses by names, options, configs and the headers of files.  `specdec plan` and the process that starts ranks ask
it too, so that none of them accepts what another refuses.  What only weights tell (numbers that are not finite, a head that is
not the target's) is found as they are loaded.  resolve.py decides what the options mean on this machine and for these models;
build.py makes an engine of the models.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from specdec.attention.needs import architecture_of
from specdec.config import SpecConfig
from specdec.draft.drafter import DraftModel
from specdec.draft.find import find_drafter, open_drafter
from specdec.draft.kind import Draft, OpenDrafter
from specdec.loading.resolve import EngineSettings, check_states, choose_attention, resolve_settings
from specdec.loading.threads import allowed_threads, threads_for, using_threads
from specdec.loading.vocabularies import match_vocabulary
from specdec.models.checkpoints.checkpoint import Checkpoint, resolve_target
from specdec.models.config import ModelConfig
from specdec.models.linear import keep_lossless_copies
from specdec.models.mixtures.dividing import ExpertSharing
from specdec.models.registry import TargetChoice, check_chosen, choose_target, load_chosen, refuse_ranks
from specdec.models.schemes.size import EXPERTS, group_size_of, kind_of_experts, quantised_matrices
from specdec.models.schemes.slow import slow_warning, slowness
from specdec.models.sharding import share_of, sharing_of, with_sharing
from specdec.models.target import Target
from specdec.ops.products.formats.lossless import ALIGN_K, ALIGN_N, MAX_OUTLIERS
from specdec.ops.products.formats.quantised import pack_factor_of
from specdec.options import EngineOptions
from specdec.parallel.group import ALONE, Group
from specdec.parallel.shard import Shard
from specdec.startup import STARTUP


class CheckedPair(NamedTuple):
    """A pair that was found and understood, and of which no weight was read."""

    folder: Path  # the target's
    chosen: TargetChoice
    checkpoint: Checkpoint  # the target's
    settings: EngineSettings  # what the options mean for this pair
    drafter: OpenDrafter | None = None  # what is known of it, and what loads it; None without one

    @property
    def configs(self) -> tuple[ModelConfig, ...]:
        """Of all that keeps keys and values in the target's pages, the target first."""
        return (self.chosen.config, *(self.drafter.model.needs.models if self.drafter else ()))


def check_pair(
    target: str | Path, draft: Draft, spec: SpecConfig | None, options: EngineOptions, *, warns: bool = True
) -> CheckedPair:
    """TypeError if spec is no SpecConfig.  ValueError if a folder, a checkpoint or a combination of options won't do.

    target, draft: as of `load_pair`.  spec: None is the drafter's default; not used without a drafter.
    warns: of a shape that the drafter was not made for.
    """
    require_spec(spec)
    folder = resolve_target(target, "target")
    found = find_drafter(draft, options)
    chosen = choose_target(folder, options.backend, options.quantize)
    refuse_ranks(chosen, options.tensor_parallel_size, options.decode_context_parallel_size)
    shape = None if found is None else spec or SpecConfig()
    settings = resolve_settings(options, shape, chosen.config, chosen.backend, chosen.reason)
    checkpoint = check_chosen(chosen, folder)
    if (way := expert_sharing(settings, chosen, checkpoint)) is not None:
        chosen, settings = chosen._replace(config=with_sharing(chosen.config, way)), replace(settings, experts=way)
    drafter = open_drafter(found, options, chosen.config, folder)
    if drafter is not None:
        match_vocabulary(drafter, folder, chosen.config)
    pair = CheckedPair(folder, chosen, checkpoint, settings, drafter)
    for index, config in enumerate((chosen.config, *(drafter.model.needs.configs if drafter else ()))):
        if index == 0 and chosen.native is None:
            continue  # each rank holds all of it
        share_of(config, Shard(0, options.tensor_parallel_size), drafter.called if drafter and index else "target")
    if drafter is None:
        if options.shapes is not None:
            raise ValueError("shapes are of draft trees, and there is no drafter; nearest setting that works: shapes=None")
        check_states(settings, chosen.config)
        return pair
    if spec is None:
        settings = replace(settings, spec=drafter.model.default_shape())
    assert settings.spec is not None
    settings = settings.with_drafter(drafter.model)
    assert settings.spec is not None
    drafter.model.shapes(settings.spec, warns, settings.asked_shapes)
    check_states(settings, *pair.configs)
    return pair._replace(settings=replace(settings, attention_backend=choose_attention(settings, *pair.configs)))


def expert_sharing(settings: EngineSettings, chosen: TargetChoice, checkpoint: Checkpoint) -> ExpertSharing | None:
    """How ranks are to share the target's mixtures; None: there are no ranks, or no mixtures of our own.

    ValueError if a way is asked for then.
    """
    options, config = settings.options, chosen.config
    ranks, asked = options.tensor_parallel_size, options.expert_parallel
    if ranks == 1 or config.experts is None or chosen.native is None:
        if asked != "auto":
            got = f"tensor_parallel_size={ranks}" if ranks == 1 else f"a {config.family} target by {chosen.backend} code"
            raise ValueError(
                f"expert_parallel={asked!r} says how several processes share experts that specdec's own modules compute, got "
                f"{got}; nearest setting that works: expert_parallel='auto'"
            )
        return None
    kind, nodes = kind_of_experts(checkpoint), settings.most_nodes
    bits = 8 * settings.dtype.itemsize if kind is None else 16 // pack_factor_of(kind)
    return sharing_of(config, asked, ranks, options.max_batch_size * nodes, bits, steps=kind is not None)


def warn_of_slow_weights(pair: CheckedPair, dtype: torch.dtype, capability: Callable[[], tuple[int, int] | None]) -> None:
    """Warns of weights in 8 or 4 bits that make rounds slower, the target's and the drafter's.

    capability: says that of the GPU on which they are to run, None for a CPU; asked only where there are such weights.
    """
    drafter = pair.drafter
    head = (drafter.called, drafter.checkpoint) if drafter and drafter.is_apart else ("", None)
    for whose, checkpoint in (("target", pair.checkpoint), head):
        if checkpoint is None or checkpoint.quantization is None:
            continue
        quantised = quantised_matrices(checkpoint, tuple(checkpoint.names()))
        groups = {group_size_of(checkpoint, name, format) for name, format in quantised.items() if EXPERTS not in name}
        why, helps = slowness(groups, capability(), dtype)
        if quantised and why:
            warnings.warn(f"the {whose}'s {slow_warning(why, helps, checkpoint.quantization)}", stacklevel=2)


def require_spec(spec: SpecConfig | None) -> None:
    """TypeError for anything else; None is the drafter's default."""
    if spec is not None and not isinstance(spec, SpecConfig):
        raise TypeError(
            f"spec must be a SpecConfig, got {spec!r} of type {type(spec).__name__}; nearest setting that works: "
            f"spec=SpecConfig({', '.join(map(repr, astuple(SpecConfig())[:3]))})"
        )


def load_pair(
    target: str | Path, draft: Draft, spec: SpecConfig | None, options: EngineOptions, group: Group = ALONE
) -> tuple[Target, DraftModel | None, EngineSettings, Path]:
    """Both models on their device, the settings that they run with, and the target's folder (for its tokenizer).

    target, draft: folders or hub ids, or the name of a drafter without a checkpoint; draft None: no drafter is loaded, and
        spec is not used.  spec: None is the drafter's default.
    group: the ranks of which each loads a share of both.

    TypeError if spec is no SpecConfig.  ValueError if a folder, a checkpoint or a combination of options won't do.
    """
    require_spec(spec)
    STARTUP.lap("imports")
    STARTUP.begin("checking the files")
    pair = check_pair(target, draft, spec, options, warns=group.size == 1)  # several have warned before they were started
    if group.size == 1:
        warn_of_slow_weights(pair, pair.settings.dtype, partial(architecture_of, pair.settings.device))
    folder, settings, drafter = pair.folder, pair.settings, pair.drafter
    device, dtype, graphs = settings.device, settings.dtype, bool(settings.cuda_graphs)
    max_positions = settings.max_seq_len + settings.lookahead
    STARTUP.begin("reading the target's weights", len(pair.checkpoint.names()))
    model = load_chosen(pair.chosen, folder, max_positions, device, dtype, graphs, group, pair.checkpoint)
    del pair  # the target's files are closed before the drafter's weights are read
    settings = replace(settings, threads=decoding_threads(model, settings))
    STARTUP.lap("target")
    with using_threads(settings.threads):
        STARTUP.begin("reading the drafter's weights")
        head = None if drafter is None else drafter.load(model, max_positions, device, dtype)
        STARTUP.lap("draft")
        if settings.options.pack_weights:
            STARTUP.begin("packing weights")
            pack_pair(model, head)
            STARTUP.lap("packing")
    return model, head, settings, folder


def pack_pair(model: Target, head: DraftModel | None) -> None:
    """Gives both models' matrices their lossless copies.  ValueError if no matrix can have one."""
    require_lossless(keep_lossless_copies(*([model] if head is None else [model, head])))


def require_lossless(found: int) -> None:
    """ValueError if nothing was found that can be kept in 12 bits.  found: matrices, or their bytes."""
    if not found:
        raise ValueError(
            f"pack_weights=True packs matrices whose width is a multiple of {ALIGN_K} and whose rows are a multiple of "
            f"{ALIGN_N}, none with more than {MAX_OUTLIERS} outliers, and found none; "
            "nearest setting that works: pack_weights=False"
        )


def decoding_threads(model: Target, settings: EngineSettings) -> int | None:
    """How many CPU threads the decoder's work takes; None for a decoder on a GPU."""
    if settings.device.type != "cpu":
        return None
    threads = settings.options.threads
    if threads != "auto":
        return threads
    weights = {weight.data_ptr(): weight.nbytes for weight in model.parameters()}  # tied ones are read once
    return threads_for(sum(weights.values()), model.config.num_layers, allowed_threads())
