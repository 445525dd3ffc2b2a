"""Trees of tokens that one pass drafted independently of one another.

Shapes: B sequences, K topk, S levels, H hidden, T = B * S, W a rank's run of the draft vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.draft.block.rounds.grow import best_paths
from specdec.draft.head import Head
from specdec.draft.shared_noise import noise_of_levels
from specdec.ops.noise.gumbel import Noise
from specdec.ops.rows import prepend


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
