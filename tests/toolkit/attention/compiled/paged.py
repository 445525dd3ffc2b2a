"""Compiles paged_hopper.py's kernel for a Hopper GPU, on a machine that needs none.  Run it in a process of its own,
with the folder of tests on the path."""

from dataclasses import replace

import torch

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.kernels import paged_hopper
from specdec.attention.kernels.hopper_tiles import _tiles
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, prefix_segment
from toolkit.attention.compiled.hopper import compile_only

KV_HEADS, GROUP = 2, 4


def compile_for(queries: int, D: int, causal: bool, window: bool, joined: bool = False) -> None:
    T, H = 2 * queries, KV_HEADS * GROUP
    q_THD = torch.zeros(T, H, D, dtype=torch.bfloat16)
    view = MHAView(torch.zeros(256, 2, KV_HEADS, D, dtype=torch.bfloat16))
    pages, lens_B = PageTable(torch.zeros(2, 8, dtype=torch.int32), 16), torch.full((2,), queries, dtype=torch.int32)
    segment = causal_segment(pages, lens_B, queries, "queries") if causal else prefix_segment(pages, lens_B, queries, "none")
    if window:
        segment = replace(segment, starts_T=torch.zeros(T, dtype=torch.int32))
    tiles = _tiles(queries * GROUP, D, not causal, 2 * KV_HEADS, 128, 132)
    assert tiles is not None and tiles.joined == joined
    out_THSD, lse_THS = torch.zeros(T, H, 3, D), torch.zeros(T, H, 3)
    scoring = Scoring(softcap=20.0) if window else PLAIN
    paged_hopper.launch_paged_hopper(q_THD, view, segment, scoring, out_THSD, lse_THS, tiles)


if __name__ == "__main__":
    compiled_names: set[str] = set()
    compile_only(compiled_names)
    paged_hopper.chained = lambda device: {"PDL": True, "launch_pdl": True}  # type: ignore[attr-defined, assignment]
    compile_for(6, 128, True, False)
    compile_for(32, 64, False, False)
    compile_for(6, 256, True, True)
    compile_for(128, 128, True, False, joined=True)
    print(*sorted(compiled_names))
