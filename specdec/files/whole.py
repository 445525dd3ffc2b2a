"""Writes a file all at once: whoever reads it finds what stood there before, or all that is new, even after a kill.

This file knows no format.  Text is written in UTF-8, whatever the machine's own encoding is.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Has `write` make another file, which then takes this one's place.

    A pipe or a device is written itself, and so is a file in a folder that takes no other one; that may end half-written.
    So is what /dev names: /dev/stdout may lead to a file that the program has open, and goes on writing.
    OSError, which names the file, leaves it as it was.
    """
    try:
        is_replaced = path.is_file() and path.parts[:2] != ("/", "dev") and os.access(path.resolve().parent, os.W_OK)
        if path.exists() and not is_replaced:
            write(path)
            return
        real = path.resolve()  # a link goes on naming the file that it names
        part = part_of(real)
        try:
            write(part)
            if real.exists():
                shutil.copymode(real, part)
            part.replace(real)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def part_of(path: Path) -> Path:
    """The name of what is not whole yet.  It ends as the file does, since some writers choose their format by that; and a run
    that is killed leaves one such file, which the next run replaces.
    """
    return path.with_name(f"{path.stem}.part{path.suffix}")


def write_text_whole(path: Path, text: str) -> None:
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))
