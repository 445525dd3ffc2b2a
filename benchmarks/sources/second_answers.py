"""Second answers over the same documents: tokens a round and a second, with earlier answers among the sources and without.

    python benchmarks sources.second_answers --out benchmarks/sources/results/second_answers_cpu.json

A document is a prompt of the file.  The first answer goes on after the whole of it, the second one after its beginning: a share
of its words is left out at the end, so that the target has to write what comes after that, and may come back to the first
answer.  Both decoders write all first answers, then all second ones, which are measured, in turns; each repeat has a
`cache_salt` of its own, so that nothing is known of the repeat before.  Texts must be equal.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from specdec import SamplingParams, SpecConfig, SpecDecoder, shipped

SOURCES = {"head": [], "suffix": ["suffix"], "answers": ["suffix", "answers"]}


def prompts_of(path: Path, count: int) -> list[str]:
    """The first prompts of a file with a JSON object a line, with a text as "prompt", or texts as "turns"."""
    lines = [json.loads(line) for line in path.read_text().splitlines()[:count]]
    return [line["prompt"] if "prompt" in line else line["turns"][0] for line in lines]


def second(prompt: str, share: float) -> str:
    """The beginning of a document."""
    words = prompt.split(" ")
    return " ".join(words[: max(1, math.ceil(share * len(words)))])


def a_turn(decoder: SpecDecoder, prompts: list[str], args: argparse.Namespace, temperature: float, salt: str) -> dict[str, Any]:
    """Both answers to each document, of which the second ones are measured."""
    seeds = (0, 1) if temperature else (None, None)
    first, later = (SamplingParams(max_tokens=args.max_tokens, temperature=temperature, seed=seed) for seed in seeds)
    decoder.generate(prompts, first, cache_salt=salt)
    assert decoder.settle_tables(), "the table takes too long"
    asked = [second(prompt, args.share) for prompt in prompts]
    begun = time.perf_counter()
    outputs = decoder.generate(asked, later, cache_salt=salt)
    seconds = time.perf_counter() - begun
    emitted, rounds = (sum(getattr(out.stats, name) for out in outputs) for name in ("emitted", "rounds"))
    return {"accept_length": emitted / rounds, "tokens_per_s": emitted / seconds, "texts": [out.token_ids for out in outputs]}


def interval(values: list[float]) -> tuple[float, float]:
    """The mean of repeats, and half of its 95 % interval (of a normal distribution)."""
    return mean(values), 1.96 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(shipped.target_folder()))
    parser.add_argument("--draft", default=str(shipped.draft_folder()))
    parser.add_argument("--prompts", type=Path, default=shipped.prompts_file())
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--share", type=float, default=0.7, help="of a document's words that the second prompt has")
    parser.add_argument("--spec", default="5,4,16")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    prompts, spec = prompts_of(args.prompts, args.num_prompts), SpecConfig(*map(int, args.spec.split(",")))
    rows = list[dict[str, Any]]()
    for batch in map(int, args.batches.split(",")):
        given: dict[str, Any] = {"device": args.device, "max_batch_size": batch, "smoke": False, "max_seq_len": 512}
        decoders = {
            name: SpecDecoder.from_pretrained(args.target, [args.draft, *more] if more else args.draft, spec, **given)
            for name, more in SOURCES.items()
        }
        for temperature in map(float, args.temperatures.split(",")):
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in decoders}
            for repeat in range(-1, args.repeats):  # the first one warms up, and shows what sources are worth
                for name, decoder in decoders.items():
                    turn = a_turn(decoder, prompts, args, temperature, f"{temperature} {repeat}")
                    if repeat >= 0:
                        found[name].append(turn)
            assert len({str(turn["texts"]) for turns in found.values() for turn in turns}) == 1, "texts must be equal"
            for name, turns in found.items():
                row = {"batch": batch, "temperature": temperature, "sources": name}
                row |= {key: interval([turn[key] for turn in turns]) for key in ("accept_length", "tokens_per_s")}
                rows.append(row)
                own = next(r for r in rows if r["batch"] == batch and r["temperature"] == temperature)
                (length, _), (rate, half) = row["accept_length"], row["tokens_per_s"]
                print(
                    f"batch {batch}, T={temperature:g}, {name:>7}: {length:.3f} tokens a round "
                    f"({length / own['accept_length'][0] - 1:+.1%}), {rate:.0f} +- {half:.0f} tok/s "
                    f"({rate / own['tokens_per_s'][0] - 1:+.1%})",
                    flush=True,
                )
        for decoder in decoders.values():
            decoder.close()
    if args.out:
        facts = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "device": args.device, "spec": spec.label}
        facts |= {"num_prompts": len(prompts), "max_tokens": args.max_tokens, "share": args.share, "repeats": args.repeats}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
