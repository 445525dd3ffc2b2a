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
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
from toolkit.driver import Driver
from toolkit.inside.hooks import wait_for
from toolkit.models import Zoo
from toolkit.traffic.audit import auditor_of

from specdec import AsyncSpecDecoder, SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.screen.progress import Pace, show_progress

GREEDY = SamplingParams(max_tokens=20)
LONG = SamplingParams(max_tokens=80)


@pytest.fixture()
def make(zoo: Zoo) -> Callable[[], SpecDecoder]:
    spec = SpecConfig(3, 4, 12)
    return lambda: zoo.decoder("llama", "eagle3", spec, page_size=4, max_batch_size=3, max_seq_len=96)


def engine_threads() -> set[threading.Thread]:
    """The threads of all decoders.  Those of decoders that other tests have forgotten may end at any time."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("specdec")}


def is_closed(decoder: SpecDecoder) -> bool:
    """Whether it takes no more requests; a step may still be under way."""
    try:
        decoder.__enter__()
    except RuntimeError:
        return True
    return False


def test_a_closed_decoder_is_gone(make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: weights, caches or a thread that live on; a call that hangs, or fails without saying why."""
    before = engine_threads()
    with make() as decoder:
        model = weakref.ref(decoder.model)
        stream = decoder.stream([3], GREEDY)
        decoder.generate([3, 4], GREEDY)
        assert len(engine_threads() - before) == 1
    decoder.close()
    gc.collect()
    assert model() is None and engine_threads() <= before
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
        assert wait_for(lambda: is_closed(decoder))  # the round that is held now is the last one
        let_run.release(3)
        for thread in (closing, *threads):
            thread.join(timeout=120)
            assert not thread.is_alive()
    assert len(said) == 3 and all("closed while the request ran" in each for each in said)


def test_a_forgotten_decoder_ends_its_thread(make: Callable[[], SpecDecoder]) -> None:
    before = engine_threads()
    decoder = make()
    decoder.generate([3, 4], GREEDY)
    assert len(engine_threads() - before) == 1
    del decoder
    gc.collect()
    assert wait_for(lambda: engine_threads() <= before)


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


def test_a_fault_of_the_thread_itself_ends_every_wait(make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: a thread that ends without a word, after which every caller waits for ever and all looks well."""
    decoder = make()
    said = "(while it ran|must be loaded again): a bug"  # the thread may fail before `submit` returns
    with Driver(decoder).break_owner(ZeroDivisionError("a bug")), pytest.raises(RuntimeError, match=said):
        decoder.generate([[1], [2], [3], [4], [5]], LONG)
    with pytest.raises(RuntimeError, match="has failed for good and must be loaded again: a bug"):
        decoder.generate([1], GREEDY)
    with pytest.raises(RuntimeError, match="has failed for good"):
        next(decoder.stream([1], GREEDY))
    decoder.close()


def test_close_ends_the_threads_of_coroutines(make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: threads that turn prompts into ids and outlive their decoder, which the caller closed by itself."""
    before, decoder = engine_threads(), make()
    shared = AsyncSpecDecoder(decoder)
    asyncio.run(shared.generate([3, 4], GREEDY))
    assert len(engine_threads() - before) == 2
    decoder.close()
    assert wait_for(lambda: engine_threads() <= before)


def test_an_error_that_ends_no_request_comes_to_an_end(make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: a mistake in planning that every step raises again, for ever, while the caller waits for ever."""
    decoder = make()
    with Driver(decoder).fail_in_planning(KeyError("a mistake")):
        with pytest.raises(RuntimeError, match="a mistake"):
            decoder.generate([1, 2], GREEDY)
    with pytest.raises(RuntimeError, match="has failed for good"):
        decoder.generate([1, 2], GREEDY)
    decoder.close()


def test_work_between_steps_hides_no_failure(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: a mistake that every step raises again, for ever, because comparisons between these steps end well."""
    decoder = zoo.decoder("llama", max_seq_len=96, audit=1.0, audit_busy=1.0, audit_folder=str(tmp_path))
    driver = Driver(decoder)
    auditor_of(driver).compare = never_ends
    decoder.generate([3, 4], GREEDY)
    with driver.fail_in_planning(KeyError("a mistake")), pytest.raises(RuntimeError, match="a mistake"):
        decoder.generate([1, 2], GREEDY)
    with pytest.raises(RuntimeError, match="has failed for good"):
        decoder.generate([1, 2], GREEDY)
    decoder.close()


def never_ends(*_: object) -> None:
    """A comparison that makes way each time."""


def test_several_threads_close_one_decoder(make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: a second thread whose `close` fails, or returns before the decoder is closed."""
    decoder, said = make(), []
    decoder.generate([3, 4], GREEDY)
    together = threading.Barrier(4)

    def close() -> None:
        together.wait()
        decoder.close()
        with pytest.raises(RuntimeError, match="this decoder is closed"):
            said.append(decoder.model)
        said.append("closed")

    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert said == ["closed"] * 4


def test_a_tokenizer_that_closes_its_decoder(make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: an engine that is taken away in the middle of its own step, and a caller that waits for it for ever."""
    decoder = make()
    with patch.object(decoder.tokenizer, "decode", side_effect=lambda ids: decoder.close()):
        with pytest.raises(RuntimeError, match="can't be called from inside itself"):
            decoder.generate([3, 4], GREEDY)
    assert decoder.generate([3, 4], GREEDY)[0].token_ids
    decoder.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_that_closes_leaves_the_decoder_open(make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: a child that leaves `with SpecDecoder...` with an error, or closes what its parent uses."""
    decoder = make()
    decoder.generate([3, 4], GREEDY)
    child = os.fork()
    if not child:
        code = 1
        try:
            decoder.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert decoder.generate([3, 4], GREEDY)[0].token_ids
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
    requests = [decoder.new_request(ids, GREEDY) for ids in ([3, 4], [5])]
    with show_progress("generate", "requests", pace=Pace(first=0.0)) as show:
        assert [out.token_ids for out in decoder.run(requests, show)] == plain
    out, err = capfd.readouterr()
    assert out == "" and "specdec: generate: " in err and "tokens" in err
    with pytest.raises(TypeError, match="progress must be a bool"):
        decoder.generate([3], progress=1)  # type: ignore[arg-type]


def test_an_error_that_can_not_be_hashed_reaches_its_request(zoo: Zoo, make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: an engine's thread that ends with an error of its own, after which every caller waits for ever."""

    @dataclass
    class Unhashable(Exception):
        code: int = 7

    decoder = make()
    with Driver(decoder).fail_in("verify", Unhashable()), pytest.raises(RuntimeError, match="failed while it ran"):
        decoder.generate([1, 2], GREEDY)
    assert decoder.generate([3, 4], GREEDY)[0].token_ids == zoo.greedy("llama", [3, 4], 24)[:20]


def test_a_decoder_is_not_copied(make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: two objects of which one closes the other's engine."""
    decoder = make()
    for each in (decoder, AsyncSpecDecoder(decoder)):
        for make_another in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="can't be copied or pickled"):
                make_another(each)


def test_progress_without_a_console(make: Callable[[], SpecDecoder]) -> None:
    """Keeps out: an AttributeError in programs whose stderr is None (pythonw, some services) or closed."""
    decoder, closed = make(), io.StringIO()
    closed.close()
    for stderr in (None, closed):
        with redirect_stderr(stderr):
            assert decoder.generate([3], GREEDY, progress=True)
