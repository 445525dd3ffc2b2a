"""Measures a pair against its own autoregressive decoding: every batch size with every tree shape, in one process.

Checks what was asked for, loads both models once, and fills a Measurement; how one cell is measured is cell's business.
Prints nothing.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specdec.bench.cell import measure_cell
from specdec.bench.measurement import Measurement
from specdec.bench.prompt_file import FilePrompt
from specdec.config import SamplingParams, SpecConfig, require_int
from specdec.decoder import SpecDecoder
from specdec.doctor import machine_facts, steal_and_total, versions
from specdec.draft.eagle import DraftHead
from specdec.loading import EngineSettings, load_pair
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoint import resolve_folder
from specdec.models.loader import read_target_config
from specdec.prompts import Tokenizer, check_length, encode_prompt

Progress = Callable[[str, int, int], None]  # what runs now, passes done, passes in all


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.  sampling: for every prompt; when it samples, prompt i gets seed + i.  chat: apply the chat template.

    max_seq_len None: what the longest prompt and max_tokens need.
    """

    target: str | Path
    draft: str | Path
    prompts: Sequence[FilePrompt]
    prompts_source: str
    specs: Sequence[SpecConfig]
    batch_sizes: Sequence[int]
    sampling: SamplingParams
    repeats: int = 3
    chat: bool = False
    engine: dict[str, Any] = field(default_factory=dict)  # device, dtype, attention, page_size, cuda_graphs
    max_seq_len: int | None = None

    def __post_init__(self) -> None:
        require_int("repeats", self.repeats, 1)
        for size in self.batch_sizes:
            require_int("batch_sizes", size, 1)
            if size > len(self.prompts):
                raise ValueError(
                    f"a batch of {size} needs at least {size} prompts to be full, got {len(self.prompts)}; nearest settings: "
                    f"--num-prompts {size}, or --batch-sizes {len(self.prompts)}"
                )
        for name, values in (("spec", self.specs), ("batch_sizes", self.batch_sizes)):
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} must name each value once, and at least one; got {', '.join(map(str, values))}")
        if self.sampling.temperature > 0 and self.sampling.seed is None:
            raise ValueError("sampling needs a seed: both sides must draw the same; nearest setting that works: seed=0")


def run_bench(options: BenchOptions, on_progress: Progress = lambda *_: None) -> Measurement:
    """Every batch size with every tree shape."""
    on_progress("loading", 0, 1)
    tokenizer = Tokenizer(resolve_folder(options.target))
    prompts = _encode(options, tokenizer)
    model, head, settings = _load(options, max(map(len, prompts)))
    passes_a_cell = 2 * (options.repeats + 2)
    total = len(options.batch_sizes) * len(options.specs) * passes_a_cell
    result = Measurement(
        machine_facts(settings.device), versions(), _settings(options, settings), _prompt_facts(options, prompts)
    )
    steal, total_cpu = steal_and_total()
    for size in options.batch_sizes:
        for spec in options.specs:
            done = len(result.cells) * passes_a_cell
            name = f"batch {size}, {spec.num_steps},{spec.topk},{spec.num_draft_tokens}"
            _free_memory(settings.device)  # of the last decoder, whose pool would shrink this one's
            decoder = SpecDecoder(model, head, replace(settings, spec=spec, max_batch_size=size), tokenizer)

            def on_pass(what: str, index: int, name: str = name, done: int = done) -> None:
                on_progress(f"{name}: {what}", done + index, total)

            result.cells.append(measure_cell(decoder, prompts, options.sampling, options.repeats, on_pass))
            del decoder
    steal, total_cpu = (now - before for now, before in zip(steal_and_total(), (steal, total_cpu)))
    result.machine["cpu_steal"] = steal / total_cpu if total_cpu else 0.0
    return result


def _encode(options: BenchOptions, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of all prompts, checked against the model's limits before its weights are read."""
    config = read_target_config(resolve_folder(options.target))
    encoded = []
    for i, prompt in enumerate(options.prompts):
        name = f"prompt {i + 1} of {options.prompts_source}"
        if options.chat and not isinstance(prompt, str):
            raise ValueError(f"{name} holds token ids, to which no chat template can be applied; leave --chat out")
        message = [{"role": "user", "content": prompt}]
        ids = encode_prompt(message if options.chat else prompt, name, tokenizer, config.vocab_size)
        check_length(ids, options.sampling, name, options.max_seq_len or config.max_position)
        encoded.append(ids)
    return encoded


def _load(options: BenchOptions, longest_prompt: int) -> tuple[CausalLM, DraftHead, EngineSettings]:
    """Both models, once for all cells: with room in their position tables for the widest look-ahead."""
    widest = max(options.specs, key=lambda spec: spec.lookahead)
    length = options.max_seq_len or longest_prompt + options.sampling.max_tokens
    engine: dict[str, Any] = {"device": "auto", "dtype": "auto", "attention": "auto", "page_size": 16, "cuda_graphs": "round"}
    engine |= {"max_batch_size": max(options.batch_sizes), "max_seq_len": length} | options.engine
    model, head, settings, _ = load_pair(options.target, options.draft, widest, **engine)
    assert head is not None
    for spec in options.specs:
        if spec.topk > head.config.draft_vocab_size:
            raise ValueError(f"topk must be at most the draft vocabulary {head.config.draft_vocab_size}, got {spec.topk}")
    return model, head, settings


def _settings(options: BenchOptions, settings: EngineSettings) -> dict[str, Any]:
    sampling = options.sampling
    return {
        "target": str(options.target),
        "draft": str(options.draft),
        "device": str(settings.device),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "attention": settings.attention.name,
        "attention_reason": settings.attention.reason,
        "cuda_graphs": settings.cuda_graphs,
        "page_size": settings.page_size,
        "max_seq_len": settings.max_seq_len,
        "repeats": options.repeats,
        "sampling": {name: getattr(sampling, name) for name in sampling.__dataclass_fields__},
    }


def _prompt_facts(options: BenchOptions, prompts: list[list[int]]) -> dict[str, Any]:
    """sha256 is of the token ids as they ran, chat template included, written as JSON without spaces."""
    text = json.dumps(prompts, separators=(",", ":"))
    return {
        "source": options.prompts_source,
        "count": len(prompts),
        "tokens": {"min": min(map(len, prompts)), "max": max(map(len, prompts)), "sum": sum(map(len, prompts))},
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "chat_template": options.chat,
    }


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
