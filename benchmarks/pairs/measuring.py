"""The steps of a comparison that measure a trained head: accept lengths, speeds, losslessness and the seconds of a start.

Accept lengths are counted by the runtime itself while it writes the prompts' answers; they need no GPU, and depend on a machine
only as far as its rounding chooses between tokens that tie.  Speeds are those of `specdec bench`.  Nothing here trains.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from texts.sources import interval

from pairs.plan import PairsPlan, PartsFolder
from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.bench.cell import measure_cell
from specdec.bench.encode import encode_prompts, with_seeds
from specdec.bench.prompt_file import read_prompts
from specdec.generation import Stats
from specdec.loading.build import free_memory
from specdec.models.checkpoints.checkpoint import resolve_target
from specdec.options import EngineOptions
from specdec.prompts.tokenizer import Tokenizer
from specdec.session import Session

FIRST_TOKENS = 16  # of the text of a start


def shape_of(label: str) -> SpecConfig:
    return SpecConfig(*map(int, label.split(",")))


def asked(folder: PartsFolder, plan: PairsPlan, file: str, count: int) -> list[list[int]]:
    """The token ids of the first prompts of a file, as chats if the plan says so."""
    source, longest = folder.prompts(file), sampling_of(0.0, max(plan.eval_tokens, plan.bench_tokens))
    tokenizer, options = Tokenizer(resolve_target(plan.target, "target")), EngineOptions()
    return encode_prompts(read_prompts(source, count), str(source), plan.target, tokenizer, longest, options, chat=plan.chat)


def sampling_of(temperature: float, tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=temperature, seed=0 if temperature else None)


class MeasuredPair:
    """The target with a head of one kind, loaded once for all shapes and batches."""

    def __init__(self, folder: PartsFolder, plan: PairsPlan, kind: str) -> None:
        self.folder, self.plan, self.kind = folder, plan, kind
        most = max(plan.eval_prompts, plan.bench_prompts, *plan.batches)
        self.prompts = {file: asked(folder, plan, file, most) for file in plan.files}
        longest = max(len(ids) for prompts in self.prompts.values() for ids in prompts)
        settings: dict[str, Any] = {"device": plan.device, "max_batch_size": max(plan.eval_batch, *plan.batches)}
        settings |= {"threads": plan.threads} if plan.threads else {}
        settings["max_seq_len"] = longest + max(plan.eval_tokens, plan.bench_tokens)
        widest = max(map(shape_of, plan.shapes), key=lambda spec: spec.lookahead)
        self.loaded = SpecDecoder.from_pretrained(plan.target, folder.head(kind), widest, smoke=False, **settings)

    @contextmanager
    def opened(self, shape: str, batch: int) -> Iterator[SpecDecoder]:
        """A decoder over the same weights, with rounds of that shape."""
        settings = replace(self.loaded.settings.with_options(max_batch_size=batch), spec=shape_of(shape))
        with SpecDecoder(self.loaded.model, self.loaded.head, settings, self.loaded.tokenizer) as decoder:
            yield decoder
        free_memory(settings.device)

    def close(self) -> None:
        self.loaded.close()


def accept_lengths(pair: MeasuredPair, shape: str) -> dict[str, Any]:
    """By file and temperature: tokens a round, and the share accepted at each depth."""
    plan, rows = pair.plan, []
    with pair.opened(shape, plan.eval_batch) as decoder:
        for file in plan.files:
            prompts = pair.prompts[file][: plan.eval_prompts]
            for temperature in plan.temperatures:
                params = with_seeds(sampling_of(temperature, plan.eval_tokens), len(prompts))
                stats = Stats.total([output.stats for output in decoder.generate(prompts, params)])
                counted = {name: value for name, value in vars(stats).items() if name != "accepted_per_round"}
                row = {"file": file, "temperature": temperature, "prompts": len(prompts), **counted}
                rows.append(row | {"accept_length": stats.accept_length, "acceptance_by_depth": stats.acceptance_by_depth})
    return {"kind": pair.kind, "shape": shape, "rows": rows}


def speeds(pair: MeasuredPair, shape: str, batch: int) -> dict[str, Any]:
    """By file and temperature: tokens a second of plain decoding and of rounds, in turns on one decoder, as `bench` does."""
    plan, rows = pair.plan, []
    with pair.opened(shape, batch) as decoder:
        session, explained = Session(decoder), dict[Any, Any]()
        for file in plan.files:
            prompts = pair.prompts[file][: max(plan.bench_prompts, batch)]
            for temperature in plan.temperatures:
                explained.clear()
                params = sampling_of(temperature, plan.bench_tokens)
                cell = measure_cell(session, prompts, params, plan.repeats, explained=explained)
                plain, rounds = cell.baseline.rates, cell.speculative.rates
                ratios = [fast / slow for fast, slow in zip(rounds, plain, strict=True)]
                row = {"file": file, "temperature": temperature, "prompts": len(prompts), "plain": plain, "rounds": rounds}
                row |= {"accept_length": cell.speculative.counters.accept_length, "outputs": cell.outputs.verdict}
                rows.append(row | interval(ratios) | {"cold_timed": cell.baseline.cold_timed + cell.speculative.cold_timed})
    return {"kind": pair.kind, "shape": shape, "batch": batch, "rows": rows}


def verdict(pair: MeasuredPair) -> dict[str, Any]:
    """What `specdec verify` says, by file and temperature."""
    plan, rows = pair.plan, []
    with pair.opened(plan.shapes[0], plan.verify_prompts) as decoder:
        for file in plan.files:
            prompts = pair.prompts[file][: plan.verify_prompts]
            for temperature in plan.temperatures:
                found = decoder.verify(prompts, with_seeds(sampling_of(temperature, plan.bench_tokens), len(prompts)))
                row = {"file": file, "temperature": temperature, "passed": found.passed, "tokens": found.tokens}
                rows.append(row | {"verdicts": [each.verdict for each in found.prompts], "unsure": found.unsure})
    return {"kind": pair.kind, "shape": plan.shapes[0], "rows": rows, "passed": all(row["passed"] for row in rows)}


def start_seconds(folder: PartsFolder, plan: PairsPlan, kind: str) -> dict[str, Any]:
    """Wall seconds of `specdec generate` for a few tokens, with all that was compiled before."""
    words = ["generate", "--target", plan.target, "--draft", str(folder.head(kind)), "--device", plan.device, "--no-smoke"]
    words += ["--max-tokens", str(FIRST_TOKENS), "--spec", plan.shapes[0], *(["--chat"] if plan.chat else []), "Tell a story."]
    begun = time.monotonic()
    subprocess.run([sys.executable, "-P", "-m", "specdec.cli", *words], check=True, capture_output=True)
    seconds = round(time.monotonic() - begun, 2)
    return {"kind": kind, "shape": plan.shapes[0], "tokens": FIRST_TOKENS, "seconds": seconds}
