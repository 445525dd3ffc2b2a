"""Which matrices of a checkpoint are in which format, and how configs say so.  Knows no method of quantisation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import regex

from specdec.models.checkpoints.config_values import MAX_INTEGER
from specdec.models.schemes.source import WeightFormat

HEAD = "lm_head"
PATIENCE = 2.0  # seconds for one expression and one name; an expression that backtracks may otherwise take for ever


@dataclass(frozen=True)
class Rule:
    """A name in the words of a config: exact, a regular expression from the beginning, a wildcard, a part, or a class."""

    how: Literal["exact", "regex", "wildcard", "part", "class"]
    what: str

    def fits(self, name: str, patience: float = PATIENCE) -> bool:
        if self.how == "regex":
            return _begins(self.what, name, patience)
        if self.how == "wildcard":
            return fnmatchcase(name, self.what) or name.startswith(f"{self.what}.")
        if self.how == "part":
            return self.what in name
        return self.how == "class" or name == self.what


def _begins(expression: str, name: str, patience: float) -> bool:
    """Whether the expression fits the beginning of the name.  `regex` reads what Python's own `re` does, and has a clock."""
    try:
        return regex.match(expression, name, timeout=patience) is not None
    except TimeoutError:
        raise ValueError(
            f"the regular expression {expression[:200]!r}, by which a config names matrices, was not done with {name!r} after "
            f"{patience:g} s: it tries the same characters in ever new ways; write it without repetitions inside repetitions"
        ) from None


@dataclass(frozen=True)
class Quantization:
    """The weight scheme of a checkpoint.

    method: who wrote it, or "round to nearest".  formats: rules and the format of the matrices that they fit; exact rules
    before expressions, and those before classes.  kept: matrices that are not quantised.
    optional: matrices that are quantised only where the tensors say so.  kept_by: the config's key that says `kept`.
    names: what names in files may begin with, and what that is here, where it is otherwise (keys/wrapper_table.py): rules are
    about the file's names, `optional` ones about ours too.
    setting: the option by which dense weights are rounded to these formats as they are loaded; empty: the checkpoint is
    quantised.
    """

    method: str
    formats: tuple[tuple[Rule, WeightFormat], ...]
    kept: tuple[Rule, ...] = ()
    optional: tuple[Rule, ...] = ()
    kept_by: str = "ignore"
    setting: str = ""
    names: tuple[tuple[str, str], ...] = ()

    def format_of(self, name: str, has: Callable[[WeightFormat], bool]) -> WeightFormat | None:
        """The format of the matrix of that name; None: it is not quantised.  has: whether the tensors look like the format."""
        files = [f"{begin}{name.removeprefix(own)}" for begin, own in self.names if name.startswith(own)] or [name]
        if any(rule.fits(each) for rule in self.kept for each in files):
            return None
        found = next((format for rule, format in self.formats if any(map(rule.fits, files))), None)
        if found is not None and any(rule.fits(each) for rule in self.optional for each in (name, *files)) and not has(found):
            return None
        return found

    def groups(self, names: Iterable[str], columns: int) -> tuple[int, ...]:
        """Columns of a scale, of each format in which matrices of these names may be and which has scales for groups.

        columns: of each of these matrices.
        """
        found = {format for name in names if (format := self.format_of(name, lambda _: True)) is not None}
        return tuple(sorted({group for format in found if (group := format.group_size_of(columns))}))

    def in_act_order(self, names: Iterable[str]) -> bool:
        """Whether a matrix of one of these names may be in act order."""
        found = (self.format_of(name, lambda _: True) for name in names)
        return any(format is not None and format.in_act_order for format in found)

    def __str__(self) -> str:
        kinds = ", ".join(dict.fromkeys(format.describe() for _, format in self.formats))
        return f"{kinds} ({self.method})"


# ---- how configs name things ----


def refuse_keys(scheme: dict[str, Any], known: str, where: str) -> None:
    """ValueError for a key that nobody here has read about, unless its value says nothing."""
    said = {key for key, value in scheme.items() if value not in (None, {})}
    if unknown := sorted(said - set(known.split())):
        raise ValueError(f"{where}: unknown keys {', '.join(unknown)}; they may change what the weights stand for")


def only(raw: dict[str, Any], key: str, where: str, *allowed: Any) -> Any:
    """The value, which must be one of these; the first stands for one that is absent or null."""
    value = allowed[0] if raw.get(key) is None else raw[key]
    if not any(type(value) is type(one) and value == one for one in allowed):  # True is no 1, and 4.0 no 4
        raise ValueError(f"{where}: {key} must be {' or '.join(map(repr, allowed))}, got {value!r}")
    return value


def neutral(raw: dict[str, Any], where: str, allowed: dict[str, Any]) -> None:
    """ValueError for a key that has another value than the one given here, with which the key changes nothing."""
    for key, value in allowed.items():
        only(raw, key, where, value)


def name_list(raw: dict[str, Any], key: str, where: str) -> list[str]:
    value = [] if raw.get(key) is None else raw[key]
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{where}: {key} must be null or a list of names, got {value!r}")
    return value


def regex_rule(expression: str, key: str, where: str) -> Rule:
    try:
        re.compile(expression)  # what the tools that write such configs use
        regex.compile(expression)
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{where}: {key} must hold regular expressions, got {expression[:200]!r}: {error}") from error
    return Rule("regex", expression)


def rule_of(name: str, key: str, where: str) -> Rule:
    """compressed-tensors' way to name modules.  key: that of the config."""
    if name.startswith("re:"):
        return regex_rule(name.removeprefix("re:"), key, where)
    return Rule("class", name) if name == "Linear" else Rule("exact", name)


def block(raw: dict[str, Any], key: str, where: str) -> tuple[int, int]:
    """The rows and columns that share a scale: a list of two numbers, or a text such as "128x128"."""
    value = sizes = raw.get(key)
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", value):
        sizes = [int(part) for part in value.split("x")]
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(type(size) is int and 0 < size <= MAX_INTEGER for size in sizes)
    ):
        raise ValueError(f"{where}: {key} must be [rows, columns], got {value!r}")
    check_group(sizes[1], f"{where}: the columns of {key}")
    return sizes[0], sizes[1]


def check_group(columns: int, what: str) -> None:
    """ValueError unless the kernels read a scale for so many columns: for each 32, or a larger power of two of them."""
    if columns < 32 or columns & (columns - 1):
        raise ValueError(f"{what} must be a power of two from 32 on, got {columns}")
