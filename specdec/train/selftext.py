"""Text that a target writes itself, which is the text that its draft head must learn to predict.

This file knows prompts, the runtime's `generate` and rows of tokens.  It knows neither heads nor losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.config import SamplingParams
from specdec.decoder import SpecDecoder
from specdec.train.loop import reporter

ROUND = 512  # prompts of one call of generate; progress is saved and shown after each call


def prompt_ids(decoder: SpecDecoder, documents: Sequence[str], count: int, longest: int, seed: int) -> list[list[int]]:
    """The token ids of `count` prompts, each the first 4 to `longest` tokens of a random document.

    Several prompts may come from one document.  The same seed gives the same prompts.  ValueError if all documents are shorter.
    """
    generator = torch.Generator().manual_seed(seed)
    usable = [ids for document in documents if len(ids := decoder.tokenizer.encode(document[:2000])) >= 4]
    if not usable:
        raise ValueError(f"text: expected documents of at least 4 tokens, got {len(documents)} shorter ones")
    picks = torch.randint(len(usable), (count,), generator=generator).tolist()
    sizes = torch.randint(4, longest + 1, (count,), generator=generator).tolist()
    return [usable[pick][:size] for pick, size in zip(picks, sizes, strict=True)]


def write_rows(
    decoder: SpecDecoder,
    prompts: Sequence[list[int]],
    rows: Tensor,
    greedy_share: float,
    seed: int,
    save: Callable[[], None],
) -> None:
    """Fills rows [len(prompts), width] with the ids of each prompt and its continuation by the target.

    rows must hold -1 at first; columns after the end of a text keep it.  Rows that a run before has filled stay as they are.
    greedy_share: share of the rows that continue greedily.  The others are sampled at temperature 1, so that the head also
    learns texts that the target rarely prefers.
    seed: makes the choice of greedy rows and the sampling repeatable.  save: called after every ROUND prompts.
    """
    width = rows.shape[1]
    generator = torch.Generator().manual_seed(seed)
    greedy = (torch.rand(len(prompts), generator=generator) < greedy_share).tolist()
    done = int((rows[:, 0] >= 0).sum())
    with reporter(len(prompts), done) as report:
        for start in range(done, len(prompts), ROUND):
            batch = range(start, min(start + ROUND, len(prompts)))
            sampling = [
                SamplingParams(
                    max_tokens=width - len(prompts[i]), temperature=0.0 if greedy[i] else 1.0, seed=seed * 1_000_003 + i
                )
                for i in batch
            ]
            outputs = decoder.generate([list(prompts[i]) for i in batch], sampling, speculate=False)
            for i, output in zip(batch, outputs, strict=True):
                ids = (output.prompt_token_ids + output.token_ids)[:width]
                rows[i, : len(ids)] = torch.tensor(ids)
            save()
            report(batch[-1] + 1, "texts written", batch[-1] + 1 == len(prompts) or start // ROUND % 8 == 0)


def frequent_ids(rows: Tensor, size: int, vocab_size: int) -> Tensor:
    """The ids of the `size` most frequent tokens of rows, ascending: [size] int64.

    Of tokens that are equally frequent, or never occur, those with lower ids are taken.  ValueError if size is not within
    1 .. vocab_size.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(f"draft_vocab_size must be in [1, {vocab_size}], got {size}")
    counts = torch.bincount(rows[rows >= 0], minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values
