"""Times one layer of sparse latent attention against dense latent attention at DeepSeek V3.2's dims, in bf16 under CUDA graphs.

A layer is all that lies between its projections: the stores, the indexer's scores and choice, absorbed queries, attention, and
values.  Prompts are chunks of 2,048 tokens after a cached prefix, where dense attention is expanded; they run without a graph.
"""

from __future__ import annotations

import argparse
import json
import sys
from copy import copy
from pathlib import Path

import torch
from torch import Tensor

from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.mla_cache import LatentLayout
from specdec.attention.caches.sparse_cache import SparseLatentLayout
from specdec.attention.inputs import LayerInputs
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import FULL, Scoring
from specdec.attention.latent.mla import LatentInputs
from specdec.attention.latent.prep import LatentPrep
from specdec.attention.pages import PageTable
from specdec.attention.segment import AttentionPlan, Segment, uniform_cu_seqlens
from specdec.attention.sparse.index_store import IndexPrep
from specdec.attention.sparse.inputs import IndexInputs, SparseLatentInputs
from specdec.ops.rope import Rotation, rotary_table

H, C, R, N, V, J, I, TOPK, PAGE = 128, 512, 64, 128, 128, 64, 128, 2048, 64
SCORING = Scoring(scale=0.1)
DECODE = [(B, L) for L in (8192, 32768, 131072) for B in (1, 8, 32)]
PROMPTS = [(1, L) for L in (0, 8192, 32768, 131072)]
POOL = 24 << 30  # bytes of the cache; as many layers take part as fit, up to 8, so that no layer's keys stay in the L2 cache


class World:
    """B sequences of L cached tokens and n new ones each, on pages in random order."""

    def __init__(self, B: int, L: int, n: int) -> None:
        self.B, self.n, pages = B, n, -(-(L + n) // PAGE)
        slots, layout = B * pages * PAGE, SparseLatentLayout(LatentLayout(C, R, torch.bfloat16), I, torch.bfloat16)
        self.layers = max(1, min(8, POOL // (layout.layer_bytes(0) * slots)))
        self.cache = KVCache(layout, (FULL,) * self.layers, slots, device="cuda")
        for plane in self.cache.planes.values():
            plane.normal_()
        self.pages = PageTable(torch.randperm(B * pages, device="cuda").int().view(B, pages), PAGE)
        self.positions_T = (L + torch.arange(n, device="cuda")).repeat(B)
        self.slots_T = self.pages.slots_at(self.positions_T.view(B, n)).flatten()
        lens, cu = torch.full((B,), L + n, dtype=torch.int32, device="cuda"), uniform_cu_seqlens(B, n, torch.device("cuda"))
        self.plan = AttentionPlan((Segment(self.pages, lens, cu, n, n > 1, max_cached=L if n > 1 else None),), self.positions_T)
        frequencies = 10000.0 ** -(torch.arange(R // 2) / (R // 2))
        self.rotation = Rotation(rotary_table(frequencies, L + n).to("cuda", torch.bfloat16), self.positions_T)
        self.up_HXC = rand(H, N + V, C) / C**0.5
        self.parts = [rand(B * n, *shape) for shape in ((H, N + R), (C + R,), (J, I), (I,), (J,))]
        self.ones = torch.ones(C, device="cuda", dtype=torch.bfloat16)

    def inputs(self, sparse: bool) -> LayerInputs:
        q_THQ, latent_TL, q_TJI, key_TI, weights_TJ = self.parts
        latents = LatentInputs(q_THQ, latent_TL, self.up_HXC, LatentPrep(self.rotation, self.ones, 1e-6))
        if not sparse:
            return latents
        prep = IndexPrep(self.rotation, self.ones[:I], torch.zeros_like(self.ones[:I]), 1e-6, J**-0.5)
        return SparseLatentInputs(latents, TOPK, IndexInputs(q_TJI, key_TI, weights_TJ, prep))

    def run(self, sparse: bool) -> Tensor:
        """One pass through all layers."""
        cache = self.cache if sparse else _latents_of(self.cache)
        attn = PagedAttention(TritonBackend(), cache, PassTables(self.plan, self.slots_T))
        for layer in range(self.layers):
            out = attn(layer, self.inputs(sparse), None, SCORING)
        return out


def _latents_of(cache: KVCache) -> KVCache:
    """The same latents, for dense layers."""
    latents = copy(cache)
    latents._views = [cache.view(layer).latents for layer in range(len(cache.kinds))]  # type: ignore[attr-defined]
    return latents


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def timed(world: World, sparse: bool, captured: bool, replays: int) -> float:
    """The median time of a layer in microseconds."""
    world.run(sparse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            world.run(sparse)
    times = []
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay() if captured else world.run(sparse)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[2:])[replays // 2] * 1000 / world.layers


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the numbers, as JSON")
    parser.add_argument("--replays", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: us of a layer, {J} x {I}, top {TOPK}, {H} heads")
    for kind, cases, n in (("decode", DECODE, 1), ("chain of 6", [(8, 32768)], 6), ("prompt", PROMPTS, 2048)):
        for B, L in cases:
            world = World(B, L, n)
            dense, sparse = (timed(world, which, n < 2048, args.replays) for which in (False, True))
            rows.append(dict(kind=kind, batch=B, cached=L, queries=n, dense_us=round(dense, 1), sparse_us=round(sparse, 1)))
            print(f"{kind:10} {B:3} x {L:6}  dense {dense:9.1f}  sparse {sparse:9.1f}  {dense / sparse:5.2f} times", flush=True)
            del world
            torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(
            json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
