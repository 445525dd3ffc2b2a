"""The folder that a training run writes: what it must not overwrite, how files come to be whole or not there, and whether a
checkpoint in it belongs to this run.

This file knows file names and settings.  It knows neither models nor text.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor

from specdec.files.whole import write_whole

WEIGHTS = "model.safetensors"
MODEL_FILES = ("config.json", WEIGHTS, "model.safetensors.index.json", "pytorch_model.bin")
UNFINISHED = "unfinished.part"  # a folder, of a model that is being written
RUN_FILES = ("checkpoint.pt", "self_text.pt")  # of a run that may go on
FREE = (  # settings that a run may go on with in another way
    "steps", "seconds", "call_seconds", "eval_every", "eval_prompts", "patience", "keep_states", "capture", "layout",
    "checkpoint_size", "save_dtype",
)  # fmt: skip


def prepare_out(
    out: str | Path,
    resume: bool,
    overwrite: bool,
    keep: Iterable[str | Path] = (),
    checkpoint: Path | None = None,
) -> Path:
    """The folder of a run, which `begin_run` makes: until then, a run that is refused leaves no trace.

    resume, overwrite: which of the two the caller asked for, if any; either allows a folder that holds a run.
    checkpoint: a file outside of the folder that the run goes on from.

    ValueError if it can't be made (it is tried), holds a model or a run, or is one of the folders to keep.
    """
    if str(out) == "":  # which a Path takes for the current folder
        raise ValueError("out: expected a folder, got ''; nearest thing that works: --out .")
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out: expected a folder, got the file {folder}")
    for kept in keep:
        if Path(kept).is_dir() and folder.exists() and Path(kept).samefile(folder):
            raise ValueError(f"out: expected a folder of its own, got {folder}, which holds the target; name another one")
    found = [name for name in (*MODEL_FILES, *RUN_FILES) if (folder / name).exists()]
    if found and not (resume or overwrite):
        raise ValueError(
            f"out: {folder} holds {found[0]} already; go on with that run by --resume, replace it by --overwrite, or name "
            "another folder"
        )
    elsewhere = [checkpoint] if checkpoint is not None else []
    if resume and not any(path.exists() for path in (*elsewhere, *(folder / name for name in RUN_FILES))):
        raise ValueError(f"resume: expected a folder that holds a run, got {folder}, which holds none; start without --resume")
    if resume and overwrite:
        raise ValueError("overwrite: expected one of resume and overwrite, got both")
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out: expected a folder that can be written, got {folder}: {error}") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"out: expected a folder that can be written, got {folder}: permission is denied")
    for each in made:
        each.rmdir()
    return folder


def begin_run(folder: Path, overwrite: bool, checkpoint: Path | None = None) -> None:
    """Makes the folder; to overwrite, it removes what a run could go on from, also a checkpoint outside of the folder.

    To be called once a new run is sure to begin: what it replaces took hours.
    """
    folder.mkdir(parents=True, exist_ok=True)
    elsewhere = [checkpoint] if checkpoint is not None else []
    for path in (*elsewhere, *(folder / name for name in RUN_FILES)) if overwrite else ():
        path.unlink(missing_ok=True)


def put_model(folder: Path, write: Callable[[Path], object]) -> None:
    """Has `write` make a model's files in a folder inside of this one, then puts each in its place: whatever ends that, the
    folder holds the model that it held, the new one, or none.  OSError, which names the folder, leaves it as it was.
    """
    made = folder / UNFINISHED
    shutil.rmtree(made, ignore_errors=True)  # of a run that was killed
    try:
        made.mkdir()
        write(made)
        names = sorted(each.name for each in made.iterdir() if each.name != WEIGHTS)
        changed = [name for name in names if not _is_same(made / name, folder / name)]
        others = [name for name in MODEL_FILES if name not in (*names, WEIGHTS) and (folder / name).exists()]
        for name in (WEIGHTS, *others) if changed or others else ():  # no weights stand beside another model's config
            (folder / name).unlink(missing_ok=True)
        for name in (*changed, WEIGHTS):
            (made / name).replace(folder / name)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(folder)) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _is_same(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()


def save_whole(path: Path, data: Mapping[str, Any]) -> None:
    """As torch.save, all of the file or none of it.  OSError if it can't be written."""

    def write(part: Path) -> None:
        try:
            with part.open("wb") as file:
                torch.save(data, file)
        except RuntimeError as error:  # of torch, which does not say what the disk said
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None

    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, write)


def load_whole(path: Path) -> Any:
    """What torch.save has written.  ValueError says why it can't be read, or that a disk has changed it."""
    try:
        with ZipFile(path) as file:
            damaged = file.testzip()  # torch would take changed bytes as numbers
        data = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, UnpicklingError, BadZipFile) as error:
        raise ValueError(f"a file that can't be read: {error}") from error
    if damaged:
        raise ValueError("a damaged file")
    return data


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A short name of these tensors' values, of the first numbers of each."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.detach().flatten()[: 1 << 16].double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def text_fingerprint(texts: Iterable[str]) -> str:
    """A short name of texts."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode(errors="surrogatepass") + b"\0")
    return digest.hexdigest()[:16]


def check_same(
    path: Path,
    saved: Mapping[str, Any],
    wanted: Mapping[str, Any],
    setting: str = "resume",
    instead: str = "start without --resume",
) -> None:
    """ValueError if a file was made by a run with other settings.  saved, wanted: settings by name; FREE ones may differ.
    setting, instead: what errors name, and what they advise.
    """
    names = [name for name in wanted if name not in FREE and saved.get(name) != wanted[name]]
    if names:
        was, now = (", ".join(f"{name}={of.get(name)}" for name in names) for of in (saved, wanted))
        raise ValueError(f"{setting}: {path} belongs to a run with {was}, this run has {now}; {instead}")
