"""The end of a server: signals to the real command, requests that may finish, and those that may not."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from toolkit.driver import Driver
from toolkit.serving.server import PATIENCE, Served, error_of, wait_until

from specdec import SpecDecoder
from specdec.cli import main

PATH = "/v1/completions"
LONG: dict[str, Any] = {"model": "specdec", "prompt": "Once", "max_tokens": 100, "temperature": 0}
MORE = {"extra_body": {"ignore_eos": True}}


# The command `specdec`, whose rounds wait while a file is there: no text ends before a test has asked all its questions.
HELD = """if True:
    import sys, time
    from pathlib import Path
    from specdec.cli.entry import main
    from specdec.engine.loop import Engine
    file, step = Path(sys.argv.pop(1)), Engine.step

    def held(engine):
        while engine.running and file.exists():
            time.sleep(0.01)
        step(engine)

    Engine.step = held
    sys.exit(main())
"""


@contextmanager
def command(holding: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`specdec serve` on a free port, and its address once it listens.  holding: a file, while which is there no round runs."""
    holding.touch()
    argv = [sys.executable, "-P", "-c", HELD, str(holding), "serve", "--port", "0", "--device", "cpu", *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"specdec: listening on (http://127\.0\.0\.1:\d+) \(model specdec\)\n", line)
        assert found, (line, process.poll() is not None and process.communicate())
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def test_a_signal_lets_streams_finish(tmp_path: Path) -> None:
    """Keeps out: texts cut off by every deployment, an exit code that reads as a crash, and a server that never ends."""
    with command(tmp_path / "held", "--grace-seconds", "300") as (process, url):  # the default is short for a busy machine
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(stream=True, n=4, **LONG, **MORE)
        chunks = [next(stream)]
        process.send_signal(signal.SIGTERM)
        wait_until(
            lambda: httpx.get(f"{url}/ready", timeout=PATIENCE).status_code == 503, "the server says that it is not ready"
        )
        refused = httpx.post(url + PATH, json=LONG, timeout=PATIENCE)
        assert error_of(refused, 503)["code"] == "shutting_down" and refused.headers["retry-after"] == "1"
        assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
        (tmp_path / "held").unlink()
        chunks += list(stream)
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons[-1] == "length" and reasons.count("length") == 4
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "")
    assert "shutting down: 4 choices" in err and "Traceback" not in err


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    """Keeps out: a signal after Ctrl-C that does nothing while a long request runs, and a Ctrl-C that is no signal to end."""
    with command(tmp_path / "held", "--grace-seconds", "600") as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(stream=True, **LONG, **MORE)
        next(stream)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: httpx.get(f"{url}/ready", timeout=PATIENCE).status_code == 503, "the first signal has arrived")
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 128 + signal.SIGTERM


def test_requests_that_are_cut_off_get_an_answer(pair: SpecDecoder) -> None:
    """Keeps out: connections that just break at the end of the grace period, streamed or not, waiting or running."""
    answers: dict[str, Any] = {}

    def ask(name: str, **body: Any) -> None:
        answers[name] = served.post(PATH, {**LONG, "model": "tiny", "ignore_eos": True, **body})

    with Served(pair, times={"last": 120.0}, grace_seconds=0) as served:  # the machine may be busy
        asked = {"whole": {}, "stream": {"stream": True}, "waiting": {"n": 6}}
        threads = [threading.Thread(target=ask, args=(name,), kwargs=body) for name, body in asked.items()]
        with Driver(pair).rounds_by_hand():
            for thread in threads:
                thread.start()
            wait_until(lambda: served.state.queue.open_choices == 8, "all of them are in the queue")
            served.server.handle_exit(signal.SIGTERM, None)
        for thread in threads:
            thread.join(120)
    assert error_of(answers["whole"], 503)["code"] == error_of(answers["waiting"], 503)["code"] == "shutting_down"
    assert answers["stream"].text.count('"code":"shutting_down"') == 1 and "[DONE]" not in answers["stream"].text
    Driver(pair).assert_nothing_leaked()


def test_a_reader_that_has_stopped_does_not_keep_the_server_alive(pair: SpecDecoder) -> None:
    """Keeps out: a server that waits for ever to write to a connection that nobody reads."""
    name = "m" * 4000
    with Served(pair, model_name=name, send_buffer=4096, grace_seconds=1) as served, served.connect(4096) as slow:
        content = f'{{"model": "{name}", "prompt": "Once", "max_tokens": 150, "ignore_eos": true, "stream": true}}'.encode()
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % len(content)
            + content
        )
        wait_until(lambda: not served.state.queue.is_empty, "the request has come in")
        served.server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: not served.is_running, "the server has ended")


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a traceback after the minutes that a model takes to load."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port]) == 2
    out, err = capsys.readouterr()
    (said,) = err.splitlines()
    assert not out and said.startswith("specdec: error: can't listen on 127.0.0.1 port") and "--port 0" in said
