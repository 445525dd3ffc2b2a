"""Shows what `specdec verify` found.  Knows no model and checks nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from specdec.lossless.replay import ReplayedText, ReplayFile
from specdec.lossless.verification import Divergence, OffTarget, Verification
from specdec.screen.grid import Grid

STYLES = {"EXACT": "green", "near-tie": "yellow"}
SHOWN_OFF = 3  # tokens of a prompt; the JSON holds all


def print_verification(found: Verification, console: Console) -> None:
    """A line a prompt, what differs, and what all of it says."""
    grid = Grid(("prompt",), "outputs", "tokens", "rounds", "bound", "unsure", "first difference", "margin")
    for each in found.prompts:
        part = each.difference
        grid.add(
            str(each.prompt + 1),
            Text(each.verdict, STYLES.get(each.verdict, "bold red")),
            str(each.tokens),
            str(each.rounds),
            f"{each.bound:.3g}",
            str(each.unsure),
            "" if part is None else _tokens(part),
            "" if part is None else _number(part.margin),
        )
    grid.print(console)
    for each in found.prompts:
        for token in each.off_target[:SHOWN_OFF]:
            console.print(Text(f"prompt {each.prompt + 1}: {_off(token)}", "red"))
        if len(each.off_target) > SHOWN_OFF:
            console.print(Text(f"prompt {each.prompt + 1}: {len(each.off_target) - SHOWN_OFF} more, all in --json", "red"))
    console.print(Text(_summary(found), "green" if found.passed else "bold red"))
    if not found.saw_trees:
        said = (
            f"only {found.accepted} of these were accepted drafts, so a fault in how draft trees are computed would hardly show"
        )
        console.print(
            Text(f"{said}; a drafter that fits the target looks closer (draft='ngram' on text that repeats)", "yellow")
        )


def print_replay(file: ReplayFile, texts: Sequence[ReplayedText], console: Console) -> None:
    """A line a text, and what follows from all of them."""
    how = "with speculation" if file.speculate else "plainly"
    console.print(Text(f"{len(file.token_ids)} tokens, written {how} on {file.date} by specdec {file.versions.get('specdec')}"))
    grid = Grid(("text",), "off target", "parts at", "first token off", "margin", "bound")
    for each in texts:
        first = next((token for token in each.check.off if not token.is_explained), None)
        grid.add(
            each.name,
            Text(str(each.wrong), "bold red" if each.wrong else "green"),
            "" if each.parts_at is None else str(each.parts_at),
            "" if first is None else f"at {first.index}: {first.token}, the reference {first.best}",
            "" if first is None else _number(first.margin),
            f"{each.check.bound:.3g}",
        )
    grid.print(console)
    recorded, *now = texts
    if any(each.wrong for each in now):
        said = "the fault happens again: " + ", ".join(each.name for each in now if each.wrong)
    elif recorded.wrong:
        said = "the recorded text is not the target's, and what is written now is: another version, machine or moment wrote it"
    else:
        said = "nothing is wrong here: the recorded text is the target's own by this reference"
    console.print(Text(said, "bold red" if recorded.wrong or any(each.wrong for each in now) else "green"))


def _summary(found: Verification) -> str:
    """The verdict, and how much stands after it."""
    settings, count = found.settings, len(found.prompts)
    what = f"{found.count('EXACT')} of {count} prompts EXACT, {found.count('near-tie')} part at near-ties"
    wrong = [f"{found.count(name)} {name}" for name in ("DIVERGED", "OFF TARGET", "EMPTY") if found.count(name)]
    kept = "" if settings["kv_cache_dtype"] == "auto" else f", KV {settings['kv_cache_dtype']}"
    unsure = f"at {found.unsure} of them two tokens tie within rounding, so that a wrong one of the two would go unseen"
    return (
        f"{'PASS' if found.passed else 'FAIL'}: {', '.join([what, *wrong])}. Compared {found.tokens} tokens with the reference "
        f"({settings['dtype']}{kept}, spec {settings['spec']}, accept length {found.accept_length:.2f}); "
        + (unsure if found.unsure else "at none of them do two tokens tie within rounding")
    )


def _tokens(part: Divergence) -> str:
    if part.token_baseline is None or part.token_speculative is None:
        return f"at {part.index}, where one ends"
    return f"at {part.index}: {part.token_baseline} or {part.token_speculative}"


def _off(token: OffTarget) -> str:
    whose = "both texts hold" if token.side == "both" else f"the {token.side} text holds"
    return (
        f"at output token {token.index} {whose} {token.token}, the reference {token.best}; margin {_number(token.margin)}, "
        f"bound {token.bound:.3g}"
    )


def _number(margin: float | None) -> str:
    return "none" if margin is None else f"{margin:.3g}"
