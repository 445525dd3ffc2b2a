"""What each sampling option adds to a round at the Llama-3.1-8B shape, random bf16 weights; a batch without pays nothing.

    python benchmarks texts.sampling_options --out benchmarks/texts/results/sampling_options.json

Every line is a round's wall time through the engine, as in rounds/round_8b.py.  "no option" is measured first, before any row
had rules for tokens, and last, when the tables of such rules exist.
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
from rounds.round_8b import Case, make_decoder, random_pair, random_prompts, spec_of

from specdec.bench.profile import Workload, full_rounds
from specdec.config import SamplingParams
from specdec.session import Session

CASES = (Case("5,4,16", 1, 1024), Case("5,4,16", 8, 1024), Case("5,1,6", 32, 1024))
PHRASES = [[7, token, 9] for token in range(1000, 1200)]
OPTIONS: dict[str, dict[str, Any]] = {
    "no option": {},
    "temperature": dict(temperature=0.8),
    "temperature, min_p": dict(temperature=0.8, min_p=0.05),
    "temperature, top_p": dict(temperature=0.8, top_p=0.9),
    "logit_bias": dict(logit_bias={token: 1.0 for token in range(300)}),
    "penalties": dict(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    "bad_words": dict(bad_words=PHRASES),
    "min_tokens": dict(min_tokens=800, stop_token_ids=[5]),
    "logprobs 0": dict(logprobs=0),
    "logprobs 20": dict(logprobs=20),
    "no option again": {},
}  # fmt: skip
SETTLE = 12  # rounds before those that count: kernels compile, graphs are captured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", help="cases whose spec:batch:context starts with this")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, head = random_pair(4096, torch.device("cuda", 0))
    rows = []
    for case in CASES:
        if args.only and not case.name.startswith(args.only):
            continue
        session = Session(make_decoder(model, head, spec_of(case.spec), case.batch, case.context, "round"))
        prompts = random_prompts(case.batch, case.context)
        for name, options in OPTIONS.items():
            sampling = [SamplingParams(max_tokens=900, ignore_eos=True, **options)] * case.batch
            work = Workload(session, prompts, sampling, speculate=True)
            full_rounds(work, session.step, SETTLE)
            walls = [timed.wall for timed, _ in full_rounds(work, session.timed_step, args.rounds)]
            rows.append({**case._asdict(), "option": name, "rounds": len(walls), "ms": 1e3 * median(walls)})
            added = 1e3 * (rows[-1]["ms"] - next(row["ms"] for row in rows if row["batch"] == case.batch))
            print(f"{case.name:>16} {name:<20} {rows[-1]['ms']:7.3f} ms  {added:+8.0f} us", flush=True)
        session.decoder.close()
        torch.cuda.empty_cache()
    result = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"), "weights": "random", "dtype": "bfloat16", "rows": rows,
    }  # fmt: skip
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
