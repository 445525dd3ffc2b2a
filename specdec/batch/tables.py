"""What rows' options say of single tokens, and what their texts hold, as tables on the device.

The tables are made when the first row with such rules enters, and no pass without a need for them reads or writes them.  A row
without rules has neutral entries.  Knows no tree and no other option; what follows for logits is said in rules.py.

Shapes: B rows, R some of them, W a rank's run of the vocabulary, K bad words, M tokens before a word's last,
E new tokens, T = M + E.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specdec.batch.transfer import to_device
from specdec.limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from specdec.steps import TokenRules

ANY, NO_TOKEN = -1, -2  # in a bad word: any token, before its first one; in the end of a text: before the text begins
MAX_BEFORE = MAX_BAD_WORD_TOKENS - 1


@dataclass(frozen=True)
class TokenTables:
    """The tables of all rows, of this rank's run of the vocabulary.  Their last column, W, is for the ids of other ranks.

    bias_BW: float32, added to the logits.
    in_prompt_BW: bool, whether the prompt holds the token.  count_BW: int32, how often the output does.
    ends_BW: bool, tokens that are banned before RowOptions.first_end.
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
            full(ANY, torch.int64, MAX_BAD_WORDS, MAX_BEFORE),
            full(NO_TOKEN, torch.int64, MAX_BAD_WORDS),
            full(NO_TOKEN, torch.int64, MAX_BEFORE),
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

    def enter(self, row: int, rules: TokenRules, first: int, written: Sequence[int] = ()) -> None:
        """Writes a neutral row's rules.  first: the lowest id of this rank's run.  written: what its output holds already."""
        device, width = self.tail_BM.device, self.bias_BW.shape[1] - 1
        if own := [(token - first, added) for token, added in rules.bias if 0 <= token - first < width]:
            columns, added = zip(*own, strict=True)
            self.bias_BW[row].index_copy_(0, to_device(columns, device), to_device(added, device, torch.float32))
        for table_BW, ids in ((self.in_prompt_BW, set(rules.prompt_ids)), (self.ends_BW, rules.ends)):
            if local := [token - first for token in ids if 0 <= token - first < width]:
                table_BW[row].index_fill_(0, to_device(local, device), True)
        if rules.bad_words:
            before = [[ANY] * (MAX_BEFORE + 1 - len(word)) + list(word[:-1]) for word in rules.bad_words]
            self.words_BKM[row, : len(before)] = to_device(before, device)
            self.word_ends_BK[row, : len(before)] = to_device([word[-1] for word in rules.bad_words], device)
        if own := sorted(Counter(token - first for token in written if 0 <= token - first < width).items()):
            columns, counts = zip(*own, strict=True)
            self.count_BW[row].index_copy_(0, to_device(columns, device), to_device(counts, device, torch.int32))
        if tail := [*rules.prompt_ids[-MAX_BEFORE:], *written[-MAX_BEFORE:]][-MAX_BEFORE:]:
            self.tail_BM[row, -len(tail) :] = to_device(tail, device)

    def record(self, tokens_BE: Tensor, counts_B: Tensor, first: int) -> None:
        """Adds the first counts_B tokens of each row to what its text holds."""
        E, M = tokens_BE.shape[1], self.tail_BM.shape[1]
        is_new_BE = torch.arange(E, dtype=torch.int64, device=tokens_BE.device) < counts_B[:, None]
        local_BE, _ = self.local(tokens_BE, first)
        self.count_BW.scatter_add_(1, local_BE, is_new_BE.int())
        whole_BT = torch.cat((self.tail_BM, tokens_BE), dim=1)
        self.tail_BM.copy_(whole_BT.gather(1, counts_B[:, None] + torch.arange(M, dtype=torch.int64, device=tokens_BE.device)))

    def local(self, tokens: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """(the tokens' columns, W for other ranks' ids; whether they are this rank's)."""
        width = self.bias_BW.shape[1] - 1
        local = tokens - first
        is_own = (local >= 0) & (local < width)
        return torch.where(is_own, local, width), is_own
