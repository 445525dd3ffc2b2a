"""What latent attention (MLA) chooses by measurement: tiles, and what is done with prompts.  Prints and writes JSON.

    python benchmarks latent.mla_tiles tiles --out FILE        # each tile that was tried, over cases of each kind
    python benchmarks latent.mla_tiles prompts --out FILE      # absorbed or expanded: limits.py
    python benchmarks latent.mla_tiles conversions --out FILE  # 8-bit latents as they are or converted first: limits.py

The shape (DeepSeek-V3's), the times and their limits are those of mla.py.

Shapes: B sequences, L prefix length, N queries of a sequence, T queries in all, H heads, C rank, R rotated dim.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from graph_timing import timed
from torch import Tensor

from latent.mla import DEVICE, KINDS, SCALING, Around, C, Case, H, Pool, R, measure, run, show, warm, warm_all
from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.mla_cache import LatentLayout
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import FULL
from specdec.attention.latent import limits, mla_launch
from specdec.attention.latent.limits import LIMITS, Limits
from specdec.attention.latent.mla import LatentInputs
from specdec.attention.latent.mla_launch import LatentTiles
from specdec.attention.latent.upconvert import Workspace
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment
from specdec.attention.segment import AttentionPlan
from specdec.ops.products.numerics import FAST

TRIED = [
    LatentTiles(64, 64, 8, 2, 256, hopper=True),
    LatentTiles(64, 64, 8, 2, 256),
    LatentTiles(64, 32, 8, 2, 256),
    LatentTiles(64, 32, 8, 3, 256),
]


def use(tiles: LatentTiles) -> None:
    mla_launch.latent_tiles = lambda *_: tiles


def warm_tiles(job: tuple[LatentTiles, Case]) -> str:
    tiles, case = job
    use(tiles)
    try:
        return f"{tiles}, {warm(case)}"
    except Exception as reason:  # a tile that does not fit is no reason to stop
        return f"{job}: {type(reason).__name__} {str(reason)[:200]}"


def tune(pool: Pool, replays: int) -> list[dict[str, Any]]:
    """Every tile that compiles, over cases of each kind."""
    rows = []
    sizes = ((1, 8192), (1, 32768), (8, 8192), (32, 8192))
    cases = [Case(kind, B, L, N, 64) for (kind, N), (B, L) in itertools.product(KINDS, sizes)]
    cases.append(Case("tree", 32, 8192, 32, 16))
    for tiles in TRIED:
        use(tiles)
        for case in cases:
            try:
                row = {**tiles._asdict(), **measure(case, pool, replays, False)}
            except Exception as reason:  # likewise; the row says why
                row = {**tiles._asdict(), **case._asdict(), "failed": str(reason)[:200]}
            rows.append(row)
        done = [row for row in rows[-len(cases) :] if "us" in row]
        print(tuple(tiles))
        for r in done:
            print("   ", show(r))
    return rows


class OneLayer:
    layers = 1


class Prompt(OneLayer):
    """T tokens of one prompt after `cached` others, through a whole layer's attention without its projections."""

    def __init__(self, T: int, cached: int) -> None:
        pages = -(-(T + cached) // 64)
        self.table = torch.randperm(pages, device=DEVICE).view(1, pages).int()
        self.positions_T = cached + torch.arange(T, device=DEVICE)
        self.cache = KVCache(LatentLayout(C, R, torch.bfloat16), [FULL], pages * 64, device=DEVICE)
        self.cache.buffers["latent"].normal_()
        length_1 = torch.tensor([T + cached], dtype=torch.int32, device=DEVICE)
        segment = replace(causal_segment(PageTable(self.table, 64), length_1, T), max_cached=cached)
        self.plan = AttentionPlan((segment,))
        self.around = Around(T)

    def __call__(self, _: object) -> list[Tensor]:
        slots_T, around = PageTable(self.table, 64).slots_at(self.positions_T[None])[0], self.around
        attn = PagedAttention(TritonBackend(), self.cache, PassTables(self.plan, slots_T))
        return [attn(0, LatentInputs(around.q, around.fresh, around.up, around.prep, FAST, LIMITS), None, SCALING)]


def prompts(_: Pool, replays: int) -> list[dict[str, Any]]:
    """Absorbed against expanded attention, which shows from how many tokens on expanding is faster (limits.py)."""
    rows = []
    for T, cached in itertools.product((256, 512, 1024, 2048, 4096, 8192), (0, 8192)):
        row: dict[str, Any] = {"kind": "prompt", "T": T, "cached": cached}
        for name, above in (("absorbed_us", 1 << 30), ("expanded_us", 0)):
            limits.LIMITS = Limits(expand_above=above)
            step = Prompt(T, cached)
            row[name] = round(timed(step, step, replays)[0], 1)
        rows.append(row)
        print(f"prompt of {T:5} after {cached:5}: absorbed {row['absorbed_us']:9.1f} us, expanded {row['expanded_us']:9.1f} us")
    return rows


class CachedPrompt(OneLayer):
    """T absorbed queries of one prompt, whose latents in 8 bits have been stored, as those of `cached` tokens before them."""

    def __init__(self, T: int, cached: int) -> None:
        pages = -(-(T + cached) // 64)
        self.view = Pool(pages * 64).views("fp8_ds_mla", pages * 64)[0]
        table = torch.randperm(pages, device=DEVICE).view(1, pages).int()
        length_1 = torch.tensor([T + cached], dtype=torch.int32, device=DEVICE)
        self.segment = replace(causal_segment(PageTable(table, 64), length_1, T), max_cached=cached)
        self.q_THL = torch.randn(T, H, C + R, device=DEVICE, dtype=torch.bfloat16)
        self.workspace, self.backend = (
            Workspace.of(self.segment, C + R, torch.bfloat16, LIMITS.workspace_tokens),
            TritonBackend(),
        )

    def direct(self, _: object) -> list[Tensor]:
        return [self.backend.run(self.q_THL, self.view, self.segment, SCALING).out_THD]

    def converted(self, _: object) -> list[Tensor]:
        return [self.workspace.state(self.backend, self.q_THL, self.view, SCALING).out_THD]


def conversions(_: Pool, replays: int) -> list[dict[str, Any]]:
    """Prompts over latents in 8 bits: read as they are, or converted first (limits.py)."""
    rows = []
    for T, cached in itertools.product((16, 32, 64, 128, 256, 512), (0, 2048, 8192, 32768)):
        prompt = CachedPrompt(T, cached)
        direct, converted = (round(timed(step, prompt, replays)[0], 1) for step in (prompt.direct, prompt.converted))
        rows.append({"kind": "converted", "T": T, "cached": cached, "direct_us": direct, "converted_us": converted})
        print(f"prompt of {T:5} after {cached:5}: direct {direct:9.1f} us, converted {converted:9.1f} us")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"tiles": tune, "prompts": prompts, "conversions": conversions}
    parser.add_argument("choice", choices=parts)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--replays", type=int, default=9)
    args = parser.parse_args()
    if args.choice == "tiles":
        warm_all(warm_tiles, list(itertools.product(TRIED, [Case(kind, 2, 300, N, P) for kind, N in KINDS for P in (64, 16)])))
    run((parts[args.choice],), args.replays, args.out)
    return 0
