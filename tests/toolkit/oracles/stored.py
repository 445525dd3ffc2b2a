"""The text of a target over a cache that rounds what it keeps, against dense passes that round as the cache does."""

from collections.abc import Sequence

from specdec import SamplingParams, SpecDecoder
from specdec.generation import Generation
from specdec.lossless.choice import GeneratedText
from specdec.lossless.reference import passes_of, read_text
from specdec.session import Session


def is_clearly_the_oracle_s_text(decoder: SpecDecoder, out: Generation) -> bool:
    """Asserts that every token is the reference's, or that rounding explains it.

    Returns whether no other token was as good within rounding at any place.
    """
    check = read_text(passes_of(Session(decoder)), GeneratedText(out.prompt_token_ids, out.token_ids, SamplingParams()))
    assert all(each.is_explained for each in check.off), check.off
    return check.unsure == 0


def hold_stored_text(decoder: SpecDecoder, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> None:
    """Asserts that texts, drafted and plain, are the reference's or explained by rounding, and equal where they are clear."""
    outputs = decoder.generate(list(prompts), list(sampling))
    plain = decoder.generate(list(prompts), list(sampling), speculate=False)
    clear = [is_clearly_the_oracle_s_text(decoder, out) for out in outputs]
    for out, other, is_clear in zip(outputs, plain, clear, strict=True):
        assert out.token_ids == other.token_ids or not is_clear
        is_clearly_the_oracle_s_text(decoder, other)
    assert sum(clear) >= 2, "too many near-ties: choose other prompts"
    assert sum(out.stats.drafted for out in outputs) > 0
