"""The card of a trained head: what it is, of what it was made, and what it is worth, for whoever gets the folder.

This file knows what a run was and found.  It measures nothing.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from specdec import __version__
from specdec.files.whole import write_text_whole
from specdec.train.card.measure import SHARE, Found, as_record
from specdec.train.checkpoint import Progress
from specdec.train.folder import WEIGHTS
from specdec.train.settings import MAX_NUMBER, HeadRun

CARD_FILES = "training.json", "README.md"
OF_A_CALL = "call_seconds"  # a setting that says nothing of the run: the last call need not have paused


@dataclass(frozen=True)
class Made:
    """What a card says of a run beside its settings and its progress.

    target: folder, hub id or file.  device: in words.  notes: lines about the text, the draft vocabulary and the like.
    parameters: of the head that were trained.  tokens: of the target's text that a step may read.
    """

    target: str
    device: str
    notes: list[str]
    parameters: int
    tokens: int


def write_card(folder: Path, run: HeadRun, made: Made, progress: Progress, found: Found) -> None:
    """Writes README.md and training.json."""
    size = (folder / WEIGHTS).stat().st_size
    record: dict[str, Any] = {
        "run": vars(run), "target": made.target, "device": made.device, "parameters": made.parameters, "tokens": made.tokens,
        "steps": progress.step, "best_step": progress.best_step, "seconds": progress.seconds, "spent": progress.spent,
        "ended": progress.ended, "held_out_loss": progress.best_loss, "history": progress.history, "bytes": size,
        "version": __version__, "date": time.strftime("%Y-%m-%d", time.gmtime()), "accept": as_record(found),
    }  # fmt: skip
    write_text_whole(folder / CARD_FILES[0], json.dumps(record, indent=1) + "\n")
    write_text_whole(folder / CARD_FILES[1], "\n".join(_lines(run, made, progress, found, record)) + "\n")


def _lines(run: HeadRun, made: Made, progress: Progress, found: Found, record: dict[str, Any]) -> list[str]:
    name = Path(made.target).name or made.target
    changed = [
        f"`--{field.name.replace('_', '-')} {value}`"
        for field in fields(run)
        if (value := getattr(run, field.name)) != field.default and value != MAX_NUMBER and field.name != OF_A_CALL
    ]
    return [
        f"# A draft head ({run.kind}) for {name}", "",
        f"Trained by `specdec train` of specdec {record['version']} on {record['date']}. It drafts for `{made.target}` and for "
        "no other model.", "",
        "| | |", "| --- | --- |",
        f"| parameters | {made.parameters:,} that were trained; {WEIGHTS} {record['bytes'] / 1e6:.1f} MB |",
        f"| text | written by the target: {run.texts:,} rows of {run.width} tokens, {made.tokens:,} tokens to learn from |",
        f"| training | {progress.step:,} steps of {run.batch} rows in {progress.seconds:.0f} s on {made.device}, "
        f"{progress.spent:.0f} s with text and loading; ended by: {progress.ended} |",
        f"| kept | the weights of step {progress.best_step:,}, held-out loss {progress.best_loss:.4f} |",
        f"| settings | {', '.join(changed) or 'the defaults'} |", "",
        *(f"- {note}" for note in made.notes), "",
        "## Accept length",
        f"Tokens of a round, measured by the runtime on prompts that no training has read, with the interval of {SHARE:.0%} "
        "over the prompts; then the share of accepted drafts at each depth, of those that get there.", "",
        "| text | draft tree | decoding | accept length | by depth | prompts |", "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {text} | {shape} | {how} | {each.accept_length:.3f} [{each.low:.3f}, {each.high:.3f}] | "
            f"{' '.join(f'{share:.2f}' for share in each.by_depth)} | {each.prompts} |"
            for text, shapes in found.items() for shape, of in shapes.items() for how, each in of.items()
        ),
    ]  # fmt: skip
