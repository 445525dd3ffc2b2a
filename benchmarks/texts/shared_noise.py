"""Accept lengths of sampled text with drafts that know the target's noise, beside drafts ranked by probability alone.

    python benchmarks texts.shared_noise --out benchmarks/texts/results/shared_noise_cpu.json
    python benchmarks texts.shared_noise --pair stories FOLDER/target FOLDER/head FOLDER/prompts.jsonl
    python benchmarks texts.shared_noise --rounds --out benchmarks/texts/results/shared_noise_h200.json

Without --pair, the shipped pair is measured.  Each line of the prompts' file holds a `prompt` (text) or `token_ids`.  The texts
of both rules, and those without speculation, must be equal.  --rounds measures milliseconds a round on a GPU instead, at the
Llama-3.1-8B shape of rounds/round_8b.py with random weights, where three of four drafts are accepted by force.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from rounds.round_8b import make_decoder, random_pair, random_prompts

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.bench.profile import Workload, full_rounds
from specdec.generation import Generation, Stats
from specdec.session import Session
from specdec.shipped import draft_folder, prompts_file, target_folder

RULES = {"by_probability": False, "shared_noise": True}
SHAPES = ((5, 1, 6), (5, 4, 16), (5, 8, 32))
ROUNDS = (((5, 1, 6), 1), ((5, 8, 32), 1), ((5, 1, 6), 32))  # shape, batch
FILTERS = {"temperature": 1.0, "top_p": 0.95, "top_k": 20}
MODES: dict[str, tuple[dict[str, Any], bool]] = {  # options, rule
    "greedy": ({}, True), "by_probability": ({"temperature": 1.0}, False), "shared_noise": ({"temperature": 1.0}, True),
    "filtered_by_probability": (FILTERS, False), "filtered_shared_noise": (FILTERS, True),
}  # fmt: skip
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.6}, {"temperature": 0.8}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": 1.0, "min_p": 0.1},
)  # fmt: skip


def texts(outputs: list[Generation]) -> list[list[int]]:
    return [out.token_ids for out in outputs]


class Case(NamedTuple):
    """One line of the table.  target, draft, file: paths of both models and the prompts."""

    pair: str
    target: str
    draft: str
    file: str
    shape: tuple[int, int, int]
    setting: dict[str, Any]


def measure(case: Case, count: int, tokens: int, seed: int) -> dict[str, Any]:
    """Accept lengths of both rules, on one thread.  Fails if one of them changes a text."""
    torch.set_num_threads(1)
    lines = [json.loads(line) for line in Path(case.file).read_text().splitlines()[:count]]
    prompts = [line.get("token_ids") or line["prompt"] for line in lines]
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed + i, **case.setting) for i in range(len(prompts))]
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_batch_size": len(prompts)}
    with SpecDecoder.from_pretrained(case.target, case.draft, SpecConfig(*case.shape), **options) as decoder:
        plain, found = texts(decoder.generate(prompts, params, speculate=False)), {}
        for name, shares in RULES.items():
            Session(decoder).share_noise(shares)
            outputs = decoder.generate(prompts, params)
            assert texts(outputs) == plain, f"{name} changed a text"
            found[name] = Stats.total([out.stats for out in outputs]).accept_length
    old, new = found["by_probability"], found["shared_noise"]
    print(f"{case.pair} {case.shape} {case.setting}: {old:.2f} -> {new:.2f} ({new / old - 1:+.0%})", flush=True)
    return {"pair": case.pair, "shape": case.shape, **case.setting, **found}


def round_rows(blocks: int = 2, rounds: int = 40) -> list[dict[str, Any]]:
    """Milliseconds a round: greedy, and at temperature 1 by both rules, without and with filters.  Blocks of rounds take turns,
    so that all see the same clocks."""
    model, head = random_pair(4096, torch.device("cuda", 0))
    rows = []
    for shape, batch in ROUNDS:
        work, walls = {}, dict[str, list[float]]()
        for name, (options, shares) in MODES.items():
            session = Session(make_decoder(model, head, SpecConfig(*shape), batch, 1024, "round"))
            session.share_noise(shares)
            session.force_acceptance([0.75] * shape[0])
            params = [SamplingParams(max_tokens=900, ignore_eos=True, seed=i, **options) for i in range(batch)]
            work[name] = Workload(session, random_prompts(batch, 1024), params, speculate=True)
            full_rounds(work[name], session.step, 6)
        for _ in range(blocks):
            for name, each in work.items():
                found = full_rounds(each, each.session.timed_step, rounds)
                walls.setdefault(name, []).append(1e3 * median(step.wall for step, _ in found))
        rows.append({"shape": shape, "batch": batch, **{f"{name}_ms": median(values) for name, values in walls.items()}})
        print(rows[-1], walls, flush=True)
    return rows


def write(out: Path | None, result: dict[str, Any]) -> None:
    if out:
        versions = {"torch": torch.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
        out.write_text(json.dumps({**versions, **result}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", nargs=4, action="append", metavar=("NAME", "TARGET", "DRAFT", "PROMPTS"))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.rounds:
        write(args.out, {"device": torch.cuda.get_device_name(), "dtype": "bfloat16", "rows": round_rows()})
        return
    shipped = ["shipped", str(target_folder()), str(draft_folder()), str(prompts_file())]
    cases = [Case(*pair, *each) for pair in args.pair or [shipped] for each in itertools.product(reversed(SHAPES), SETTINGS)]
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        waits = [pool.submit(measure, case, args.prompts, args.tokens, args.seed) for case in cases]
        rows = [wait.result() for wait in waits]
    write(args.out, {
        "device": "cpu", "dtype": "float32", "prompts": args.prompts, "tokens": args.tokens, "seed": args.seed, "rows": rows,
    })  # fmt: skip
