"""The rule of acceptance by chi-square: whatever a tree proposes, the tokens that a round emits follow the target.

A target over 8 tokens, whose next token depends on the last one, meets many trees of a root, its children, and a child of
each.  What is counted: the first token that is emitted; and where that one was proposed, the second token after it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from toolkit.oracles.statistics import DRAWS, LIMIT, draw, filtered, p_value, pair_counts
from torch import Tensor

from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.draft.shared_noise import LOGIT_WEIGHT, NOISE_WEIGHT
from specdec.ops.noise.gumbel import Noise, gumbel_noise
from specdec.ops.topk import top_tokens
from specdec.verify.accept import accept

V, ROOT, AT = 8, 3, 9  # the root's token; the position of the first token after it
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]  # on a GPU, acceptance is the kernel's
OPTIONS: dict[str, dict[str, Any]] = {"plain": {"temperature": 1.0}, "filtered": {"temperature": 1.3, "top_k": 6, "top_p": 0.9}}
Proposer = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def target() -> Tensor:
    """[V, V]: the logits of the next token after each token."""
    return 1.5 * torch.randn(V, V, generator=torch.Generator().manual_seed(4))


def drafted() -> Tensor:
    """[V, V]: what a drafter takes for them: nearly right."""
    return target() + 0.7 * torch.randn(V, V, generator=torch.Generator().manual_seed(5))


def by_the_drafters_rule(logits_BV: Tensor, seed_B: Tensor, at_B: Tensor, count: int) -> Tensor:
    """What a head proposes where rows are sampled."""
    temperature_B = torch.ones(len(seed_B), device=seed_B.device)
    noise = Noise(temperature_B, seed_B, at_B.int() - 1, 1, LOGIT_WEIGHT, NOISE_WEIGHT)
    return top_tokens(logits_BV, count, noise=noise)[1]


# Each proposes `count` different tokens after the last ones: by (drafter's logits [B, V], seeds, positions, count).
# A new way to draft is a line here.
PROPOSERS: dict[str, Proposer] = {
    "likeliest": lambda logits_BV, seed_B, at_B, count: logits_BV.topk(count).indices,
    "random": lambda logits_BV, seed_B, at_B, count: torch.rand(logits_BV.shape).topk(count).indices.to(seed_B.device),
    "sampled": lambda logits_BV, seed_B, at_B, count: (logits_BV + gumbel_noise(seed_B + 77, at_B, V)).topk(count).indices,
    "the target's own noise": by_the_drafters_rule,
}
BRANCHES = {"chain": 1, "tree": 2}


def trees(propose: Proposer, seed_B: Tensor, count: int) -> DraftTree:
    """The root, `count` children of it, and a child of each of these."""
    device, likely_VV = seed_B.device, drafted().to(seed_B.device)
    at_B = torch.full_like(seed_B, AT)
    first_Bk = propose(likely_VV[ROOT].expand(len(seed_B), V), seed_B, at_B, count)
    second_Bk = torch.cat([propose(likely_VV[first_Bk[:, k]], seed_B, at_B + 1, 1) for k in range(count)], dim=1)
    tokens_BN = torch.cat((torch.full_like(first_Bk[:, :1], ROOT), first_Bk, second_Bk), dim=1)
    parents = [0, *[0] * count, *range(1, count + 1)]
    return DraftTree(tokens_BN, torch.tensor(parents, device=device).expand(len(seed_B), -1).contiguous(), 2)


def choices(tree: DraftTree, seed_B: Tensor, options: dict[str, Any], second_at: int = AT + 1) -> Tensor:
    """[B, N]: the target's token at each node; 0 at leaves, whose tokens nobody counts.

    second_at: the position of the tokens after the root's children.
    """
    B, count = len(tree.tokens_BN), tree.tokens_BN.shape[1] // 2
    position_M = torch.tensor([AT, *[second_at] * count], device=seed_B.device)
    logits_RV = target().to(seed_B.device)[tree.tokens_BN[:, : count + 1].flatten()]
    tokens_R = draw(logits_RV, seed_B.repeat_interleave(count + 1), position_M.repeat(B), **options)
    return torch.cat((tokens_R.view(B, count + 1), torch.zeros_like(tree.tokens_BN[:, count + 1 :])), dim=1)


def p_values(tree: DraftTree, tokens_BN: Tensor, options: dict[str, Any]) -> tuple[float, float]:
    """Of the first emitted token, and of the second after each first one that was accepted."""
    state = BatchState.empty(len(tokens_BN), 1, page_size=1, device=tokens_BN.device)
    state.active_B.fill_(1)
    state.speculates_B.fill_(1)
    done, _ = accept(tree, tokens_BN, state)
    tokens_BE, accepted_B = done.tokens_BE.cpu(), done.accepted_B.cpu()
    assert int(accepted_B.max()) == 2 and int(accepted_B.min()) == 0, "rounds of every length must occur"
    want_VV = np.stack([filtered(row, **options) for row in target().double().numpy()])
    first = np.bincount(tokens_BE[:, 0].numpy(), minlength=V)
    pairs_VV = pair_counts(tokens_BE[accepted_B > 0, :2].tolist(), 0, V)
    share_V = pairs_VV.sum(1) / pairs_VV.sum()
    return p_value(first, want_VV[ROOT]), p_value(pairs_VV, share_V[:, None] * want_VV)


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("branches", BRANCHES)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_emitted_tokens_follow_the_target(proposer: str, branches: str, device: str) -> None:
    """Keeps out: an acceptance rule that favours or avoids what was proposed; noise shared with the draft that leaks out."""
    options = OPTIONS["plain" if branches == "tree" else "filtered"]
    seed_B = torch.arange(DRAWS, device=device)
    tree = trees(PROPOSERS[proposer], seed_B, BRANCHES[branches])
    first, second = p_values(tree, choices(tree, seed_B, options), options)
    assert first > LIMIT and second > LIMIT, (first, second)


def test_faults_of_the_rule_are_seen() -> None:
    """Keeps out: counts that fit any rule: one that takes a tenth of all first drafts unseen, one that uses noise twice."""
    options, seed_B = OPTIONS["plain"], torch.arange(DRAWS)
    tree = trees(PROPOSERS["likeliest"], seed_B, 1)
    tokens_BN = choices(tree, seed_B, options)
    trusting = tokens_BN.clone()
    trusting[::10, 0] = tree.tokens_BN[::10, 1]
    assert p_values(tree, trusting, options)[0] < LIMIT
    first, second = p_values(tree, choices(tree, seed_B, options, second_at=AT), options)
    assert first > LIMIT and second < LIMIT
