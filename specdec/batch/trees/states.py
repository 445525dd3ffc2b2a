"""The rows of a batch as recurrent layers see them: which states each row reads and writes, and what is pending.

A row owns two numbers of the pool, and by turns reads one and writes the other.  Its first pass reads ZEROS, or a state that
was kept for later prompts.  So moves of rows, and what captures and trials put back, are moves of a few integers.  This module
knows the batch and trees; it knows no rule.

Shapes: B rows, R some of the rows, N nodes, E places on a path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.batch.ragged import RaggedPrompts
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.limits import RESERVED_STATES, TRASH, ZEROS
from specdec.ops.index import use_index_kernels
from specdec.ops.recurrent.states import ChunkSteps, TreeSteps


@dataclass(frozen=True)
class StateRows:
    """Views of a batch's first rows are StateRows too.

    numbers_B3: int64: the number that the row reads next, the one it writes, and the one it writes after that; the last two are
        its own.  The row of padding owns none, and writes TRASH.
    path_BE, count_B: int64, int32: the accepted nodes that are pending in the state that the row reads next; see TreeSteps.
    """

    numbers_B3: Tensor
    path_BE: Tensor
    count_B: Tensor

    @classmethod
    def empty(cls, rows: int, places: int, device: torch.device | str) -> StateRows:
        """rows: of the batch, the last of them padding.  places: the most nodes of a path."""
        own_B = RESERVED_STATES + 2 * torch.arange(rows, dtype=torch.int64, device=device)
        numbers_B3 = torch.stack((torch.full_like(own_B, ZEROS), own_B, own_B + 1), dim=1)
        numbers_B3[-1, 1:] = TRASH
        path_BE = torch.zeros(rows, places, dtype=torch.int64, device=device)
        return cls(numbers_B3, path_BE, torch.zeros(rows, dtype=torch.int32, device=device))

    def tensors(self) -> list[Tensor]:
        return [self.numbers_B3, self.path_BE, self.count_B]

    def narrow(self, rows: int) -> StateRows:
        """Views of the first `rows` rows."""
        return StateRows(*(tensor[:rows] for tensor in self.tensors()))

    # ---- rounds, over the rows of a state ----

    def tree_steps(self, state: BatchState, tree: DraftTree) -> TreeSteps:
        """What a pass over these trees reads and writes.  Rows that don't run touch no state."""
        if use_index_kernels(self.count_B):
            from specdec.batch.trees.states_triton import launch_state_numbers

            read_B, write_B, count_B = launch_state_numbers(state.active_B, self.numbers_B3, self.count_B)
        else:
            runs_B, (read_B, write_B, _) = state.active_B > 0, self.numbers_B3.unbind(1)
            read_B, write_B, count_B = read_B.where(runs_B, ZEROS), write_B.where(runs_B, TRASH), self.count_B.where(runs_B, 0)
        return TreeSteps(read_B, write_B, tree.parents_BN, tree.max_depth, tree.is_chain, self.path_BE, count_B)

    def commit(self, state: BatchState, path_BE: Tensor, accepted_B: Tensor) -> None:
        """The accepted paths are pending now, in the states that the pass has written.

        path_BE: int64 nodes from the root on.  accepted_B: how many come after the root.
        """
        if use_index_kernels(self.count_B):
            from specdec.batch.trees.states_triton import launch_commit_states

            launch_commit_states(state.active_B, path_BE, accepted_B, *self.tensors())
            return
        runs_B = state.active_B > 0
        self.numbers_B3.copy_(turned(self.numbers_B3, runs_B))
        here_BE = self.path_BE[:, : path_BE.shape[1]]
        here_BE.copy_(path_BE.where(runs_B[:, None], here_BE))
        self.count_B.copy_((accepted_B + 1).int().where(runs_B, self.count_B))

    # ---- prompts, over all rows ----

    def chunk_steps(self, prompts: RaggedPrompts) -> ChunkSteps:
        """What a pass over parts of prompts reads and writes."""
        assert prompts.keep_2B is not None, "a target with states has chunks that say what is kept"
        read_B, write_B, _ = self.numbers_B3.index_select(0, prompts.rows_B).T.contiguous().unbind(0)
        keep_B, after_B = prompts.keep_2B.unbind(0)
        return ChunkSteps(read_B, write_B, prompts.cu_B1, keep_B, after_B.int(), prompts.most)

    def ran(self, prompts: RaggedPrompts) -> None:
        """The parts have been added to the states that their rows read next."""
        numbers_R3 = self.numbers_B3.index_select(0, prompts.rows_B)
        self.numbers_B3.index_copy_(0, prompts.rows_B, turned(numbers_R3, numbers_R3[:, 1] != TRASH))

    def next_steps(self, prompts: RaggedPrompts) -> TreeSteps:
        """What a pass over the one token after each part reads and writes, once the parts `ran`."""
        read_B, write_B, _ = self.numbers_B3.index_select(0, prompts.rows_B).T.contiguous().unbind(0)
        nothing_BE = self.path_BE.new_zeros(read_B.shape[0], self.path_BE.shape[1])
        count_B = self.count_B.new_zeros(read_B.shape[0])
        return TreeSteps(read_B, write_B, nothing_BE[:, :1].contiguous(), 0, True, nothing_BE, count_B)

    def ran_next(self, prompts: RaggedPrompts) -> None:
        """The tokens after the parts that end a prompt are pending now, in the states that the pass has written."""
        numbers_R3, ends_R = self.numbers_B3.index_select(0, prompts.rows_B), prompts.final_B > 0
        self.numbers_B3.index_copy_(0, prompts.rows_B, turned(numbers_R3, ends_R & (numbers_R3[:, 1] != TRASH)))
        self.path_BE.index_fill_(0, prompts.rows_B, 0)
        self.count_B.index_copy_(0, prompts.rows_B, prompts.final_B)

    # ---- what changes rows ----

    def enter_rows(self, rows_R: Tensor, states_R: Tensor) -> None:
        """Rows (int64) go on with these states (int64), in which nothing is pending."""
        self.numbers_B3[rows_R, 0] = states_R
        self.count_B.index_fill_(0, rows_R, 0)

    def move_rows(self, sources_R: Tensor, targets_R: Tensor) -> None:
        """Each target row becomes what its source was; the source gets the target's numbers.  No row is both."""
        of_sources, of_targets = self.numbers_B3[sources_R], self.numbers_B3[targets_R]
        self.numbers_B3[targets_R] = of_sources
        self.numbers_B3[sources_R] = of_targets
        for tensor in (self.path_BE, self.count_B):
            tensor[targets_R] = tensor[sources_R]


def turned(numbers_R3: Tensor, runs_R: Tensor) -> Tensor:
    """The numbers after a pass in which the rows of runs_R have taken part."""
    _, written_R, next_R = numbers_R3.unbind(1)
    return torch.stack((written_R, next_R, written_R), dim=1).where(runs_R[:, None], numbers_R3)
