"""What a run leaves behind when it is broken off anywhere, or the disk is full: whole files or none, and who is told what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from specdec.files import whole
from specdec.files.whole import write_text_whole, write_whole
from specdec.train import folder as folders
from specdec.train.folder import MODEL_FILES, WEIGHTS, load_whole, put_model, save_whole

OLD = {"config.json": "old", WEIGHTS: "old " * 9, "model.safetensors.index.json": "shards"}
NEW = {"config.json": "new", WEIGHTS: "new " * 9, "tokenizer.json": "words"}


class Interrupted:
    """Ctrl-C before the n-th line of specdec's own files, as Python may raise it; `came`: whether there were so many lines."""

    def __init__(self, number: int) -> None:
        self.left, self.came = number, False

    def __enter__(self) -> Interrupted:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in (folders.__file__, whole.__file__) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not self.came:
            self.left -= 1
            if self.left < 0:
                self.came = True
                raise KeyboardInterrupt
        return self._line


def files_of(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def write_model(files: dict[str, str]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name, text in files.items():
            (folder / name).write_text(text)

    return write


@pytest.mark.parametrize(
    "before", [{}, OLD, {**NEW, WEIGHTS: "of an earlier step"}], ids=["none", "another's", "an earlier step's"]
)
def test_a_model_that_is_broken_off_anywhere_is_the_old_one_the_new_one_or_none(tmp_path: Path, before: dict[str, str]) -> None:
    """Keeps out: weights cut off by Ctrl-C; weights beside another head's config, or beside an index of shards, by which they
    would be read."""
    number, came = 0, True
    while came:
        folder = tmp_path / str(number)
        folder.mkdir()
        write_model(before)(folder)
        with Interrupted(number) as broken:
            try:
                put_model(folder, write_model(NEW))
            except KeyboardInterrupt:
                pass
        came, found = broken.came, files_of(folder)
        if WEIGHTS in found:
            model = {name: text for name, text in found.items() if name in MODEL_FILES}
            assert model in [{name: text for name, text in of.items() if name in MODEL_FILES} for of in (before, NEW)], number
        number += 1
    assert found == NEW and number > 15
    put_model(folder, write_model(NEW))
    assert not (folder / folders.UNFINISHED).exists()


def test_a_file_that_is_broken_off_anywhere_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    """Keeps out: a checkpoint or a result that Ctrl-C has cut off, and what was not whole left beside it."""
    path, number, came = tmp_path / "a.pt", 0, True
    while came:
        write_text_whole(path, "old")
        path.chmod(0o640)
        with Interrupted(number) as broken:
            try:
                write_text_whole(path, "new")
            except KeyboardInterrupt:
                pass
        came = broken.came
        assert path.read_text() in ("old", "new") and path.stat().st_mode & 0o777 in (0o640, 0o644)
        number += 1
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640 and number > 10


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    """Keeps out: a link replaced by a file, and `--json` into a pipe, which nothing can take the place of."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text_whole(tmp_path / "pipe", "text")
    assert os.read(reader, 9) == b"text" and sorted(files_of(tmp_path)) == ["file", "link"]
    os.close(reader)


def test_what_dev_names_is_written_itself(tmp_path: Path) -> None:
    """Keeps out: a page on /dev/stdout that takes the place of the file to which stdout goes, with whatever else is printed."""
    code = "from pathlib import Path; from specdec.files.whole import write_text_whole as write; print('a', flush=True); "
    code += "write(Path('/dev/stdout'), 'b'); print('c')"
    with (tmp_path / "out").open("a") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert "c" in (tmp_path / "out").read_text()


FULL = """
import resource, signal, sys
from pathlib import Path
import torch
from specdec.cli.terminal.output import json_writer, write_files
from specdec.lossless.replay import ReplayFile
from specdec.train.folder import put_model, save_whole
from specdec.train.target import TargetRun, build_model, save_target, train_tokenizer

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder, data = Path(sys.argv[1]), {"numbers": torch.arange(60_000)}
run = TargetRun(intermediate_size=64, num_hidden_layers=1, vocab_size=270)
model, words = build_model(run), train_tokenizer(["One day a bear met a fox."] * 9, 270, 64)
for limit in (1 << 40, 1 << 15):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for name, write in {
        "a.pt": lambda: save_whole(folder / "a.pt", data | {"limit": limit}),
        "b.json": lambda: write_files({str(folder / "b.json"): json_writer(lambda: {"limit": limit, "numbers": [1] * 60_000})}),
        "c": lambda: put_model(folder / "c", lambda made: save_target(model, words, made)),
        "d": lambda: ReplayFile("a", None, None, {}, {}, "", [1] * 60_000, [1], [0], True, {}, [], 0.0).write(folder / "d"),
    }.items():
        try:
            write()
        except OSError as error:
            assert limit == 1 << 15, error
            print(name, str(folder / name) in str(error), "File too large" in str(error) or "os error 27" in str(error))
"""


def test_a_full_disk_leaves_what_was_there_and_is_told_with_the_file(tmp_path: Path) -> None:
    """Keeps out: half a checkpoint, half a head, half a result, half a replay file of an audit; "unexpected pos 640 vs 534",
    which is all that torch says of a full disk; a traceback of safetensors' own error."""
    (tmp_path / "c").mkdir()
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["a.pt True True", "b.json True True", "c True True", "d True True"], done.stderr
    assert load_whole(tmp_path / "a.pt")["limit"] == 1 << 40
    assert '"limit": 1099511627776' in (tmp_path / "b.json").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.json", "c", "d"]
    (replay,) = (tmp_path / "d").iterdir()
    assert len(json.loads(replay.read_text())["prompt_token_ids"]) == 60_000 and replay.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "c" / WEIGHTS).stat().st_size > 1 << 15 and not (tmp_path / "c" / folders.UNFINISHED).exists()


def test_texts_that_a_disk_has_changed_are_refused(tmp_path: Path) -> None:
    """Keeps out: rows that a head learns from with tokens that no target wrote."""
    save_whole(tmp_path / "a.pt", {"tokens": torch.arange(9000, dtype=torch.int32)})
    held = bytearray((tmp_path / "a.pt").read_bytes())
    at = held.index(torch.tensor([4000], dtype=torch.int32).numpy().tobytes())
    held[at] ^= 4
    write_whole(tmp_path / "a.pt", lambda part: part.write_bytes(held))
    with pytest.raises(ValueError, match="damaged"):
        load_whole(tmp_path / "a.pt")
