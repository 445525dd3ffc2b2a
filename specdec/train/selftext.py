"""Text that a target writes itself, which is the text that its draft head must learn to predict.

This file knows prompts, the runtime's `generate` and rows of tokens.  It knows neither heads nor losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.config import SamplingParams
from specdec.decoder import SpecDecoder
from specdec.train.folder import check_same, load_whole, save_whole
from specdec.train.settings import HeadRun
from specdec.train.text.documents import Document
from specdec.train.text.openings import opening_ids

# Prompts of one call of generate, by device.  At a call's end few rows of its batches are busy; after it rows are saved.
ROUNDS = {"cuda": 2048, "cpu": 512}
WRITTEN_BY = ("texts", "width", "longest_prompt", "greedy_share", "held_out", "seed")  # settings that the rows follow from
ENOUGH = 0.98  # of the text should lie in the draft vocabulary
CHECKED = 20, 256  # one row of so many tells the loss on other text than a head learns from; at most so many rows


class SelfText(NamedTuple):
    """rows_NT: int64 ids, a text each; columns after its end hold -1.  begins_N: int64, the column after each row's prompt.

    The last `checked` rows go on from other documents than those before them.
    """

    rows_NT: Tensor
    begins_N: Tensor

    @property
    def checked(self) -> int:
        return checked_rows(len(self.rows_NT))

    def to(self, device: torch.device) -> SelfText:
        return SelfText(self.rows_NT.to(device), self.begins_N.to(device))

    def written(self) -> Tensor:
        """[N, T] bool: what the target wrote."""
        at_T = torch.arange(self.rows_NT.shape[1], dtype=torch.int64, device=self.rows_NT.device)
        return (at_T >= self.begins_N[:, None]) & (self.rows_NT >= 0)

    def goals(self) -> Tensor:
        """The rows with -1 for all that the target did not write."""
        return torch.where(self.written(), self.rows_NT, -1)


def checked_rows(rows: int) -> int:
    """How many of all rows are kept out of training."""
    share, most = CHECKED
    return min(most, max(1, rows // share))


def train_prompts(
    decoder: SpecDecoder, documents: Sequence[Document], count: int, run: HeadRun, seed: int = 0
) -> list[list[int]]:
    """The token ids of `count` prompts of random documents: 4 to run.longest_prompt of a text's first tokens, or a chat up to
    where the answer begins.  seed: beside the run's.

    Several prompts may come from one document.  The same seed gives the same prompts.  ValueError if no document will do.
    """
    generator = torch.Generator("cpu").manual_seed(run.seed + 500_009 * seed)
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


def write_text(
    decoder: SpecDecoder,
    train: Sequence[Document],
    checked: Sequence[Document],
    run: HeadRun,
    path: Path,
    origin: Mapping[str, Any],
) -> SelfText:
    """The rows that the target writes, [run.texts, run.width].

    train, checked: documents that open the rows to train on, and the others.  path: a file that keeps the rows as they come; if
    it is there, only the rest is written.  origin: which target and which text they are made of; the file must say the same.
    """
    made_of = {name: getattr(run, name) for name in WRITTEN_BY} | dict(origin)
    apart = checked_rows(run.texts)
    prompts = train_prompts(decoder, train, run.texts - apart, run) + train_prompts(decoder, checked or train, apart, run, 1)
    rows = torch.full((run.texts, run.width), -1, dtype=torch.int64, device="cpu")
    if path.is_file():
        read_rows_file(path, made_of, rows)
    at_once = ROUNDS[decoder.settings.device.type]
    write_rows(decoder, prompts, rows, run.greedy_share, run.seed, lambda: save_rows_file(path, made_of, rows), at_once)
    return SelfText(rows, torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64, device="cpu"))


def save_rows_file(path: Path, made_of: Mapping[str, Any], rows_NT: Tensor) -> None:
    """Saves the rows that are written so far, one after another without their ends, in the fewest bytes that hold their ids."""
    lengths_N = (rows_NT >= 0).sum(1)
    tokens = rows_NT[rows_NT >= 0]
    tokens = tokens.to(torch.uint16 if int(tokens.amax()) < 1 << 16 else torch.int32)
    save_whole(path, {"made_of": dict(made_of), "tokens": tokens, "lengths": lengths_N.to(torch.int32)})


def read_rows_file(path: Path, made_of: Mapping[str, Any], rows_NT: Tensor) -> None:
    """Fills rows of -1 from a file of `save_rows_file`.  ValueError if they are made of something else."""
    try:
        saved = load_whole(path)
        was, lengths, tokens = saved["made_of"], saved["lengths"].tolist(), saved["tokens"].to(torch.int64)
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"self_text: expected rows that a run has written at {path}, got {error}; delete the file") from error
    check_same(path, was, made_of, "self_text", "name another file by --self-text")
    for index, ids in enumerate(tokens.split(lengths)):
        rows_NT[index, : len(ids)] = ids


def write_rows(
    decoder: SpecDecoder,
    prompts: Sequence[list[int]],
    rows: Tensor,
    greedy_share: float,
    seed: int,
    save: Callable[[], None],
    at_once: int,
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
    return _by_counts(rows, vocab_size)[:size].sort().values


def _by_counts(rows: Tensor, vocab_size: int) -> Tensor:
    return torch.bincount(rows[rows >= 0], minlength=vocab_size).sort(descending=True, stable=True).indices


def coverage(text: SelfText, size: int, vocab_size: int) -> str:
    """A line that says how much of the text that no training reads lies in a draft vocabulary of that size, and which sizes
    hold more of it: what lies outside can never be drafted.
    """
    ranks_V = torch.empty(vocab_size, dtype=torch.int64, device="cpu")
    order_V = _by_counts(text.goals()[: -text.checked], vocab_size)
    ranks_V[order_V] = torch.arange(vocab_size, dtype=torch.int64, device="cpu")
    goals = text.goals()[-text.checked :]
    found = ranks_V[goals[goals >= 0]].sort().values
    if not len(found):
        return f"draft vocabulary: {size:,} of {vocab_size:,} tokens; the target wrote no text to check it on"
    share = float((found < size).double().mean())
    line = f"draft vocabulary: {size:,} of {vocab_size:,} tokens, {share:.2%} of the text that is kept out of training"
    if share < ENOUGH:
        sizes = {wanted: int(found[min(len(found) - 1, int(len(found) * wanted))]) + 1 for wanted in (ENOUGH, 0.99, 0.995)}
        need = ", ".join(f"{wanted:.1%} with {min(-(-least // 64) * 64, vocab_size):,}" for wanted, least in sizes.items())
        line += f"; each other token ends a draft: {need} tokens (--draft-vocab-size)"
    return line
