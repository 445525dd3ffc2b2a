"""Prompt lookup by hand, over one text as a list: what the n-gram drafter must find.  And random texts in pages."""

import random

import torch

from specdec.attention.pages import PageTable
from specdec.draft.ngram.lookup import MAX_MATCH, PagedTexts

PAGE, WIDTH = 4, 12


def random_texts(lens: list[int], alphabet: int, span: int | None, seed: int) -> tuple[PagedTexts, list[list[int]]]:
    """Texts in pages in random order; slots that hold no text hold junk."""
    rng = random.Random(seed)
    pages = list(range(1, len(lens) * WIDTH + 1))
    rng.shuffle(pages)
    table = torch.tensor(pages, dtype=torch.int32).view(len(lens), WIDTH)
    tokens = torch.randint(alphabet, ((len(pages) + 1) * PAGE,), generator=torch.Generator().manual_seed(seed)).int()
    text = PagedTexts(tokens, PageTable(table, PAGE), torch.tensor(lens, dtype=torch.int32), span)
    whole = text.at(torch.arange(WIDTH * PAGE).expand(len(lens), -1)).tolist()
    return text, [entries[:length] for entries, length in zip(whole, lens, strict=True)]


def places(entries: list[int], span: int | None = None, back: int = 0) -> list[tuple[int, int]]:
    """(length, position) of every place where the end of the text stood before, the best first.  back: how far before the end
    the place is to which equally long matches are near; of two as near, the one after is better."""
    first, at = max(0, len(entries) - span) if span else 0, len(entries) - 1 - back
    found = [(match_length(entries, end, span), end) for end in range(first, len(entries) - 1)]
    return sorted(found, key=lambda place: (-place[0], abs(place[1] - at), -place[1]))


def match_length(entries: list[int], end: int, span: int | None = None) -> int:
    """How many entries up to a place equal the last ones."""
    first, last, length = max(0, len(entries) - span) if span else 0, len(entries) - 1, 0
    while length < MAX_MATCH and end - length >= first and entries[end - length] == entries[last - length]:
        length += 1
    return length


def followers(entries: list[int], end: int, steps: int) -> list[int]:
    """What followed the place, and follows if the text goes on as it did from there."""
    known = list(entries)
    for step in range(steps):
        known.append(known[end + 1 + step])
    return known[end + 1 : end + 1 + steps]


def accepted_by_round(prompt: list[int], output: list[int], steps: int) -> list[int]:
    """How many tokens of each round's chain are right, if the output is the one that the target writes."""
    text, at, accepted = prompt + output, len(prompt) + 1, []
    while at < len(text):
        entries = text[1:at]  # the drafter has no entry for the first token
        best = places(entries)
        chain = followers(entries, best[0][1], steps) if best else [entries[-1]] * steps
        right = 0
        while right < steps and at + right < len(text) and chain[right] == text[at + right]:
            right += 1
        accepted.append(right)
        at += right + 1
    return accepted
