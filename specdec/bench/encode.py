"""Prompts of a file as token ids, checked against the target's limits before its weights are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec.bench.prompt_file import FilePrompt
from specdec.config import SamplingParams
from specdec.models.checkpoints.checkpoint import resolve_target
from specdec.models.registry import choose_target
from specdec.options import EngineOptions
from specdec.prompts.encode import check_length, encode_prompt, is_chat
from specdec.prompts.tokenizer import Tokenizer


def encode_prompts(
    prompts: Sequence[FilePrompt],
    source: str,
    target: str | Path,
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    engine: EngineOptions,
    *,
    chat: bool,
) -> list[list[int]]:
    """The ids of each prompt.  source: the file's name, for errors.  chat: apply the chat template to texts."""
    config = choose_target(resolve_target(target, "target"), engine.backend).config
    if config.encoder is not None:
        raise ValueError(
            f"the target of bench and verify must be a decoder-only model, such as a Llama, got {target}, a {config.family} "
            "model: near-ties are checked over one model's text, not over what an encoder read besides"
        )
    encoded = []
    for i, prompt in enumerate(prompts):
        name = f"prompt {i + 1} of {source}"
        if chat and not isinstance(prompt, str) and not is_chat(prompt):
            raise ValueError(f"{name} holds token ids, to which no chat template can be applied; leave --chat out")
        is_message = chat and isinstance(prompt, str)
        asked = [{"role": "user", "content": prompt}] if is_message else prompt
        ids = encode_prompt(asked, name, tokenizer, config.vocab_size)
        check_length(ids, sampling, name, engine.max_seq_len or config.max_position, config.max_position)
        encoded.append(ids)
    return encoded


def with_seeds(sampling: SamplingParams, count: int) -> list[SamplingParams]:
    """The sampling of each prompt: prompt i has the seed + i."""
    return [sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + i) for i in range(count)]


def prompt_facts(prompts: Sequence[Sequence[int]], asked: Sequence[FilePrompt], source: str, *, chat: bool) -> dict[str, Any]:
    """Which prompts ran, for results.  asked: what `encode_prompts` made their ids of; source, chat: as there.

    sha256: of the token ids as they ran, with the chat template where it is applied, written as JSON without spaces.
    """
    text = json.dumps(prompts, separators=(",", ":"))
    return {
        "source": source,
        "count": len(prompts),
        "tokens": {"min": min(map(len, prompts)), "max": max(map(len, prompts)), "sum": sum(map(len, prompts))},
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "chat_template": chat or any(map(is_chat, asked)),
    }
