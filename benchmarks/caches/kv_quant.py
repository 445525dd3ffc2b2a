"""What keeping KV in 8 bits costs and brings: quality on the shipped pair, milliseconds a round at the Llama-3.1-8B shape.

    python benchmarks caches.kv_quant quality --out benchmarks/caches/results/kv_quant_cpu.json       # any device
    python benchmarks caches.kv_quant rounds --out benchmarks/caches/results/kv_quant_h100.json       # a GPU of 80 GB

quality: accept length and texts of the shipped pair, over float32 KV and over KV in 8 bits.  Then how far attention and logits
move away from those over float32 KV, in one dense forward over the pair's texts: with 8 bits, and with bf16 for comparison.
rounds: random weights and random stored keys and values, through the engine, host included.  Prompts are not prefilled, since
the values that are stored do not change what a round costs.
"int8 queries" and "int8_keys queries" stand for these caches with int8_queries=True.  attention.py --caches times one layer.

Shapes: T tokens, V vocabulary, K kv heads, D head dim.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from engine_internals import caches, num_pages, target_cache, without_prefill
from gpus import this_gpu
from torch import Tensor

from specdec import SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.attention.caches.int8_keys import INT8_KEYS, Int8KeysLayout, Int8KeysView, rounded_queries
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.quant_cache import HEADROOM, QuantLayout, QuantView, as_stored
from specdec.attention.eager.dense import DenseAttention, StoreFn
from specdec.attention.inputs import HeadInputs, LayerInputs
from specdec.attention.kinds import FULL
from specdec.bench.byte_limit import byte_limit
from specdec.bench.kernels import trace
from specdec.bench.profile import Workload, full_rounds
from specdec.bench.prompt_file import read_prompts
from specdec.loading.memory import pool_plan
from specdec.loading.resolve import EngineSettings, resolve_settings
from specdec.options import EngineOptions
from specdec.prompts.tokenizer import Tokenizer
from specdec.session import Session

QUERIES = " queries"
KINDS = ("auto", "fp8", "int8", "int8 queries", INT8_KEYS, INT8_KEYS + QUERIES)
SHAPES = ("5,1,6", "5,8,32")
PROMPTS, MAX_TOKENS = 48, 128
BATCH, CONTEXT = 8, 32768


def options_of(kind: str) -> dict[str, Any]:
    """The engine options of one of KINDS."""
    return dict(kv_cache_dtype=kind.removesuffix(QUERIES), int8_queries=kind.endswith(QUERIES))


# ---- quality ----


def texts(kind: str, shape: str) -> tuple[list[list[int]], float, SpecDecoder]:
    """(prompts and their texts, accept length, the decoder) of the shipped pair, greedy."""
    spec = SpecConfig(*map(int, shape.split(",")))
    folders = shipped.target_folder(), shipped.draft_folder()
    settings: dict[str, Any] = dict(dtype="float32", device="cpu", **options_of(kind))
    decoder = SpecDecoder.from_pretrained(*folders, spec, **settings)
    prompts = read_prompts(shipped.prompts_file(), PROMPTS)
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    rounds = sum(out.stats.rounds for out in outputs)
    emitted = sum(out.stats.emitted for out in outputs)
    return [[*out.prompt_token_ids, *out.token_ids] for out in outputs], emitted / rounds, decoder


class Compared(DenseAttention):
    """Dense attention as stored, which also notes how far each layer's output is from that over the values as they are."""

    def __init__(self, as_stored: StoreFn, int8_queries: bool) -> None:
        super().__init__([FULL] * 1000, as_stored=as_stored, queries_as_read=rounded_queries if int8_queries else None)
        self.exact, self.errors = DenseAttention(self.kinds), list[float]()

    def __call__(self, layer: int, inputs: LayerInputs, *args: Any, **kwargs: Any) -> Tensor:
        assert isinstance(inputs, HeadInputs)
        want = self.exact(layer, HeadInputs(inputs.qkv_TXD.clone(), inputs.prep), *args, **kwargs)
        got = super().__call__(layer, inputs, *args, **kwargs)
        self.errors.append(float((got - want).norm() / want.norm()))
        return got


@torch.inference_mode()
def errors(decoder: SpecDecoder, sequences: list[list[int]], as_stored: StoreFn) -> dict[str, float]:
    """Attention outputs of each layer by themselves (relative, ||.||), and logits at the end of all layers."""
    model, relative, differences, same, scale = decoder.model, list[float](), list[Tensor](), list[Tensor](), list[Tensor]()
    for ids in sequences:
        ids_T, positions_T = torch.tensor(ids), torch.arange(len(ids))
        attn = Compared(as_stored, decoder.settings.options.int8_queries)
        got_TV = model.logits(model(ids_T, positions_T, attn).hidden_TH)
        want_TV = model.logits(model(ids_T, positions_T, attn.exact).hidden_TH)
        relative += attn.errors
        differences.append((got_TV - want_TV).abs().flatten())
        same.append(got_TV.argmax(-1) == want_TV.argmax(-1))
        scale.append(want_TV.std(-1))
    all_V, std = torch.cat(differences), torch.cat(scale).mean()
    return {
        "attention_relative_mean": sum(relative) / len(relative), "attention_relative_max": max(relative),
        "logits_mean": float(all_V.mean()), "logits_max": float(all_V.max()), "logits_std": float(std),
        "same_best_token": float(torch.cat(same).float().mean()),
    }  # fmt: skip


def quality(only: str | None) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    baseline: dict[str, tuple[list[list[int]], float]] = {}
    for shape in ("5,1,6", "5,4,16"):
        for kind in [kind for kind in KINDS if kind == "auto" or only is None or kind.startswith(only)]:
            found, tau, decoder = texts(kind, shape)
            baseline.setdefault(shape, (found, tau))
            reference, reference_tau = baseline[shape]
            cache = target_cache(decoder)
            row: dict[str, Any] = {
                "kv": kind, "spec": shape, "accept_length": tau, "change": tau / reference_tau - 1,
                "equal_texts": sum(a == b for a, b in zip(found, reference, strict=True)), "prompts": len(found),
                "pool_bytes": pool_bytes(decoder), "pool_bytes_in_bf16": pool_bytes_in_bf16(decoder),
            }  # fmt: skip
            stores: StoreFn = as_stored(cache) or as_bf16
            if shape == "5,1,6":
                row["errors of bf16 KV" if kind == "auto" else "errors"] = errors(decoder, reference, stores)
            rows.append(row)
            print(json.dumps(row), flush=True)
    return {"pair": "shipped", "dtype": "float32", "max_tokens": MAX_TOKENS, "fp8_headroom": HEADROOM, "rows": rows}


def as_bf16(layer: int, kv_T2KD: Tensor) -> Tensor:
    return kv_T2KD.bfloat16().to(kv_T2KD.dtype)


def pool_bytes(decoder: SpecDecoder) -> int:
    """Bytes of both caches as they lie in memory, scales included."""
    return sum(cache.bytes for cache in caches(decoder))


def pool_bytes_in_bf16(decoder: SpecDecoder) -> int:
    settings = replace(decoder.settings.with_options(**options_of("auto")), dtype=torch.bfloat16)
    return counted_bytes(decoder, settings)


def counted_bytes(decoder: SpecDecoder, settings: EngineSettings) -> int:
    """Bytes of the pool as its size is computed."""
    configs = [decoder.model.config] + ([decoder.head.config.model] if decoder.head else [])
    return num_pages(decoder) * sum(pool_plan(configs, settings, 1 << 60).page_bytes)


# ---- rounds ----


def fill(cache: KVCache) -> None:
    """Random numbers, as though they had been stored."""
    if isinstance(cache.layout, Int8KeysLayout):
        for view in map(cache.view, range(len(cache.kinds))):
            assert isinstance(view, Int8KeysView)
            for part in view.heads:
                part.random_(-127, 128) if part.dtype == torch.int8 else part.normal_()
        cache.buffers["scales"].uniform_(1e-3, 2e-2)
    elif isinstance(cache.layout, QuantLayout):
        bytes_ = cache.buffers["kv"].view(torch.uint8)
        for layer, view in enumerate(map(cache.view, range(len(cache.kinds)))):
            bytes_[layer].copy_(torch.randint(0, 120, bytes_[layer].shape, dtype=torch.uint8, device=bytes_.device))
            assert isinstance(view, QuantView)
            if view.scale_2K is not None:
                view.scale_2K.fill_(1 / 64)
                view.needs_scale = False
        if "scales" in cache.buffers:
            cache.buffers["scales"].uniform_(1e-3, 2e-2)
    else:
        for layer in cache.buffers["kv"]:
            layer.normal_()


def measure(model: Any, head: Any, kind: str, shape: str, rounds: int) -> dict[str, Any]:
    from rounds import round_8b

    spec = round_8b.spec_of(shape)
    options = EngineOptions(
        device="cuda:0", dtype="bfloat16", max_batch_size=BATCH, max_seq_len=CONTEXT + 1024, attention="triton",
        **options_of(kind),
    )  # fmt: skip
    settings = resolve_settings(options, spec, model.config)
    decoder = SpecDecoder(model, head, settings, Tokenizer(Path("/nonexistent")))
    for cache in caches(decoder):
        fill(cache)
    without_prefill(decoder)
    sampling = [SamplingParams(max_tokens=900, ignore_eos=True)] * BATCH
    session = Session(decoder)
    work = Workload(session, round_8b.random_prompts(BATCH, CONTEXT), sampling, speculate=spec is not None)
    full_rounds(work, session.step, 8)  # compiles, captures
    walls = [full_rounds(work, session.timed_step, rounds) for _ in range(2)]
    ms = [[1e3 * step.wall for step, _ in found] for found in walls]
    limit = byte_limit(model, head, spec, BATCH, CONTEXT, options.kv_cache_dtype)
    with work.running():
        split = trace(session.step, 10, decoder.settings.device)
    row = {
        "kv": kind, "spec": shape, "batch": BATCH, "context": CONTEXT, "ms": median(ms[0] + ms[1]),
        "ms_of_each_half": [median(half) for half in ms], "rounds": 2 * rounds,
        "limit_ms": 1e3 * limit.total / this_gpu().read_bandwidth, "kv_bytes": pool_bytes(decoder),
        "counted_kv_bytes": counted_bytes(decoder, decoder.settings),
        "gpu_ms": split.span, "phases_ms": split.by_phase, "kinds_ms": split.by_kind, "longest": split.longest,
    }  # fmt: skip
    print(json.dumps({key: row[key] for key in list(row)[:9] + ["phases_ms", "kinds_ms"]}), flush=True)
    return row


def rounds(count: int, only: str | None) -> dict[str, Any]:
    import triton
    from rounds import round_8b

    torch.manual_seed(0)
    model, head = round_8b.random_pair(CONTEXT + 2048, torch.device("cuda", 0))
    rows = []
    for kind in KINDS:
        for shape in SHAPES:
            if only is None or f"{kind}:{shape}".startswith(only):
                rows.append(measure(model, head, kind, shape, count))
                torch.cuda.empty_cache()
    return {
        "device": torch.cuda.get_device_name(), "triton": triton.__version__, "weights": "random", "dtype": "bfloat16",
        "read_bandwidth": this_gpu().read_bandwidth, "rows": rows,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("quality", "rounds"))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", help="caches whose name starts with this; of rounds: cases whose kv:S,k,nd does")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = quality(args.only) if args.what == "quality" else rounds(args.rounds, args.only)
    result |= {"torch": torch.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
