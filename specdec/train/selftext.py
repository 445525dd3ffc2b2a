"""Text that a target writes itself, which is the text that its draft head must learn to predict.

This file knows prompts, the runtime's `generate` and rows of tokens.  It knows neither heads nor losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.config import SamplingParams
from specdec.decoder import SpecDecoder
from specdec.train.settings import HeadRun
from specdec.train.text.documents import Document
from specdec.train.text.openings import opening_ids

ROUND = 512  # prompts of one call of generate; rows are saved after each call


def train_prompts(decoder: SpecDecoder, documents: Sequence[Document], count: int, run: HeadRun) -> list[list[int]]:
    """The token ids of `count` prompts of random documents: 4 to run.longest_prompt of a text's first tokens, or a chat up to
    where the answer begins.

    Several prompts may come from one document.  The same seed gives the same prompts.  ValueError if no document will do.
    """
    generator = torch.Generator("cpu").manual_seed(run.seed)
    usable = [
        (ids, document.messages is None)
        for document in documents
        if (ids := opening_ids(decoder.tokenizer, document, run.width // 2, run.longest_prompt))
    ]
    if not usable:
        raise ValueError(
            f"text: expected documents of at least 4 tokens, or chats of at most {run.width // 2} tokens (half of width) "
            f"before the answer, got {len(documents)} others"
        )
    picks = torch.randint(len(usable), (count,), generator=generator, dtype=torch.int64, device="cpu").tolist()
    sizes = torch.randint(4, run.longest_prompt + 1, (count,), generator=generator, dtype=torch.int64, device="cpu").tolist()
    return [usable[pick][0][: size if usable[pick][1] else None] for pick, size in zip(picks, sizes, strict=True)]


def eval_prompts(decoder: SpecDecoder, held: Sequence[Document], train: Sequence[Document], run: HeadRun) -> list[list[int]]:
    """The token ids of at most run.eval_prompts prompts, each of a held-out document of its own.

    They are as long as prompts may be, and none begins a training document: what the target writes after a prompt of the
    training is what the head has learnt by heart.  ValueError if there is none.
    """
    known = [opening_ids(decoder.tokenizer, document, run.width // 2, run.longest_prompt) for document in train]
    found: list[list[int]] = []
    for document in held:
        ids = opening_ids(decoder.tokenizer, document, run.width // 2, run.longest_prompt)
        prompt = ids if document.messages is not None else ids[: run.longest_prompt]
        if prompt and len(found) < run.eval_prompts and not any(other[: len(prompt)] == prompt for other in known):
            found.append(prompt)
    if not found:
        raise ValueError(
            f"text: expected held-out documents that begin unlike those to train on, got {len(held)} others; name other text "
            "with --eval-text"
        )
    return found


def write_rows(
    decoder: SpecDecoder,
    prompts: Sequence[list[int]],
    rows: Tensor,
    greedy_share: float,
    seed: int,
    save: Callable[[], None],
    at_once: int = ROUND,
) -> None:
    """Fills rows [len(prompts), width] with the ids of each prompt and its continuation by the target.

    rows must hold -1 at first; columns after the end of a text keep it.  Rows that a run before has filled stay as they are.
    greedy_share: share of the rows that continue greedily.  The others are sampled at temperature 1, so that the head also
    learns texts that the target rarely prefers.
    seed: makes the choice of greedy rows and the sampling repeatable.  save: called after every `at_once` prompts.
    """
    width = rows.shape[1]
    generator = torch.Generator("cpu").manual_seed(seed)
    greedy = (torch.rand(len(prompts), generator=generator, dtype=torch.float32, device="cpu") < greedy_share).tolist()
    done = int((rows[:, 0] >= 0).sum())
    for start in range(done, len(prompts), at_once):
        batch = range(start, min(start + at_once, len(prompts)))
        sampling = [
            SamplingParams(max_tokens=width - len(prompts[i]), temperature=0.0 if greedy[i] else 1.0, seed=seed * 1_000_003 + i)
            for i in batch
        ]
        outputs = decoder.generate([list(prompts[i]) for i in batch], sampling, speculate=False, progress=True)
        for i, output in zip(batch, outputs, strict=True):
            ids = (output.prompt_token_ids + output.token_ids)[:width]
            rows[i, : len(ids)] = torch.tensor(ids, dtype=torch.int64, device="cpu")
        save()
        print(f"{batch.stop:,} of {len(prompts):,} texts written by the target", flush=True)


def frequent_ids(rows: Tensor, size: int, vocab_size: int) -> Tensor:
    """The ids of the `size` most frequent tokens of rows, ascending: [size] int64.

    Of tokens that are equally frequent, or never occur, those with lower ids are taken.  ValueError if size is not within
    1 .. vocab_size.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(f"draft_vocab_size must be in [1, {vocab_size}], got {size}")
    counts = torch.bincount(rows[rows >= 0], minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values
