"""Trees that follow from one pass: of tokens that it drafted independently of one another, and of a DSpark head's.

A DSpark head corrects each row's logits by the token before it on the node's own path: its trees grow level by level as an
EAGLE head's do, but a level costs a product of low rank and no pass.

Shapes: B sequences, K topk, S levels, R = B * K branches, H hidden, T = B * S, W a rank's run of the draft vocabulary, r rank.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.draft.block.rounds.correct import corrected_logits, greedy_chain
from specdec.draft.block.rounds.grow import best_paths
from specdec.draft.head import Head
from specdec.draft.shared_noise import noise_of_levels
from specdec.draft.tree.build_tree import best_nodes
from specdec.draft.tree.expand import Candidates, expand, first_level
from specdec.ops.index import arange
from specdec.ops.noise.gumbel import Noise
from specdec.ops.rows import prepend

if TYPE_CHECKING:
    from specdec.draft.block.dflash import DSparkHead

# A threshold: where a token is less likely than this to be accepted with all tokens before it, it counts after all other nodes.
STOP_BELOW = 0.05
STOPPED = 1e4  # taken off the scores of such tokens


def tree_of_levels(head: Head, hidden_BSH: Tensor, bonus_B: Tensor, spec: SpecConfig, noise: Noise | None) -> DraftTree:
    """As of `BlockHead.tree`: one distribution for each level, from which the best tree follows (grow.py)."""
    logits_TW, S = head.logits(hidden_BSH.flatten(0, 1)), hidden_BSH.shape[1]
    noise = noise and noise_of_levels(noise, S)
    if spec.topk == 1:
        tokens_BS = head.vocabulary.greedy(logits_TW, head.d2t_V, noise=noise).view(-1, S)
        return DraftTree.chain(prepend(bonus_B, tokens_BS))
    logp_TK, tokens_TK = head.vocabulary.top(logits_TW, spec.topk, head.d2t_V, noise=noise)
    logp_BSK, tokens_BSK = logp_TK.view(-1, S, spec.topk), tokens_TK.view(-1, S, spec.topk)
    return best_paths(logp_BSK, tokens_BSK, bonus_B, spec.num_draft_tokens)


class MarkovWalk:
    """A DSpark head's drafts of one round.

    hidden_BSH: the rows of the blocks.  stop_below: see STOP_BELOW.
    """

    def __init__(self, head: DSparkHead, hidden_BSH: Tensor, noise: Noise | None, stop_below: float = STOP_BELOW) -> None:
        self.head, self.hidden_BSH, self.noise = head, hidden_BSH, noise
        self.least = math.log(stop_below)
        self.own_BSW = head.logits(hidden_BSH.flatten(0, 1)).view(*hidden_BSH.shape[:2], -1)

    def chain(self, bonus_B: Tensor) -> DraftTree:
        head, plain = self.head, self.head.markov.plain
        if plain is not None and self.noise is None and head.vocabulary.group.size == 1:
            return DraftTree.chain(greedy_chain(self.own_BSW, bonus_B, *plain, head.d2t_V))
        tokens, state_Br = [bonus_B], None
        for step in range(self.hidden_BSH.shape[1]):
            logits_BW, state_Br = self._logits(step, tokens[-1], state_Br)
            noise = self.noise and self.noise.at(step + 1)
            tokens.append(head.vocabulary.greedy(logits_BW, head.d2t_V, noise=noise))
        return DraftTree.chain(torch.stack(tokens, dim=1))

    def tree(self, bonus_B: Tensor, spec: SpecConfig) -> DraftTree:
        """The best K branches of a level go on, and the best nodes of all are the tree."""
        head, (B, S, _), K = self.head, self.hidden_BSH.shape, spec.topk
        candidates = Candidates.empty(B, K, S, bonus_B.device)
        logits_BW, state_Rr = self._logits(0, bonus_B, None)
        logp_BK, tokens_BK = head.vocabulary.top(logits_BW, K, head.d2t_V, noise=self.noise)
        beam = first_level(candidates, tokens_BK, logp_BK)
        sure_R = None if head.confidence is None else self._sure(0, bonus_B)
        for level in range(2, S + 1):
            tokens_R = beam.tokens_BK.flatten()
            if state_Rr is not None or sure_R is not None:
                first_B = arange(B, bonus_B.device, 1 if level == 2 else K)
                parents_R = (beam.parents_BK + first_B[:, None]).flatten()
                state_Rr = None if state_Rr is None else state_Rr.index_select(0, parents_R)
            logits_RW, state_Rr = self._logits(level - 1, tokens_R, state_Rr)
            if sure_R is not None:
                sure_R = sure_R.index_select(0, parents_R) + self._sure(level - 1, tokens_R)
                stopped_R = torch.zeros_like(sure_R, dtype=torch.float32)
                stopped_R.masked_fill_(sure_R < self.least, -STOPPED)
                beam = replace(beam, scores_BK=beam.scores_BK + stopped_R.view(B, K))
            noise = self.noise and self.noise.at(level)
            beam = expand(candidates, level, beam, logits_RW, head.d2t_V, head.vocabulary, noise)
        return best_nodes(candidates, bonus_B, spec.num_draft_tokens, S)

    def _logits(self, step: int, before_R: Tensor, state_Rr: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """([R, W], the state after): of the rows' step, equally many branches for each sequence.

        before_R: int64, the token before.
        """
        own_BW, markov = self.own_BSW[:, step], self.head.markov
        if (plain := markov.plain) is not None:
            return corrected_logits(own_BW, before_R, *plain), None
        row_Rr, state_Rr = markov.step(self._hidden(step, before_R), markov.embed(before_R), state_Rr)
        added_RW = markov.w2(row_Rr)
        return (own_BW[:, None] + added_RW.unflatten(0, (len(own_BW), -1))).flatten(0, 1), state_Rr

    def _hidden(self, step: int, before_R: Tensor) -> Tensor:
        """[R, H]: the row of the step, for each branch."""
        each = len(before_R) // len(self.hidden_BSH)
        return self.hidden_BSH[:, step].repeat_interleave(each, 0) if each > 1 else self.hidden_BSH[:, step]

    def _sure(self, step: int, before_R: Tensor) -> Tensor:
        """[R] float32: the logarithm of the estimate that the token of that step is accepted if those before it are."""
        hidden_RH, embedded_Rr = self._hidden(step, before_R), self.head.markov.embed(before_R)
        return F.logsigmoid(self.head.confidences(hidden_RH, embedded_Rr).float())
