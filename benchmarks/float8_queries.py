#!/usr/bin/env python3
"""What flash-attn 3 costs in quality over an fp8 cache, where it rounds queries and softmax weights to float8 too.

    python benchmarks/float8_queries.py --out benchmarks/results/float8_queries_h200.json      # with flash-attn-3's kernels

The shipped pair, bf16, greedy, over KV in bf16 and in fp8, read by our kernels and by flash-attn 3.  A line holds the accept
length, how many texts equal those of plain decoding with the same settings, and how many of the others part at a near-tie, by
the check of `specdec bench`.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import torch

from specdec import SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.bench.near_tie import explain_divergence
from specdec.bench.prompt_file import read_prompts
from specdec.bench.session import Session

SETTINGS = (("auto", "triton"), ("auto", "fa3"), ("fp8", "triton"), ("fp8", "fa3"))  # kv_cache_dtype, attention
SHAPES = ("5,1,6", "5,4,16")
PROMPTS = 48


def measure(kv: str, attention: str, shape: str, max_tokens: int) -> dict[str, Any]:
    spec, folders = SpecConfig(*map(int, shape.split(","))), (shipped.target_folder(), shipped.draft_folder())
    decoder = SpecDecoder.from_pretrained(
        *folders, spec, dtype="bfloat16", device="cuda", kv_cache_dtype=kv, attention=attention, max_batch_size=PROMPTS
    )
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompts = read_prompts(shipped.prompts_file(), PROMPTS)
    fast, plain = (decoder.generate(prompts, sampling, speculate=speculate) for speculate in (True, False))
    session = Session(decoder)
    found = [
        explain_divergence(session, number, a.prompt_token_ids, a.token_ids, b.token_ids, sampling)
        for number, (a, b) in enumerate(zip(plain, fast, strict=True))
    ]
    accepted = sum(out.stats.emitted for out in fast) / sum(out.stats.rounds for out in fast)
    row = {
        "kv": kv, "attention": attention, "spec": shape, "accept_length": round(accepted, 4),
        "prompts": len(prompts), "equal": found.count(None),
        "near_ties": sum(each is not None and each.verdict == "near-tie" for each in found),
        "diverged": sum(each is not None and each.verdict != "near-tie" for each in found),
        "widest_margin": max((each.margin or 0 for each in found if each), default=0.0),
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    decoder.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--max-tokens", type=int, default=300)
    args = parser.parse_args()
    rows = [measure(*setting, shape, args.max_tokens) for shape in SHAPES for setting in SETTINGS]
    about = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": datetime.date.today().isoformat(),
        "pair": "shipped", "dtype": "bfloat16", "max_tokens": args.max_tokens,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
