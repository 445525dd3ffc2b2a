"""Chats that name no max_tokens beside the same chats with exact ones: how many run together, and tokens a second.

    python benchmarks serving.unbounded --out benchmarks/serving/results/unbounded.json
    python benchmarks serving.unbounded --tiny   (the shipped pair on a CPU: whether this script works, no numbers)

The Llama-3.1-8B shape with an EAGLE-3 head of the real shape, random bf16 weights, the chain (5,1,6) with forced acceptance of
0.75 a level, 131,072 tokens of context, 32 rows.  32 prompts of 300 to 1,500 random ids arrive at once; their outputs end after
200 to 2,000 tokens.  "exact" asks for just so many tokens; "open" may write all that the context has left, and ends there as
though the model had.  "crowded" is "open" where other pages are taken away, so that the pool holds half of what all write
together: there rows step back.  Runs take turns after one that is not counted; the median of each kind counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
from engine_internals import open_request, run_requests, taken_pages, totals
from rounds.round_8b import make_decoder, random_pair

from specdec import shipped
from specdec.config import SpecConfig
from specdec.decoder import SpecDecoder
from specdec.session import Session

CHAIN, ACCEPTANCE, CONTEXT, ROWS, REPEATS, BAR = SpecConfig(5, 1, 6), 0.75, 131_072, 32, 3, 0.95
Chat = tuple[list[int], int]  # a prompt, and how long its output turns out to be


def chats(count: int, prompt: tuple[int, int], output: tuple[int, int], vocabulary: tuple[int, int]) -> list[Chat]:
    """The same for every run."""
    rng = random.Random(0)
    return [([rng.randrange(*vocabulary) for _ in range(rng.randint(*prompt))], rng.randint(*output)) for _ in range(count)]


def run(decoder: SpecDecoder, asked: list[Chat], context: int, kind: str) -> dict[str, Any]:
    """One run of all chats."""
    before = totals(decoder)
    most = [length if kind == "exact" else context - len(prompt) for prompt, length in asked]
    requests = [open_request(prompt, most, length) for (prompt, length), most in zip(asked, most, strict=True)]
    held = sum(len(prompt) + length for prompt, length in asked) // 2 if kind == "crowded" else None
    with taken_pages(decoder, held):
        seconds, rows = run_requests(decoder, requests)
    after, tokens = totals(decoder), sum(len(request.output.token_ids) for request in requests)
    assert tokens == sum(length for _, length in asked)
    return {
        "kind": kind, "tok_s": tokens / seconds, "seconds": seconds, "rows": rows, "rounds": after.rounds - before.rounds,
        "stepped_back": after.stepped_back - before.stepped_back,
        "recomputed_tokens": after.recomputed_tokens - before.recomputed_tokens,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the shipped pair on a CPU, no numbers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.tiny:
        context, asked = 256, chats(4, (5, 20), (10, 30), (3, 200))
        folders = shipped.target_folder(), shipped.draft_folder()
        decoder = SpecDecoder.from_pretrained(
            *folders, CHAIN, device="cpu", dtype="float32", max_batch_size=4, max_seq_len=context
        )
    else:
        context, asked = CONTEXT, chats(ROWS, (300, 1500), (200, 2000), (1000, 100_000))
        model, head = random_pair(CONTEXT + 1024, torch.device("cuda", 0))
        decoder = make_decoder(model, head, CHAIN, ROWS, CONTEXT - 1024, "round")
    Session(decoder).force_acceptance([ACCEPTANCE] * CHAIN.max_steps)
    kinds = ("exact", "open", "crowded")
    runs = [run(decoder, asked, context, kind) for _ in range(1 + (1 if args.tiny else REPEATS)) for kind in kinds][
        len(kinds) :
    ]
    rates = {kind: median(each["tok_s"] for each in runs if each["kind"] == kind) for kind in kinds}
    result = {
        "device": "cpu" if args.tiny else torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
        "weights": "shipped" if args.tiny else "random", "spec": CHAIN.label, "acceptance": ACCEPTANCE, "context": context,
        "tok_s": rates, "open_to_exact": rates["open"] / rates["exact"], "bar": BAR, "runs": runs,
    }  # fmt: skip
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=1))
    for each in runs:
        print(each)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if not args.tiny and (rates["open"] < BAR * rates["exact"] or min(r["rows"] for r in runs if r["kind"] == "open") < ROWS):
        raise SystemExit("below the bar: chats without max_tokens must all run together, at 95 percent of the rate")


if __name__ == "__main__":
    main()
