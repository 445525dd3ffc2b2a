"""Milliseconds a round at the Llama-3.1-8B shape with one MTP layer (MiMo's kind, a dense layer), against an EAGLE-3 head.

    python benchmarks rounds.mtp_8b --out benchmarks/rounds/results/mtp_8b.json
    python benchmarks rounds.mtp_8b --only 5,8,32:8

Weights are random in bf16, and both drafters run in one process on the same target, through the engine as in `generate()`.  An
MTP layer has no vocabulary of its own: each level multiplies with the target's whole language-model head, of 128,256 tokens,
where the EAGLE-3 head has 32,000.  The limit in the table counts these bytes.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
import triton
from gpus import this_gpu
from shapes import TARGET

from rounds.round_8b import Case, measure, random_pair, show
from specdec.draft.mtp.head import MtpHead
from specdec.draft.mtp.layouts import FAMILIES
from specdec.draft.mtp.spec import MtpSpec
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.loader import build
from specdec.models.sharding import join
from specdec.parallel.group import ALONE

CASES = (Case("5,1,6", 1, 1024), Case("5,1,6", 8, 1024), Case("5,8,32", 1, 1024), Case("5,8,32", 8, 1024))


def random_mtp(target: CausalLM, max_positions: int) -> MtpHead:
    """One layer as the target's own, with normal weights."""
    layer, family = replace(TARGET, num_layers=1, layer_kinds=(), kv_source=()), FAMILIES["mimo"]
    spec = MtpSpec("mimo", layer, ("model.mtp_layers.0",), family.names, family.rules, family.block)
    head = build(lambda: MtpHead(spec, max_positions), target.embed_tokens.weight.device, torch.bfloat16)
    for parameter in head.parameters():
        parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    head.borrow(target)
    join(head, ALONE)
    return head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases whose spec:batch:context starts with this, as 5,1,6:8")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    longest = max(case.context for case in CASES) + 2048
    model, eagle = random_pair(longest, torch.device("cuda", 0))
    heads, rows = {"eagle3": eagle, "mtp": random_mtp(model, longest)}, []
    for case in CASES:
        for name, head in heads.items():
            if args.only and not case.name.startswith(args.only):
                continue
            rows.append({"drafter": name, **measure(model, head, case, args.rounds, "round")})
            rows[-1]["bar"] = rows[-1]["bar"] if name == "eagle3" else None  # the bars are those of EAGLE-3's rounds
            print(f"{name:>6}", end=" ")
            show(rows[-1])
            torch.cuda.empty_cache()
            if args.out:  # after each line, so that a run that is cut short leaves what it measured
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(facts() | {"rows": rows}, indent=1) + "\n")


def facts() -> dict[str, object]:
    return {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"), "weights": "random", "dtype": "bfloat16",
        "read_bandwidth": this_gpu().read_bandwidth,
    }  # fmt: skip
