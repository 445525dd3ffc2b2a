"""Heads of several kinds over one target: accept lengths and tokens per second of each tree shape, one request at a time.

    python benchmarks texts.trained_heads --target DIR --heads eagle3=DIR dflash=DIR dspark=DIR --prompts FILE.jsonl --out FILE

Each line of the prompts' file holds a `prompt` (text) or `token_ids`.  Every head writes the same texts, greedily and then
sampled at temperature 1; before them a few tokens are written that are not timed.  tokens_per_second counts output tokens over
wall seconds, prompts included, in one pass over all prompts; plain decoding is timed in the same process.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.generation import Stats

SHAPES = ("5,4,16", "5,1,6", "7,8,32", "7,1,8")
TEMPERATURES = (0.0, 1.0)


def read_prompts(path: Path, count: int) -> list[str | list[int]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()[:count]]
    return [line.get("token_ids") or line["prompt"] for line in lines]


def write(decoder: SpecDecoder, prompts: list[str | list[int]], temperature: float, tokens: int, speculate: bool) -> Any:
    """(counters, seconds, output tokens)."""
    seeds = [None if temperature == 0 else seed for seed in range(len(prompts))]
    params = [SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed) for seed in seeds]
    begun = time.perf_counter()
    outputs = decoder.generate(prompts, params, speculate=speculate)
    seconds = time.perf_counter() - begun
    return Stats.total([out.stats for out in outputs]), seconds, sum(len(out.token_ids) for out in outputs)


def measure(args: argparse.Namespace, name: str, head: str, shape: str) -> list[dict[str, Any]]:
    prompts, rows = read_prompts(args.prompts, args.num_prompts), []
    settings: dict[str, Any] = {"max_batch_size": 1, "max_seq_len": 256 + args.max_tokens, "dtype": args.dtype}
    spec = SpecConfig(*map(int, shape.split(",")))
    with SpecDecoder.from_pretrained(args.target, head, spec, smoke=False, **settings) as decoder:
        for temperature in args.temperatures:
            for speculate in (True, False) if args.plain else (True,):
                write(decoder, prompts[:2], temperature, 24, speculate)
                stats, seconds, tokens = write(decoder, prompts, temperature, args.max_tokens, speculate)
                row: dict[str, Any] = {"head": name, "spec": shape if speculate else "plain", "temperature": temperature}
                row |= {"tokens_per_second": round(tokens / seconds, 1), "tokens": tokens}
                if speculate:
                    row |= {"accept_length": round(stats.accept_length, 4), "rounds": stats.rounds}
                    row["ms_a_round"] = round(seconds / stats.rounds * 1000, 4)
                    row["acceptance_by_depth"] = [round(share, 4) for share in stats.acceptance_by_depth]
                rows.append(row)
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--heads", nargs="+", required=True, metavar="NAME=DIR")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="S,k,nd")
    parser.add_argument("--temperatures", nargs="+", type=float, default=list(TEMPERATURES), metavar="T")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    record: dict[str, Any] = {"device": device, "torch": torch.__version__, "prompts": args.num_prompts, "rows": []}
    for shape in args.shapes:
        for number, each in enumerate(args.heads):
            name, _, folder = each.partition("=")
            args.plain = shape == args.shapes[0] and number == 0  # plain decoding is the same with each head
            for row in measure(args, name, folder, shape):
                record["rows"].append(row)
                print(json.dumps(row), flush=True)
            if args.out:  # after each head, so that a run that is cut short leaves what it has measured
                args.out.write_text(json.dumps(record, indent=1) + "\n")
