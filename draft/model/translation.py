"""How a small model of other tokens reads and writes its target's: by the text behind them.

The model reads each of the target's tokens in one place.  A token that both have is the model's own; of any other it reads the
mean of the embeddings of the own tokens that spell it.  It drafts tokens that both have, and no other.

Shapes: V tokens of the target, n tokens that both have, P own tokens of all of the target's, one after the other, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Translation(NamedTuple):
    """reads: for each id of the target's the own ids that spell it; none for what the model can't spell, and for padding.

    drafts: of tokens that both have, by the target's id, the own one.
    """

    reads: tuple[tuple[int, ...], ...]
    drafts: dict[int, int]

    def offsets(self, device: torch.device) -> Tensor:
        """[n] int64: what takes a draft id, which counts the tokens that both have, to the target's id."""
        ids_n = torch.tensor([*self.drafts], dtype=torch.int64, device="cpu")
        return (ids_n - torch.arange(len(ids_n), dtype=torch.int64, device="cpu")).to(device)

    def own_ids(self, device: torch.device) -> Tensor:
        """[n] int64: the own ids of tokens that both have."""
        return torch.tensor([*self.drafts.values()], dtype=torch.int64, device=device)

    def embeddings(self, own_OH: Tensor) -> Tensor:
        """[V, H]: what the model reads of each of the target's tokens.  own_OH: the embeddings of the own tokens."""
        device = own_OH.device
        counts_V = torch.tensor([len(each) for each in self.reads], dtype=torch.int64, device=device)
        rows_P = torch.arange(len(counts_V), dtype=torch.int64, device=device).repeat_interleave(counts_V)
        own_P = torch.tensor([token for each in self.reads for token in each], dtype=torch.int64, device=device)
        sums_VH = torch.zeros(len(counts_V), own_OH.shape[1], dtype=torch.float32, device=device)
        sums_VH.index_add_(0, rows_P, own_OH.index_select(0, own_P).float())
        return (sums_VH / counts_V.clamp(min=1)[:, None]).to(own_OH.dtype)


def translate(
    own: Mapping[bytes, int], target: Mapping[int, bytes], target_ids: Mapping[bytes, int], size: int, same: Mapping[int, int]
) -> Translation:
    """own: each own token's id by its bytes.  target: the bytes of the target's ids; target_ids: the id of each text there.

    size: V.  same: tokens of both that mean the same without being spelled alike, by the target's id, as those that end texts.
    """
    longest = max(map(len, own), default=0)
    reads = [() if token not in target else spelled(target[token], own, longest) for token in range(size)]
    drafts = {target_ids[text]: token for text, token in own.items() if target_ids.get(text, size) < size}
    for token, other in same.items():
        if token < size and len(reads[token]) != 1:
            reads[token] = (other,)
            drafts.setdefault(token, other)
    return Translation(tuple(reads), dict(sorted(drafts.items())))


def spelled(text: bytes, own: Mapping[bytes, int], longest: int) -> tuple[int, ...]:
    """The own ids that spell a text, each the longest one that fits; bytes that no own token begins with are left out."""
    found, at = [], 0
    while at < len(text):
        end = next((end for end in range(min(len(text), at + longest), at, -1) if text[at:end] in own), None)
        if end is not None:
            found.append(own[text[at:end]])
        at = at + 1 if end is None else end
    return tuple(found)
