"""A pair in its folders, as several ranks load it: what can't be shared is refused before any rank starts, and a rank that has
no room for its share says what would have.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from specdec.config import SpecConfig
from specdec.draft.drafter import DraftModel
from specdec.draft.kinds import head_config, is_name
from specdec.loading.load import load_pair, require_spec
from specdec.loading.resolve import EngineSettings, resolve_settings
from specdec.models.checkpoints.checkpoint import resolve_folder
from specdec.models.config import ModelConfig
from specdec.models.registry import choose_target, refuse_ranks
from specdec.models.sharding import misfit, share_of
from specdec.models.target import Target
from specdec.options import EngineOptions
from specdec.parallel.group import Group
from specdec.parallel.shard import Shard

MOST_RANKS = 64
WEIGHTS_SHARE = 0.9  # of a GPU's memory: the weights must leave room for keys, values and activations
Loaded = tuple[Target, DraftModel | None, EngineSettings, Path]


class WantedPair(NamedTuple):
    """See `load_pair`."""

    target: str | Path
    draft: str | Path | None
    spec: SpecConfig
    options: EngineOptions

    def check(self, size: int) -> None:
        require_spec(self.spec)
        configs = self._configs()
        for config in configs:
            share_of(config, Shard(0, size))
        resolve_settings(self.options, None if self.draft is None else self.spec, configs[0])

    def load(self, group: Group, options: EngineOptions) -> Loaded:
        try:
            return load_pair(self.target, self.draft, self.spec, options, group)
        except torch.OutOfMemoryError as error:
            folders = [folder for folder in (self.target, self.draft) if folder is not None and not is_name(folder)]
            whole = sum(weights_bytes(resolve_folder(folder, "folder")) for folder in folders)
            raise RuntimeError(no_room(whole, group, torch.device(options.device), self._configs())) from error

    def _configs(self) -> list[ModelConfig]:
        """Of the target, and of the head if there is one.  ValueError if ranks can't share such a target."""
        folder = resolve_folder(self.target, "target")
        chosen = choose_target(folder, self.options.backend, self.options.quantize)
        refuse_ranks(chosen, self.options.tensor_parallel_size)
        head = head_config(self.draft, self.options, chosen.config, folder)
        return [chosen.config] if head is None else [chosen.config, head]


def weights_bytes(folder: Path) -> int:
    """Bytes of the files that hold a model's weights."""
    kinds = ("*.safetensors", "*.bin")
    return next((total for kind in kinds if (total := sum(file.stat().st_size for file in folder.glob(kind)))), 0)


def no_room(whole: int, group: Group, device: torch.device, configs: Iterable[ModelConfig]) -> str:
    """What to tell of a rank whose GPU has no room for its share.  whole: bytes of all weights."""
    free, total = torch.cuda.mem_get_info(device)
    configs = list(configs)
    fits = (
        size
        for size in range(group.size + 1, MOST_RANKS + 1)
        if whole / size <= WEIGHTS_SHARE * total and not any(misfit(config, size) for config in configs)
    )
    more = next((f"tensor_parallel_size={size}" for size in fits), "a smaller model")
    return (
        f"rank {group.rank} of {group.size} has no room for its share of the models on {device}: their files hold "
        f"{whole / 2**30:.1f} GiB, of which each rank takes about 1/{group.size}; the GPU has {total / 2**30:.1f} GiB, and "
        f"{free / 2**30:.1f} GiB of it are free now; nearest setting that works: {more}, or a GPU that nothing else uses"
    )
