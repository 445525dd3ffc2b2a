"""Rehearsals: operations of torch that compute nothing, and what a decoder keeps of them."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from contextlib import suppress
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from toolkit.driver import Driver
from toolkit.models import Zoo

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.loading import build
from specdec.loading.build import can_rehearse
from specdec.ops.compiling import rehearsal
from specdec.ops.compiling.rehearsal import MAX_THREADS, Nothing, _threads, is_rehearsed
from specdec.ops.index import predecessors
from specdec.steps import Needs

FUNCTIONS = {
    "product": lambda x_RC, i_R: x_RC @ x_RC.T,
    "linear": lambda x_RC, i_R: torch.nn.functional.linear(x_RC, x_RC, x_RC[:, 0]),
    "rows": lambda x_RC, i_R: x_RC.index_select(0, i_R),
    "embedding": lambda x_RC, i_R: torch.nn.functional.embedding(i_R, x_RC),
    "gather": lambda x_RC, i_R: x_RC.gather(0, i_R[:, None]),
    "mean of squares": lambda x_RC, i_R: x_RC.float().pow(2).mean(-1, keepdim=True).rsqrt() * x_RC,
    "where": lambda x_RC, i_R: torch.where(x_RC > 0, x_RC, 0.0).clamp(min=-1),
    "joined": lambda x_RC, i_R: torch.cat((x_RC, x_RC.roll(1, -1)), -1).cumsum(-1),
    "best": lambda x_RC, i_R: x_RC.topk(2, dim=-1).indices,
    "sorted": lambda x_RC, i_R: x_RC.sort(-1, descending=True).values,
    "transposed": lambda x_RC, i_R: x_RC.t().contiguous().to(torch.bfloat16),
    "indexed": lambda x_RC, i_R: x_RC[i_R, i_R],
    "added product": lambda x_RC, i_R: torch.addmm(x_RC[:, 0], x_RC, x_RC.T),
    "stack of products": lambda x_RC, i_R: torch.bmm(x_RC.expand(3, 4, 6), x_RC.T.expand(3, 6, 4)),
    "made": lambda x_RC, i_R: torch.stack((i_R, torch.arange(4))).repeat(1, 2),
    "int": lambda x_RC, i_R: x_RC.argmax(-1).int() // 2,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_shapes_are_those_of_the_operation(name: str) -> None:
    """Keeps out: a result of another shape, layout or dtype, for which other kernels would be compiled; reads out of bounds."""
    function = FUNCTIONS[name]
    x_RC, i_R = torch.randn(4, 6), torch.randint(4, (4,))
    real = function(x_RC, i_R)
    garbage_R = torch.full((4,), 1 << 40)
    with torch.inference_mode(), Nothing():
        got = function(x_RC, garbage_R)
    assert (got.shape, got.dtype, got.stride(), got.device) == (real.shape, real.dtype, real.stride(), real.device)


def test_no_compiler_of_torch_is_imported() -> None:
    """Keeps out: seconds of imports in every start, because torch tells the shapes of some results through its compiler."""
    x_RC, i_R = torch.randn(4, 6), torch.randint(4, (4,))
    absent = dict.fromkeys(("torch._dynamo", "sympy", "torch.fx.experimental.symbolic_shapes"))
    with patch.dict(sys.modules, absent), torch.inference_mode(), Nothing():
        for function in FUNCTIONS.values():
            function(x_RC, i_R)


def test_tensors_stay_as_they_are() -> None:
    """Keeps out: a rehearsal that writes."""
    x_RC, i_R = torch.randn(4, 6), torch.randint(4, (4,))
    before = x_RC.clone()
    with torch.inference_mode(), Nothing():
        x_RC.copy_(torch.zeros(4, 6)).add_(1)
        x_RC[:, 0].fill_(3)
        x_RC.index_copy_(0, i_R, torch.ones(4, 6))
        torch.add(x_RC, 1, out=x_RC)
        x_RC[1] = 5
        values, places = torch.empty(4, 2), torch.empty(4, 2, dtype=torch.int64)
        assert torch.topk(x_RC, 2, out=(values, places))[0] is values
    assert torch.equal(x_RC, before)


@pytest.mark.parametrize("function", [lambda x_R: x_R.sum().item(), lambda x_R: x_R[x_R > 0], torch.nonzero])
def test_values_are_refused(function: Any) -> None:
    """Keeps out: a pass that goes on with a number that nobody computed."""
    x_R = torch.ones(3)
    with torch.inference_mode(), Nothing(), pytest.raises(RuntimeError, match="needs values"):
        function(x_R)


def test_constants_of_a_rehearsal_are_not_kept() -> None:
    """Keeps out: a constant for all later passes that was never computed."""
    count, cpu = 9, torch.device("cpu")
    _threads.rehearses = True
    try:
        assert is_rehearsed()
        with Nothing():
            predecessors(count, cpu)
    finally:
        _threads.rehearses = False
    assert predecessors(count, cpu).tolist() == [0, *range(count - 1)]


def test_rehearsed_passes_change_nothing(zoo: Zoo) -> None:
    """Keeps out: rehearsals that write to rows or caches, also where they fail on their way, as they do on a CPU."""
    pair = zoo.target("llama"), zoo.head("llama", "eagle3")
    prompt, spec = [5, 6, 7, 8], SpecConfig(3, 2, 6)
    with SpecDecoder.from_pretrained(*pair, spec, max_seq_len=64) as decoder:
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        expected = decoder.generate(prompt, sampling)[0].token_ids
        with patch.object(rehearsal, "_compilers", lambda pool: MagicMock()), patch("torch.cuda.set_device"):
            assert not Driver(decoder).rehearse(prompt, Needs(), spec, rows=1)
        assert decoder.generate(prompt, sampling)[0].token_ids == expected


def test_compilations_wait_until_all_passes_were_rehearsed() -> None:
    """Keeps out: rehearsals that share Python's lock with compilers, and a failure that ends the process."""
    ran: list[int] = []
    with patch.object(rehearsal, "_compilers", lambda pool: MagicMock()), patch("torch.cuda.set_device"):
        rehearsals = rehearsal.Rehearsals(torch.device("cpu"))

    def fails() -> None:
        raise OSError("no space left on device")

    futures = [rehearsals.submit(lambda: ran.append(1)), rehearsals.submit(fails)]
    assert not ran and not any(future.done() for future in futures)
    with patch("torch.cuda.set_device"):
        rehearsals.begin()
        assert isinstance(futures[1].exception(timeout=120), OSError) and futures[0].result(timeout=120) is None
    assert ran == [1]
    rehearsals.close()


@pytest.mark.parametrize("ends", ["fails", "is dropped", "is interrupted", "has not begun"])
def test_launches_compile_what_nothing_came_of(ends: str) -> None:
    """Keeps out: a failure ahead of a launch that every later launch gets again, and launches that wait for ever because a
    compilation was dropped, or because Ctrl-C kept it from beginning."""
    tried, free = list[int](), threading.Event()

    def compiles() -> str:
        tried.append(1)
        if ends == "fails" and len(tried) == 1:
            raise OSError("no space left on device")
        return "kernel"

    def run() -> None:
        kernels.append(rehearsals._compilers.submit("a", compiles, lambda kernel: None))
        if ends == "is interrupted":
            raise KeyboardInterrupt

    with patch("torch.cuda.set_device"), patch.object(rehearsal, "_loaded", lambda kernel: kernel):
        rehearsals, kernels = rehearsal.Rehearsals(torch.device("cpu")), list[Any]()
        if ends == "is dropped":
            for _ in range(rehearsals._most):
                rehearsals.submit(free.wait)
        with suppress(KeyboardInterrupt):
            rehearsals.rehearse(run)
            if ends != "has not begun":
                rehearsals.begin()
        if ends == "fails":
            assert kernels[0].result(ignore_errors=True) is None
        if ends != "has not begun":
            rehearsals.close()
        free.set()
        launched = Thread(target=kernels[0].result, daemon=True)
        launched.start()
        launched.join(120)
    assert not launched.is_alive() and kernels[0].result() == "kernel" and len(tried) == (2 if ends == "fails" else 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("ends", ["program", "main thread"])
def test_what_has_not_begun_is_dropped_at_the_end(ends: str) -> None:
    """Keeps out: seconds in which a program that needs nothing any more compiles a round's kernels before it ends, and a call
    that fails, or waits for ever, because the main thread has ended before it."""
    reader, writer = os.pipe()

    def compiles() -> None:
        time.sleep(0.05)
        os.write(writer, b"c")

    def program() -> None:
        def run() -> None:
            for i in range(200):
                rehearsals._compilers.submit(str(i), compiles, lambda kernel: None)

        def waits() -> None:
            threading.main_thread().join()
            wait()
            os.write(writer, b"w")

        rehearsals = rehearsal.Rehearsals(torch.device("cpu"))
        wait = rehearsals.rehearse(run)
        if ends == "program":
            rehearsals.begin()
        else:
            Thread(target=waits).start()

    with patch("torch.cuda.set_device"), patch.object(rehearsal, "_loaded", lambda kernel: kernel):
        child = multiprocessing.get_context("fork").Process(target=program)  # it ends as a program does
        child.start()
        child.join(20)
    os.close(writer)
    with open(reader, "rb") as written:
        told = written.read()
    assert child.exitcode == 0 and told.count(b"c") <= MAX_THREADS and told.count(b"w") == (ends == "main thread")


def test_a_closed_decoder_drops_what_waits(zoo: Zoo) -> None:
    """Keeps out: a decoder that ran no round, whose round's kernels are compiled after it is closed."""
    ran: list[int] = []
    with patch.object(rehearsal, "_compilers", lambda pool: MagicMock()), patch("torch.cuda.set_device"):
        rehearsals = rehearsal.Rehearsals(torch.device("cpu"))
        with SpecDecoder.from_pretrained(zoo.target("llama"), max_seq_len=64) as decoder:
            Driver(decoder).expect_round(rehearsals)
            future = rehearsals.submit(lambda: ran.append(1))
    assert future.cancelled() and not ran


def test_compilations_fail_where_there_are_no_threads() -> None:
    """Keeps out: a request that fails, or waits for ever, because the system has no thread to compile ahead with."""
    with patch.object(rehearsal, "_compilers", lambda pool: MagicMock()):
        rehearsals = rehearsal.Rehearsals(torch.device("cpu"))
    future = rehearsals.submit(lambda: 1)
    with patch.object(Thread, "start", side_effect=RuntimeError("can't start new thread")):
        rehearsals.begin()
    assert future.cancelled()


@pytest.mark.parametrize(
    "change", [{"device": "cpu"}, {"attention": "fa3"}, {"backend": "transformers"}, {"ranks": 2}, {"kept": "fp8"}, {}], ids=str
)
def test_only_passes_without_host_side_state_are_rehearsed(change: dict[str, Any]) -> None:
    """Keeps out: a library that launches in a rehearsal, an exchange with a rank that has none, and scales taken of garbage."""
    given = {"device": "cuda", "attention": "triton", "backend": "native", "ranks": 1, "kept": "auto"} | change
    settings: Any = SimpleNamespace(
        device=torch.device(given["device"]), attention_backend=SimpleNamespace(name=given["attention"]),
        target_backend=given["backend"], options=SimpleNamespace(kv_cache_dtype=given["kept"]),
    )  # fmt: skip
    model: Any = SimpleNamespace(group=SimpleNamespace(size=given["ranks"]))
    assert can_rehearse(model, settings) == (not change)
    with patch.object(build, "compiles_ahead", return_value=False):  # an older Triton
        assert not can_rehearse(model, settings)
