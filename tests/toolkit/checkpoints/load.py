"""A target of specdec's own modules without an engine around it, or one rank's share of it; and one whose numbers are gone."""

from pathlib import Path

import torch

from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.frame import load_family
from specdec.models.config import ModelConfig
from specdec.models.described import target_json
from specdec.models.keys.ends import with_ends
from specdec.models.llama.config import parse_llama
from specdec.models.registry import TargetChoice, check_chosen
from specdec.parallel.shard import WHOLE, Shard


def read_target_config(folder: Path) -> ModelConfig:
    """The config of a target, by the Llama family's rules."""
    return with_ends(parse_llama(target_json(folder), str(folder / "config.json")), folder)


def cut_numbers(folder: Path) -> Path:
    """Cuts the weights of a folder off after their headers: whoever opens them fails."""
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        file.write_bytes(data[: 8 + int.from_bytes(data[:8], "little")])
    return folder


def load_target(
    folder: Path, config: ModelConfig, max_positions: int, device: torch.device, dtype: torch.dtype, shard: Shard = WHOLE
) -> CausalLM:
    """As `load_chosen` loads it for a group of ranks."""
    choice = TargetChoice("native", "asked for by name", config)
    assert choice.native is not None
    return load_family(choice.native, check_chosen(choice, folder), config, max_positions, device, dtype, shard)
