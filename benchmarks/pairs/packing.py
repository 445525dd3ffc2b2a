"""The folder of a comparison in few files of a bounded size, for a machine that is not kept: what matters most first.

A machine that is lent hands back so many bytes and no more.  What did not fit is said, and a later call makes it again.
"""

from __future__ import annotations

import io
import lzma
import tarfile
from pathlib import Path

MIB = 1 << 20
VOLUME, VOLUMES = 15 * MIB, 4
NAME = "pairs-{}.bin"
FIRST = (
    "*.json", "parts/*.json", "*.jsonl", "*.md", "texts/*", "heads/*/*.json", "heads/*/*.md", "heads/*-long/*",
    "heads/*/*.safetensors", "heads/*/*",
)  # fmt: skip


def in_order(folder: Path) -> list[Path]:
    """All files, the most important first; a file that was being written is none."""
    found = dict.fromkeys(file for pattern in FIRST for file in sorted(folder.glob(pattern)) if file.is_file())
    return [file for file in found if file.suffix != ".part"]


def pack(folder: Path, out: Path, volume: int = VOLUME, volumes: int = VOLUMES) -> list[str]:
    """Writes the files into at most so many volumes of so many bytes; the names of those that did not fit, which it prints."""
    out.mkdir(parents=True, exist_ok=True)
    stream, left = io.BytesIO(), list[str]()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for file in in_order(folder):
            name, data = str(file.relative_to(folder)), lzma.compress(file.read_bytes(), preset=1)
            if stream.tell() + len(data) + 2 * tarfile.RECORDSIZE > volume * volumes:  # its header, and the archive's end
                left.append(name)
                continue
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    packed = stream.getvalue()
    for number, start in enumerate(range(0, len(packed), volume)):
        (out / NAME.format(number)).write_bytes(packed[start : start + volume])
    print(f"packed {len(packed) / MIB:.1f} MiB" + (f"; no room for {', '.join(left)}" if left else ""))
    return left


def unpack(folder: Path, packed: Path) -> None:
    """Writes the files of all volumes into the folder.  ValueError where there are none."""
    volumes = sorted(packed.glob(NAME.format("*")), key=lambda file: int(file.stem.partition("-")[2]))
    if not volumes:
        raise ValueError(f"--out: expected a folder with {NAME.format(0)}, got {packed}; the step `pack` writes it")
    stream = io.BytesIO(b"".join(file.read_bytes() for file in volumes))
    with tarfile.open(fileobj=stream) as archive:
        for member in archive:
            file, opened = folder / member.name, archive.extractfile(member)
            assert opened is not None and file.resolve().is_relative_to(folder.resolve())
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(lzma.decompress(opened.read()))
