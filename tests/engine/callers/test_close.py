"""What becomes of requests, threads and memory when a decoder is closed, is forgotten, or breaks for good."""

from __future__ import annotations

import asyncio
import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import pytest
from toolkit.driver import Driver
from toolkit.inside.hooks import wait_for
from toolkit.models import Zoo

from specdec import AsyncSpecDecoder, SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.engine.owner import EngineOwner
from specdec.steps import RunRound

GREEDY = SamplingParams(max_tokens=20)
LONG = SamplingParams(max_tokens=80)


@pytest.fixture()
def make(zoo: Zoo) -> Callable[[], SpecDecoder]:
    spec = SpecConfig(3, 4, 12)
    return lambda: zoo.decoder("llama", "eagle3", spec, page_size=4, max_batch_size=3, max_seq_len=96)


def engine_threads() -> int:
    return sum(thread.name.startswith("specdec") for thread in threading.enumerate())


def test_a_closed_decoder_is_gone(make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: weights, caches or a thread that live on; a call that hangs, or fails without saying why."""
    before = engine_threads()
    with make() as decoder:
        model = weakref.ref(decoder.model)
        stream = decoder.stream([3], GREEDY)
        decoder.generate([3, 4], GREEDY)
        assert engine_threads() == before + 1
    decoder.close()
    gc.collect()
    assert model() is None and engine_threads() == before
    for call in (
        lambda: decoder.generate([3, 4]), lambda: next(stream), lambda: decoder.stream([3]), lambda: decoder.model,
        decoder.__enter__, lambda: asyncio.run(AsyncSpecDecoder(decoder).generate([3])),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="this decoder is closed"):
            call()


def test_closing_ends_what_runs_and_what_waits(make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: a caller in another thread that waits for ever."""
    decoder, said = make(), []

    def ask() -> None:
        try:
            decoder.generate([[1], [2], [3], [4], [5]], LONG)
        except RuntimeError as error:
            said.append(str(error))

    driver = Driver(decoder)
    threads = [threading.Thread(target=ask) for _ in range(3)]
    with driver.rounds_by_hand() as let_run:
        for thread in threads:
            thread.start()
            let_run.release()
        let_run.release(3)
        assert wait_for(lambda: len(driver.waiting) == 12)
        closing = threading.Thread(target=decoder.close)
        closing.start()
        let_run.release(3)
        for thread in (closing, *threads):
            thread.join(timeout=20)
            assert not thread.is_alive()
    assert len(said) == 3 and all("closed while the request ran" in each for each in said)


def test_a_forgotten_decoder_ends_its_thread(make: Callable[[], SpecDecoder]) -> None:
    before = engine_threads()
    decoder = make()
    decoder.generate([3, 4], GREEDY)
    assert engine_threads() == before + 1
    del decoder
    gc.collect()
    assert wait_for(lambda: engine_threads() == before)


def test_a_program_that_closes_nothing_ends() -> None:
    """Keeps out: an interpreter that hangs or crashes at its end, with a stream open and a thread in the middle of a round."""
    program = """if True:
        from specdec import SamplingParams, SpecDecoder, shipped
        decoder = SpecDecoder.from_pretrained(shipped.target_folder(), shipped.draft_folder(), device="cpu")
        stream = decoder.stream("Once upon a time", SamplingParams(max_tokens=400, ignore_eos=True))
        print(next(stream).token_ids != [])
    """
    assert shipped.target_folder().is_dir()
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_an_engine_that_cannot_clean_up_says_so(make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: after the GPU has failed, a thread that retries for ever, and callers that wait for it."""
    decoder = make()
    driver = Driver(decoder)
    with driver.fail_every_step(RuntimeError("the GPU has fallen off the bus")):
        with pytest.raises(RuntimeError, match="fallen off the bus"):
            decoder.generate([[1], [2], [3], [4], [5]], LONG)
        with pytest.raises(RuntimeError, match="has failed for good and must be loaded again: the GPU has fallen"):
            decoder.generate([1], GREEDY)
    assert "fallen off the bus" in str(AsyncSpecDecoder(decoder).failure)
    decoder.close()


def test_errors_in_a_row_do_not_end_an_engine_that_cleans_up(zoo: Zoo, make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: a decoder that gives up after a few requests that failed by themselves."""
    decoder = make()
    with Driver(decoder).fail_in("verify", RuntimeError("out of memory")):
        for _ in range(8):
            with pytest.raises(RuntimeError, match="out of memory"):
                decoder.generate([1, 2], GREEDY)
    assert decoder.generate([3, 4], GREEDY)[0].token_ids == zoo.greedy("llama", [3, 4], 24)[:20]
    Driver(decoder).assert_nothing_leaked()


def test_progress_counts_requests_and_tokens(make: Callable[[], SpecDecoder], capfd: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a bar on stdout, and a call that waits differently because somebody watches."""
    decoder = make()
    plain = [out.token_ids for out in decoder.generate([[3, 4], [5]], GREEDY)]
    assert [out.token_ids for out in decoder.generate([[3, 4], [5]], GREEDY, progress=True)] == plain
    out, err = capfd.readouterr()
    assert out == "" and "specdec: generate: " in err and "tokens" in err
    with pytest.raises(TypeError, match="progress must be a bool"):
        decoder.generate([3], progress=1)  # type: ignore[arg-type]


def test_closing_at_the_same_time(make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: an AttributeError in the second of two threads that close a decoder while it runs."""
    for _ in range(5):
        decoder, errors = make(), []

        def close(decoder: SpecDecoder = decoder, errors: list[BaseException] = errors) -> None:
            try:
                decoder.close()
            except BaseException as error:
                errors.append(error)

        stream = decoder.stream([3], LONG)
        next(stream)
        closing = [threading.Thread(target=close) for _ in range(4)]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(20)
        assert not errors and not any(thread.is_alive() for thread in closing)


def test_closing_from_inside_a_step(make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: a close that the garbage collector happens to run on the engine's thread; that thread ended with an error, and
    whoever waited for a request waited for ever."""
    before, decoder = engine_threads(), make()
    model = weakref.ref(decoder.model)
    Driver(decoder).before_step(RunRound, 1, decoder.close)
    with pytest.raises(RuntimeError, match="closed while the request ran"):
        decoder.generate([3], LONG)
    assert wait_for(lambda: engine_threads() == before)
    gc.collect()
    assert model() is None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_may_close_what_it_can_not_use(make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: an AssertionError at the end of a `with` block in a forked child."""
    with make() as decoder:
        decoder.generate([3], GREEDY)
        child = os.fork()
        if not child:
            try:
                decoder.close()
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert decoder.generate([3], GREEDY)


def test_an_error_that_can_not_be_hashed_reaches_its_request(zoo: Zoo, make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: an engine's thread that ends with an error of its own, after which every caller waits for ever."""

    @dataclass
    class Unhashable(Exception):
        code: int = 7

    decoder = make()
    with Driver(decoder).fail_in("verify", Unhashable()), pytest.raises(RuntimeError, match="failed while it ran"):
        decoder.generate([1, 2], GREEDY)
    assert decoder.generate([3, 4], GREEDY)[0].token_ids == zoo.greedy("llama", [3, 4], 24)[:20]


def test_a_fault_of_the_thread_reaches_everybody(make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: callers that wait for ever for a thread that has ended."""
    decoder = make()
    stream = decoder.stream([1], LONG)
    with patch.object(EngineOwner, "_step", side_effect=ZeroDivisionError("a bug")):
        with pytest.raises(RuntimeError, match="a bug"):
            decoder.generate([[1], [2], [3], [4]], LONG)
    with pytest.raises(RuntimeError, match="has failed for good"):
        list(stream)
    decoder.close()


def test_a_decoder_is_not_copied(make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: two objects of which one closes the other's engine."""
    decoder = make()
    for each in (decoder, AsyncSpecDecoder(decoder)):
        for make_another in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="can't be copied or pickled"):
                make_another(each)


def test_progress_without_a_console(make: Callable[[], SpecDecoder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: an AttributeError in programs whose stderr is None (pythonw, some services) or closed."""
    decoder, closed = make(), io.StringIO()
    closed.close()
    for stderr in (None, closed):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert decoder.generate([3], GREEDY, progress=True)
