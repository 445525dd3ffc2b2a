"""Compiles the kernels of a layer of sparse latent attention for a Hopper GPU, on a machine that needs none.

Run this file in a process of its own, with the folder of tests on the path.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from toolkit.attention.compiled.hopper import compile_only

GROUP = 128  # latents are kept in 8 bits if their rank is a multiple of this


class Dims(NamedTuple):
    """H heads, C rank, R rotated, J indexer heads, I their dims, topk, P page size."""

    dtype: torch.dtype
    H: int
    C: int
    R: int
    J: int
    I: int
    topk: int
    P: int


TINY, REAL = Dims(torch.float32, 4, 16, 8, 16, 16, 6, 1), Dims(torch.bfloat16, 128, 512, 64, 64, 128, 2048, 64)


def layer(d: Dims, width: int) -> None:
    """The launches of a layer for single queries, a chain and a tree.  width: pages of a row, few or many."""
    from specdec.attention.caches.mla_cache import MLAView
    from specdec.attention.kernels.triton_plan import TritonPlan
    from specdec.attention.kinds import Scoring
    from specdec.attention.latent import mla_launch
    from specdec.attention.pages import PageTable
    from specdec.attention.plan import causal_segment, prefix_segment
    from specdec.attention.segment import AttentionPlan, Segment
    from specdec.attention.sparse import index_store_triton, launch, rows_launch
    from specdec.attention.sparse.candidates import Candidates
    from specdec.attention.sparse.index_store import IndexPrep
    from specdec.ops.rope import Rotation, rotary_table

    for module in (index_store_triton, launch, mla_launch, rows_launch):
        module.chained = lambda device: {"PDL": True, "launch_pdl": True}  # type: ignore[attr-defined]
    mla_launch.gpu_generation = lambda device: 9  # type: ignore[assignment]
    keys, latents = (torch.zeros(64 * d.P, width, dtype=d.dtype) for width in (d.I, d.C + d.R))
    pages, lens_B = PageTable(torch.zeros(3, width, dtype=torch.int32), d.P), torch.full((3,), 4, dtype=torch.int32)
    table = rotary_table(100.0 ** -(torch.arange(d.R // 2) / (d.R // 2)), 64).to(d.dtype)
    for queries, tree in ((1, False), (3, False), (4, True)):
        T = 3 * queries
        q_TJI = torch.zeros(T, 24 + d.J * d.I, dtype=d.dtype)[:, 24:].unflatten(1, (d.J, d.I))
        both, at_T = torch.zeros(T, 20 + d.I + d.J, dtype=d.dtype), torch.zeros(T, dtype=torch.int64)
        prep = IndexPrep(Rotation(table, at_T), keys[0], keys[0], 1e-6, 0.1)
        key_TI, weights_TJ = both[:, 20:].split((d.I, d.J), dim=1)
        weights_TJ = index_store_triton.launch_store_index(keys, q_TJI, key_TI, weights_TJ, at_T, prep)
        plan = AttentionPlan((causal_segment(pages, lens_B, queries),))
        if tree:
            plan = AttentionPlan((prefix_segment(pages, lens_B, queries),), at_T, Segment.empty(T, 3, 1))
        rows = launch.launch_sparse_segment(q_TJI, weights_TJ, keys, Candidates.of(plan, T), d.topk, programs=132)
        q_THL = torch.zeros(T, d.H, d.C + d.R, dtype=d.dtype)
        for segment in (rows, plan.segments[0]):
            mla_launch.attend_latent(q_THL, MLAView(latents, d.C), TritonPlan((segment,)), Scoring(0.1), 132)
        if d.C % GROUP == 0:
            eight_bits(d, q_THL, TritonPlan((rows,)), pages, Rotation(table, at_T))


def eight_bits(d: Dims, q_THL: Tensor, plan: Any, pages: Any, rotation: Any) -> None:
    """The same rows over latents in 8 bits, whole segments of few and many queries, their store, and their conversion."""
    from specdec.attention.caches.fp8_latent import Fp8LatentView, row_bytes
    from specdec.attention.kernels.triton_plan import TritonPlan
    from specdec.attention.kinds import LayerKind, Scoring
    from specdec.attention.latent import mla_launch, mla_store_triton, upconvert_triton
    from specdec.attention.latent.prep import LatentPrep
    from specdec.attention.plan import causal_segment

    for module in (mla_store_triton, upconvert_triton):
        module.chained = lambda device: {"PDL": True, "launch_pdl": True}  # type: ignore[attr-defined]
    T, lens_B = q_THL.shape[0], torch.full((3,), 4, dtype=torch.int32)
    view = Fp8LatentView(torch.zeros(64 * d.P, row_bytes(d.C, d.R), dtype=torch.uint8), d.C)
    whole = causal_segment(pages, lens_B, T // 3)
    for one in (plan, TritonPlan((whole,)), TritonPlan((whole.local(LayerKind(window=5), torch.zeros(T, dtype=torch.int64)),))):
        mla_launch.attend_latent(q_THL, view, one, Scoring(0.1), 132)
    prep, slots_T = LatentPrep(rotation, q_THL[0, 0, : d.C], 1e-6), torch.zeros(T, dtype=torch.int64)
    fresh_TL, q_THR = q_THL[:, 0].contiguous(), q_THL[..., d.C :]
    mla_store_triton.launch_store_latent(view, q_THR, fresh_TL, slots_T, prep, q_THR)
    upconvert_triton.launch_upconvert(view, pages, lens_B, lens_B, 4, torch.zeros(64, d.C + d.R, dtype=d.dtype))


if __name__ == "__main__":
    compiled_names: set[str] = set()
    compile_only(compiled_names)
    with torch.inference_mode():
        for dims, width in ((TINY, 8), (REAL, 8), (REAL, 512)):
            layer(dims, width)
    print(*sorted(compiled_names))
