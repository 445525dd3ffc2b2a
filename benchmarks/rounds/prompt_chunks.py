"""A long prompt that enters beside running rows: how long the rows wait, and how much longer the prompt takes.

    python benchmarks rounds.prompt_chunks --out benchmarks/rounds/results/prompt_chunks.json

Llama-3.1-8B shape with an EAGLE-3 head of the real shape, random bf16 weights, through the engine, host included.  A gap is the
time between two deliveries of tokens to a row that runs all the while; it is compared with the gaps before the prompt came.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton

from rounds.round_8b import make_decoder, random_pair, random_prompts
from specdec.config import SamplingParams, SpecConfig
from specdec.session import Session, Submitted

CHAIN = SpecConfig(5, 1, 6)
ROWS, ROW_CONTEXT, PROMPT = 8, 1024, 32768
LONG = SamplingParams(max_tokens=900, ignore_eos=True)
FIRST = SamplingParams(max_tokens=1, ignore_eos=True)


def until_first_token(session: Session, prompt: Submitted, rows: list[Submitted]) -> tuple[float, list[float]]:
    """(seconds until the prompt's first token, the gaps of the first row that runs all the while)."""
    start = last = time.perf_counter()
    gaps, tokens = [], rows[0].num_tokens if rows else 0
    while not prompt.is_done:
        session.step()
        now = time.perf_counter()
        if rows and rows[0].num_tokens > tokens:
            gaps.append(now - last)
            last, tokens = now, rows[0].num_tokens
    assert prompt.error is None and not any(row.is_done for row in rows)
    return time.perf_counter() - start, gaps


def alone(session: Session, ids: list[int]) -> float:
    (prompt,) = session.submit([ids], [FIRST], speculate=True)
    seconds, _ = until_first_token(session, prompt, [])
    return seconds


def beside(session: Session, ids: list[int], row_prompts: list[list[int]]) -> tuple[float, list[float], list[float]]:
    """(seconds until the first token, gaps while the prompt entered, gaps before)."""
    rows = session.submit(row_prompts, [LONG] * len(row_prompts), speculate=True)
    while session.num_running < len(rows):
        session.step()
    before = []
    for _ in range(12):
        start = time.perf_counter()
        session.step()
        before.append(time.perf_counter() - start)
    (prompt,) = session.submit([ids], [FIRST], speculate=True)
    seconds, gaps = until_first_token(session, prompt, rows)
    session.cancel()
    return seconds, gaps, before[4:]


def short_after_long(session: Session, ids: list[int], short: list[int]) -> tuple[float, float]:
    """Seconds until the first token of a short prompt that comes a moment after a long one, and of the long one."""
    start = time.perf_counter()
    (long,) = session.submit([ids], [FIRST], speculate=True)
    session.step()
    begun = time.perf_counter()
    (quick,) = session.submit([short], [FIRST], speculate=True)
    until_first_token(session, quick, [])
    first = time.perf_counter() - begun
    until_first_token(session, long, [])
    return first, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, head = random_pair(PROMPT + 2048, torch.device("cuda", 0))
    session = Session(make_decoder(model, head, CHAIN, ROWS + 1, PROMPT, "round"))
    (ids,), row_prompts = random_prompts(1, PROMPT), random_prompts(ROWS, ROW_CONTEXT)
    found: list[dict[str, Any]] = []
    for _ in range(args.repeats + 1):
        lone = alone(session, ids)
        together, gaps, before = beside(session, ids, row_prompts)
        short, long = short_after_long(session, ids, row_prompts[0][:256])
        found.append(
            {"alone_s": lone, "beside_s": together, "ratio": together / lone, "longest_gap_ms": 1e3 * max(gaps),
             "median_gap_ms": 1e3 * median(gaps), "gaps": len(gaps), "round_ms": 1e3 * median(before),
             "short_prompt_ms": 1e3 * short, "long_prompt_beside_short_s": long}
        )  # fmt: skip
        print(", ".join(f"{name} {value:.3f}" for name, value in found[-1].items()), flush=True)
    found = found[1:]  # the first one compiles and captures
    middle = {name: median(row[name] for row in found) for name in found[0]}
    print("medians: " + ", ".join(f"{name} {value:.3f}" for name, value in middle.items()))
    budget = session.chunk_budget
    result = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "weights": "random", "dtype": "bfloat16",
        "rows": ROWS, "row_context": ROW_CONTEXT, "prompt": PROMPT, "spec": CHAIN.label, "chunk_cost": budget,
        "medians": middle, "repeats": found,
    }  # fmt: skip
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
