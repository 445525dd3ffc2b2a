"""A trained head as a folder that may be published: its two files, and a card that says what it is for and how good it is.

A repository takes no large files: a head that is larger than LARGEST, or that was not measured, is refused.  This file trains
and measures nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pairs.plan import PartsFolder
from pairs.table import markdown, table_of

LARGEST = 16_000_000  # bytes of all files together
FILES = ("config.json", "model.safetensors")


def write_head(folder: PartsFolder, kind: str, out: Path) -> Path:
    """The folder out/NAME with the head and README.md, its card.  ValueError for a head that is too large or not measured."""
    trained, measured = folder.part(f"train-{kind}"), [name for name in folder.parts("eval") if name.startswith(f"{kind}-")]
    if not trained or not measured:
        raise ValueError(f"{kind}: expected a head that was trained and measured; the steps `train` and `eval` come first")
    size = sum((folder.head(kind) / name).stat().st_size for name in FILES)
    if size > LARGEST:
        raise ValueError(
            f"{kind}: expected at most {LARGEST / 1e6:g} MB, got {size / 1e6:.1f}; nearest thing that works: a smaller "
            "draft_vocab_size or intermediate_size"
        )
    place = out / f"{_name_of(folder.plan.target)}-{kind}"
    place.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copy(folder.head(kind) / name, place)
    (place / "README.md").write_text(card(folder, kind, size))
    print(f"{place}: {size / 1e6:.1f} MB")
    return place


def _name_of(target: str) -> str:
    path = Path(target)
    return (path.stem if path.suffix == ".gguf" else path.name).lower().replace(".", "-")


def card(folder: PartsFolder, kind: str, size: int) -> str:
    """What the head is, how it is used, of what it was made, what was measured, and what it can't do."""
    plan, record = folder.plan, table_of(folder)
    only = {step: {name: part for name, part in record[step].items() if name.startswith(kind)} for step in ("eval", "bench")}
    only |= {step: {kind: record[step][kind]} for step in ("train", "verify", "start") if kind in record[step]}
    told = markdown({**record, "verify": {}, "start": {}, **only})
    config: dict[str, Any] = json.loads((folder.head(kind) / "config.json").read_text())
    name = _name_of(plan.target)
    chat = " --chat" if plan.chat else ""
    return (
        f"# A {kind} head for {name}\n"
        f"{size / 1e6:.1f} MB, {config.get('torch_dtype') or config.get('dtype', 'mixed numbers')}. It drafts for "
        f"`{Path(plan.target).name}` alone; the text is the target's own whatever it drafts.\n"
        f'```text\nspecdec generate --target TARGET --draft {name}-{kind}{chat} "Are dogs real?"\n```\n'
        "TARGET is the target's folder or file; the draft is this folder, in the clone or anywhere else.\n\n"
        "## How it was trained\n"
        f"`specdec train`, on {plan.texts:,} rows of {plan.width} tokens that the target wrote: its answers to questions that "
        "it asked itself, and to requests about functions of TheAlgorithms/Python (MIT), arithmetic of GSM8K's training part "
        "(MIT), TinyStories (CDLA-Sharing-1.0) and books in the public domain. Requests that share eight words in a row with a "
        f"prompt below were left out. {plan.steps:,} steps of {plan.batch} rows, {plan.num_steps} tokens deep, seed "
        f"{plan.seed}. "
        "The licence is that of the target.\n\n"
        f"## What was measured\n{told}\n"
        "## Limits\nIt was trained on short chats in English and Python, and drafts worse for anything else. Its vocabulary is "
        f"{plan.draft_vocab_size or 'all'} of the target's tokens, so it can't draft the rarer ones.\n"
    )
