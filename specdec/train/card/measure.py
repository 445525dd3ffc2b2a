"""Measures a finished head with the runtime itself, on prompts of documents that no training has read.

Each number is of one draft tree, one kind of text and one temperature, with an interval over the prompts.  This file knows the
runtime and prompts.  It knows no losses and writes no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec.config import SamplingParams
from specdec.decoder import SpecDecoder
from specdec.generation import Stats
from specdec.train.settings import MEASURED

TEMPERATURES = {"greedy": 0.0, "T=1": 1.0}
DRAWS = 1000  # of the bootstrap
SHARE = 0.95  # of the draws lies in the interval

Prompts = Mapping[str, Sequence[list[int]]]  # token ids by the name of a kind of text


class AcceptedDrafts(NamedTuple):
    """What a head makes of one kind of text.

    accept_length: tokens of a round, over all rounds.  low, high: the interval of 95 percent, over other prompts of that kind.
    by_depth: the share of accepted drafts at each depth, of those that get there.  prompts, rounds: how many.
    """

    accept_length: float
    low: float
    high: float
    by_depth: list[float]
    prompts: int
    rounds: int

    def __str__(self) -> str:
        depths = " ".join(f"{share:.3f}" for share in self.by_depth)
        return f"{self.accept_length:.3f} [{self.low:.3f}, {self.high:.3f}] (by depth {depths})"


Found = dict[str, dict[str, dict[str, AcceptedDrafts]]]  # by kind of text, draft tree and temperature


def accepted(parts: Sequence[Stats]) -> AcceptedDrafts | None:
    """Of the prompts' counts; None if there was no round.  The interval is that of a bootstrap over the prompts."""
    total = Stats.total(list(parts))
    if not total.rounds:
        return None
    counts = torch.tensor([[each.emitted, each.rounds] for each in parts], dtype=torch.float64, device="cpu")
    generator = torch.Generator("cpu").manual_seed(0)
    picks = torch.randint(len(parts), (DRAWS, len(parts)), generator=generator, dtype=torch.int64, device="cpu")
    emitted_D, rounds_D = counts[picks].sum(1).unbind(1)
    edges = torch.tensor([(1 - SHARE) / 2, (1 + SHARE) / 2], dtype=torch.float64, device="cpu")
    low, high = (emitted_D / rounds_D.clamp(min=1)).quantile(edges).tolist()
    return AcceptedDrafts(total.accept_length, low, high, list(total.acceptance_by_depth), len(parts), total.rounds)


def measure(decoder: SpecDecoder, folder: Path, prompts: Prompts, width: int) -> Found:
    """The head of a folder over the decoder's target; each number is printed as it comes.

    width: tokens of a prompt and what follows it, with the look-ahead of a tree.
    """
    from specdec.draft.load import load_head

    settings, found = decoder.settings, Found()
    head = load_head(folder, decoder.model, width, settings.device, settings.dtype)
    for spec in MEASURED:
        longest = width - spec.lookahead
        with_head = replace(settings.with_options(max_batch_size=32), spec=spec, max_seq_len=longest)
        pair = SpecDecoder(decoder.model, head, with_head, decoder.tokenizer)
        shape = f"S={spec.num_steps} k={spec.topk} nd={spec.num_draft_tokens}"
        for text, each in prompts.items():
            for name, temperature in TEMPERATURES.items():
                sampling = [
                    SamplingParams(max_tokens=longest - len(ids), temperature=temperature, seed=seed)
                    for seed, ids in enumerate(each)
                ]
                outputs = pair.generate([list(ids) for ids in each], sampling, progress=True)
                counted = accepted([output.stats for output in outputs])
                said = f"not measured, as rows of --width {width} leave no round" if counted is None else str(counted)
                print(f"{text}, {name}: accept length at {shape}: {said}", flush=True)
                if counted is not None:
                    found.setdefault(text, {}).setdefault(shape, {})[name] = counted
    return found


def as_record(found: Found) -> dict[str, Any]:
    """The same as plain data."""
    return {
        text: {shape: {name: each._asdict() for name, each in of.items()} for shape, of in shapes.items()}
        for text, shapes in found.items()
    }
