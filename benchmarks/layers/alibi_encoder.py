"""ALiBi, cross attention and encoder attention alone, in bf16.  Prints a table, and writes JSON.

    python benchmarks layers.alibi_encoder --out benchmarks/layers/results/alibi_encoder_h200.json

ALiBi: 32/8 heads of 128 over scattered pages of 16, with slopes and without.  Cross attention: 16 heads of 64, texts of 1,024
tokens (BART).  Encoder attention: 12 heads of 64, all of a text and windows of 64 tokens on both sides (ModernBERT), beside
torch's own attention over all of it.  Times are medians of CUDA-graph replays, per layer; a graph holds several layers with
caches of their own, so that a layer finds its keys in memory and not in L2.  The byte limit is the time to read keys and values
once; that of an encoder also writes the output.

Shapes: B sequences, L keys, N queries of a sequence.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from graph_timing import replay_us
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.encoder.encoder_texts import EncoderTexts
from specdec.attention.encoder.texts import attend_texts, encoder_segment
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import FULL, PLAIN, LayerKind, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
BANDWIDTH = 4.48e12  # bytes a second, measured on one H200
IN_MEMORY = 200_000_000  # bytes of keys and values that a graph's layers hold together, four times L2
DEPTH = 8  # of the trees


def timed(steps: list[Callable[[], Tensor]], replays: int) -> float:
    """Microseconds of one of the steps, which are replayed as one graph."""
    for step in steps[:2]:
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    return replay_us(graph, replays) / len(steps)


def layers_of(slots: int, K: int, D: int) -> list[MHAView]:
    count = max(2, min(24, -(-IN_MEMORY // (slots * 2 * K * D * 2))))
    return [MHAView(torch.randn(slots, 2, K, D, device=DEVICE, dtype=BF16)) for _ in range(count)]


def steps_over(views: list[MHAView], plan: AttentionPlan, q_THD: Tensor, scoring: Scoring) -> list[Callable[[], Tensor]]:
    backend = TritonBackend()
    prepared = backend.prepare(plan)
    return [lambda view=view: backend.attend(q_THD, view, prepared, scoring).out_THD for view in views]  # type: ignore[misc]


def alibi(kind: str, B: int, L: int, N: int, replays: int) -> dict[str, Any]:
    """A tree's or a chain's queries with slopes, and the same without."""
    H, K, D, P = 32, 8, 128, 16
    width = -(-(L + N) // P)
    pages = PageTable(torch.randperm(B * width, device=DEVICE).view(B, width).int(), P)
    lens = torch.full((B,), L, dtype=torch.int32, device=DEVICE)
    if kind == "tree":
        parents = [0, *((n - 1) // 2 for n in range(1, N))]
        mask = torch.eye(N, dtype=torch.bool)
        for node in range(1, N):
            mask[node] |= mask[parents[node]]
        slots = pages.slots_at((L + torch.arange(N, device=DEVICE)).expand(B, N))
        suffix = replace(Segment.empty(B * N, DEPTH, 1, device=DEVICE), base_B=lens)
        fill_tree_suffix(suffix, slots, mask.to(DEVICE).expand(B, N, N))
        positions = (L + mask.sum(1) - 1).repeat(B).to(DEVICE)
        plan = AttentionPlan((prefix_segment(pages, lens, N),), positions, suffix)
    else:
        plan = AttentionPlan((causal_segment(pages, lens, N),))
    views, q = layers_of(B * width * P, K, D), torch.randn(B * N, H, D, device=DEVICE, dtype=BF16)
    slopes = Scoring(slopes_H=2.0 ** -torch.arange(0.25, 8.25, 0.25, device=DEVICE))
    without = timed(steps_over(views, plan.local(FULL), q, PLAIN), replays)
    with_slopes = timed(steps_over(views, plan.local(LayerKind(alibi=True)), q, slopes), replays)
    limit = B * L * 2 * K * D * 2 / BANDWIDTH * 1e6
    return {"what": f"alibi {kind}", "B": B, "L": L, "N": N, "us": with_slopes, "without": without, "limit": limit}


def cross(B: int, N: int, replays: int) -> dict[str, Any]:
    K, D, S = 16, 64, 1024
    views, q = layers_of(B * S, K, D), torch.randn(B * N, K, D, device=DEVICE, dtype=BF16)
    texts = EncoderTexts(torch.randperm(B, device=DEVICE).int(), torch.full((B,), S, dtype=torch.int32, device=DEVICE), S)
    us = timed(steps_over(views, AttentionPlan((texts.read_by(N),)), q, PLAIN), replays)
    return {"what": "cross", "B": B, "L": S, "N": N, "us": us, "limit": B * S * 2 * K * D * 2 / BANDWIDTH * 1e6}


def encoder(B: int, S: int, reach: int | None, replays: int) -> dict[str, Any]:
    """Texts of S tokens; `without`: torch's attention over all of each text, whatever the window."""
    H, D = 12, 64
    cu = torch.arange(0, B * S + 1, S, dtype=torch.int32, device=DEVICE)
    segment = encoder_segment(cu, S, torch.arange(S, device=DEVICE).repeat(B), reach, ragged=False)
    q, k, v = (torch.randn(B * S, H, D, device=DEVICE, dtype=BF16) for _ in range(3))
    backend = TritonBackend()
    us = timed([lambda: attend_texts(backend, q, k, v, segment)] * 4, replays)
    dense = [x.view(B, S, H, D).transpose(1, 2).contiguous() for x in (q, k, v)]
    torchs = timed([lambda: F.scaled_dot_product_attention(*dense)] * 4, replays)
    limit = B * S * 4 * H * D * 2 / BANDWIDTH * 1e6
    what = "encoder" if reach is None else f"encoder window {reach}"
    return {"what": what, "B": B, "L": S, "N": S, "us": us, "without": torchs, "limit": limit}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--replays", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    with torch.inference_mode():
        for kind, N in (("decode", 1), ("chain", 6), ("tree", 32)):
            rows += [alibi(kind, B, L, N, args.replays) for B, L in ((1, 8192), (8, 8192), (32, 2048))]
        rows += [cross(B, N, args.replays) for B in (1, 8, 32) for N in (1, 6, 32)]
        rows += [encoder(B, S, reach, args.replays) for B, S in ((8, 512), (4, 8192)) for reach in (None, 64)]
    for row in rows:
        beside = f"{row['without']:8.1f}" if "without" in row else " " * 8
        where = f"{row['what']:18} B={row['B']:<3} L={row['L']:<6} N={row['N']:<5}"
        print(f"{where} {row['us']:8.1f} us {beside}  limit {row['limit']:7.1f}")
    if args.out is not None:
        report = {"device": torch.cuda.get_device_name(), "bandwidth": BANDWIDTH, "rows": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0
