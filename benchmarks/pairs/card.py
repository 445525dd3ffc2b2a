"""A trained head as a folder that may be published: its two files, and a card that says what it is for and how good it is.

A repository takes no large files: a head that is larger than LARGEST, or that was not measured, is refused.  This file trains
and measures nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pairs.plan import PartsFolder
from pairs.requests import RUN
from pairs.table import MEASURED, markdown, table_of

LARGEST = 16_000_000  # bytes of all files together
FILES = ("config.json", "model.safetensors")


def write_head(folder: PartsFolder, kind: str, out: Path) -> Path:
    """The folder out/NAME with the head and README.md, its card.  ValueError for a head that is too large or not measured."""
    trained, measured = folder.part(f"train-{kind}"), [part["kind"] for part in folder.parts("eval").values()]
    if trained is None or kind not in measured:
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
    (place / "README.md").write_text(card(folder, kind, place.name))
    print(f"{place}: {size / 1e6:.1f} MB")
    return place


def _name_of(target: str) -> str:
    path = Path(target)
    return (path.stem if path.suffix == ".gguf" else path.name).lower().replace(".", "-")


def _known_as(target: str) -> str:
    """A hub id as it is; of a file or a folder its name, because its place says nothing to whoever gets the head."""
    return target if target.count("/") == 1 and not target.endswith(".gguf") else Path(target).name


def card(folder: PartsFolder, name: str, head: str) -> str:
    """What training says of the head, and then how it is used, of what it was made, what was measured, and what it can't do."""
    plan, record = folder.plan, table_of(folder)
    own = {step: {part: held for part, held in record[step].items() if held.get("kind", part) == name} for step in MEASURED}
    told = markdown({**record, **own})
    chat = " --chat" if plan.chat else ""
    trained = (folder.head(name) / "README.md").read_text()  # it names places of the machine that trained it
    trained = trained.replace(f"`{plan.target}`", f"`{_known_as(plan.target)}`").replace(f"- {folder.path}/", "- ")
    return (
        f"{trained}\n"
        "## How to use it\n"
        f'```text\nspecdec generate --target TARGET --draft {head}{chat} "Are dogs real?"\n```\n'
        "TARGET is the target's folder or file; the draft is this folder. The text is the target's own whatever is drafted.\n\n"
        "## Requests\n"
        "The target answered questions that it asked itself, and requests about functions of TheAlgorithms/Python (MIT), "
        "arithmetic of GSM8K's training part (MIT), TinyStories (CDLA-Sharing-1.0) and books in the public domain. Requests "
        f"that share {RUN} words in a row with a prompt below were left out. The licence is that of the target.\n\n"
        f"## Measured\n{told}\n"
        f"## Limits\nIt was trained on short chats in English and Python, of at most {plan.width} tokens with their answers, "
        "and drafts worse for anything else. In longer texts it goes on, and `specdec` warns of that: `--beyond-trained`.\n"
    )
