"""What rows' options say of single tokens, and what their texts hold, as tables on the device; and the logits that follow.

The tables are made when the first row with such rules enters, and no pass without a need for them reads or writes them.  A row
without rules has neutral entries.  At a node of a draft tree, a row's text is what the tables hold and the tokens on the node's
path after the root; the root itself, the last emitted token, is in the tables.

Shapes: B rows, N nodes, R = B * N rows of logits, W a rank's run of the vocabulary, K bad words, M tokens before a word's last,
E levels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specdec.batch.sampling import RowSampling
from specdec.batch.sending import sent
from specdec.batch.tree import DraftTree
from specdec.limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from specdec.parallel.vocabulary import Vocabulary
from specdec.steps import Needs, TokenRules

ANY, NO_TOKEN = -1, -2  # in a bad word: any token, before its first one; in the end of a text: before the text begins
MOST_BEFORE = MAX_BAD_WORD_TOKENS - 1


@dataclass(frozen=True)
class TokenTables:
    """The tables of all rows, of this rank's run of the vocabulary.  Their last column, W, is for the ids of other ranks.

    bias_BW: float32, added to the logits.
    in_prompt_BW: bool, whether the prompt holds the token.  count_BW: int32, how often the output does.
    ends_BW: bool, tokens that are banned before RowSampling.first_end_R.
    words_BKM: int64, the bad words without their last tokens, at the end of each row; ANY stands before them.
    word_ends_BK: int64, their last tokens; NO_TOKEN where there is no word.
    tail_BM: int64, the row's last tokens; NO_TOKEN where there is none.
    """

    bias_BW: Tensor
    in_prompt_BW: Tensor
    count_BW: Tensor
    ends_BW: Tensor
    words_BKM: Tensor
    word_ends_BK: Tensor
    tail_BM: Tensor

    @classmethod
    def neutral(cls, rows: int, width: int, device: torch.device | str) -> TokenTables:
        """Tables of rows without rules.  width: W."""

        def full(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((rows, *shape), value, dtype=dtype, device=device)

        return cls(
            full(0, torch.float32, width + 1),
            full(0, torch.bool, width + 1),
            full(0, torch.int32, width + 1),
            full(0, torch.bool, width + 1),
            full(ANY, torch.int64, MAX_BAD_WORDS, MOST_BEFORE),
            full(NO_TOKEN, torch.int64, MAX_BAD_WORDS),
            full(NO_TOKEN, torch.int64, MOST_BEFORE),
        )

    def tensors(self) -> list[Tensor]:
        return [getattr(self, each.name) for each in fields(self)]

    @property
    def written(self) -> list[Tensor]:
        """The tensors that `record` changes."""
        return [self.count_BW, self.tail_BM]

    def narrow(self, rows: int) -> TokenTables:
        """Views of the first rows."""
        return TokenTables(*(tensor[:rows] for tensor in self.tensors()))

    def of_rows(self, rows_R: Tensor) -> TokenTables:
        """Copies of some rows.  rows_R: int64."""
        return TokenTables(*(tensor.index_select(0, rows_R) for tensor in self.tensors()))

    def clear_rows(self, rows_R: Tensor) -> None:
        """Makes rows (int64) neutral."""
        for tensor, value in zip(self.tensors(), (0, False, 0, False, ANY, NO_TOKEN, NO_TOKEN), strict=True):
            tensor.index_fill_(0, rows_R, value)

    def enter(self, row: int, rules: TokenRules, first: int) -> None:
        """Writes a neutral row's rules.  first: the lowest id of this rank's run."""
        device, width = self.tail_BM.device, self.bias_BW.shape[1] - 1
        if own := [(token - first, added) for token, added in rules.bias if 0 <= token - first < width]:
            columns, added = zip(*own, strict=True)
            self.bias_BW[row].index_copy_(0, sent(columns, device), sent(added, device, torch.float32))
        for table_BW, ids in ((self.in_prompt_BW, set(rules.prompt_ids)), (self.ends_BW, rules.ends)):
            if local := [token - first for token in ids if 0 <= token - first < width]:
                table_BW[row].index_fill_(0, sent(local, device), True)
        if rules.bad_words:
            before = [[ANY] * (MOST_BEFORE + 1 - len(word)) + list(word[:-1]) for word in rules.bad_words]
            self.words_BKM[row, : len(before)] = sent(before, device)
            self.word_ends_BK[row, : len(before)] = sent([word[-1] for word in rules.bad_words], device)
        if tail := list(rules.prompt_ids[-MOST_BEFORE:]):
            self.tail_BM[row, -len(tail) :] = sent(tail, device)

    def record(self, tokens_BE: Tensor, counts_B: Tensor, first: int) -> None:
        """Adds the first counts_B tokens of each row to what its text holds."""
        E, M = tokens_BE.shape[1], self.tail_BM.shape[1]
        is_new_BE = torch.arange(E, dtype=torch.int64, device=tokens_BE.device) < counts_B[:, None]
        local_BE, _ = self._local(tokens_BE, first)
        self.count_BW.scatter_add_(1, local_BE, is_new_BE.int())
        whole_BT = torch.cat((self.tail_BM, tokens_BE), dim=1)
        self.tail_BM.copy_(whole_BT.gather(1, counts_B[:, None] + torch.arange(M, dtype=torch.int64, device=tokens_BE.device)))

    def _local(self, tokens: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """(the tokens' columns, W for other ranks' ids; whether they are this rank's)."""
        width = self.bias_BW.shape[1] - 1
        local = tokens - first
        is_own = (local >= 0) & (local < width)
        return torch.where(is_own, local, width), is_own


def edited_logits(
    logits_RW: Tensor, sampling: RowSampling, positions_R: Tensor, needs: Needs, vocabulary: Vocabulary, tree: DraftTree | None
) -> Tensor:
    """[R, W] float32: the logits after all that the rows' options say of single tokens.

    sampling: of B rows, with tables.  positions_R: int64, of the tokens before those that are to be chosen.
    tree: of which each row has one row of logits a node; None: each row has one, after its text.
    """
    tables = sampling.tables
    assert tables is not None, "a pass with rules for tokens has tables"
    first, (R, W) = vocabulary.first, logits_RW.shape
    B, N = sampling.rows, R // sampling.rows
    x_BNW = logits_RW.float().view(B, N, W)
    if needs.bias:
        x_BNW = x_BNW + tables.bias_BW[:, None, :-1]
    if needs.penalties:
        x_BNW = _penalised(x_BNW, sampling, tables, tree, first)
    if needs.bad_words:
        suffix_BNM = tables.tail_BM[:, None] if tree is None or tree.max_depth == 0 else _suffixes(tables.tail_BM, tree)
        words_B1KM = tables.words_BKM[:, None]
        completes_BNK = ((words_B1KM == suffix_BNM[:, :, None]) | (words_B1KM == ANY)).all(-1)
        local_BK, is_own_BK = tables._local(tables.word_ends_BK, first)
        banned_BNW = torch.zeros(B, N, W + 1, dtype=torch.bool, device=x_BNW.device)
        at_BNK = local_BK[:, None].expand_as(completes_BNK)
        banned_BNW.scatter_(2, torch.where(completes_BNK & is_own_BK[:, None], at_BNK, W), True)
        x_BNW = x_BNW.masked_fill(banned_BNW[..., :-1], -torch.inf)
    if needs.ends:
        is_early_BN1 = (positions_R.view(B, N) + 1 < sampling.first_end_R[:, None])[..., None]
        x_BNW = x_BNW.masked_fill(is_early_BN1 & tables.ends_BW[:, None, :-1], -torch.inf)
    return x_BNW.view(R, W)


def _penalised(x_BNW: Tensor, sampling: RowSampling, tables: TokenTables, tree: DraftTree | None, first: int) -> Tensor:
    """The logits after the penalties for tokens that the text holds."""
    in_prompt_B1W, count_B1W = tables.in_prompt_BW[:, None], tables.count_BW[:, None]
    options = [
        each[:, None, None]
        for each in (sampling.repetition_penalty_R, sampling.presence_penalty_R, sampling.frequency_penalty_R)
    ]

    def penalised(x: Tensor, in_prompt: Tensor, count: Tensor) -> Tensor:
        repetition, presence, frequency = options
        repeated = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where(in_prompt | (count > 0), repeated, x)
        return x - frequency * count - presence * (count > 0)

    result_BNW = penalised(x_BNW, in_prompt_B1W[..., :-1], count_B1W[..., :-1])
    if tree is None or tree.max_depth == 0 or not x_BNW.shape[2]:
        return result_BNW
    # Tokens on a node's path occur once more than the tables say.  The logits of all tokens of the tree are computed again with
    # the right counts.  Where a token is not on the node's path, nothing changes; equal tokens get equal values.
    tokens_BN = tree.tokens_BN[:, 1:]
    local_BN, is_own_BN = tables._local(tokens_BN, first)
    local_BN = torch.where(is_own_BN, local_BN, 0)  # of another rank: column 0 is computed again, for nothing
    equal_BNN = ((local_BN[:, :, None] == local_BN[:, None]) & is_own_BN[:, :, None]).float()
    on_path_BNN = torch.matmul(tree.mask_BNN[:, :, 1:].float(), equal_BNN).int()
    at_BNN = local_BN[:, None].expand_as(on_path_BNN)
    count_BNN = count_B1W.expand(-1, at_BNN.shape[1], -1).gather(2, at_BNN) + on_path_BNN
    in_prompt_BNN = in_prompt_B1W.expand(-1, at_BNN.shape[1], -1).gather(2, at_BNN)
    return result_BNW.scatter(2, at_BNN, penalised(x_BNW.gather(2, at_BNN), in_prompt_BNN, count_BNN))


def _suffixes(tail_BM: Tensor, tree: DraftTree) -> Tensor:
    """[B, N, M] int64: the last tokens of each node's text, the node's own included."""
    B, M = tail_BM.shape
    N, E, mask_BNN, depths_BN = tree.num_nodes, tree.max_depth, tree.mask_BNN, tree.depths_BN
    # Each node's path after the root, by depth; what is not on it goes into a column more.
    place_BNN = torch.where(mask_BNN & (depths_BN[:, None] > 0), depths_BN[:, None] - 1, E)
    path_BNE = tail_BM.new_zeros(B, N, E + 1).scatter(2, place_BNN, tree.tokens_BN[:, None].expand(B, N, N))
    whole_BNT = torch.cat((tail_BM[:, None].expand(B, N, M), path_BNE), dim=2)
    return whole_BNT.gather(2, depths_BN[..., None] + torch.arange(M, dtype=torch.int64, device=tail_BM.device))
