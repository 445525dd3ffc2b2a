"""How ranks end: a program whose ranks are processes is broken off, and what it said and left behind is looked at.

    python -m toolkit.parallel.ends WHEN RANKS DEVICE TARGET DRAFT

is that program.  WHEN: "start", "prompt" or "round": it kills its last rank there, and prints what it is told of that; "first":
it kills itself in a round; "interrupt": it writes until somebody sends it a signal.  It has a session of its own, by which
whatever it leaves behind is found.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.parallel.launched import VARIABLES
from toolkit.driver import Driver
from toolkit.paths import ROOT

WHENS = ("start", "prompt", "round", "first", "interrupt")
WRITING, PATIENCE = "writing", 400.0  # what the program says when it has begun; seconds for a start of many processes


class End(NamedTuple):
    """said: the program's last line.  seconds: from the blow until every process was gone.  left: processes that were not."""

    said: str
    code: int
    seconds: float
    left: list[int]


def how_it_ends(when: str, size: int, device: str, target: Path, draft: Path) -> End:
    argv = [sys.executable, "-P", "-m", "toolkit.parallel.ends", when, str(size), device, str(target), str(draft)]
    # Without those of a launcher, which tests around this one may have: the program starts its own ranks.
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment = kept | {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    program = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    watchdog = threading.Timer(PATIENCE, lambda: os.killpg(program.pid, signal.SIGKILL))
    watchdog.start()
    assert program.stdout is not None
    try:
        first = program.stdout.readline().strip()
        began = time.monotonic()
        if when == "interrupt" and first == WRITING:
            os.killpg(program.pid, signal.SIGINT)  # a terminal sends it to all
        said = [first, *program.stdout.read().strip().splitlines()]
        code = program.wait()
        while (left := processes_of(program.pid)) and time.monotonic() - began < PATIENCE / 4:
            time.sleep(0.05)
    finally:
        watchdog.cancel()
        for process in processes_of(program.pid):
            os.kill(process, signal.SIGKILL)
    return End(said[-1], code, time.monotonic() - began, left)


def processes_of(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # state, parent, group, session
        except OSError:  # it has just ended
            continue
        if fields[0] != "Z" and int(fields[3]) == session:
            found.append(int(stat.parent.name))
    return found


def main(when: str, ranks: str, device: str, *folders: str) -> None:
    size, told = int(ranks), lambda error: print(error, flush=True)
    if when == "start":
        threading.Thread(target=_kill_when_all_are_there, args=(size,), daemon=True).start()
    try:
        with load(size, device, *folders) as decoder:
            print(WRITING, flush=True)
            if when == "prompt":
                driver = Driver(decoder)
                driver.set_chunk(4)
                driver.submit([3, 1, 4, 1, 5] * 9, SamplingParams(max_tokens=5))
                driver.step()
                _kill_the_last()
                driver.run_until_idle()
            stream = decoder.stream([3, 1, 4], SamplingParams(max_tokens=90, ignore_eos=True))
            next(stream)
            if when == "round":
                _kill_the_last()
            elif when == "first":
                os.kill(os.getpid(), signal.SIGKILL)
            for _ in stream:
                time.sleep(0.5 if when == "interrupt" else 0.0)
    except KeyboardInterrupt:
        told("interrupted")
        raise SystemExit(130) from None
    except RuntimeError as error:
        told(str(error).splitlines()[0])


def load(size: int, device: str, *folders: str) -> SpecDecoder:
    settings: dict[str, Any] = {"device": device, "dtype": "float32", "max_seq_len": 120}
    settings |= {"threads": 1} if device == "cpu" else {}
    return SpecDecoder.from_pretrained(*folders, SpecConfig(3, 3, 8), tensor_parallel_size=size, **settings)  # type: ignore


def _kill_the_last() -> None:
    victim = max(multiprocessing.active_children(), key=lambda each: each.pid or 0)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)


def _kill_when_all_are_there(size: int) -> None:
    while len(multiprocessing.active_children()) < size - 1:
        time.sleep(0.01)
    _kill_the_last()


if __name__ == "__main__":
    main(*sys.argv[1:])
