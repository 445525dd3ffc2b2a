"""Evaluates a head offline: the target writes greedy texts, and what the head drafts along them is counted.

This file knows models, prompts and the runtime's `generate`.  It prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from specdec.config import SamplingParams, SpecConfig
from specdec.decoder import SpecDecoder
from specdec.draft.block.head import BlockHead
from specdec.draft.eagle.head import EagleHead
from specdec.draft.find import HEADS_ONLY, how_to_read
from specdec.draft.formats.empty import empty_head
from specdec.draft.formats.open import open_head
from specdec.draft.kinds import kind_of
from specdec.draft.load import load_head
from specdec.generation import Stats
from specdec.limits import MAX_PAUSE
from specdec.loading.resolve import resolve_device
from specdec.loading.threads import using_threads
from specdec.models.checkpoints.checkpoint import resolve_folder, resolve_target
from specdec.models.config import ModelConfig
from specdec.models.registry import choose_target
from specdec.options import EngineOptions
from specdec.train.offline.count import count
from specdec.train.states import read_rows


def check_head(head: str, target: str | Path, specs: Sequence[SpecConfig], options: EngineOptions) -> ModelConfig:
    """The target's config.  ValueError if no head of the folder can be counted with these shapes, or the device is not there;
    no weights are read.
    """
    resolve_device(options.device)
    if kind_of(head):
        raise ValueError(
            f"HEAD must be a folder or hub id of a draft head, got {head!r}; specdec bench --draft {head} measures it"
        )
    config = choose_target(resolve_target(target, "--target"), options.backend).config
    if config.encoder is not None:
        raise ValueError(f"--target must be a decoder-only model, such as a Llama, got {target}, a {config.family} model")
    opened = open_head(resolve_folder(head, "HEAD"), config, how_to_read(options))
    empty = empty_head(opened.parsed.spec)
    for spec in specs:
        if spec.is_auto:
            raise ValueError(f"--spec must name its levels for eval-head, got {spec.label}; nearest: {SpecConfig().label}")
        empty.resolved(spec)
        empty.shapes(spec, warns=True)
    return config


def eval_head(
    head: str,
    target: str | Path,
    prompts: Sequence[list[int]],
    specs: Sequence[SpecConfig],
    max_tokens: int,
    options: EngineOptions,
    progress: Callable[[int], object] = lambda done: None,
) -> list[Stats]:
    """What a served run of each shape would count, over all prompts.

    prompts: token ids, which leave room for max_tokens and the levels of a tree.  progress: told how many prompts are done.
    ValueError as of check_head, and of the target's and the head's weights.
    """
    check_head(head, target, specs, options)
    more = max(spec.max_steps for spec in specs) + 1
    length = max(map(len, prompts)) + max_tokens + more
    without_head = {name: getattr(EngineOptions(), name) for name in HEADS_ONLY}
    decoder = SpecDecoder.from_pretrained(target, options=replace(options, max_seq_len=length, **without_head))
    with decoder, using_threads(decoder.settings.threads):
        sampling = SamplingParams(max_tokens=max_tokens + more, ignore_eos=True)
        outputs = decoder.generate([list(ids) for ids in prompts], sampling, speculate=False)
        model, settings = decoder.model, decoder.settings
        how = how_to_read(options)
        drafter = load_head(resolve_folder(head, "HEAD"), model, length + MAX_PAUSE, settings.device, settings.dtype, how)
        assert isinstance(drafter, EagleHead | BlockHead)
        parts: list[list[Stats]] = []
        for output in outputs:
            ids_T = torch.tensor(output.prompt_token_ids + output.token_ids, dtype=torch.int64, device=settings.device)
            seen = read_rows(model, ids_T[None], drafter.config.aux_layers)
            ends = [i for i, token in enumerate(output.token_ids[:max_tokens]) if token in decoder.eos_ids]
            tokens = ends[0] + 1 if ends else max_tokens
            parts.append(count(drafter, ids_T, seen.features_BTF[0], len(output.prompt_token_ids), tokens, specs))
            progress(len(parts))
    return [Stats.total([part[i] for part in parts]) for i in range(len(specs))]
