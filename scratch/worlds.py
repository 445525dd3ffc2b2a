"""Layers of the 8B shape with real attention, timed under graphs with other tiles.  Scratch: not for the repository."""
import math, os, statistics, sys, time
from dataclasses import replace
from functools import partial
import torch
from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.kernels import triton_backend
from specdec.attention.kernels.tiles_triton import PagedTiles
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import LayerKind
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.loader import build
from specdec.models.config import ModelConfig, RopeConfig
from specdec.ops.products import linear as linear_module
from specdec.ops.products.numerics import Numerics
from specdec.ops.products.tiles import ProductTiles

LAYERS = 12
DEV = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
TARGET = ModelConfig(
    family="llama", hidden_size=4096, intermediate_size=14336, num_layers=LAYERS, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=32000, rms_norm_eps=1e-5, rope=RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192), max_position=131072,
)
PRODUCTS = {"qkv": (6144, 4096, False), "o": (4096, 4096, False), "gu": (14336 * 2, 4096, True), "down": (4096, 14336, False)}
OVER = {}  # (O, I) -> tiles
PAGED = [None]  # (PagedTiles, splits)
_plain_tiles, _plain_paged = Numerics.product_tiles, TritonBackend._tiles

def product_tiles(self, T, O, I, dtype, gated, kind=None, tuned=None):
    return OVER.get((O, I)) or _plain_tiles(self, T, O, I, dtype, gated, kind, None)

def paged(self, q, view, segment):
    return PAGED[0] or _plain_paged(self, q, view, segment)

Numerics.product_tiles = product_tiles
TritonBackend._tiles = paged

from specdec.ops.products import normed as normed_module
DEFER = [False]
JOIN = [False]
_plain_joins = TritonBackend._joins
TritonBackend._joins = lambda self, *a: JOIN[0] and _plain_joins(self, *a)
_normed_tiles = normed_module._tiles
normed_module._tiles = lambda *a: _normed_tiles(*a) if DEFER[0] else None

def make_model():
    torch.manual_seed(0)
    model = build(lambda: CausalLM(TARGET, 40000), DEV, torch.bfloat16)
    for p in model.parameters():
        p.normal_(std=0.02) if p.dim() > 1 else p.fill_(1.0)
    return model

class World:
    """kind: chain or tree; B rows of L tokens, N nodes."""
    def __init__(self, model, kind, B, L, N, depth=6, pages_extra=1024):
        self.model, self.name = model, f"{kind} b{B} n{N} L{L}"
        width = -(-(L + pages_extra + 64) // 16)
        held = -(-(L + N + 16) // 16)
        slots = B * held * 16
        self.cache = KVCache(HeadsLayout(8, 128, torch.bfloat16), [LayerKind()] * LAYERS, slots, device=DEV)
        for planes in self.cache.planes_of.values():
            for plane in planes.values():
                plane.normal_()
        table = torch.zeros(B, width, dtype=torch.int32, device=DEV)
        table[:, :held] = torch.randperm(B * held, device=DEV).view(B, held).int()
        pages, lens = PageTable(table, 16), torch.full((B,), L, dtype=torch.int32, device=DEV)
        at = lens[:, None].long() + torch.arange(N, device=DEV)
        self.slots_T = pages.slots_at(at).flatten()
        if kind == "chain":
            plan = AttentionPlan((causal_segment(pages, lens + N, N),), at.flatten())
            self.positions_T = at.flatten()
        else:
            mask = torch.eye(N, dtype=torch.bool)
            g = torch.Generator().manual_seed(0)
            for n in range(1, N):
                shallow = [p for p in range(n) if mask[p].sum() < depth]
                mask[n] |= mask[shallow[int(torch.randint(len(shallow), (), generator=g))]]
            mask = mask.to(DEV)
            suffix = replace(Segment.empty(B * N, min(N, depth), 1, device=DEV), base_B=lens)
            fill_tree_suffix(suffix, self.slots_T.view(B, N), mask.expand(B, N, N))
            self.positions_T = (L + mask.sum(1) - 1).repeat(B)
            plan = AttentionPlan((prefix_segment(pages, lens, N),), self.positions_T, suffix)
        self.plan, self.ids = plan, torch.randint(0, 32000, (B * N,), device=DEV)
        self.backend = TritonBackend()

    def run(self):
        attn = PagedAttention(self.backend, self.cache, PassTables(self.plan, self.slots_T))
        return self.model(self.ids, self.positions_T, attn).hidden_TH

    def few(self):
        layers = self.model.layers
        try:
            self.model.layers = layers[:2]
            return self.run()
        finally:
            self.model.layers = layers

    def graph(self):
        self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.out = self.run()
        return graph

    def us(self, replays=11):
        graph = self.graph()
        times = []
        for _ in range(2 + replays):
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record(); graph.replay(); b.record(); b.synchronize()
            times.append(a.elapsed_time(b) * 1e3)
        return statistics.median(times[2:]) / LAYERS

def short(t):
    if t is None: return "default"
    return f"({t.block_t},{t.block_o},{t.block_i},s{t.splits},w{t.warps},st{t.stages},l{t.lag})"

def timeline(world, replays=4):
    """Own us of each launch of a layer, in the order of launches, averaged over layers."""
    graph = world.graph()
    for _ in range(3): graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for _ in range(replays): graph.replay()
        torch.cuda.synchronize()
    spans = sorted(((e.time_range.start, e.time_range.end, e.name) for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA))
    now, place, own, waits = spans[0][0], 0, {}, {}
    order = ["qkv", "o", "gu", "down"]
    n_lin = n_norm = 0
    for s, e, name in spans:
        if "hopper_linear" in name or "linear" in name:
            key = order[n_lin % 4]; n_lin += 1
        elif "add_rms" in name:
            key = "norm_" + ("in" if n_norm % 2 == 0 else "post"); n_norm += 1
        else:
            key = name[:24]
        own.setdefault(key, []).append(max(0.0, e - max(s, now)))
        waits.setdefault(key, []).append(e - s)
        now = max(now, e)
    print("   timeline", world.name, ", ".join(f"{k} {sum(v) / (replays * LAYERS):.2f} (span {statistics.median(waits[k]):.1f})" for k, v in own.items() if len(v) >= replays * LAYERS / 2), flush=True)
