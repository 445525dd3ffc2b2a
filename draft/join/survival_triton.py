"""The kernels of survival.py: one that halves counts, and one with a program for each path, which adds its trials.

Shapes: B sequences, P paths of each, D tokens of a path, E emitted tokens of a row with padding, C classes, L lengths, K kinds
of support, G groups of depths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from specdec.batch.emitted import NewTokens
from specdec.draft.join.paths_triton import groups_of_steps
from specdec.draft.join.survival import FIRST_DEPTHS, LENGTHS, MAX_TRIALS, SUPPORTS
from specdec.ops.launch import chained

if TYPE_CHECKING:
    from specdec.draft.join.paths import Paths


@triton.jit
def halve_counts_kernel(
    counts,  # [CELLS, 2] int32
    CELLS: tl.constexpr,
    MOST: tl.constexpr,  # MAX_TRIALS
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    cell = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    trials = tl.load(counts + 2 * cell, mask=cell < CELLS, other=0)
    accepted = tl.load(counts + 2 * cell + 1, mask=cell < CELLS, other=0)
    tl.store(counts + 2 * cell, trials // 2, mask=trials > MOST)
    tl.store(counts + 2 * cell + 1, accepted // 2, mask=trials > MOST)


@triton.jit(do_not_specialize=["room", "emitted", "stride_tokens"])
def learn_kernel(
    paths,  # [B, P, room] int64
    lengths,  # [B, P] int64
    support,  # [B, P] int64
    parts,  # [B, P] int64
    classes,  # [P] int64
    tokens,  # [B, E] int64
    last,  # [B] int64
    active,  # [B] int64
    counts,  # [C, L, K, G, 2] int32
    room,
    emitted,  # E
    stride_tokens,
    LENGTHS: tl.constexpr,
    SUPPORTS: tl.constexpr,
    FIRSTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    b, p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    path = b * tl.num_programs(1) + p
    d_D = tl.arange(0, BLOCK)
    ok_D = (d_D < room) & (d_D < emitted)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    own_D = tl.load(paths + path * room + d_D, mask=ok_D, other=-1)
    true_D = tl.load(tokens + b * stride_tokens + d_D, mask=ok_D, other=-2)
    is_right_D = (own_D == true_D).to(tl.int32)
    wrong_D = 1 - is_right_D
    reached_D = (tl.cumsum(wrong_D, 0) - wrong_D) == 0
    is_known_D = (d_D <= tl.load(last + b)) & (tl.load(active + b) > 0) & (own_D >= 0)
    trial_D = (reached_D & is_known_D).to(tl.int32)
    length = tl.minimum(tl.maximum(tl.load(lengths + path), 0), LENGTHS - 1)
    group_D = groups_of_steps(d_D, tl.load(parts + path), FIRSTS)
    cell = (tl.load(classes + p) * LENGTHS + length) * SUPPORTS + tl.load(support + path)
    counts += 2 * cell * 2 * len(FIRSTS)
    for group in tl.static_range(2 * len(FIRSTS)):
        own_group_D = tl.where(group_D == group, trial_D, 0)
        tl.atomic_add(counts + 2 * group, tl.sum(own_group_D, 0))
        tl.atomic_add(counts + 2 * group + 1, tl.sum(own_group_D * is_right_D, 0))


def launch_learn(counts_CLKG2: Tensor, paths: Paths, new: NewTokens, active_B: Tensor) -> None:
    """`Survival.learn`.  Whole numbers are added up, so that the order does not matter."""
    tokens_BPD, lengths_BP, support_BP, classes_P, parts_BP = paths
    (B, P, room), device, cells = tokens_BPD.shape, counts_CLKG2.device, counts_CLKG2.numel() // 2
    assert (
        tokens_BPD.is_contiguous()
        and lengths_BP.is_contiguous()
        and support_BP.is_contiguous()
        and new.tokens_BE.stride(1) == 1
    )
    assert counts_CLKG2.is_contiguous() and parts_BP.is_contiguous() and new.last_B.is_contiguous() and active_B.is_contiguous()
    block = triton.next_power_of_2(cells)
    halve_counts_kernel[(1,)](counts_CLKG2, CELLS=cells, MOST=MAX_TRIALS, BLOCK=block, num_warps=4, **chained(device))
    learn_kernel[(B, P)](
        tokens_BPD, lengths_BP, support_BP, parts_BP, classes_P, new.tokens_BE, new.last_B, active_B, counts_CLKG2,
        room, new.tokens_BE.shape[1], new.tokens_BE.stride(0),
        LENGTHS=LENGTHS, SUPPORTS=SUPPORTS, FIRSTS=FIRST_DEPTHS, BLOCK=max(16, triton.next_power_of_2(room)),
        num_warps=1, **chained(device),
    )  # fmt: skip
