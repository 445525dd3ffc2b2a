"""The text of a target over a cache that rounds what it keeps, against dense passes that round as the cache does."""

from specdec import SamplingParams, SpecDecoder
from specdec.bench.session import Session
from specdec.generation import Generation
from specdec.lossless.choice import Text
from specdec.lossless.passes import DensePasses
from specdec.lossless.reference import read_text


def is_clearly_the_oracle_s_text(decoder: SpecDecoder, out: Generation) -> bool:
    """Asserts that every token is the reference's, or that rounding explains it.

    Returns whether no other token was as good within rounding at any place.
    """
    reading = read_text(DensePasses(Session(decoder)), Text(out.prompt_token_ids, out.token_ids, SamplingParams()))
    assert all(each.is_explained for each in reading.off), reading.off
    return reading.unsure == 0
