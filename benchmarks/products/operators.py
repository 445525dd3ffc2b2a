"""What operators cost and what tracing gains: host time of an operator's call, and a decode step run in four ways.

    python benchmarks products.operators --out benchmarks/products/results/operators_h200.json

The shape is that of Llama-3.2-1B (hidden 2,048, 16 layers unless --layers says otherwise, 32 query and 8 kv heads of 64, a
vocabulary of 128,256 tokens), bf16, random weights.  A step is `directly` the runtime's pass over the triton backend,
`operators` the same module called eagerly, `exported` the program of torch.export, `compiled` torch.compile(fullgraph=True) by
inductor.  Each is measured as the host launches it, and replayed as a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.attention.attend import PagedAttention, PassTables, make_backend
from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.kinds import Scoring
from specdec.attention.operators.heads import PAGED_ATTENTION, ROPE_STORE
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment
from specdec.attention.segment import AttentionPlan
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.loader import build
from specdec.models.llama.config import parse_llama
from specdec.operators import DecodePass, export_decode
from specdec.ops.norm import ADD_RMS_NORM, add_rms_norm
from specdec.ops.products.dense import LINEAR, linear
from specdec.ops.rope import HeadPrep, Rotation

SHAPE = dict(
    model_type="llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=5e5,
    tie_word_embeddings=True, hidden_act="silu",
)  # fmt: skip
PAGE, DEVICE = 16, torch.device("cuda")
Call = Callable[[], Any]


def host_us(call: Call, calls: int = 100, repeats: int = 15) -> float:
    """Microseconds that the host needs for a call, by the median of repeats between which the GPU catches up."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times[2:])


def step_us(call: Call, calls: int = 10, repeats: int = 15) -> float:
    """Microseconds of a call on the GPU, launches included where the host is slower, by the median of repeats."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[3:])


def captured(call: Call) -> Call:
    """A replay of the call as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def dispatch_rows() -> list[dict[str, Any]]:
    """One decode step's functions, called directly and through their operators."""
    H, Q, K, D, slots = 2048, 32, 8, 64, 1024
    x, weight_OH, norm_H = bf16(1, H), bf16(3072, H), bf16(H)
    view, qkv = MHAView(bf16(slots, 2, K, D)), bf16(1, Q + 2 * K, D)
    slot_1, table_P2D = torch.tensor([1000], device=DEVICE), bf16(slots, 2, D)
    prep, backend = HeadPrep(Rotation(table_P2D, slot_1), K), make_backend("triton")
    pages = PageTable(torch.arange(slots // PAGE, dtype=torch.int32, device=DEVICE)[None], PAGE)
    segment = causal_segment(pages, torch.tensor([1001], dtype=torch.int32, device=DEVICE), 1)
    rows = (pages.table, segment.cache_seqlens, segment.cu_seqlens_q, 1, PAGE, False, D**-0.5)
    pairs: dict[str, tuple[Call, Call]] = {
        "linear": (lambda: linear(x, weight_OH), lambda: LINEAR(x, weight_OH)),
        "add_rms_norm": (lambda: add_rms_norm(x, x, norm_H, 1e-5), lambda: ADD_RMS_NORM(x, x, norm_H, 1e-5)),
        "rope_store": (
            lambda: backend.store(view, qkv, slot_1, prep),
            lambda: ROPE_STORE(qkv, view.kv, slot_1, slot_1, table_P2D),
        ),
        "paged_attention": (
            lambda: backend.run(qkv[:, :Q], view, segment, Scoring(D**-0.5)),
            lambda: PAGED_ATTENTION(qkv[:, :Q], view.kv, None, False, *rows),
        ),
    }
    found = []
    for name, (direct, operator) in pairs.items():
        row = {"function": name, "direct_us": host_us(direct), "operator_us": host_us(operator)}
        print(f"{name:16s} direct {row['direct_us']:6.1f} us, operator {row['operator_us']:6.1f} us")
        found.append(row)
    return found


def random_target(layers: int) -> CausalLM:
    config = parse_llama({**SHAPE, "num_hidden_layers": layers}, "the shape of Llama-3.2-1B")
    model = build(lambda: CausalLM(config, 8192), DEVICE, torch.bfloat16)
    for name, weight in model.named_parameters():
        weight.fill_(1.0) if "norm" in name else weight.normal_(std=0.02)
    return model


def steps(decode: DecodePass, batch: int, context: int) -> dict[str, Callable[[], Tensor]]:
    """The same decode step in each way."""
    width = context // PAGE + 1
    cache = decode.new_cache(batch * width * PAGE)
    for layer in cache:
        layer["kv"].normal_()
    table_BW = torch.randperm(batch * width, device=DEVICE).int().view(batch, width)
    lens_B = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
    args = (torch.randint(1000, (batch, 1), device=DEVICE), table_BW, lens_B, cache)
    pages, backend, model = PageTable(table_BW, PAGE), make_backend("triton"), decode.target
    given = decode.given_cache(cache)

    def directly() -> Tensor:
        new = pages.next_tokens(lens_B, 1)
        plan = AttentionPlan((causal_segment(pages, new.ends_PB[0], 1),))
        attn = PagedAttention(backend, given, PassTables(plan, new.slots.flatten()))
        return model.logits(model(args[0].flatten(), new.positions.flatten(), attn).hidden_TH)

    sizes = dict(batch=batch, num_tokens=1, table_width=width, num_slots=batch * width * PAGE)
    exported, compiled = export_decode(decode, **sizes).module(), torch.compile(decode, fullgraph=True)
    return {
        "directly": directly,
        "operators": lambda: decode(*args),
        "exported": lambda: exported(*args),
        "compiled": lambda: compiled(*args),
    }


def step_rows(layers: int, batches: list[int], context: int) -> list[dict[str, Any]]:
    decode, found = DecodePass(random_target(layers), PAGE), []
    for batch in batches:
        ways = steps(decode, batch, context)
        want = ways["directly"]().float()
        for name, way in ways.items():
            start = time.perf_counter()
            error = float((way().float().view_as(want) - want).norm() / want.norm())
            seconds = time.perf_counter() - start
            row = dict(
                batch=batch, way=name, error=error, first_call_s=seconds, us=step_us(way), graph_us=step_us(captured(way))
            )
            print(f"batch {batch:2d} {name:10s} {row['us']:7.0f} us, in a graph {row['graph_us']:6.0f} us, error {error:.1e}")
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.no_grad():
        batches = [int(batch) for batch in args.batches.split(",")]
        result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **vars(args), "out": None}
        result |= {"dispatch": dispatch_rows(), "steps": step_rows(args.layers, batches, args.context)}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
