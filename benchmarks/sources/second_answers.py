"""Second answers over the same documents: tokens a round and a second, with earlier answers among the sources and without.

    python benchmarks sources.second_answers --out benchmarks/sources/results/second_answers_cpu.json

A document is a prompt of the file.  It is asked twice, the second time in another form: "cut", without its last word; "after",
with a sentence in front of it; or, sampled, "again", with another seed.  All decoders write all first answers, then all second
ones, which are measured, in turns.  Each turn has a `cache_salt` of its own, so that nothing is known of the turn before.
Texts of all decoders must be equal.  Seconds are those of this process's processors on a CPU, where other programs run too.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from specdec import SamplingParams, SpecConfig, SpecDecoder, shipped

SOURCES = {"head": [], "suffix": ["suffix"], "answers": ["suffix", "answers"]}
FORMS: dict[str, tuple[float, Callable[[str], str]]] = {  # the temperature, and the second prompt
    "cut": (0.0, lambda prompt: prompt.rpartition(" ")[0] or prompt),
    "after": (0.0, lambda prompt: "The end. " + prompt),
    "again": (1.0, lambda prompt: prompt),
}


def prompts_of(path: Path, count: int) -> list[str]:
    """The first prompts of a file with a JSON object a line, with a text as "prompt", or texts as "turns"."""
    lines = [json.loads(line) for line in path.read_text().splitlines()[:count]]
    return [line["prompt"] if "prompt" in line else line["turns"][0] for line in lines]


def a_turn(decoder: SpecDecoder, prompts: list[str], tokens: int, form: str, salt: str) -> dict[str, Any]:
    """Both answers to each document, of which the second ones are measured."""
    temperature, asked = FORMS[form]
    seeds = (0, 1) if temperature else (None, None)
    first, later = (SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed) for seed in seeds)
    decoder.generate(prompts, first, cache_salt=salt)
    assert decoder.settle_tables(), "the table takes too long"
    clock = time.process_time if decoder.settings.device.type == "cpu" else time.perf_counter
    begun = clock()
    outputs = decoder.generate([asked(prompt) for prompt in prompts], later, cache_salt=salt)
    seconds = clock() - begun
    emitted, rounds = (sum(getattr(out.stats, name) for out in outputs) for name in ("emitted", "rounds"))
    return {"accept_length": emitted / rounds, "tokens_per_s": emitted / seconds, "texts": [out.token_ids for out in outputs]}


def interval(values: list[float]) -> tuple[float, float]:
    """The mean of repeats, and half of its 95 % interval (of a normal distribution)."""
    return mean(values), 1.96 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def compared(found: dict[str, list[dict[str, Any]]], batch: int, form: str) -> list[dict[str, Any]]:
    """A row for each decoder; ratios are to the head alone, turn by turn."""
    assert len({str(turn["texts"]) for turns in found.values() for turn in turns}) == 1, "texts must be equal"
    rows = []
    for name, turns in found.items():
        row: dict[str, Any] = {"batch": batch, "form": form, "sources": name}
        for key in ("accept_length", "tokens_per_s"):
            pairs = zip(turns, found["head"], strict=True)
            row |= {key: interval([turn[key] for turn in turns]), f"{key}_ratio": interval([a[key] / b[key] for a, b in pairs])}
        rows.append(row)
        ratio, half = row["tokens_per_s_ratio"]
        print(
            f"batch {batch}, {form:>5}, {name:>7}: {row['accept_length'][0]:6.3f} tokens a round, "
            f"{row['tokens_per_s'][0]:6.0f} tok/s, {ratio:.3f} +- {half:.3f} of the head's",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(shipped.target_folder()))
    parser.add_argument("--draft", default=str(shipped.draft_folder()))
    parser.add_argument("--prompts", type=Path, default=shipped.prompts_file())
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--spec", default="5,4,16")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    prompts, spec = prompts_of(args.prompts, args.num_prompts), SpecConfig(*map(int, args.spec.split(",")))
    rows = list[dict[str, Any]]()
    for batch in map(int, args.batches.split(",")):
        given: dict[str, Any] = {"device": args.device, "max_batch_size": batch, "smoke": False, "max_seq_len": 512}
        given |= {"dtype": args.dtype}  # in 16 bits texts may part where two tokens tie
        decoders = {
            name: SpecDecoder.from_pretrained(args.target, [args.draft, *more] if more else args.draft, spec, **given)
            for name, more in SOURCES.items()
        }
        for form in FORMS:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in decoders}
            for repeat in range(-1, args.repeats):  # the first one warms up, and shows what sources are worth
                for name, decoder in decoders.items():
                    turn = a_turn(decoder, prompts, args.max_tokens, form, f"{form} {repeat}")
                    found[name] += [turn] if repeat >= 0 else []
            rows += compared(found, batch, form)
        for decoder in decoders.values():
            decoder.close()
    if args.out:
        facts = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "device": args.device, "spec": spec.label}
        facts |= {"num_prompts": len(prompts), "max_tokens": args.max_tokens, "repeats": args.repeats}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
