"""The words of a report in plain English: each term that its tables use, and what it means."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.bench.budget import PHASES
from specdec.bench.measurement import REPEAT_FLAG, REPEAT_N, Measurement

NARROW = 60  # columns below which a term stands above its meaning

SHAPE = [
    ("S", "num_steps: levels of the draft tree; auto: the whole shape is chosen for every round"),
    ("k", "topk: branches that the draft keeps on each level"),
    ("nd", "num_draft_tokens: tokens that the target checks in a round, 1 of them known"),
    ("batch", "sequences that run at once"),
]
SPEED = [
    ("round", "the draft proposes a tree of tokens, and the target checks it in one pass"),
    ("accept length", "tokens that a sequence gains in a round, the target's own included"),
    ("tok/s", "output tokens a second, prefill included; median of {repeats} repeats"),
    ("baseline", "specdec without a draft: same process and warm-up, in turns"),
    ("speed-up", "specdec tok/s / baseline tok/s"),
]
PREDICTED = [
    ("predicted", "accept length x plain step / whole round; knows no prefill"),
    ("uneven ends", "last rounds that run half empty, and tokens cut off after the end"),
    ("prefill", "reading the prompts: only the target without a draft, else both"),
    ("other", "noise, and the waiting in the pass from which the prediction comes"),
]
VERDICTS = {
    "equal": "both sides wrote the same tokens in every pass",
    "near-tie": "outputs part only where two tokens score equally, but for rounding",
    "DIVERGED": "outputs differ by more than rounding: no speed-up is shown",
    "EMPTY": "an output holds nothing, so being equal proves nothing",
    "SYNTHETIC": "acceptance is forced: no text of the target, so nothing to compare",
}
PARTING = [
    ("rank", "a token's place among all, by the target's scores; 1 is the best"),
    ("bound", "how far below the best score a near-tie may lie"),
]
PHASE_TIMES = {
    "plain step": "a step of the baseline: one token for each sequence of a batch",
    "whole round": "a round of specdec: draft, verify, extend and the rest",
    "draft": "the draft proposes a tree",
    "verify": "the target checks the tree, and what is accepted is kept",
    "extend": "the draft reads what was accepted",
    "decode": "plain steps that S = auto took, spread over all rounds",
    "rest": "time that no phase took: Python at work",
    "all prefill": "reading all prompts, once for the whole pass",
}
AVERAGES = [
    ("over tokens", "all tokens of rounds / all rounds: long texts count more"),
    ("over requests", "the mean of each request's own accept length: all count alike"),
]
MEMORY = [
    ("KV pool", "memory for the keys and values of all tokens that run"),
    ("repeated", f"{REPEAT_N}-grams that occurred before; above {REPEAT_FLAG} acceptance is inflated"),
]
BUDGETS = [
    ("limit ms", "to read every weight, key and value that a pass needs, once, at the measured bandwidth; a model that fits a "
    "cache can be faster"),
    ("x limit", "ms / limit ms"),
    ("as it runs", "the median round in normal use, host included"),
    ("phases", "each is waited for, so their sum can differ from the round"),
]  # fmt: skip
TRACED = [
    ("GPU", "a profiler's trace, which slows launches; a kernel that waits for the one before it counts from that one's end"),
    ("idle", "time between the first kernel and the last in which none ran"),
]


def terms_of(measurement: Measurement) -> list[tuple[str, str]]:
    """(term, meaning) of the terms that occur, in the order in which the report uses them."""
    cells, repeats, found = measurement.cells, measurement.settings["repeats"], list[tuple[str, str]]()
    if cells or measurement.failures:
        found += SHAPE
    if cells:
        found += [(term, meaning.format(repeats=repeats)) for term, meaning in SPEED]
        if any(cell.speed_up_factors for cell in cells):
            found += PREDICTED
        said = {cell.outputs.verdict for cell in cells}
        found += [(verdict, meaning) for verdict, meaning in VERDICTS.items() if verdict in said]
        if any(cell.outputs.differing for cell in cells):
            found += PARTING
        shown = {"plain step", "whole round", *phases_shown(measurement), "all prefill"}
        found += [(term, meaning) for term, meaning in PHASE_TIMES.items() if term in shown]
        found += AVERAGES + MEMORY
    if measurement.plain_cells:
        meanings = dict(SPEED) | PHASE_TIMES
        words = ("tok/s", "plain step", "all prefill")
        found += [(term, meanings[term].format(repeats=repeats)) for term in words] + MEMORY
    if measurement.budgets:
        found += BUDGETS
    if any(budget.kernels for budget in measurement.budgets):
        found += TRACED
    return found


def phases_shown(measurement: Measurement) -> list[str]:
    """Phases that have a column: plain steps only where "auto" took some."""
    has_plain = any("decode" in cell.speculative.phases.calls for cell in measurement.cells)
    return [name for name in (*PHASES, "rest") if name != "decode" or has_plain]


def print_legend(measurement: Measurement, console: Console) -> None:
    console.print(Text("\nWhat the words mean", "bold"))
    terms = terms_of(measurement)
    if console.width < NARROW:
        for term, meaning in terms:
            console.print(Text.assemble((term, "cyan"), (f": {meaning}", "dim")))
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(style="dim", overflow="fold")
        for term, meaning in terms:
            table.add_row(term, Text(meaning))
        console.print(table)
    console.print(Text("All definitions and raw counters: --json FILE.", "dim"))
