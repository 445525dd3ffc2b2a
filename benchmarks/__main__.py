"""Runs a script of this folder: `python benchmarks rounds.round_8b --out FILE`.  Without a name it lists all scripts.

A script is a module of one of the rooms beside this file that has a `main()`, which reads its options from the command line.
Python puts this folder on its path, so that a script imports its neighbours as `rounds.round_8b`, in spawned processes too, and
`specdec` as it is installed.  This file imports little, because `rounds.start` counts seconds from the start of the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
USAGE = "python benchmarks ROOM.SCRIPT [its options]; with --help a script says what it does and which options it has"
BROKEN_PIPE = 141  # the exit code of a command whose reader went away, as that of `specdec`
FULL_PROG = sys.version_info >= (3, 14)  # argparse puts "python" before the name of a program in a folder


def rooms() -> list[str]:
    return sorted(file.parent.name for file in HERE.glob("*/__init__.py"))


def is_script(name: str) -> bool:
    """Whether a room has a module of that name that can be run."""
    file = HERE.joinpath(*name.split(".")).with_suffix(".py")
    return name.count(".") == 1 and file.is_file() and "\ndef main() -> " in file.read_text()


def scripts(room: str) -> list[str]:
    return [name for file in sorted((HERE / room).glob("*.py")) if is_script(name := f"{room}.{file.stem}")]


def summary(name: str) -> str:
    """The first sentence of a module's docstring."""
    path = HERE / name.replace(".", "/")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    paragraph = " ".join(text.split('"""')[1].split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".")


def listing(shown: list[str]) -> Iterator[str]:
    yield USAGE
    for room in shown:
        yield f"\n{room}: {summary(room)}"
        names = scripts(room)
        yield from (f"  {name:{max(map(len, names))}}  {summary(name)}" for name in names)


def nearest(asked: str) -> str:
    """The script whose name, with its room or without, is most like what was asked for."""
    asked = asked.removesuffix(".py").replace("/", ".")

    def likeness(known: str) -> float:
        pairs = (asked, known), (asked.rpartition(".")[2], known.rpartition(".")[2])
        return max(SequenceMatcher(None, *pair).ratio() for pair in pairs)

    return max((name for room in rooms() for name in scripts(room)), key=likeness)


def run(name: str, options: list[str]) -> int | None:
    """What the script's main() returns: nothing, or an exit code."""
    sys.argv = [f"{'' if FULL_PROG else 'python '}benchmarks {name}", *options]
    sys.path.append(str(HERE.parent / "tests"))  # last: some scripts share `toolkit` with the tests
    code: int | None = import_module(name).main()
    return code


def main(arguments: list[str], start: Callable[[str, list[str]], int | None] = run) -> int | None:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", *rooms()):
        print("\n".join(listing([name] if name in rooms() else rooms())))
        return 0
    if not is_script(name):
        told = f"no script is called {name!r}; the nearest is {nearest(name)!r}; `python benchmarks` lists all"
        print(told, file=sys.stderr)
        return 2
    options = arguments[1:]
    for option, value in zip(options, [*options[1:], ""]):
        if option == "--out" and not (Path.cwd() / value).parent.is_dir():  # said before hours of measurement, not after
            raise ValueError(f"--out {value} can't be written: the folder {(Path.cwd() / value).parent} does not exist")
    return start(name, options)


def answer(arguments: list[str], start: Callable[[str, list[str]], int | None] = run) -> int | None:
    """As main, but a wrong value that specdec refuses, or a file that is missing, is one line, and `| head` is no error.

    An error of any other kind keeps its traceback: it may have ended a measurement that took long.
    """
    try:
        code = main(arguments, start)
        sys.stdout.flush()  # a reader that went away is noticed here, not when Python exits
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, TypeError, OSError) as error:
        if os.environ.get("SPECDEC_DEBUG"):
            raise
        told = " ".join(str(error).split())
        print(f"python benchmarks {' '.join(arguments[:1])}: error: {told} (SPECDEC_DEBUG=1 shows where)", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(answer(sys.argv[1:]))
