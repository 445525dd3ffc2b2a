"""`specdec serve`: its flags, what it says before it starts, and its options."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from contextlib import nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec import cli, shipped
from specdec.async_decoder import AsyncSpecDecoder
from specdec.checks import setting_of
from specdec.cli.flags import flag_of
from specdec.cli.serve import name_of
from specdec.options import EngineOptions
from specdec.serve.options import KEY_VARIABLE, ServeOptions

OTHER: dict[str, tuple[list[str], Any]] = {  # of each option: a value that is not its default, as a flag and as it arrives
    "host": (["::1"], "::1"),
    "port": (["0"], 0),
    "api_key": (["sesame"], "sesame"),
    "model_name": (["my/model"], "my/model"),
    "allowed_origins": (["https://a.example"], "https://a.example"),
    "allowed_hosts": (["models.example"], "models.example"),
    "max_queue": (["3"], 3),
    "max_body_bytes": (["5000"], 5000),
    "max_connections": (["7"], 7),
    "read_seconds": (["2"], 2),
    "write_seconds": (["4"], 4),
    "max_tokens_cap": (["9"], 9),
    "grace_seconds": (["0"], 0),
    "log_prompts": ([], True),
    "page": ([], False),
    "metrics_aliases": (["vllm"], "vllm"),
    "max_logprobs": (["30"], 30),
    "tool_parser": (["hermes"], "hermes"),
    "reasoning_parser": (["think"], "think"),
    "lenient": ([], True),
}


@pytest.fixture()
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command would have loaded and served."""
    calls: list[Any] = []

    def load(*pair: Any, **more: Any) -> Any:
        calls.append((pair, more["options"]))
        return SimpleNamespace(decoder=SimpleNamespace(close=lambda: calls.append("closed")))

    def served(decoder: Any, options: ServeOptions, listener: Any) -> int:
        calls.append(options)
        return 0

    monkeypatch.setattr(AsyncSpecDecoder, "from_pretrained", load)
    monkeypatch.setattr("specdec.serve.run.serve", served)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    return calls


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    try:
        code: Any = cli.main(["serve", *argv])
    except SystemExit as end:
        code = end.code
    out = capsys.readouterr()
    assert (code, out.out) == (2, "") and out.err.startswith("specdec: error: ") and out.err.count("\n") == 1, out.err
    return out.err


def test_every_option_is_a_flag(started: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: an option that the command line drops, and one whose help says nothing."""
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    help_text = " ".join(capsys.readouterr().out.split())
    for item in fields(ServeOptions):
        words, value = OTHER[item.name]
        assert value != item.default and setting_of(item).meaning in help_text
        port = [] if item.name == "port" else ["--port", "0"]
        flag = flag_of(f"no_{item.name}" if item.default is True else item.name)
        assert cli.main(["serve", flag, *words, *port]) == 0
        assert started[-1] == "closed" and started[-2] == ServeOptions(**{"port": 0, item.name: value})
    for item in fields(EngineOptions):
        assert flag_of(item.name) in help_text


def test_a_target_alone_says_that_it_decodes_plainly(started: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a server that nobody told how to speculate, and that did not say so."""
    assert cli.main(["serve", "--port", "0", "--target", "some/where/Llama-9"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "specdec: no --draft: some/where/Llama-9 decodes plainly; to speculate, give the folder of its draft head, mtp or ngram"
    ]
    assert cli.main(["serve", "--port", "0"]) == 0 and not capsys.readouterr().err


def test_the_pair_in_the_box_is_served(started: list[Any]) -> None:
    """Keeps out: arguments that are needed for a first try, and a name of the model that is a path."""
    assert cli.main(["serve", "--port", "0"]) == 0
    (pair, engine), options, closed = started
    assert pair == (shipped.target_folder(), shipped.draft_folder(), None) and engine == EngineOptions()
    assert options.name == "specdec" and closed == "closed"
    argv = ["serve", "--port", "0", "--target", "some/where/Llama-9", "--draft", "head", "--max-batch-size", "3", "--spec"]
    assert cli.main([*argv, "5,1,6"]) == 0
    (pair, engine), options, _ = started[3:]
    assert pair[:2] == ("some/where/Llama-9", "head") and pair[2].label == "5,1,6" and engine.max_batch_size == 3
    assert options.name == "Llama-9"


def test_the_key_may_come_from_the_environment(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a key that every user of the machine can read in `ps`, and an empty variable that opens the door."""
    monkeypatch.setenv(KEY_VARIABLE, "from-env")
    assert cli.main(["serve", "--port", "0"]) == 0 and started[1].api_key == "from-env"
    assert cli.main(["serve", "--port", "0", "--api-key", "flag"]) == 0 and started[4].api_key == "flag"
    monkeypatch.setenv(KEY_VARIABLE, "")
    assert cli.main(["serve", "--port", "0"]) == 2


@pytest.mark.parametrize(
    ("argv", "warns"),
    [
        (["--host", "0.0.0.0"], True),
        (["--host", "::"], True),
        (["--host", "0.0.0.0", "--api-key", "k"], False),
        (["--host", "127.0.0.2"], False),
        (["--host", "localhost"], False),
        ([], False),
    ],
)
def test_an_open_server_is_said(started: list[Any], capsys: pytest.CaptureFixture[str], argv: list[str], warns: bool) -> None:
    """Keeps out: a server without a key on a public address that nobody meant to open."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli.main(["serve", "--port", "0", *argv]) == 0
    said = capsys.readouterr().err
    assert said.startswith("specdec: warning: --host") == warns and (KEY_VARIABLE in said) == warns
    assert said.count("\n") == warns


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "prometheus_client"])
def test_a_missing_extra_is_one_line(
    started: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Keeps out: a traceback for a package that is not there, after the minutes that a model takes to load."""
    monkeypatch.setitem(sys.modules, missing, None)  # Python then finds no such module
    said = error_of(capsys)
    assert f"needs {missing.replace('_', '-')}" in said and "clone[serve]'" in said
    assert not started


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--port", "70000"], "port must be in [0, 65535], got 70000; nearest setting that works: port=65535"),
        (["--max-queue", "-1"], "max_queue must be in [0, 1048576]"),
        (["--max-tokens-cap", "0"], "max_tokens_cap must be >= 1"),
        (["--grace-seconds", "soon"], "expected a whole number, got 'soon'"),
        (["--host", ""], "expected a name, got an empty value"),
        (["--host", "two words"], "host must be printable ASCII"),
        (["--host", "192.0.2.1", "--port", "0"], "can't listen on 192.0.2.1 port 0"),
        (["--model-name", "ä"], "model_name must be printable ASCII"),
        (["--model-name", "my model"], "nearest setting that works: model_name='my-model'"),
        (["--prot", "1"], "nearest: --port"),
        (["--target", "a", "--spec", "5,4"], "--spec would do nothing without --draft"),
        (["--max-batch-size", "0"], "max_batch_size must be in [1, 4096]"),
    ],
)
def test_a_wrong_flag_is_one_line(started: list[Any], capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    """Keeps out: a server that starts otherwise than it was told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert said in error_of(capsys, *argv)
    assert not started


@pytest.mark.parametrize("after", ["raised", "dropped", "another error"])
def test_sigterm_while_models_load_is_one_line(
    after: str, started: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps out: ranks, memory and a port that nobody gives back, an end without a word; a server that goes on because the
    signal came where Python drops what is raised, or a traceback of what that left behind."""

    def load(*_pair: Any, **_more: Any) -> Any:
        with nullcontext() if after == "raised" else suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("the signal did nothing")
        if after == "another error":
            raise ImportError("cannot load module more than once per process")
        return SimpleNamespace(decoder=SimpleNamespace(close=lambda: None))

    monkeypatch.setattr(AsyncSpecDecoder, "from_pretrained", load)
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["serve", "--port", "0"]) == 143
    assert capsys.readouterr() == ("", "specdec: ended by SIGTERM\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_folder_with_spaces_has_a_name(tmp_path: Path) -> None:
    """Keeps out: a complaint about a --model-name that nobody gave."""
    assert name_of("/models/Model.Q4_1.gguf") == "Model.Q4_1"
    (tmp_path / "Real.Q4_1.gguf").touch()
    (tmp_path / "mine.gguf").symlink_to(tmp_path / "Real.Q4_1.gguf")
    assert name_of(str(tmp_path / "mine.gguf")) == "mine", "a link has a name of its own"
    assert name_of("/models/my ä model/") == "my-model" and name_of("org/name") == "name" and name_of("/models/ä") == "specdec"
