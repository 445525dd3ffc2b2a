"""The ids that end a target's texts, by the files of its folder that name some.

Knows no tokenizer: what its chat template writes after an answer is `loading/build.py`'s.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specdec.models.checkpoints.config_values import token_ids
from specdec.models.config import ModelConfig, read_json


def with_generation_eos(config: ModelConfig, folder: Path) -> ModelConfig:
    """EOS ids from generation_config.json where it has some, as transformers does."""
    generation = folder / "generation_config.json"
    raw = read_json(generation) if generation.is_file() else {}
    eos_ids = token_ids(raw, "eos_token_id", str(generation), config.vocab_size)
    return replace(config, eos_ids=eos_ids) if eos_ids else config
