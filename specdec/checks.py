"""Checks that settings share: the value, or an error that names it, what was expected and the nearest value that works.

A `Setting` is what a class of options says of each of its fields.
"""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, field
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Any

MAX_FILE = 256 << 20  # bytes of a file that people write
UNITS = {"G": 10**9, "GB": 10**9, "GIB": 2**30, "M": 10**6, "MB": 10**6, "MIB": 2**20}


class PromptTooLong(ValueError):
    """A prompt and its longest output are longer together than a sequence, or all keys and values, may be."""


class NoTokenLeft(ValueError):
    """What a request asks for leaves no token at some position of its output."""


@contextmanager
def about(field: str) -> Iterator[None]:
    """Marks what is raised inside as an error about this option, for doors that name the field; see `field_of`."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        mark(error, field)
        raise


def mark(error: BaseException, field: str) -> None:
    """Says that an error is about this option, unless it is known to be about another one."""
    vars(error).setdefault("field", field)


def field_of(error: BaseException) -> str:
    """The option that an error is about; empty where none is known."""
    return str(vars(error).get("field", ""))


def warn_caller(message: str, within: Collection[str]) -> None:
    """Warns at the line that called these modules, unless that is one of specdec's own: a door has judged what it was given."""
    frame, level = sys._getframe(1).f_back, 3  # as warnings counts: this function is 1, its caller 2
    while frame is not None and frame.f_globals.get("__name__") in within:
        frame, level = frame.f_back, level + 1
    if frame is not None and not str(frame.f_globals.get("__name__")).startswith("specdec."):
        warnings.warn(message, stacklevel=level)


def require_int(name: str, value: Any, low: int, high: float = math.inf) -> int:
    """The value as an int, if it is an integer of Python or numpy within [low, high].  A bool is refused."""
    if not is_number(type(value), Integral):
        number = _number_in(value)
        near = "" if number is None else f"; nearest setting that works: {name}={int(min(max(number, low), high))}"
        raise TypeError(f"{name} must be an int, got {shown(value)} of type {type(value).__name__}{near}")
    if not low <= value <= high:
        bounds = f">= {low}" if high == math.inf else f"in [{low}, {int(high)}]"
        nearest = low if value < low else int(high)
        raise ValueError(f"{name} must be {bounds}, got {value}; nearest setting that works: {name}={nearest}")
    return int(value)


def require_float(name: str, value: Any, low: float, high: float, *, above_low: bool = False) -> float:
    """The value as a float, if it is a finite number of Python or numpy within [low, high] (or (low, high])."""
    if not is_number(type(value), Real):
        number = _number_in(value)
        works = number is not None and low <= number <= high and not (above_low and number == low)
        near = f"; nearest setting that works: {name}={number}" if works else ""
        raise TypeError(f"{name} must be a number, got {shown(value)} of type {type(value).__name__}{near}")
    if not low <= value <= high or (above_low and value == low):
        bounds = f"{'(' if above_low else '['}{low}, {high}]"
        nearest = high if value > low else low
        setting = f"a {name} above {low}" if above_low and nearest == low else f"{name}={nearest}"
        hint = f"; nearest setting that works: {setting}"
        raise ValueError(f"{name} must be in {bounds}, got {value}{hint}")
    return float(value)


def _number_in(value: Any) -> float | None:
    """The finite number that a text or a float stands for; None if there is none."""
    try:
        number = float(value) if isinstance(value, str | float) else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def bytes_of(text: str) -> int | None:
    """80GB, 75.5 GiB or 512M as a number of bytes; None if it is no such text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        return None
    return int(float(match[1]) * UNITS[match[2].upper()])


def require_memory(name: str, value: Any, of: str = "the free memory") -> int | float:
    """A number of bytes as an int, or a share as a float below 1; texts such as "2GiB" and "0.5" are read.

    of: what it is a share of, for errors.
    """
    expected = f"{name} must be a number of bytes, a size such as '2GiB', or a share of {of} below 1, got {shown(value)}"
    nearest = f"nearest setting that works: {name}="
    if not isinstance(value, str) and not is_number(type(value), Real):
        raise TypeError(f"{expected} of type {type(value).__name__}; {nearest}'auto'")
    try:
        size: int | float = (bytes_of(value) if isinstance(value, str) else value) or float(value)
    except ValueError:
        raise ValueError(f"{expected}; {nearest}'auto'") from None
    if not 0 < size < math.inf:
        raise ValueError(f"{expected}; {nearest}'auto'")
    if size < 1:
        return float(size)
    if size != int(size):
        raise ValueError(f"{expected}; {nearest}{int(size)}")
    return int(size)


def require_size(name: str, value: Any, low: int = 1 << 20, high: int = 1 << 36) -> int:
    """A number of bytes from `low` to `high`; texts such as "2GiB" are read."""
    expected = (
        f"{name} must be a number of bytes or a size such as '2GiB', {low >> 20}MiB to {high >> 30}GiB, got {shown(value)}"
    )
    if not isinstance(value, str) and not is_number(type(value), Integral):
        raise TypeError(f"{expected} of type {type(value).__name__}; nearest setting that works: {name}='{low >> 20}MiB'")
    size = bytes_of(value) if isinstance(value, str) else int(value)
    if size is None or not low <= size <= high:
        near = high if size is not None and size > high else low
        raise ValueError(f"{expected}; nearest setting that works: {name}='{near >> 20}MiB'")
    return size


def require_share(name: str, value: Any) -> float:
    """A number from 0 to 1; a text such as "0.01" is read."""
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        number = value
    return require_float(name, number, 0.0, 1.0)


def require_folder(name: str, value: Any) -> Any:
    """The name of a folder, which is not looked at."""
    if not isinstance(value, str | Path):
        raise TypeError(f"{name} must be the name of a folder, got {shown(value)} of type {type(value).__name__}")
    if not str(value).strip():
        raise ValueError(f"{name} must be the name of a folder, got an empty one; nearest setting that works: {name}='.'")
    return value


def require_file(name: str, value: Any) -> Any:
    """The name of a file, which is not looked at."""
    if not isinstance(value, str | Path):
        raise TypeError(f"{name} must be the name of a file, got {shown(value)} of type {type(value).__name__}")
    if not str(value).strip():
        raise ValueError(f"{name} must be the name of a file, got an empty one; nearest setting that works: {name}=None")
    return value


def require_bool(name: str, value: Any, nearest: bool) -> bool:
    """The value, if it is True or False.  nearest: the setting that the error proposes for what looks like neither."""
    if not isinstance(value, bool):
        nearest = {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower(), nearest)
        raise TypeError(f"{name} must be a bool, got {shown(value)}; nearest setting that works: {name}={nearest}")
    return value


def require_choice(name: str, value: Any, choices: Sequence[Any], default: Any) -> Any:
    """The value, if it is one of the choices; a torch dtype may stand for its name.

    The error proposes the choice that is spelled most like the value, or the default.
    """
    plain = str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value
    if any(plain == choice and type(plain) is type(choice) for choice in choices):
        return value
    *others, last = map(repr, choices)
    expected = f"{name} must be {', '.join(others)} or {last}, got {shown(value)}"
    if type(plain) not in {type(choice) for choice in choices}:
        raise TypeError(f"{expected} of type {type(value).__name__}; nearest setting that works: {name}={default!r}")
    alike = nearest_name(plain, [choice for choice in choices if isinstance(choice, str)]) if isinstance(plain, str) else ""
    raise ValueError(f"{expected}; nearest setting that works: {name}={(alike or default)!r}")


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """What json.loads is to make of an object's pairs: ValueError for a key that stands there twice, as one would be lost."""
    made = dict(pairs)
    if len(made) < len(pairs):
        left = dict(made)
        twice = next(name for name, _ in pairs if left.pop(name, left) is left)
        raise ValueError(f"the key {ascii(twice[:100])} stands twice in one object")
    return made


def nearest_name(name: str, known: Iterable[str]) -> str:
    """The known name that is spelled most like this one, in letters of either case; empty if none is alike."""
    known = list(known)
    lower = [each.lower() for each in known]
    return next((known[lower.index(match)] for match in get_close_matches(name.lower(), lower, 1)), "")


def major_minor(text: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    numbers = ["".join(filter(str.isdigit, part)) for part in text.split(".")[:2]]
    major, minor = [int(number or 0) for number in numbers + ["0"] * (2 - len(numbers))]
    return major, minor


def is_number(kind: type, of: type) -> bool:
    """Whether values of this type are numbers `of` Integral or Real.  A bool is none, though Python counts it as one."""
    return issubclass(kind, of) and not issubclass(kind, bool)


def store(settings: object, **values: Any) -> None:
    """Puts checked values into a frozen dataclass while it is being made: only there may its fields be set."""
    for name, value in values.items():
        object.__setattr__(settings, name, value)


def read_some(path: Path) -> bytes:
    """A file, or what comes through a pipe.  ValueError if that is more than people write: /dev/zero has no end."""
    with path.open("rb") as file:
        read = file.read(MAX_FILE + 1)
    if len(read) > MAX_FILE:
        raise ValueError(f"{path} holds more than {MAX_FILE >> 20} MiB")
    return read


def is_array(value: Any) -> bool:
    """Whether it is an array of numpy or torch, told by what those have, so that neither must be imported to ask."""
    return all(hasattr(value, name) for name in ("ndim", "dtype", "tolist"))


# ---- what options say of texts and tokens ----


def require_characters(name: str, text: str) -> None:
    """ValueError for a text with half of a surrogate pair."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{name} holds {text!r}, which no text can hold: half of a surrogate pair is no character")


def require_texts(name: str, stop: Any) -> str | tuple[str, ...]:
    """A text or texts to stop at."""
    for text in (stop,) if isinstance(stop, str | bytes) or not isinstance(stop, Sequence) else stop:
        if not isinstance(text, str):
            raise TypeError(f"{name} must be a string or a list of strings, got {text!r} of type {type(text).__name__}")
        if not text:
            raise ValueError(f"{name} must not hold an empty string: it would end every text at once; leave it out")
        require_characters(name, text)
    return stop if isinstance(stop, str) else tuple(stop)


def require_text(name: str, value: Any) -> str:
    """A regular expression or a grammar."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {shown(value)} of type {type(value).__name__}"[:400])
    if not value or (name == "grammar" and not value.strip()):
        raise ValueError(f"{name} must not be empty; nearest setting that works: leave it out")
    require_characters(name, value)
    return value


def require_ids(name: str, value: Any) -> tuple[int, ...]:
    """The ids of a sequence or of a one-dimensional array of numpy or torch, checked.  name: what errors call them."""
    ids = value.tolist() if is_array(value) and value.ndim == 1 else value
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise TypeError(f"{name} must be a list of ints, got {shown(value)} of type {type(value).__name__}")
    if {*map(type, ids)} == {int} and min(ids) >= 0 and max(ids) < 2**31:  # a check of each would take a second for a million
        return tuple(ids)
    for i, token in enumerate(ids):
        if not is_number(type(token), Integral):
            raise TypeError(f"{name} must be a list of ints, got {shown(token)} of type {type(token).__name__} at index {i}")
    return tuple(require_int(f"{name}[{i}]", token, 0, 2**31 - 1) for i, token in enumerate(ids))


def require_prediction(name: str, value: Any) -> str | tuple[int, ...]:
    """A text or ids, not empty."""
    if isinstance(value, str):
        require_characters(name, value)
        kept: str | tuple[int, ...] = value
    else:
        kept = require_ids(name, value)
    if not kept:
        raise ValueError(f"{name} must not be empty; nearest setting that works: leave it out")
    return kept


def shown(value: Any) -> str:
    """A wrong value as an error names it: not longer than a line or two."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def require_names(name: str, value: Any) -> tuple[str, ...]:
    """Texts, each of them once, and one at least."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not all(isinstance(each, str) for each in value):
        raise TypeError(f"{name} must be a list of strings, got {shown(value)} of type {type(value).__name__}")
    if not value or len(set(value)) < len(value):
        raise ValueError(
            f"{name} must hold one name or more, each once, got {shown(list(value))}; nearest setting that works: leave it out"
        )
    return tuple(value)


def require_bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict from token ids to numbers, got {shown(value)} of type {type(value).__name__}")
    for token in value:
        if not is_number(type(token), Integral):
            raise TypeError(f"{name} must have token ids as keys, got {shown(token)} of type {type(token).__name__}")
        if not 0 <= token < 2**31:
            raise ValueError(f"{name} must have token ids of at least 0 as keys, got {token}")
    return {int(token): require_float(f"{name}[{token}]", added, -100.0, 100.0) for token, added in value.items()}


def require_words(name: str, value: Any) -> tuple[str, ...] | tuple[tuple[int, ...], ...]:
    """Texts alone, or lists of ids alone."""
    expected = f"{name} must be a list of strings or a list of lists of ints"
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TypeError(f"{expected}, got {shown(value)} of type {type(value).__name__}")
    are_texts = all(isinstance(word, str) for word in value)
    for word in value:
        if are_texts:
            require_characters(name, word)
        elif not isinstance(word, Sequence) and not is_array(word) or isinstance(word, str | bytes):
            raise TypeError(f"{expected}, got {word!r} of type {type(word).__name__} among them")
    words = tuple(value if are_texts else (require_ids(f"{name}[{number}]", word) for number, word in enumerate(value)))
    if not all(words):
        raise ValueError(f"{name} must not hold an empty word: every text would hold it; leave it out")
    return words


@dataclass(frozen=True)
class Setting:
    """What users are told of an option, and which values it takes: choices, or bounds, or a pattern, besides the default."""

    meaning: str  # one sentence, for help and tables
    details: str = ""  # more of it, for the documentation of from_pretrained
    choices: tuple[Any, ...] = ()
    bounds: tuple[int, float | Callable[[], int]] | None = None  # the upper one is a function where the machine decides
    pattern: tuple[str, str] | None = None  # a regular expression and what it stands for
    word: str | None = None  # a value besides numbers, where the default is a number
    others: Callable[[str, Any], Any] | None = None  # reads values besides the default, by the option's name and the value
    metavar: str | None = None  # what the command line calls the value, if it is no number
    decided_by: Mapping[str, str] = field(default_factory=dict)  # commands without a flag for it, and what their help says

    def check(self, name: str, value: Any, default: Any) -> Any:
        """The value, numbers as Python's own.  ValueError or TypeError unless it is allowed."""
        if self.choices:
            return require_choice(name, value, self.choices, default)
        if self.others is not None:
            return value if value == default and type(value) is type(default) else self.others(name, value)
        if isinstance(default, bool):
            return require_bool(name, value, default)
        if self.pattern is not None:
            if not re.fullmatch(self.pattern[0], str(value)):
                expected = f"{name} must be {self.pattern[1]}"
                raise ValueError(f"{expected}, got {value!r}; nearest setting that works: {name}={default!r}")
        if self.bounds is not None and (value != default or type(value) is not type(default)):
            low, high = self.bounds
            word = default if isinstance(default, str) else self.word
            if word is not None and not is_number(type(value), Integral):
                if isinstance(value, str) and value == word:
                    return value
                raise TypeError(f"{name} must be {word!r} or an int, got {value!r} of type {type(value).__name__}")
            return require_int(name, value, low, high() if callable(high) else high)
        return value


def option(default: Any, meaning: str, **more: Any) -> Any:
    """A field of EngineOptions, or of another class of options."""
    return field(default=default, metadata={"setting": Setting(meaning, **more)})


def setting_of(field: Field[Any]) -> Setting:
    return field.metadata["setting"]
