"""What a pass emitted: tensors for the drafter, and numbers for the host, whose layout only this file knows.

This module knows neither the verifier nor the drafter.

Shapes: B rows, E places on a path, X = E + 3 numbers of a row, F features of a token, N nodes of a tree.  Of log-probabilities:
R rows of logits, W a rank's run of the vocabulary, k likeliest tokens, X = 1 + k of which a token has log-probabilities,
Y = X + k numbers of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.batch.tree import DraftTree
from specdec.generation import Emitted, Logprobs, NodeTable
from specdec.limits import MAX_LOGPROBS
from specdec.ops.index import use_index_kernels
from specdec.parallel.vocabulary import Vocabulary


class NewTokens(NamedTuple):
    """Tokens by which texts have grown, as a drafter learns them.

    base_lens_B: int32, the committed lengths before.
    tokens_BE: int64, the accepted draft tokens, then the bonus token; columns after last_B are padding.  All of them are ids:
        where the target's logits were not finite, there is a 0, so that the device can go on.
    last_B: int64, the column of the bonus token: how many draft tokens were accepted.
    features_BEF: for each token, the target's features of the token before it; None if they were not asked for.
    """

    base_lens_B: Tensor
    tokens_BE: Tensor
    last_B: Tensor
    features_BEF: Tensor | None


class EmittedRows(NamedTuple):
    """What the host reads of a round: one int64 tensor, whose columns are written and read here alone.

    A row holds the number of accepted draft tokens; the tokens, -1 where the target's logits were not finite; and how many
    draft tokens of the tree's best path were accepted, and how many that path has.  Where trees have several sources, it goes
    on with the sources of each place on the path after the root, as bits; and where texts wait for their grammars, with
    whether the row has halted.  The number of accepted draft tokens is -1 then in a row that emits nothing.

    num_sources: how many columns those of sources are.  says_halts: whether the last column is there.
    """

    numbers_BX: Tensor
    num_sources: int = 0
    says_halts: bool = False

    @classmethod
    def empty(cls, rows: int, places: int, device: torch.device, num_sources: int = 0) -> EmittedRows:
        """Memory to be written through the views."""
        return cls(torch.empty(rows, places + 3 + num_sources, dtype=torch.int64, device=device), num_sources)

    @classmethod
    def of(cls, accepted_B: Tensor, tokens_BE: Tensor, best_B2: Tensor) -> EmittedRows:
        return cls(torch.cat((accepted_B[:, None], tokens_BE, best_B2), dim=1))

    @property
    def accepted_B(self) -> Tensor:
        return self.numbers_BX[:, 0]

    @property
    def tokens_BE(self) -> Tensor:
        return self.numbers_BX[:, 1 : self._end - 2]

    @property
    def best_B2(self) -> Tensor:
        return self.numbers_BX[:, self._end - 2 : self._end]

    @property
    def sources_BD(self) -> Tensor:
        return self.numbers_BX[:, self._end : self._end + self.num_sources]

    @property
    def _end(self) -> int:
        """How many columns come before those of sources."""
        return self.numbers_BX.shape[1] - self.num_sources - self.says_halts

    def with_sources(self, sources_BE: Tensor) -> EmittedRows:
        """The same, and the sources of each place on the path, of which the root is the first."""
        assert not self.num_sources
        return EmittedRows(torch.cat((self.numbers_BX, sources_BE[:, 1:]), dim=1), sources_BE.shape[1] - 1)

    def with_halts(self, accepted_B: Tensor, halted_B: Tensor) -> EmittedRows:
        """The same with other numbers of accepted tokens, and whether rows have halted.  Both are int64."""
        assert not self.says_halts
        columns = accepted_B[:, None], self.numbers_BX[:, 1:], halted_B[:, None]
        return EmittedRows(torch.cat(columns, dim=1), self.num_sources, says_halts=True)

    def read(self, numbers_BX: Tensor) -> list[Emitted]:
        """What each row emitted.  numbers_BX: these numbers on the host."""
        end, named, halts, found = self._end, self.num_sources > 0, self.says_halts, list[Emitted]()
        for row in numbers_BX.tolist():
            accepted = row[0]
            sources = row[end : end + max(0, accepted)] if named else ()
            best = row[end - 2], row[end - 1]
            found.append(Emitted(row[1 : accepted + 2], best, sources, halts and row[-1] > 0))
        return found


class RoundResult(NamedTuple):
    """What a round emitted.

    new: for the drafter.  emitted: for the host.
    logprobs_BEY: of the emitted tokens, see `token_logprobs`; trees_B5N: see `tree_numbers`; None if they were not asked for.
    """

    new: NewTokens
    emitted: EmittedRows
    logprobs_BEY: Tensor | None
    trees_B5N: Tensor | None = None


class FirstTokens(NamedTuple):
    """The first output tokens of a chunk's prompts.

    tokens_B: int64, and more rows with padding; -1 if the target's logits are not finite.  Of a part whose next token is known
        it is that token.  Values of padding mean nothing.
    logprobs_BY: of these tokens, see `token_logprobs`; None if they were not asked for.
    scores_RY: of the tokens of all scored parts, one part after the other (see PromptPart); None: no part is scored.
    """

    tokens_B: Tensor
    logprobs_BY: Tensor | None = None
    scores_RY: Tensor | None = None

    @staticmethod
    def read(tokens_B: Tensor, wanted: Sequence[bool]) -> list[Emitted]:
        """The tokens of those parts that are wanted.  tokens_B: on the host."""
        return [Emitted([token] if is_wanted else []) for token, is_wanted in zip(tokens_B.tolist(), wanted, strict=True)]


def token_logprobs(logits_RW: Tensor, tokens_R: Tensor, top: int, vocabulary: Vocabulary) -> Tensor:
    """[R, Y] int64: the log-probability of each row's token, those of the likeliest tokens, and these tokens' ids.  Of
    log-probabilities it holds the bits of float64 numbers.  They depend on the row's logits alone, bit for bit.

    logits_RW: of this rank's run of the vocabulary.  tokens_R: int64.  top: k, at most as many as there are tokens.
    """
    wanted_RX = tokens_R[:, None]
    if top:
        likeliest = vocabulary.top if top <= MAX_LOGPROBS else vocabulary.best  # the kernels are for few
        wanted_RX = torch.cat((wanted_RX, likeliest(logits_RW, min(top, vocabulary.size))[1]), dim=1)
    local_RX, own_RX = wanted_RX - vocabulary.first, torch.zeros_like(wanted_RX, dtype=torch.float32)
    if vocabulary.own:
        is_own_RX = (local_RX >= 0) & (local_RX < vocabulary.own)
        own_RX = torch.where(is_own_RX, logits_RW.gather(1, local_RX.clamp(0, vocabulary.own - 1)).float(), 0.0)
    best_R1, of_best_R1 = vocabulary.best_logprobs(logits_RW)
    bits_RX = ((vocabulary.group.all_reduce(own_RX) - best_R1) + of_best_R1).double().view(torch.int64)
    return torch.cat((bits_RX, wanted_RX[:, 1:]), dim=1)


def read_logprobs(numbers_Y: Tensor) -> list[list[Logprobs]]:
    """The log-probabilities of each row's tokens.  numbers_Y: [B, Y] or [B, E, Y] on the host, of rows of `token_logprobs`."""
    numbers_BEY = numbers_Y[:, None] if numbers_Y.dim() == 2 else numbers_Y
    floats = (numbers_BEY.shape[-1] + 1) // 2
    values, ids = numbers_BEY[..., :floats].view(torch.float64).tolist(), numbers_BEY[..., floats:].tolist()
    return [list(map(Logprobs._make, zip(*row, strict=True))) for row in zip(values, ids, strict=True)]


def read_scores(numbers_RY: Tensor, counts: Sequence[int]) -> list[list[Logprobs]]:
    """Those of each part of a chunk, of FirstTokens.scores_RY.  numbers_RY: on the host.  counts: how many each part has."""
    every = iter(each for (each,) in read_logprobs(numbers_RY))
    return [list(islice(every, count)) for count in counts]


def tree_numbers(tree: DraftTree, chosen_BN: Tensor) -> Tensor:
    """[B, 5, N] int64: of each node its token, its parent, the target's token after it, its sources as bits, which are 0 where
    there is one source, and the bits of its score, a float64 number, which is NaN where the drafter makes no estimate.
    """
    if use_index_kernels(chosen_BN):
        from specdec.batch.trees.numbers_triton import launch_tree_numbers

        return launch_tree_numbers(tree, chosen_BN)
    scores_BN = torch.full_like(chosen_BN, torch.nan, dtype=torch.float32) if tree.scores_BN is None else tree.scores_BN
    sources_BN = torch.zeros_like(chosen_BN) if tree.sources_BN is None else tree.sources_BN
    scores_BN = scores_BN.double().view(torch.int64)
    return torch.stack((tree.tokens_BN, tree.parents_BN, chosen_BN, sources_BN, scores_BN), dim=1)


def read_trees(numbers_B5N: Tensor) -> list[NodeTable]:
    """The trees of `tree_numbers`.  numbers_B5N: on the host."""
    scores_BN = numbers_B5N[:, 4].contiguous().view(torch.float64)
    has_scores = not bool(scores_BN[:, 0].isnan().any())
    tokens_BN, parents_BN, chosen_BN, sources_BN = (column.tolist() for column in numbers_B5N[:, :4].unbind(1))
    scores = scores_BN.tolist() if has_scores else [[]] * len(tokens_BN)
    return [NodeTable(*columns) for columns in zip(tokens_BN, parents_BN, chosen_BN, scores, sources_BN, strict=True)]
