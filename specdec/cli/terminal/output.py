"""Where the command line writes: one-line messages on stderr, tables on stdout, and files that were checked before the run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.terminal.waiting import over
from specdec.draft.kinds import listed
from specdec.files.whole import write_text_whole

if TYPE_CHECKING:
    from rich.console import Console


def complain(message: str, kind: str = "error") -> None:
    print(f"specdec: {kind}: " + " ".join(message.split()), file=sys.stderr)


def note(message: str) -> None:
    """One line on stderr of what happens, which is neither an error nor a warning."""
    print(f"specdec: {message}", file=sys.stderr)


def say_plain(target: str | Path) -> None:
    """What commands say of a target that was given alone."""
    kinds = listed(lambda kind: kind.name)
    note(f"no --draft: {target} decodes plainly; to speculate, give the folder of its draft head, {kinds}")


def console(*, stderr: bool = False) -> Console:
    """rich's console, but a reader that went away is an error that `main` sees: rich itself would exit with 1, which here means
    that outputs differ.  Whoever prints a table waits for nothing more."""
    over()
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return PipeConsole(stderr=stderr)


def check_files(asked: dict[str, str | None]) -> None:
    """ValueError unless every file could be written.  asked: the path of each flag, or None.  To be asked before a long run."""
    paths = {flag: name for flag, name in asked.items() if name is not None}
    for flag, name in paths.items():
        path = Path(name).absolute()
        if path.is_dir():
            raise ValueError(f"{flag} {name} can't be written: it is a folder; expected the name of a file")
        if not path.parent.is_dir():
            raise ValueError(f"{flag} {name} can't be written: the folder {path.parent} does not exist")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{flag} {name} can't be written: permission is denied")
        try:
            _open_once(path)
        except OSError as error:  # a file system that takes no files, as /proc
            raise ValueError(f"{flag} {name} can't be written: {error.strerror or error}") from error
    if len({Path(name).resolve() for name in paths.values()}) < len(paths):
        raise ValueError(f"{' and '.join(paths)} name the same file, {next(iter(paths.values()))}; give each its own")


def _open_once(path: Path) -> None:
    """Opens the file for writing and leaves everything as it was.  A pipe or a device is not opened: that may wait."""
    path = path.resolve()  # of a link to a file that does not exist the file is made and removed, and not the link
    held = path.exists()
    if held and not path.is_file():
        return
    with path.open("ab"):
        pass
    if not held:
        path.unlink()


def json_writer(data: Callable[[], dict[str, Any]]) -> Callable[[Path], object]:
    return lambda path: write_text_whole(path, json.dumps(data(), indent=1) + "\n")


def write_files(writers: dict[str | None, Callable[[Path], object]]) -> None:
    """Calls every writer with its path, if there is one; OSError names each that failed, after all were tried."""
    failed = []
    for name, write in writers.items():
        try:
            if name is not None:
                write(Path(name))
        except OSError as error:
            failed.append(f"{name} was not written: {error.strerror or error}")
    if failed:
        raise OSError("; ".join(failed))
