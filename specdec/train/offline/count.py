"""How many drafted tokens a target accepts along a text of its own, and from that what a served run of it would count.

Where a text is what the target writes greedily, what it accepts of a tree that is drafted at some place is the text's own
tokens after it.  So all places are looked at together, and the rounds of a served run are those places that it would stop at:
after each round it goes on as many places as that round emits tokens.  This file knows heads and trees, and neither engines
nor tokenizers.

Shapes: T tokens of a text, P places, N nodes of a tree, H hidden size, F target feature size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.draft.block.head import BlockHead
from specdec.draft.eagle.head import EagleHead
from specdec.generation import Stats
from specdec.train.offline.branches import OfflineDrafter

PLACES = 64  # of a text, that are looked at together
AnyHead = EagleHead | BlockHead


def trees_of(head: AnyHead, ids_T: Tensor, features_TF: Tensor) -> Callable[[Tensor, SpecConfig], DraftTree]:
    """What drafts the trees of a text, given places [P] of last known tokens, from 1 on, and a shape."""
    if not isinstance(head, BlockHead):
        return OfflineDrafter(head, ids_T, features_TF).trees

    def trees(places_P: Tensor, spec: SpecConfig) -> DraftTree:
        (hidden_PSH,) = head.drafts(features_TF[None], ids_T[None], places_P[None], spec.max_steps)
        return head.tree(hidden_PSH, ids_T[places_P], spec)

    return trees


def accepted(tree: DraftTree, ids_T: Tensor, places_P: Tensor) -> Tensor:
    """[P] int64: how deep each tree follows the text after its place."""
    depths_PN = tree.depths_BN
    at_PN = places_P[:, None] + depths_PN
    right_PN = (at_PN < len(ids_T)) & (ids_T[at_PN.clamp(max=len(ids_T) - 1)] == tree.tokens_BN)
    for _ in range(tree.max_depth):
        right_PN = right_PN & right_PN.gather(1, tree.parents_BN)
    return torch.where(right_PN, depths_PN, 0).amax(1)


@torch.inference_mode()
def count(
    head: AnyHead, ids_T: Tensor, features_TF: Tensor, prompt: int, output: int, specs: Sequence[SpecConfig]
) -> list[Stats]:
    """What runs of each shape count over a text.

    ids_T: the prompt, then what the target writes greedily: the output, and as many tokens more as trees have levels, since a
    run drafts beyond the end before it sees it.  features_TF: the target's features of these tokens.
    prompt, output: tokens of both.  The output's first token belongs to no round.
    """
    trees, last = trees_of(head, ids_T, features_TF), prompt + output - 1
    found = []
    for spec in specs:
        accepted_P = torch.zeros(len(ids_T), dtype=torch.int64, device=ids_T.device)
        for places_P in (
            torch.arange(prompt, last, dtype=torch.int64, device=ids_T.device).split(PLACES) if prompt < last else ()
        ):
            accepted_P[places_P] = accepted(trees(places_P, spec), ids_T, places_P)
        stats, place, deepest = Stats(prefill_tokens=1), prompt, min(spec.max_steps, spec.num_draft_tokens - 1)
        taken = accepted_P.tolist()
        while place < last:
            stats.count_round(spec.num_draft_tokens - 1, deepest, taken[place])
            place += taken[place] + 1
        stats.truncated = 1 + stats.emitted - output
        stats.check_identity(output)
        found.append(stats)
    return found
