"""Milliseconds a round at the Llama-3.1-8B shape with a small model of SmolLM2-135M's shape, or a hybrid, random bf16 weights.

    python benchmarks rounds.round_model --out benchmarks/rounds/results/round_model_h200.json
    python benchmarks rounds.round_model --only 5,1,6:1
    python benchmarks rounds.round_model --small hybrid

Beside each round stand the verify phase of the same round and a plain step of the small model alone, through the same engine at
the same batch size and context.  The round's bar is 1.1 times (verify + S plain steps).  Random weights accept next to nothing,
which does not change what a round costs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, TARGET

from rounds.round_8b import Case, measure, show, spec_of
from rounds.round_hybrid import QWEN, family_by, fill_hybrid
from specdec.draft.model.head import SmallModel
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.loader import build
from specdec.models.config import ModelConfig

SMALL = SHAPES["SmolLM2-135M"].config
CASES = (
    Case("5,1,6", 1, 1024), Case("5,1,6", 8, 1024), Case("5,1,6", 32, 1024), Case("5,4,16", 1, 1024), Case("5,8,32", 1, 1024),
)  # fmt: skip
# Of the kind and about the size of Qwen3.5-0.8B.
HYBRID = QWEN | dict(
    model_type="qwen3_5_text", hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8,
    num_key_value_heads=2, linear_num_value_heads=16, vocab_size=131072, tie_word_embeddings=True,
)  # fmt: skip
BAR = 1.1


def random_model(config: ModelConfig, max_positions: int, device: torch.device) -> CausalLM:
    model = build(lambda: CausalLM(config, max_positions), device, torch.bfloat16)
    for parameter in dict.fromkeys(model.parameters()):
        parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    return model


def random_hybrid(max_positions: int, device: torch.device) -> CausalLM:
    family = family_by(HYBRID["model_type"])
    config = family.parse(HYBRID, "hybrid")
    model = build(lambda: CausalLM(config, max_positions, family.layer), device, torch.bfloat16)
    for parameter in dict.fromkeys(model.parameters()):
        parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    fill_hybrid(model)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="cases whose spec:batch:context starts with one of these, as 5,1,6:8")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--small", choices=("SmolLM2-135M", "hybrid"), default="SmolLM2-135M")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    device, longest = torch.device("cuda", 0), max(case.context for case in CASES) + 2048
    target = random_model(TARGET, longest, device)
    small = random_hybrid(longest, device) if args.small == "hybrid" else random_model(SMALL, longest, device)
    drafter, alone = SmallModel(small, TARGET.vocab_size), dict[tuple[int, int], float]()
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if args.only and not case.name.startswith(tuple(args.only)):
            continue
        spec = spec_of(case.spec)
        assert spec is not None
        at = case.batch, case.context
        if at not in alone:
            own = SmallModel(small, small.config.vocab_size)
            alone[at] = measure(small, own, Case("plain", *at), args.rounds, "round")["ms"]
            torch.cuda.empty_cache()
        row = measure(target, drafter, case, args.rounds, "round")
        row["small_step_ms"] = alone[at]
        row["bar"] = BAR * (row["phases_ms"]["verify"] + spec.max_steps * alone[at])
        rows.append(row)
        show(row)
        share = row["ms"] / row["bar"] * BAR
        print(f"         the small model's own step {alone[at]:.2f} ms; the round is {share:.3f} of the sum", flush=True)
        torch.cuda.empty_cache()
    if args.out:
        result = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
            "weights": "random", "dtype": "bfloat16", "rows": rows,
        }  # fmt: skip
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
