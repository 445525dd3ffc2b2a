"""A pair in its folders, as several ranks load it: what can't be shared is refused before any rank starts, and a rank that has
no room for its share says what would have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from specdec.attention.needs import architecture_of
from specdec.config import SpecConfig
from specdec.draft.drafter import DraftModel
from specdec.draft.kind import Draft
from specdec.loading.load import check_pair, load_pair, require_spec, warn_of_slow_weights
from specdec.loading.resolve import EngineSettings
from specdec.models.config import ModelConfig
from specdec.models.gguf.file import is_gguf
from specdec.models.sharding import misfit
from specdec.models.target import Target
from specdec.options import EngineOptions
from specdec.parallel.group import Group

MAX_RANKS = 64
WEIGHTS_SHARE = 0.9  # of a GPU's memory: the weights must leave room for keys, values and activations
Loaded = tuple[Target, DraftModel | None, EngineSettings, Path]


class WantedPair(NamedTuple):
    """What every rank loads its share of: see `load_pair`.  It is pickled."""

    target: str | Path
    draft: Draft
    spec: SpecConfig | None
    options: EngineOptions

    def check(self, size: int) -> None:
        """ValueError if so many ranks can't share it, with the nearest number that can."""
        require_spec(self.spec)
        pair = check_pair(self.target, self.draft, self.spec, replace(self.options, tensor_parallel_size=size))
        warn_of_slow_weights(pair, pair.settings.dtype, partial(architecture_of, pair.settings.device))

    def load(self, group: Group, options: EngineOptions) -> Loaded:
        """This rank's share.  options: `self.options`, with this rank's device."""
        try:
            return load_pair(self.target, self.draft, self.spec, options, group)
        except torch.OutOfMemoryError as error:
            pair = check_pair(self.target, self.draft, self.spec, self.options, warns=False)
            own = pair.drafter.checkpoint if pair.drafter and pair.drafter.is_apart else None
            whole = weights_bytes(pair.folder) + (0 if own is None else weights_bytes(own.folder))
            device, packs = torch.device(options.device), options.pack_weights
            configs = pair.configs if pair.chosen.native else None
            raise RuntimeError(no_room(whole, group, device, configs, packs)) from error


def weights_bytes(folder: Path) -> int:
    """Bytes of the files that hold a model's weights.  folder: or a GGUF file."""
    if is_gguf(folder):
        return folder.stat().st_size
    kinds = ("*.safetensors", "*.bin")
    return next((total for kind in kinds if (total := sum(file.stat().st_size for file in folder.glob(kind)))), 0)


def no_room(whole: int, group: Group, device: torch.device, configs: Iterable[ModelConfig] | None, packs: bool = False) -> str:
    """What to tell of a rank whose GPU has no room for its share.

    whole: bytes of all weights.  configs: of models of which each rank takes a share; None: each takes the whole target.
    packs: with 12-bit copies.
    """
    free, total = torch.cuda.mem_get_info(device)
    taken, copies = (whole * 7 // 4, " and their lossless copies") if packs else (whole, "")
    taker, configs = "all" if configs is None else f"about 1/{group.size}", list(configs or ())
    fits = (
        size
        for size in range(group.size + 1, MAX_RANKS + 1 if configs else 0)
        if taken / size <= WEIGHTS_SHARE * total and not any(misfit(config, size) for config in configs)
    )
    more = ("pack_weights=False, " if packs else "") + next(
        (f"tensor_parallel_size={size}" for size in fits), "a smaller model"
    )
    return (
        f"rank {group.rank} of {group.size} has no room for its share of the models{copies} on {device}: the files hold "
        f"{whole / 2**30:.1f} GiB, of which each rank takes {taker}; the GPU has {total / 2**30:.1f} GiB, and "
        f"{free / 2**30:.1f} GiB of it are free now; nearest setting that works: {more}, or a GPU that nothing else uses"
    )
