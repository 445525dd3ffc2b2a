"""What stays in memory after requests have ended.

Keeps out: an idle decoder that holds the last request it was given, and an error that holds all requests of its batch, and what
their round had computed, for as long as somebody holds the error.
"""

import gc
import weakref

import pytest
from toolkit.driver import Driver
from toolkit.models import Zoo

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.batch.state import BatchState
from specdec.engine.request import Request


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(thing) is kind for thing in gc.get_objects())


def test_an_idle_decoder_holds_no_request(zoo: Zoo) -> None:
    before = alive(Request)
    with zoo.decoder("llama", "eagle3", SpecConfig(2, 2, 4)) as decoder:
        decoder.generate([[3, 4], [5]], SamplingParams(max_tokens=5))
        Driver(decoder).settle()
        assert alive(Request) == before


def error_of(decoder: SpecDecoder, phase: str) -> BaseException | None:
    """The error that a call's error came from."""
    try:
        with Driver(decoder).fail_in(phase, ValueError("boom"), call=0):
            decoder.generate([[3, 4], [5]], SamplingParams(max_tokens=5))
    except RuntimeError as raised:
        return raised.__cause__
    return None


@pytest.mark.parametrize("phase", ["prefill", "verify"])
def test_an_error_holds_no_request(zoo: Zoo, phase: str) -> None:
    before = alive(Request)
    with zoo.decoder("llama", "eagle3", SpecConfig(2, 2, 4)) as decoder:
        error = error_of(decoder, phase)
        assert error is not None and str(error) == "boom" and "in raising" in "".join(error.__notes__)
        Driver(decoder).settle()
        assert alive(Request) == before


def test_an_error_holds_no_decoder(zoo: Zoo) -> None:
    """Keeps out: an error in a variable of a notebook that keeps caches and weights in memory after `close`."""
    before = alive(BatchState)
    with zoo.decoder("llama", "eagle3", SpecConfig(2, 2, 4)) as decoder:
        model, error = weakref.ref(decoder.model), error_of(decoder, "verify")
    gc.collect()
    assert error is not None and model() is None and alive(BatchState) == before
