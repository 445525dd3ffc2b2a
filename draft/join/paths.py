"""The paths of a round: what followed the text's last tokens where they stood before, and a drafter's chain without scores.

On a CPU the definition here runs; on a GPU it is one launch of paths_triton.py after the search for places.  It knows texts and
survival, no tree but a chain.

Shapes: R rows of the batch, B of them running, M matches, P = M + 1 paths (the last is the chain's), D tokens of a path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.batch.tree import DraftTree
from specdec.draft.join.survival import MATCHES, Survival
from specdec.draft.ngram.lookup import PagedTexts, best_keys, continuations, matches_of
from specdec.ops.index import use_index_kernels


class Paths(NamedTuple):
    """tokens_BPD: int64, -1 after a path's end.  lengths_BP: int64, how many tokens before each path matched; 0 for a chain."""

    tokens_BPD: Tensor
    lengths_BP: Tensor

    @classmethod
    def empty(cls, rows: int, depth: int, device: torch.device) -> Paths:
        tokens_RPD = torch.full((rows, MATCHES + 1, depth), -1, dtype=torch.int64, device=device)
        return cls(tokens_RPD, torch.zeros(rows, MATCHES + 1, dtype=torch.int64, device=device))

    def narrow(self, rows: int) -> Paths:
        return Paths(self.tokens_BPD[:rows], self.lengths_BP[:rows])


def find_paths(text: PagedTexts, tree: DraftTree, survival: Survival, depth: int, out: Paths) -> Tensor:
    """[B, P, D] float32: the logarithm of each step's rate.  The paths themselves are written to `out`.

    tree: the drafter's; its tokens are a path if it has no scores, and then it is a chain.  depth: D, at most that of `out`.
    """
    keys_BM = best_keys(text, MATCHES)
    if use_index_kernels(text.lens_B):
        from specdec.draft.join.paths_triton import launch_paths

        return launch_paths(text, keys_BM, tree, survival.counts_CLG2, depth, out)
    matches = matches_of(keys_BM)
    tokens_BPD, lengths_BP = out
    tokens_BPD.fill_(-1)
    tokens_BPD[:, :MATCHES, :depth] = continuations(text, matches, depth)
    lengths_BP[:, :MATCHES] = matches.lengths_BM.clamp(min=0)
    if tree.scores_BN is None:
        tokens_BPD[:, MATCHES, : tree.max_depth] = tree.tokens_BN[:, 1:]
    return survival.log_rates(lengths_BP, depth)
