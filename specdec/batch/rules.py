"""Steps of the pass over logits that follow from what rows' options say of single tokens (tables.py).

At a node of a draft tree, a row's text is what the tables hold and the tokens on the node's path after the root; the root
itself, the last emitted token, is in the tables.

Shapes: B rows, N nodes, R = B * N rows of logits, W a rank's run of the vocabulary, K bad words, M tokens before a word's last,
E levels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.batch.sampling import RowSampling
from specdec.batch.tables import ANY, TokenTables
from specdec.batch.tree import DraftTree
from specdec.parallel.vocabulary import Vocabulary


class LogitRows(NamedTuple):
    """What a step knows of the rows of logits that it changes, [R, W], of this rank's run of the vocabulary.

    sampling: the options of B sequences.  A sequence's rows of logits are adjacent, equally many for each sequence.
    positions_R: int64, of the tokens before those that are to be chosen.
    tree: whose nodes the rows are; None: each sequence has one row, after the text that its tables hold.
    """

    sampling: RowSampling
    positions_R: Tensor
    vocabulary: Vocabulary
    tree: DraftTree | None = None

    @property
    def tables(self) -> TokenTables:
        assert self.sampling.tables is not None, "a pass with rules for tokens has tables"
        return self.sampling.tables

    def by_sequence(self, x_RW: Tensor) -> Tensor:
        """[B, N, W] float32: the rows of each sequence."""
        return x_RW.float().unflatten(0, (self.sampling.rows, -1))


def biased(logits_RW: Tensor, rows: LogitRows) -> Tensor:
    """Adds what logit_bias says; bad words of one token are a bias of -inf."""
    return (rows.by_sequence(logits_RW) + rows.tables.bias_BW[:, None, :-1]).flatten(0, 1)


def without_bad_words(logits_RW: Tensor, rows: LogitRows) -> Tensor:
    """Bans tokens that would complete a bad word."""
    x_BNW, tables, tree = rows.by_sequence(logits_RW), rows.tables, rows.tree
    B, N, W = x_BNW.shape
    suffix_BNM = tables.tail_BM[:, None] if tree is None or tree.max_depth == 0 else _suffixes(tables.tail_BM, tree)
    words_B1KM = tables.words_BKM[:, None]
    completes_BNK = ((words_B1KM == suffix_BNM[:, :, None]) | (words_B1KM == ANY)).all(-1)
    local_BK, is_own_BK = tables.local(tables.word_ends_BK, rows.vocabulary.first)
    banned_BNW = torch.zeros(B, N, W + 1, dtype=torch.bool, device=x_BNW.device)
    at_BNK = local_BK[:, None].expand_as(completes_BNK)
    banned_BNW.scatter_(2, torch.where(completes_BNK & is_own_BK[:, None], at_BNK, W), True)
    return x_BNW.masked_fill(banned_BNW[..., :-1], -torch.inf).flatten(0, 1)


def without_early_ends(logits_RW: Tensor, rows: LogitRows) -> Tensor:
    """Bans what ends a text before min_tokens."""
    x_BNW, first_end_B1 = rows.by_sequence(logits_RW), rows.sampling.column("first_end")[:, None]
    is_early_BN1 = (rows.positions_R.view(x_BNW.shape[:2]) + 1 < first_end_B1)[..., None]
    return x_BNW.masked_fill(is_early_BN1 & rows.tables.ends_BW[:, None, :-1], -torch.inf).flatten(0, 1)


def penalised(logits_RW: Tensor, rows: LogitRows) -> Tensor:
    """Applies the penalties for tokens that the text holds."""
    x_BNW, tables, tree = rows.by_sequence(logits_RW), rows.tables, rows.tree
    in_prompt_B1W, count_B1W = tables.in_prompt_BW[:, None], tables.count_BW[:, None]
    names = "repetition_penalty", "presence_penalty", "frequency_penalty"
    repetition, presence, frequency = (rows.sampling.column(name)[:, None, None] for name in names)

    def changed(x: Tensor, in_prompt: Tensor, count: Tensor) -> Tensor:
        repeated = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where(in_prompt | (count > 0), repeated, x)
        return x - frequency * count - presence * (count > 0)

    result_BNW = changed(x_BNW, in_prompt_B1W[..., :-1], count_B1W[..., :-1])
    if tree is None or tree.max_depth == 0 or not x_BNW.shape[2]:
        return result_BNW.flatten(0, 1)
    # Tokens on a node's path occur once more than the tables say.  The logits of all tokens of the tree are computed again with
    # the right counts.  Where a token is not on the node's path, nothing changes; equal tokens get equal values.
    tokens_BN = tree.tokens_BN[:, 1:]
    local_BN, is_own_BN = tables.local(tokens_BN, rows.vocabulary.first)
    local_BN = torch.where(is_own_BN, local_BN, 0)  # of another rank: column 0 is computed again, for nothing
    equal_BNN = ((local_BN[:, :, None] == local_BN[:, None]) & is_own_BN[:, :, None]).float()
    on_path_BNN = torch.matmul(tree.mask_BNN[:, :, 1:].float(), equal_BNN).int()
    at_BNN = local_BN[:, None].expand_as(on_path_BNN)
    count_BNN = count_B1W.expand(-1, at_BNN.shape[1], -1).gather(2, at_BNN) + on_path_BNN
    in_prompt_BNN = in_prompt_B1W.expand(-1, at_BNN.shape[1], -1).gather(2, at_BNN)
    changed_BNN = changed(x_BNW.gather(2, at_BNN), in_prompt_BNN, count_BNN)
    return result_BNW.scatter(2, at_BNN, changed_BNN).flatten(0, 1)


def _suffixes(tail_BM: Tensor, tree: DraftTree) -> Tensor:
    """[B, N, M] int64: the last tokens of each node's text, the node's own included."""
    B, M = tail_BM.shape
    N, E, mask_BNN, depths_BN = tree.num_nodes, tree.max_depth, tree.mask_BNN, tree.depths_BN
    # Each node's path after the root, by depth; what is not on it goes into a column more.
    place_BNN = torch.where(mask_BNN & (depths_BN[:, None] > 0), depths_BN[:, None] - 1, E)
    path_BNE = tail_BM.new_zeros(B, N, E + 1).scatter(2, place_BNN, tree.tokens_BN[:, None].expand(B, N, N))
    whole_BNT = torch.cat((tail_BM[:, None].expand(B, N, M), path_BNE), dim=2)
    return whole_BNT.gather(2, depths_BN[..., None] + torch.arange(M, dtype=torch.int64, device=tail_BM.device))
