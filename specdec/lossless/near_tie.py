"""Whether two outputs part at a near-tie: a place where both tokens are the target's best within rounding error."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch

from specdec.config import SamplingParams
from specdec.lossless.choice import GeneratedText
from specdec.lossless.reference import Judged, read_together
from specdec.lossless.verification import Divergence
from specdec.session import Session


def first_divergence(ids_a: Sequence[int], ids_b: Sequence[int]) -> int | None:
    """Index of the first place where the two differ; None if they are equal."""
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids_a, ids_b)))
    return None if common == len(ids_a) == len(ids_b) else common


def explain_divergence(
    session: Session,
    prompt: int,
    prompt_ids: Sequence[int],
    ids_a: Sequence[int],
    ids_b: Sequence[int],
    sampling: SamplingParams,
) -> Divergence | None:
    """Where baseline ids_a and speculative ids_b part, and whether rounding explains both tokens; None if they are equal.

    prompt: the prompt's number.  sampling: as it ran, with a seed if it samples.
    """
    if (pair := parting(ids_a, ids_b)) is None:
        return None
    asked = read_together(session, text_of(session, prompt_ids, ids_a, sampling), pair).asked if pair else []
    return difference(prompt, ids_a, ids_b, asked, rounds(session))


def parting(ids_a: Sequence[int], ids_b: Sequence[int]) -> list[tuple[int, int]] | None:
    """Where two outputs part, with either token; empty where one of them ends; None if they are equal."""
    index = first_divergence(ids_a, ids_b)
    if index is None:
        return None
    return [(index, ids_a[index]), (index, ids_b[index])] if index < min(len(ids_a), len(ids_b)) else []


def text_of(session: Session, prompt_ids: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams) -> GeneratedText:
    """What a request wrote, with all that decides which tokens it could take."""
    choice = session.choice(prompt_ids, sampling)
    return GeneratedText(prompt_ids, token_ids, sampling, choice, session.masks(choice, token_ids))


def difference(
    prompt: int, ids_a: Sequence[int], ids_b: Sequence[int], judged: Sequence[Judged], may_round: bool
) -> Divergence:
    """Where baseline's ids_a and speculation's ids_b part.

    judged: the tokens of `parting`; none: one output goes on where the other ends.  may_round: whether rounding can decide
    anything.
    """
    if not judged:
        index = min(len(ids_a), len(ids_b))
        return Divergence(prompt, index, next(iter(ids_a[index:]), None), next(iter(ids_b[index:]), None))
    a, b = judged
    margins = [each.margin for each in (a, b)]
    margin = None if None in margins else max(margins)  # type: ignore[type-var]
    is_tie = may_round and a.is_explained and b.is_explained
    verdict = "near-tie" if is_tie else "DIVERGED"
    return Divergence(prompt, a.index, a.token, b.token, a.rank, b.rank, margin, a.bound, verdict)  # type: ignore[arg-type]


def rounds(session: Session) -> bool:
    """Whether two passes of the decoder may choose different tokens by rounding alone: in 16 bit, or over KV in 8 bits.

    In float32 passes differ in the last bits too, but a tie within them is so rare that a difference is taken for an error.  In
    deterministic mode they don't differ, so that is what is held there.
    """
    if session.settings.options.deterministic:
        return False
    return session.settings.dtype in (torch.float16, torch.bfloat16) or session.as_stored is not None
