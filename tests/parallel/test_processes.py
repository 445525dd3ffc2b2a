"""Decoders over processes: what they write, and how they end when a rank fails."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import toolkit.heads.block_zoo  # noqa: F401 (the zoo has its heads by name)
import torch
from toolkit.checkpoints.mixtures import MixtureZoo
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts
from toolkit.parallel.pairs import FailingPair
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.loading import pair
from specdec.loading.pair import WantedPair, no_room
from specdec.loading.ranks import check_devices, start_ranks
from specdec.models.registry import choose_target
from specdec.options import EngineOptions
from specdec.parallel import processes
from specdec.parallel.group import Group
from specdec.parallel.processes import SILENCE_SECONDS, OtherRanks, RankFailed, RankPipe
from specdec.prompts.tokenizer import Tokenizer
from specdec.runner.readback import HostCopy, Readback

SPEC = SpecConfig(num_steps=3, topk=3, num_draft_tokens=8)
SETTINGS = {"device": "cpu", "max_seq_len": 80, "threads": 1}
SAMPLINGS = [SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=0.9, seed=3)]
PROMPTS = ragged_prompts(40, 2, seed=5)
SOON = 45.0  # seconds: much more than a busy machine needs, and less than the 60 after which exchanges give up by themselves


def load(zoo: Zoo, size: int, name: str = "qwen3", **more: Any) -> SpecDecoder:
    folders, settings = (zoo.target(name), zoo.head(name, "eagle3")), {**SETTINGS, **more}
    return SpecDecoder.from_pretrained(*folders, SPEC, **settings, tensor_parallel_size=size)


@contextmanager
def ended_soon() -> Iterator[None]:
    """Afterwards every process ends, and nothing has waited until its patience ended."""
    until = time.monotonic() + SOON
    yield
    # An error may be told before the process that made it has ended.  It is asked for again and again, and not joined: while
    # another thread takes a process's exit code, `join` returns at once, and `active_children` still lists the process.
    while multiprocessing.active_children() and time.monotonic() < until:
        time.sleep(0.05)
    assert time.monotonic() < until
    assert not multiprocessing.active_children()


@pytest.mark.slow_cases(keep=0)
def test_two_processes_write_what_one_writes_until_one_dies(tmp_path: Path) -> None:
    """Each has half of the experts of a mixture.

    Keeps out: steps that do not reach the other rank, or in another order; a process that Ctrl-C ends; a request that waits
    for ever for a rank that is gone; a process that stays after `close`; settings that reach one rank alone."""
    zoo = MixtureZoo(tmp_path)
    with load(zoo, 1, "qwen3-moe") as decoder:
        want = [out.token_ids for out in decoder.generate(PROMPTS, SAMPLINGS)]
    with load(zoo, 2, "qwen3-moe", expert_parallel="experts") as decoder:
        assert [out.token_ids for out in decoder.generate(PROMPTS, SAMPLINGS)] == want
        (child,) = multiprocessing.active_children()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGINT)  # a terminal sends it to both
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            decoder.generate([[3]], SamplingParams(max_tokens=70, ignore_eos=True))
            time.sleep(SOON)  # where the signal arrives late
        assert [out.token_ids for out in decoder.generate(PROMPTS, SAMPLINGS)] == want
        assert decoder.verify(PROMPTS[:1], SAMPLINGS[0]).passed  # dense passes, in which both ranks take part
        with ended_soon():
            os.kill(child.pid, signal.SIGKILL)
            Driver(decoder).other_ranks.word_seconds = SOON / 2  # the machine may be busy
            with pytest.raises(RuntimeError, match="rank 1 failed: it has ended without a word, with exit code (-9|None)"):
                decoder.generate(PROMPTS, SAMPLINGS)
            decoder.close()


@pytest.mark.slow
def test_ranks_warn_once(zoo: Zoo, capfd: pytest.CaptureFixture[str]) -> None:
    """Keeps out: one warning for each rank, and one more of the look at the pair before they start."""
    folders = zoo.target("qwen3"), zoo.head("qwen3", "p-eagle")
    with pytest.warns(UserWarning) as said:
        SpecDecoder.from_pretrained(*folders, SpecConfig(8, 2, 9), **SETTINGS, tensor_parallel_size=2).close()  # type: ignore
    assert [str(each.message) for each in said if "num_steps=5" in str(each.message)] == [str(said[0].message)]
    assert "warning" not in capfd.readouterr().err.lower()  # what the other process would say


@pytest.mark.slow_cases
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "call", "reason"), [(1, 1, "rank 1 failed: RuntimeError: no more room"), (0, 3, "no more room")]
)
def test_an_error_of_one_rank_ends_all(rank: int, call: int, reason: str, zoo: Zoo) -> None:
    """Keeps out: ranks that wait for the exchanges of a pass that another one gave up; an error without its rank and reason."""
    options = EngineOptions(**SETTINGS, tensor_parallel_size=2)  # type: ignore[arg-type]
    wanted = WantedPair(zoo.target("qwen3"), zoo.head("qwen3", "eagle3"), SPEC, options)
    with start_ranks(options) as started:
        model, head, settings, folder = started.load(FailingPair(wanted, rank, call))
        with SpecDecoder(model, head, settings, Tokenizer(folder), started) as decoder, ended_soon():
            # Where this rank fails, no other one will say that it failed first; else the machine may be busy.
            Driver(decoder).other_ranks.word_seconds = 0.2 if rank == 0 else SOON / 2
            with pytest.raises(RuntimeError, match=reason):
                decoder.generate(PROMPTS, SAMPLINGS)
            with pytest.raises(RuntimeError, match=f"rank {rank} failed: RuntimeError: no more room"):
                decoder.generate(PROMPTS, SAMPLINGS)
    started.close()


def follows(first: Connection, pipe: Connection, reads: bool) -> None:
    first.close()
    processes.END_SECONDS = 0.2
    rank_pipe = RankPipe(pipe)
    if reads:
        list(rank_pipe.messages())
    time.sleep(2 * SOON)


@pytest.mark.parametrize("reads", [True, False], ids=["idle", "busy"])
def test_a_rank_leaves_when_the_first_one_is_gone(reads: bool) -> None:
    """Keeps out: processes that stay, each on a GPU, after the program that started them was killed."""
    context = multiprocessing.get_context("fork")
    first, pipe = context.Pipe()
    rank = context.Process(target=follows, args=(first, pipe, reads), daemon=True)
    with ended_soon():
        rank.start()
        pipe.close()
        first.close()
        rank.join(SOON)
        assert rank.exitcode == 1


class Blocked:
    """A place whose other ranks never come."""

    rank, size = 0, 2

    def join(self, device: torch.device) -> Group:
        threading.Event().wait(2 * SOON)
        raise AssertionError("nobody waited so long")


def test_a_rank_that_fails_while_ranks_connect_is_named() -> None:
    """Keeps out: a first rank that waits for ever, in NCCL for example, for one that had no room to begin."""
    mine, theirs = multiprocessing.Pipe()
    other_ranks = OtherRanks(Blocked(), [mine], [])  # type: ignore[arg-type]
    theirs.send(("here", ""))
    threading.Timer(0.1, lambda: theirs.send(("failed", "no room"))).start()
    with ended_soon(), pytest.raises(RankFailed, match="rank 1 failed: no room"):
        other_ranks.join(torch.device("cpu"))
    theirs.close()


@pytest.mark.parametrize("silent", [True, False])
def test_the_rank_that_ended_is_named_and_not_one_that_noticed(silent: bool) -> None:
    """Keeps out: with more than two ranks, "connection reset" of a rank that is well; a wait for a rank that is well too."""
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    silence = SOON if silent else SILENCE_SECONDS  # the timer below is late on a busy machine
    other_ranks = OtherRanks(Blocked(), [mine for mine, _ in pipes], [], silence)  # type: ignore[arg-type]
    (_, first), (_, second) = pipes
    first.send(("failed", "connection reset"))
    first.close()
    leaves = threading.Timer(0.05 if silent else 0.0, second.close if silent else lambda: None)
    leaves.start()
    with (
        ended_soon(),
        pytest.raises(RankFailed, match="rank 2 failed: it has ended" if silent else "rank 1 failed: connection"),
    ):
        other_ranks.wait("here")
    leaves.join()
    second.close()


def test_a_device_that_fails_with_another_rank_names_it() -> None:
    """Keeps out: an error of CUDA for what is another rank's end."""

    class Failing:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

        def check(self) -> None:
            raise AssertionError("there is nothing to read")

        def explain(self, error: BaseException) -> BaseException:
            return RankFailed(f"rank 1 failed, and then {error}")

    readback, failing = Readback(torch.device("cpu")), Failing()
    readback.other_ranks = failing
    with pytest.raises(RankFailed, match="rank 1 failed, and then CUDA error"):
        HostCopy(readback, torch.zeros(1), None, failing, torch.zeros(1)).read(torch.Tensor.tolist)


SCRIPT = """
import sys
from specdec import SamplingParams, SpecConfig, SpecDecoder
with SpecDecoder.from_pretrained(*sys.argv[1:], SpecConfig(3, 3, 8), device="cpu", max_seq_len=80, threads=1,
                                 tensor_parallel_size=2) as decoder:
    print(decoder.generate([3, 1, 4], SamplingParams(max_tokens=20))[0].token_ids)
"""


@pytest.fixture
def _own_signals() -> Iterator[None]:
    """Torchrun's launcher leaves its handlers of signals behind."""
    kept = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    yield
    for each, handler in kept.items():
        signal.signal(each, handler)


@pytest.mark.slow_cases(keep=0)
@pytest.mark.usefixtures("_own_signals")
def test_processes_of_a_launcher_join(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: a rank of torchrun that starts ranks of its own, goes on with the script, or stays."""
    folders = [str(zoo.target("qwen3")), str(zoo.head("qwen3", "eagle3"))]
    with load(zoo, 1) as decoder:
        want = decoder.generate([3, 1, 4], SamplingParams(max_tokens=20))[0].token_ids
    logs = DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.ALL)
    torchrun = LaunchConfig(
        1,
        1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=logs,
    )
    elastic_launch(torchrun, sys.executable)("-P", "-c", SCRIPT, *folders)  # raises if a process fails
    written = {file.parent.name: file.read_text().strip() for file in tmp_path.rglob("stdout.log")}
    assert written == {"0": str(want), "1": ""}


def test_another_number_of_launched_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: two ranks of four processes, of which the others wait for ever."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="must be the number of processes .* 4, got 2; nearest .* tensor_parallel_size=4"):
        with start_ranks(EngineOptions(device="cpu", tensor_parallel_size=2)):
            pass


def next_process() -> int:
    """The number of a process that is made here and not started.  Python counts all that are made."""
    return int(multiprocessing.Process().name.rpartition("-")[2])


def test_what_ranks_can_not_share_is_refused_before_any_starts(zoo: Zoo) -> None:
    """Keeps out: a refusal that takes seconds, leaves a process, or comes as another rank's traceback."""
    before = next_process()
    with pytest.raises(ValueError, match="can share the target's 4 attention heads evenly, got 3; .*: tensor_parallel_size=2"):
        load(zoo, 3)
    with pytest.raises(ValueError, match="must be 1 for a target through transformers' code .*, got 2; nearest"):
        folder = zoo.target("qwen3")
        SpecDecoder.from_pretrained(folder, **SETTINGS, backend="transformers", tensor_parallel_size=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs 4 GPUs from cuda:1 on, but torch sees 2; nearest .*tensor_parallel_size=2"):
        check_devices(EngineOptions(device="cuda:1", tensor_parallel_size=4), lambda: 3)
    assert next_process() == before + 1, "a rank has started"


class Second(Group):
    """The second of two ranks, with nobody to talk to."""

    rank, size = 1, 2

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nobody answers")


def test_a_rank_without_room_says_what_would_have(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: an error of CUDA that names neither the rank nor a size that fits; a size that the heads do not allow."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pair, "load_pair", full)
    size = pair.weights_bytes(zoo.target("qwen3"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, int(0.4 * size)))
    wanted = WantedPair(zoo.target("qwen3"), None, SPEC, EngineOptions(device="cpu", tensor_parallel_size=2))
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 has no room .*hold 0.0 GiB.*tensor_parallel_size=4, or"):
        wanted.load(Second(), wanted.options)
    configs = [choose_target(zoo.target("qwen3")).config]
    assert "nearest setting that works: a smaller model" in no_room(10 << 40, Second(), torch.device("cpu"), configs)
    said = no_room(size, Second(), torch.device("cpu"), None)
    assert "each rank takes all; " in said and "works: a smaller model" in said  # through transformers' code
