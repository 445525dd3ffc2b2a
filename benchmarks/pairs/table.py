"""The table of a comparison, as JSON and as Markdown: what its parts hold, of as many heads as are there.

Nothing is measured here, and a number that no part holds is left empty.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from statistics import median
from typing import Any

from texts.sources import told

from pairs.plan import KINDS, LONG, PairsPlan, PartsFolder
from specdec.loading.about.machine import machine_facts, versions

MEASURED = ("train", "eval", "verify", "start", "bench")  # steps whose parts are of a head
HEADS = (*KINDS, *(kind + LONG for kind in KINDS))
Rows = list[list[str]]


def write_table(folder: PartsFolder) -> None:
    """table.json and table.md, in the folder."""
    record = table_of(folder)
    (folder.path / "table.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder.path / "table.md").write_text(markdown(record))
    print((folder.path / "table.md").read_text(), end="")


def table_of(folder: PartsFolder) -> dict[str, Any]:
    """All parts by step, the plan, and the machine that wrote the table."""
    steps = {step: folder.parts(step) for step in ("prompts", "texts", *MEASURED)}
    about = {"date": datetime.now(UTC).date().isoformat(), "versions": versions(), "machine": machine_facts()}
    return {"plan": asdict(folder.plan), **about, **steps}


def markdown(record: dict[str, Any]) -> str:
    """The tables of a record, each under a line that says what it holds."""
    plan = PairsPlan(**record["plan"])
    kinds = [kind for kind in HEADS if kind in record["train"]]
    files = " / ".join(plan.files)
    parts = [
        _about(record, plan),
        f"Accept lengths, greedy / sampled at temperature 1; {plan.eval_prompts} prompts of a file, {plan.eval_tokens} tokens:",
        _grid(["head", "tree", *plan.files], _accept_rows(record, plan, kinds)),
        f"Share of drafts accepted at each depth, of those that were reached; greedy, {plan.files[0]}:",
        _grid(["head", "tree", "by depth"], _depth_rows(record, plan, kinds)),
        *(part for temperature in plan.temperatures for part in _speeds(record, plan, kinds, temperature)),
        f"Of each head; a start is `specdec generate` of 16 tokens; `verify` over {files}:",
        _grid(["head", "MB", "steps", "training, s", "start, s", "verify"], [_facts(record, kind) for kind in kinds]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _about(record: dict[str, Any], plan: PairsPlan) -> str:
    """Which steps ran where and when, since parts of several machines meet in a folder, and how much training a head had."""
    steps: dict[str, dict[str, None]] = {}
    for step in MEASURED:
        for part in record[step].values():
            steps.setdefault(part["where"], {})[step] = None
    places = [f"{', '.join(each)}: {where}" for where, each in steps.items()]
    rows = f"{plan.texts:,} rows of {plan.width} tokens, {plan.steps:,} steps of {plan.batch} rows, the same for every kind"
    longer = f"; heads named {LONG}: {plan.long_seconds:,} seconds in place of the steps" if plan.long_seconds else ""
    return f"{'; '.join(places)}. Training: {rows}{longer}."


def _grid(names: list[str], rows: Rows) -> str:
    if not rows:
        return ""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _of(part: dict[str, Any], file: str, temperature: float) -> dict[str, Any]:
    """The row of a part for a file and a temperature; empty where there is none."""
    return next((row for row in part["rows"] if (row["file"], row["temperature"]) == (file, temperature)), {})


def _measured(record: dict[str, Any], step: str, plan: PairsPlan, kinds: list[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """(kind, what of it, part), in the order of the plan."""
    ends = [f"-{batch}" for batch in plan.batches] if step == "bench" else [""]
    named = [(kind, shape, f"{kind}-{shape}{end}") for kind in kinds for shape in plan.shapes for end in ends]
    return [(kind, shape, record[step][name]) for kind, shape, name in named if name in record[step]]


def _accept_rows(record: dict[str, Any], plan: PairsPlan, kinds: list[str]) -> Rows:
    def cell(part: dict[str, Any], file: str) -> str:
        found = [_of(part, file, temperature).get("accept_length") for temperature in plan.temperatures]
        return " / ".join(f"{length:.2f}" if length else "" for length in found)

    return [
        [kind, f"({shape})", *(cell(part, file) for file in plan.files)]
        for kind, shape, part in _measured(record, "eval", plan, kinds)
    ]


def _depth_rows(record: dict[str, Any], plan: PairsPlan, kinds: list[str]) -> Rows:
    def shares(part: dict[str, Any]) -> str:
        found = _of(part, plan.files[0], plan.temperatures[0]).get("acceptance_by_depth", [])
        return " ".join("-" if share is None else f"{share:.2f}" for share in found)

    return [[kind, f"({shape})", shares(part)] for kind, shape, part in _measured(record, "eval", plan, kinds)]


def _speeds(record: dict[str, Any], plan: PairsPlan, kinds: list[str], temperature: float) -> list[str]:
    """A line and a table; none where nothing was measured."""

    def cell(part: dict[str, Any], file: str) -> str:
        row = _of(part, file, temperature)
        if not row:
            return ""
        return f"{median(row['plain']):,.0f} -> {median(row['rounds']):,.0f}, {told(row)}{_fault(row['outputs'])}"

    rows = [
        [kind, f"({shape})", str(part["batch"]), *(cell(part, file) for file in plan.files)]
        for kind, shape, part in _measured(record, "bench", plan, kinds)
    ]
    how = f"at temperature {temperature:g}" if temperature else "greedy"
    line = (
        f"Tokens a second, plain -> with the head, {how}; times plain, with its interval of 95 percent over {plan.repeats} "
        f"repeats in turns; {plan.bench_tokens} tokens a prompt:"
    )
    return [line, _grid(["head", "tree", "batch", *plan.files], rows)] if rows else []


def _fault(outputs: str) -> str:
    """What must stand beside a speed: texts that differ beyond near-ties, or are empty."""
    return "" if outputs in ("equal", "near-tie") else f" {outputs}"


def _facts(record: dict[str, Any], kind: str) -> list[str]:
    train, start, verify = (record[step].get(kind) for step in ("train", "start", "verify"))
    starts = f"{start['seconds']:.1f}" if start else ""
    told = "" if not verify else "passed" if verify["passed"] else "FAILED"
    return [kind, f"{train['size_mb']:.1f}", str(train["steps"]), f"{train['seconds']:.0f}", starts, told]
