"""How ranks share a mixture: a part of every expert each ("tensor"), or whole experts, some each ("experts"), by counted bytes.

Both ways end in the same sum over ranks of outputs [T, H], which the next norm adds up, so only what is read differs.  Parts
are read evenly, but a part's columns may be no whole steps of a kernel.  Of whole experts, the rank of whose experts most were
chosen keeps the others waiting.

A third way exchanges tokens: each goes to the ranks of its experts, and comes back.  Attention is tensor parallel here, so that
all ranks have all tokens before a mixture, and need all outputs after it; nothing has to go anywhere.  What an exchange could
leave out of the sum are the zeros of ranks that hold none of a token's experts (`exchanged_bytes`): of Qwen3-30B-A3B's 8 of 128
experts 0.2 percent of the bytes on 2 ranks and 17 percent on 8, of gpt-oss's 4 of 32 on 8 ranks 28 percent, and nothing where
shared experts, cut over all ranks, leave no zeros.  Which rows these are is known on the device alone, so it takes another wait
for the other ranks, of 3 us or more; of gpt-oss on 8 ranks 28 percent are 3 us from 225 tokens on (a peer reads 215 GB/s).  A
round has fewer, so there is no such exchange here.

This file knows numbers: no tensor, no file and no setting.

Shapes: T tokens, H hidden size, E experts, K experts of a token (top_k), N ranks.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

from specdec.models.mixtures.rules import ExpertsConfig
from specdec.ops.products.formats.experts import STEP
from specdec.parallel.shard import Shard

LEAST_SAVED = 0.02  # of the bytes that a rank reads: what whole experts must save to be chosen.  Not measured on GPUs yet


class ExpertSharing(NamedTuple):
    """Whether experts are divided as wholes, and why."""

    divided: bool
    reason: str

    @property
    def name(self) -> str:
        return "experts" if self.divided else "tensor"


class ExpertSizes(NamedTuple):
    """What decides.  bits: of a weight.  steps: whether kernels read an expert's columns in whole steps, as quantised ones."""

    hidden_size: int
    bits: int
    steps: bool

    def expert_bytes(self, width: int) -> float:
        """Of the three matrices of an expert, or of a part of it, of that width; scales are not counted."""
        columns = -(-width // STEP) * STEP if self.steps else width
        return (2 * width + columns) * self.hidden_size * self.bits / 8


def numbers_of(count: int, ranks: int) -> list[range]:
    """The experts of each rank: neighbours, of which the last ranks may have fewer, or none."""
    return [range(count)[Shard(rank, ranks).piece(count)] for rank in range(ranks)]


def chosen_by(tokens: int, count: int, top_k: int) -> float:
    """How many experts so many tokens choose together, if each chooses at random."""
    return count * (1 - (1 - top_k / count) ** tokens)


def chosen_of_fullest(tokens: int, count: int, top_k: int, ranks: int) -> float:
    """How many of these are the fullest rank's, on average over choices at random.

    The mean of a rank with most experts, and how far the largest of N such numbers lies above it: exact moments, and the normal
    distribution's largest (Blom, 1958).  Within 7 percent of counting where ranks have equally many experts.
    """
    held = len(numbers_of(count, ranks)[0])
    if held == count or held == 1:  # alone, or somebody's only expert is chosen
        return chosen_by(tokens, count, top_k) if held == count else 1.0
    left_out = (1 - top_k / count) ** tokens
    both = ((1 - top_k / count) * (1 - top_k / (count - 1))) ** tokens
    together = both - left_out**2  # the covariance of two experts
    own = held * left_out * (1 - left_out) + held * (held - 1) * together
    spread = math.sqrt(max(0.0, own - held * held * together))
    above = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) * spread
    return min(held * (1 - left_out) + above, float(held), float(tokens * top_k))


def summed_bytes(tokens: int, hidden_size: int, ranks: int, itemsize: int = 2) -> float:
    """What a rank sends of a layer's outputs in a sum over ranks: to each row's own rank, and from there to all."""
    return 2 * (ranks - 1) / ranks * tokens * hidden_size * itemsize


def exchanged_bytes(
    tokens: int, hidden_size: int, ranks: int, experts: ExpertsConfig, itemsize: int = 2
) -> float:  # fmt: skip
    """The same where no zeros are sent: rows to their own rank only from ranks that hold one of the token's experts."""
    E, K = experts.count, experts.router.top_k
    others = E - len(numbers_of(E, ranks)[0])
    sends = 1.0 if experts.shared_size else 1 - math.comb(others, K) / math.comb(E, K)
    return (1 + sends) / 2 * summed_bytes(tokens, hidden_size, ranks, itemsize)


def held_by_rank(experts: ExpertsConfig, ranks: int) -> str:
    """What a rank holds of a layer's experts, in words.  experts: the whole model's, or a rank's share."""
    if not experts.divided:
        return f"a part of each of {experts.count} experts a rank"
    *more, last = sorted({len(own) for own in numbers_of(experts.count, ranks)}, reverse=True)
    return f"{', '.join(map(str, more))}{' or ' if more else ''}{last} of {experts.count} experts a rank"


def choose_sharing(experts: ExpertsConfig, sizes: ExpertSizes, tokens: int, ranks: int) -> ExpertSharing:
    """The way in which the rank that reads most reads less.  tokens: of a pass; that many choose at random."""
    E, K, width = experts.count, experts.router.top_k, experts.intermediate_size
    cut = chosen_by(tokens, E, K) * sizes.expert_bytes(-(-width // ranks))
    whole = chosen_of_fullest(tokens, E, K, ranks) * sizes.expert_bytes(width)
    divided = whole < (1 - LEAST_SAVED) * cut
    read = f"a rank reads {cut / 1e6:.3g} MB of a layer's experts for {tokens} tokens"
    return ExpertSharing(divided, f"{read}, and with whole experts the fullest one {whole / 1e6:.3g} MB")
