"""`specdec serve`: an OpenAI-compatible HTTP server over one decoder."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specdec.cli import flags
from specdec.cli.terminal.output import say_plain
from specdec.cli.terminal.waiting import over
from specdec.serve.options import KEY_VARIABLE, ServeOptions, key_of_environment
from specdec.serve.process.descriptors import connection_limit, raised_limit
from specdec.serve.process.output import output_that_never_waits

HELP = "serve a pair over HTTP, as OpenAI's API"
NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_option_flags(parser.add_argument_group("server"), ServeOptions, ())
    parser.add_argument(
        "--spec", type=flags.tree_shape, action=flags.StoreOnce, metavar="S,k,nd", help=f"{flags.SPEC_HELP}; default: 5,4,16"
    )
    flags.add_engine_flags(parser, "serve")
    parser.set_defaults(around=_own_process)


@contextmanager
def _own_process() -> Iterator[None]:
    """What the process is given that a server needs, and that an application that embeds the server decides by itself."""
    with raised_limit(), output_that_never_waits():
        yield


def run(args: argparse.Namespace) -> int:
    with _ended_by_sigterm() as check:
        return _serve(args, check)


def _serve(args: argparse.Namespace, check: Callable[[], None]) -> int:
    """check: raises if a signal has come in the meantime."""
    if missing := [name.replace("_", "-") for name in NEEDED if find_spec(name) is None]:
        commands = "pip install '/path/to/the/clone[serve]', or in a clone ./scripts/setup.sh serve"
        raise ValueError(f"specdec serve needs {', '.join(missing)}; install them with: {commands}")
    target, draft = flags.pair_of(args, ["--spec"] if args.spec else [])
    options, engine = _options(args), flags.engine_of(args)
    if draft is None:
        say_plain(target)
    if not options.is_loopback and options.api_key is None:
        warnings.warn(
            f"--host {options.host} lets other machines in, and there is no API key, so that whoever reaches it can use it; "
            f"nearest thing that works: {KEY_VARIABLE} in the environment",
            stacklevel=2,
        )
    from specdec.serve.run import listen, serve

    connection_limit(options.max_connections)  # an error now, not after the models were loaded
    with listen(options) as listener:  # before the models are loaded: a port in use is said at once
        from specdec import AsyncSpecDecoder

        decoder = AsyncSpecDecoder.from_pretrained(target, draft, args.spec, options=engine)
        try:
            check()
            over()
            return serve(decoder, options, listener)
        finally:
            decoder.decoder.close()


@contextmanager
def _ended_by_sigterm() -> Iterator[Callable[[], None]]:
    """Inside, SIGTERM is KeyboardInterrupt, as Ctrl-C is, so that ranks and memory are given back while models are loading.

    Gives a function that raises it again if it has come and was lost: Python drops what is raised while it clears up objects.
    The server has a handler of its own while it runs, which lets requests finish.
    """
    come: list[int] = []

    def end(number: int, _frame: object) -> None:
        come.append(number)
        check()

    def check() -> None:
        if come:
            raise KeyboardInterrupt(signal.Signals(come[0]))

    is_main = threading.current_thread() is threading.main_thread()  # Python has handlers on no other
    before = signal.signal(signal.SIGTERM, end) if is_main else None
    try:
        yield check
    except Exception:
        check()  # an import that was cut off may fail in a way of its own
        raise
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _options(args: argparse.Namespace) -> ServeOptions:
    """The options of the command line; the key may come from the environment, where other users can't read it."""
    given: dict[str, Any] = {item.name: getattr(args, item.name) for item in fields(ServeOptions)}
    if given["api_key"] is None:
        given["api_key"] = key_of_environment()
    if given["model_name"] is None and args.target:
        given["model_name"] = name_of(args.target)
    return ServeOptions(**given)


def name_of(target: str) -> str:
    """What requests call the model where nobody says: the last part of the target, with - for what a name can't hold."""
    path = Path(os.path.abspath(target))  # a link has a name of its own
    name = path.stem if path.suffix == ".gguf" else path.name
    return "-".join("".join(c if "!" <= c <= "~" else " " for c in name).split()) or "specdec"
