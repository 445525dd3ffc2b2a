#!/usr/bin/env python3
"""Milliseconds per plain step and per round at the Llama-3.1-8B shape with an EAGLE-3 head of the real shape, random weights.

    python benchmarks/round_8b.py --out benchmarks/results/round_8b.json

Random weights accept next to nothing, which does not change what a round costs.  Prints wall time per round through
`generate()` (host included), the phases waited for one by one, and where the GPU's time goes by kind of kernel.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specdec.attention.attend import choose_backend
from specdec.config import SamplingParams, SpecConfig
from specdec.decoder import SpecDecoder
from specdec.draft.eagle import DraftHead, Eagle3Head, HeadConfig
from specdec.loading import EngineSettings
from specdec.models.causal_lm import CausalLM
from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.loader import build
from specdec.prompts import Tokenizer

TARGET = ModelConfig(
    family="llama", hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=128256, rms_norm_eps=1e-5, rope=RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192), max_position=131072,
)  # fmt: skip
DRAFT_VOCAB = 32000
READ_BANDWIDTH = 3.06e12  # bytes per second, measured on an H100 80GB (DESIGN 11)
KINDS = {  # the first that a kernel's name contains
    "attention": ("_paged_", "paged_attention", "suffix", "store_kv", "_store"),
    "gemm": ("gemm", "nvjet", "cutlass", "splitk", "cublas", "gemv"),
    "norm": ("norm",),
    "top-k, sort": ("topk", "sort", "radix", "gather_topk", "bitonic"),
    "elementwise": ("elementwise", "vectorized", "copy", "CatArray", "cat", "fill"),
    "index": ("index", "gather", "scatter", "roll", "reduce", "scan", "search"),
}


def random_pair(max_positions: int, device: torch.device) -> tuple[CausalLM, DraftHead]:
    """Both models with normal weights, made on the GPU."""
    model = build(lambda: CausalLM(TARGET, max_positions), device, torch.bfloat16)
    shape = HeadConfig(replace(TARGET, num_layers=1), "eagle3", (1, 15, 28), TARGET.hidden_size, DRAFT_VOCAB)
    head = build(lambda: Eagle3Head(shape, max_positions), device, torch.bfloat16)
    head.embed_tokens = model.embed_tokens
    for parameter in {*model.parameters(), *head.parameters()}:
        parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    head.d2t_V = torch.arange(DRAFT_VOCAB, device=device) * 3
    return model, head


def make_decoder(
    model: CausalLM, head: DraftHead, spec: SpecConfig, batch: int, context: int, device: torch.device
) -> SpecDecoder:
    choice = choose_backend("auto", device, torch.bfloat16)
    settings = EngineSettings(spec, batch, context + 512, 16, choice, True, device, torch.bfloat16)
    return SpecDecoder(model, head, settings, Tokenizer(Path("/nonexistent")))


def wall_ms(decoder: SpecDecoder, prompts: list[list[int]], rounds: int, speculate: bool) -> float:
    """Median wall milliseconds of a round of the engine, everything captured, the pipeline warm."""
    sampling = SamplingParams(max_tokens=rounds * 6 if speculate else rounds, ignore_eos=True)
    requests = [decoder._request(prompt, sampling, "prompt", streaming=False) for prompt in prompts]
    decoder._start(requests, speculate)
    times = []
    for index in range(rounds + 8):
        start = time.perf_counter()
        decoder.engine.step()
        if index >= 8:  # prefill, captures and first replays
            times.append(time.perf_counter() - start)
        if all(request.is_done for request in requests):
            break
    for request in requests:
        decoder.engine.cancel(request)
    return statistics.median(times) * 1e3


def kernel_ms(decoder: SpecDecoder, prompts: list[list[int]], speculate: bool, rounds: int = 10) -> dict[str, float]:
    """GPU milliseconds per round by kind of kernel, and `idle`: the rest of the GPU's time between first and last kernel."""
    sampling = SamplingParams(max_tokens=400, ignore_eos=True)
    requests = [decoder._request(prompt, sampling, "prompt", streaming=False) for prompt in prompts]
    decoder._start(requests, speculate)
    for _ in range(5):
        decoder.engine.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            decoder.engine.step()
        torch.cuda.synchronize()
    for request in requests:
        decoder.engine.cancel(request)
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spent: dict[str, float] = {}
    for event in events:
        kind = next((k for k, parts in KINDS.items() if any(p.lower() in event.name.lower() for p in parts)), "other")
        spent[kind] = spent.get(kind, 0.0) + event.time_range.elapsed_us() / 1e3 / rounds
    span = (max(e.time_range.end for e in events) - min(e.time_range.start for e in events)) / 1e3 / rounds
    spent["kernels"] = len(events) / rounds
    spent["idle"] = span - sum(v for k, v in spent.items() if k != "kernels")
    return spent


def phase_ms(decoder: SpecDecoder, prompts: list[list[int]], speculate: bool) -> dict[str, float]:
    """Milliseconds per round of each phase, waited for one by one (so their sum exceeds a round's wall time)."""
    engine = decoder.engine
    engine.time_phases = True
    engine.phase_seconds.clear()
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True), speculate=speculate)
    engine.time_phases = False
    rounds = max(output.stats.rounds for output in outputs)
    return {name: seconds * 1e3 / rounds for name, seconds in engine.phase_seconds.items() if name != "prefill"}


def limit_ms(model: CausalLM, head: DraftHead, spec: SpecConfig | None, batch: int, context: int) -> float:
    """Every weight and KV byte read once, at the bandwidth above."""

    def size(module: torch.nn.Module) -> int:
        return sum(p.numel() * p.element_size() for p in module.parameters())

    embedding = model.embed_tokens.weight.numel() * 2
    total = size(model) - embedding + batch * context * TARGET.num_layers * 2 * TARGET.num_kv_heads * TARGET.head_dim * 2
    if spec is not None:
        step = size(head) - embedding - head.fc.weight.numel() * 2
        step += batch * context * 2 * TARGET.num_kv_heads * TARGET.head_dim * 2
        total += spec.num_steps * step + head.fc.weight.numel() * 2
    return total / READ_BANDWIDTH * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--specs", default="5,1,6;5,4,16")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda")
    start = time.perf_counter()
    torch.manual_seed(0)
    model, head = random_pair(args.context + 1024, device)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1000, 100000, (args.batch, args.context), generator=generator).tolist()
    rows: list[dict[str, Any]] = []
    specs = [SpecConfig(*map(int, text.split(","))) for text in args.specs.split(";")]
    for spec in [None, *specs]:
        decoder = make_decoder(model, head, spec or specs[0], args.batch, args.context, device)
        speculate = spec is not None
        row: dict[str, Any] = {
            "work": "plain step" if spec is None else f"round {spec.num_steps},{spec.topk},{spec.num_draft_tokens}",
            "ms": wall_ms(decoder, prompts, args.rounds, speculate),
            "limit_ms": limit_ms(model, head, spec, args.batch, args.context),
            "phases_ms": phase_ms(decoder, prompts, speculate),
            "gpu_ms": kernel_ms(decoder, prompts, speculate),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
        del decoder
        torch.cuda.empty_cache()
    result = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "batch": args.batch, "context": args.context, "dtype": "bfloat16", "weights": "random", "rows": rows,
        "date": time.strftime("%Y-%m-%d"), "total_seconds": time.perf_counter() - start,
    }  # fmt: skip
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
