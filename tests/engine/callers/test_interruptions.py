"""What reaches an engine in the middle of a step: an interrupt, a stream that is closed there, a call from inside.

Python runs signal handlers, finalisers and the tokenizer's code wherever a step happens to be.
"""

import io
import random
import signal
import sys
import threading
import time
from contextlib import nullcontext, redirect_stderr
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
from toolkit.driver import Driver, new_request
from toolkit.models import Zoo

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.engine.engine_thread import EngineThread
from specdec.steps import LeaveRows, RunChunk, RunRound

PROMPTS = [[3, 4], [5, 6, 7], [8] * 9]


@pytest.fixture()
def decoder(zoo: Zoo) -> SpecDecoder:
    return zoo.decoder("llama", "eagle3", SpecConfig(3, 4, 12), page_size=4, max_batch_size=3, max_seq_len=96)


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize("call", range(4))
@pytest.mark.parametrize("depth", [0, 1])
def test_a_stream_closed_inside_a_step(zoo: Zoo, decoder: SpecDecoder, depth: int, call: int) -> None:
    """Keeps out: the garbage collector closes a forgotten stream while a round is being launched, its row is given to another
    request at once, and that one gets tokens of the row before: wrong text, without an error."""
    driver = Driver(decoder)
    driver.set_depth(depth)
    forgotten = decoder.stream(PROMPTS[0], SamplingParams(max_tokens=60))
    next(forgotten)
    driver.before_step(RunRound | RunChunk, call, forgotten.close)
    outs = decoder.generate(PROMPTS[1:], SamplingParams(max_tokens=20))
    assert [out.token_ids for out in outs] == [zoo.greedy("llama", prompt, 24)[:20] for prompt in PROMPTS[1:]]
    driver.assert_nothing_leaked()


@pytest.mark.parametrize("others", [0, 1])
def test_an_interrupt_while_the_last_text_is_made(zoo: Zoo, decoder: SpecDecoder, others: int) -> None:
    """Keeps out: Ctrl-C in the tokenizer, after the last token was taken: the request held its row for ever, and a decoder
    with one row answered nobody any more."""
    driver = Driver(decoder)

    def interrupted(ids: Any) -> str:
        raise KeyboardInterrupt

    beside = [driver.submit(prompt, SamplingParams(max_tokens=40)) for prompt in PROMPTS[1 : 1 + others]]
    request = driver.add(new_request(PROMPTS[0], 5, decode=interrupted))
    with pytest.raises(KeyboardInterrupt):
        driver.run_until_idle()
    driver.assert_nothing_leaked()
    for failed in (request, *beside):
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
            failed.result()
    (out,) = decoder.generate(PROMPTS[1], SamplingParams(max_tokens=20))
    assert out.token_ids == zoo.greedy("llama", PROMPTS[1], 24)[:20]


def test_a_second_interrupt_while_rows_are_cleared(zoo: Zoo, decoder: SpecDecoder) -> None:
    """Keeps out: Ctrl-C twice in a benchmark, which steps the engine itself: rows of requests that had ended stayed active, and
    wrote to pages of those that came after."""
    driver = Driver(decoder)

    def interrupt() -> None:
        raise KeyboardInterrupt

    driver.before_step(RunRound, 3, interrupt)
    driver.before_step(LeaveRows, 0, interrupt)
    for prompt in PROMPTS:
        driver.submit(prompt, SamplingParams(max_tokens=30))
    with pytest.raises(KeyboardInterrupt):
        driver.run_until_idle()
    (out,) = decoder.generate(PROMPTS[1], SamplingParams(max_tokens=20))
    assert out.token_ids == zoo.greedy("llama", PROMPTS[1], 24)[:20]
    driver.assert_nothing_leaked()


@pytest.mark.slow_cases
@pytest.mark.parametrize("round", [0, 3])
def test_ctrl_c_ends_only_what_the_interrupted_call_asked_for(zoo: Zoo, decoder: SpecDecoder, round: int) -> None:
    """Keeps out: Ctrl-C that ends the requests of other threads, or leaves rows and pages behind, or a decoder that is dead."""
    driver = Driver(decoder)
    beside: list[list[int]] = []
    alone = decoder.generate(PROMPTS[1], SamplingParams(max_tokens=60))[0].token_ids

    def other_thread() -> None:
        beside.append(decoder.generate(PROMPTS[1], SamplingParams(max_tokens=60))[0].token_ids)

    def press_ctrl_c() -> None:
        signal.pthread_kill(main, signal.SIGINT)

    main = threading.main_thread().ident
    assert main is not None
    thread = threading.Thread(target=other_thread)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        driver.before_step(RunRound, round, press_ctrl_c)
        decoder.generate([PROMPTS[0]] * 4, SamplingParams(max_tokens=80))
        time.sleep(60)  # where the signal arrives late
    thread.join()
    assert beside == [alone]
    (after,) = decoder.generate(PROMPTS[0], SamplingParams(max_tokens=20))
    assert after.token_ids == zoo.greedy("llama", PROMPTS[0], 24)[:20]
    driver.assert_nothing_leaked()


def test_a_call_from_inside_is_refused(zoo: Zoo, decoder: SpecDecoder) -> None:
    """Keeps out: a decoder that waits for itself for ever, asked by the tokenizer whose text it makes."""
    driver, decode = Driver(decoder), decoder.tokenizer.decode

    def asks(ids: Any) -> str:
        decoder.generate(PROMPTS[1], SamplingParams(max_tokens=3))
        return ""

    with patch.object(decoder.tokenizer, "decode", asks):
        asking = decoder.stream(PROMPTS[0], SamplingParams(max_tokens=5))
        with patch.object(decoder.tokenizer, "decode", decode):
            beside = decoder.stream(PROMPTS[1], SamplingParams(max_tokens=20))
        with pytest.raises(RuntimeError, match="can't be called from inside itself"):
            list(asking)
    got = [token for chunk in beside for token in chunk.token_ids]
    assert got == zoo.greedy("llama", PROMPTS[1], 24)[:20]
    driver.assert_nothing_leaked()


def test_ctrl_c_at_any_moment_leaves_a_decoder_that_answers(zoo: Zoo, decoder: SpecDecoder) -> None:
    """Keeps out: a caller that is interrupted while it holds the lock inside an event or a semaphore; the engine's thread then
    waited for that lock for ever, and so did everybody else."""
    rng, interrupts, here = random.Random(0), 0, sys._getframe()

    def interrupt(_signal: int, frame: FrameType | None) -> None:
        if frame is not here:  # one that comes between two calls, or while an earlier one is counted, is followed by others
            raise KeyboardInterrupt

    def call(kind: int) -> None:
        params = SamplingParams(max_tokens=rng.randint(1, 12))
        if kind == 0:
            decoder.generate(PROMPTS, params, progress=True)
        elif kind == 1:
            list(decoder.stream(PROMPTS[0], params))
        else:
            next(decoder.stream(PROMPTS[1], params))

    decoder.generate([3], SamplingParams(max_tokens=1))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        # An interrupt within a finalizer can't be raised, and pytest's hook for such errors would itself be interrupted.
        with redirect_stderr(io.StringIO()), patch.object(sys, "unraisablehook", lambda _unraisable: None):
            while interrupts < 300:
                try:
                    # One that is swallowed, in a finalizer for example, is followed by others.
                    signal.setitimer(signal.ITIMER_REAL, 1e-6 + rng.random() * 2e-3, 0.5)
                    while True:
                        call(rng.randrange(3))
                except (KeyboardInterrupt, RuntimeError) as error:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    # Python's own Condition, in a thread's start, ends so where an interrupt comes as it takes its lock again.
                    if isinstance(error, RuntimeError) and not isinstance(error.__context__, KeyboardInterrupt):
                        raise
                    interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    answers: list[list[int]] = []
    params = SamplingParams(max_tokens=20)
    asking = threading.Thread(target=lambda: answers.append(decoder.generate([3, 4], params)[0].token_ids), daemon=True)
    asking.start()
    asking.join(120)
    assert answers == [zoo.greedy("llama", [3, 4], 24)[:20]]
    Driver(decoder).assert_nothing_leaked()


@pytest.mark.parametrize("moment", ["handing in", "waiting"])
def test_a_signal_handler_may_close_the_decoder(decoder: SpecDecoder, moment: str) -> None:
    """Keeps out: a program that closes its decoder on SIGTERM and hangs, because the signal came while the same thread handed
    in a request."""
    before = signal.signal(signal.SIGALRM, lambda *_signal: decoder.close())
    try:
        if moment == "waiting":
            signal.setitimer(signal.ITIMER_REAL, 0.02)
        sent = patch.object(EngineThread, "_start", lambda owner: signal.raise_signal(signal.SIGALRM))
        with sent if moment == "handing in" else nullcontext(), pytest.raises(RuntimeError, match="closed"):
            while True:
                decoder.generate(PROMPTS, SamplingParams(max_tokens=60))
    finally:
        signal.signal(signal.SIGALRM, before)
