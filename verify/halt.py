"""Ends accepted paths where texts halt (specdec/batch/waits.py), after the acceptance rule and before the commit.

Shapes: B sequences, E places on a path.
"""

from __future__ import annotations

from torch import Tensor

from specdec.batch.state import BatchState
from specdec.ops.index import arange, use_index_kernels
from specdec.verify.accept import Accepted


def halt(state: BatchState, accepted: Accepted, base_lens_B: Tensor, root_B: Tensor, halts: bool) -> Accepted:
    """Leads the waiting texts along their accepted paths, and ends each path where its text halts.

    Lengths and bonus tokens in `state` become those of the shorter paths.  Rows that are not active emit nothing, for which
    `emitted` says -1 accepted tokens, and keep their bonus token; their path is the root alone.
    base_lens_B: int32, the lengths before the round.  root_B: int64, the bonus tokens before it.
    halts: whether the round has no masks; with masks no path ends early.
    """
    if use_index_kernels(root_B):
        from specdec.verify.halt_triton import launch_halt

        taken_B, halted_B = launch_halt(state, accepted, base_lens_B, root_B, halts)
        return accepted._replace(emitted=accepted.emitted.with_halts(taken_B - 1, halted_B))
    waits, (path_BE, accepted_B, tokens_BE, emitted) = state.waiting, accepted
    taken_B, state_B = waits.walk(tokens_BE, (accepted_B + 1) * state.active_B, halts)
    waits.state_B.copy_(state_B)
    accepted_B = (taken_B - 1).clamp(min=0)
    places_E = arange(path_BE.shape[1], path_BE.device)
    path_BE = path_BE.where(places_E <= accepted_B[:, None], places_E)
    state.lens_B.copy_(base_lens_B + taken_B)
    state.bonus_B.copy_(tokens_BE.gather(1, accepted_B[:, None])[:, 0].where(taken_B > 0, root_B))
    halted_B = (state_B >= waits.first_halt_B).long()
    return Accepted(path_BE, accepted_B, tokens_BE, emitted.with_halts(taken_B - 1, halted_B))
