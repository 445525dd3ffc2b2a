"""The memory that `specdec plan` foresees, beside the peak of a run: the Llama-3.1-8B shape, an EAGLE-3 head, random weights.

    python benchmarks caches.memory_plan --out benchmarks/caches/results/memory_plan_h200.json

The peak is what CUDA itself takes, by the driver, and the most that torch's allocator had given out.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rounds.round_8b import random_pair, random_prompts

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.loading.plan import CountedModels, parts_of
from specdec.loading.resolve import choose_attention, resolve_settings
from specdec.options import EngineOptions
from specdec.prompts.tokenizer import Tokenizer


class Case(NamedTuple):
    """tokens: of each prompt."""

    spec: SpecConfig | None
    batch: int
    context: int
    tokens: int


CASES = (
    Case(None, 8, 4096, 16), Case(SpecConfig(5, 8, 32), 8, 4096, 1024), Case(SpecConfig(5, 1, 6), 32, 2048, 1024),
    Case(SpecConfig(7, 10, 60), 8, 4096, 3000),
)  # fmt: skip


def measure(model: Any, head: Any, case: Case) -> dict[str, Any]:
    """Bytes foreseen and bytes at the peak."""
    options = EngineOptions(
        device="cuda:0", dtype="bfloat16", max_batch_size=case.batch, max_seq_len=case.context, prefix_caching=False
    )
    settings = resolve_settings(options, case.spec, model.config)
    settings = replace(settings, attention_backend=choose_attention(settings, model.config, head.config.model))
    both = case.spec is not None
    shared = {id(weight) for weight in model.parameters()}
    weights = [sum(weight.nbytes for weight in model.parameters())]
    weights += [sum(weight.nbytes for weight in head.parameters() if id(weight) not in shared)] * both
    configs = (model.config, head.config.model) if both else (model.config,)
    plan = parts_of(CountedModels(configs, tuple(weights), head.config.feature_size * both), settings)
    torch.cuda.reset_peak_memory_stats()
    with SpecDecoder(model, head if both else None, settings, Tokenizer(Path("/nonexistent"))) as decoder:
        prompts = random_prompts(case.batch, case.tokens)
        decoder.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
        idle = 0 if both else sum(weight.nbytes for weight in head.parameters() if id(weight) not in shared)
        peak = torch.cuda.max_memory_allocated() - idle
    gc.collect()
    torch.cuda.empty_cache()
    spec = None if case.spec is None else [case.spec.num_steps, case.spec.topk, case.spec.num_draft_tokens]
    return {**case._asdict(), "spec": spec, "parts": plan, "allocated": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    total = torch.cuda.mem_get_info()[1]
    model, head = random_pair(8192, torch.device("cuda:0"))
    rows = []
    for case in CASES:
        rows.append(measure(model, head, case))
        foreseen = sum(bytes for part, bytes in rows[-1]["parts"].items() if part != "CUDA itself")
        off = foreseen / rows[-1]["allocated"] - 1
        print(f"{case}: allocated {rows[-1]['allocated'] / 1e9:.2f} GB, foreseen {foreseen / 1e9:.2f} ({off:+.1%})", flush=True)
    # Kernels are loaded as they are first used, so what CUDA itself takes is looked at last.
    context = total - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
    for row in rows:
        row["peak"], row["foreseen"] = row["allocated"] + context, sum(row["parts"].values())
        run = f"{row['spec'] or 'plain'} batch {row['batch']} x {row['context']}, prompts of {row['tokens']}"
        off = row["foreseen"] / row["peak"] - 1
        print(f"{run}: peak {row['peak'] / 1e9:.2f} GB, foreseen {row['foreseen'] / 1e9:.2f} ({off:+.1%})")
    if args.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(datetime.date.today())}
        args.out.write_text(json.dumps({**about, "context": context, "cells": rows}, indent=1) + "\n")
