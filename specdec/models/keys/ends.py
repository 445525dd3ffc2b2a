"""The ids that end a target's texts, and those that they begin with, by the files of its folder that name some.

Knows no tokenizer: what its chat template writes after an answer, and its eos_token, are `loading/build.py`'s.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec.models.checkpoints.config_values import token_ids
from specdec.models.config import ModelConfig, read_json

GENERATION = "generation_config.json"


def with_ends(config: ModelConfig, folder: Path) -> ModelConfig:
    """The config with the ids that end its texts, and with what each file says of them.

    config: with those of config.json.  Those of generation_config.json count alone where it names some.  transformers' generate
    reads config.json only where there is no generation_config.json; what differs is said when a decoder is made.
    """
    path = folder / GENERATION
    if not path.is_file():
        return replace(config, ends_by_file=(("config.json", config.eos_ids),))
    said = token_ids(read_json(path), "eos_token_id", str(path), config.vocab_size)
    by_file = ((GENERATION, said), ("config.json", config.eos_ids))
    return replace(config, eos_ids=said or config.eos_ids, ends_by_file=by_file)


def of_texts(raw: dict[str, Any], key: str) -> Any:
    """What a config.json, or a generation_config.json, says of texts: at its top, or else of its decoder.  None: nothing."""
    decoder = raw.get("decoder")
    return decoder.get(key) if raw.get(key) is None and isinstance(decoder, dict) else raw.get(key)
