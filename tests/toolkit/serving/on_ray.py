"""A local Ray with two replicas for tests, asked over HTTP.  All of it has ended when the block ends, however it ends."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

DRIVER = Path(__file__).parent / "ray_driver.py"
KEY = "only-for-this-test"
PREFIX = "/tested"
PATIENCE = 120.0  # seconds; starts of Ray's processes take long on a busy machine
START_SECONDS = 240.0
END_SECONDS = 30.0  # for Ray to end in good order


class OnRay:
    """The application of examples/ray_serve.py on a local Ray while the block runs.

    refused: what the application said to two replicas with a GPU each, of which this Ray has none.
    """

    def __init__(self, **arguments: Any) -> None:
        self._arguments = [f"{name}={value}" for name, value in arguments.items()]
        # A short path: Ray puts sockets below it, whose paths may have 107 characters.
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        self.refused = ""

    def __enter__(self) -> OnRay:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}{PREFIX}"
        argv = [sys.executable, "-P", str(DRIVER), self._folder.name, str(port), PREFIX, *self._arguments]
        self._log: IO[str] = open(Path(self._folder.name) / "driver.log", "w+")
        pipe = subprocess.PIPE
        self._driver = subprocess.Popen(
            argv, env=environment(), stdin=pipe, stdout=pipe, stderr=self._log, text=True, start_new_session=True
        )
        watchdog = threading.Timer(START_SECONDS, self._driver.kill)  # its last words are then shown
        watchdog.start()
        try:
            self.refused = self._answer("refused: ")
            self._answer("ready")
        except BaseException:
            self.__exit__()
            raise
        finally:
            watchdog.cancel()
        return self

    def __exit__(self, *_error: object) -> None:
        """Ends Ray by its driver, and whatever has not ended by then."""
        processes = self.processes()  # workers of Ray would otherwise have no parent that is known here
        assert self._driver.stdin is not None and self._driver.stdout is not None
        self._driver.stdin.close()
        try:
            self._driver.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            self._driver.wait()
        finally:
            for process in processes | self.processes():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self._driver.stdout.close()
            self._log.close()
            self._folder.cleanup()

    def _answer(self, beginning: str) -> str:
        assert self._driver.stdout is not None
        line = self._driver.stdout.readline()
        assert line.startswith(beginning), (line, Path(self._log.name).read_text())
        return line.removeprefix(beginning).strip()

    def processes(self) -> set[int]:
        """The processes of this Ray, without its driver: those that come from it, and those of its group whose parent died."""
        driver, listed = self._driver.pid, listed_processes()
        found = {driver, *(pid for pid, (_, group) in listed.items() if group == driver)}
        while new := {pid for pid, (parent, _) in listed.items() if parent in found} - found:
            found |= new
        return found - {driver}

    def running(self) -> float:
        """How many choices run."""
        return sum(self.samples("specdec_running").values())

    def kill(self, replica: str) -> None:
        self._command(f"kill {replica}")

    def delete(self) -> None:
        """Takes the application away; returns when its replicas have been drained."""
        self._command("delete")

    @contextmanager
    def slow_rounds(self) -> Iterator[None]:
        """Inside, a long text lasts for much longer than questions about it, however busy the machine is."""
        file = Path(self._folder.name) / "slow"
        file.touch()
        try:
            yield
        finally:
            file.unlink()

    def _command(self, line: str) -> None:
        assert self._driver.stdin is not None
        self._driver.stdin.write(line + "\n")
        self._driver.stdin.flush()
        self._answer(f"done: {line}")

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE)

    def samples(self, name: str, of: int | None = None) -> dict[str, float]:
        """A metric of each replica, summed over its other labels.  Replicas that do not tell their numbers in time are missing.

        of: how many replicas are waited for.
        """
        found: dict[str, float] = {}
        if of is not None:

            def all_told() -> bool:
                nonlocal found
                found = self.samples(name)
                return len(found) == of

            wait_until(all_told, f"{of} replicas tell their numbers")
            return found
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name:
                    replica = sample.labels["replica"]
                    found[replica] = found.get(replica, 0) + sample.value
        return found


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to others in the meantime."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def wait_until(happened: Callable[[], Any], what: str) -> None:
    """Asserts that something happens.  It looks seldom: most looks are requests, which cost the replicas time."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.3)


def environment() -> dict[str, str]:
    """What Ray's processes see: nothing is reported, written to the home folder, or open to other users of the machine."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SPECDEC_API_KEY": KEY,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_memory_monitor_refresh_ms": "0",  # other tests may fill the memory
        "PYTHONWARNINGS": "ignore",
    }


def listed_processes() -> dict[int, tuple[int, int]]:
    """Parent and group of every process that has not ended, whether or not its parent has noticed the end."""
    shown = subprocess.run(["ps", "-eo", "pid=,ppid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in shown.splitlines()]
    return {int(pid): (int(parent), int(group)) for pid, parent, group, state in rows if not state.startswith("Z")}
