"""With --lenient: takes out of a body what this server would refuse by name, and says what that was.

The caller reads the names in the header LEFT_OUT_HEADER.  Names that a caller has made up may quote anything, so the log holds
them with --log-prompts alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.serve.wire import fields

LEFT_OUT_HEADER = "x-specdec-left-out"
MAX_NAMES, MAX_NAME_LENGTH = 20, 100  # in a header
PLAIN = re.compile(r"[\w.\[\]-]{1,100}", re.ASCII)
MADE_UP = "(unknown)"
KNOWN = {  # names that are some API's, and so no caller's own
    *fields.ELSEWHERE, *fields.NEUTRAL_MESSAGE_VALUES, *fields.NEUTRAL_STREAM_VALUES, *fields.STREAM_OPTIONS, "stream_options",
    *(name for path in (fields.COMPLETIONS, fields.CHAT) for name in (*fields.USED_FIELDS[path], *fields.NEUTRAL_VALUES[path])),
}  # fmt: skip


def known_only(body: dict[str, Any], path: str) -> tuple[dict[str, Any], list[str]]:
    """The body without what this server does not know or can't do, in messages and stream_options too, and what that was."""
    neutral = {**fields.NEUTRAL_VALUES[path], **dict.fromkeys(fields.SILENT_FIELDS, None)}
    kept, left_out = sift(body, fields.USED_FIELDS[path], neutral)
    if isinstance(messages := kept.get("messages"), list):
        kept["messages"] = [each for each in messages]
        for index, message in enumerate(messages):
            if isinstance(message, dict):
                where = f"messages[{index}]."
                own, more = sift(message, fields.MESSAGE_FIELDS, fields.NEUTRAL_MESSAGE_VALUES, where)
                kept["messages"][index] = own
                left_out += more
    if isinstance(options := kept.get("stream_options"), dict):
        used = sift(options, fields.STREAM_OPTIONS, fields.NEUTRAL_STREAM_VALUES, "stream_options.")
        kept["stream_options"] = used[0]
        left_out += used[1]
    if not kept.get("stream") and kept.pop("stream_options", None) is not None:
        left_out.append("stream_options")
    return kept, left_out


def sift(
    values: dict[str, Any], used: Sequence[str], neutral: Mapping[str, tuple[Any, ...] | None], where: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """The values that are used, and the names of those that say more than leaving them out.

    neutral: as for `only_used`; None: whatever the value is.  where: what stands before a name.
    """
    left_out = []
    for name, value in values.items():
        allowed = neutral.get(name, ())
        if name not in used and value is not None and allowed is not None:
            if not any(fields.is_same(value, each) for each in allowed):
                left_out.append(where + name)
    return {name: value for name, value in values.items() if name in used}, left_out


def header_value(names: Sequence[str]) -> str:
    """The names in plain ASCII, which is all that a header may hold."""
    shown = [name if PLAIN.fullmatch(name) else ascii(name[:MAX_NAME_LENGTH]) for name in names[:MAX_NAMES]]
    more = len(names) - MAX_NAMES
    return ", ".join([*shown, *([f"and {more} more"] if more > 0 else [])])


def logged(names: Sequence[str], log_prompts: bool) -> list[str]:
    """The names as the log has them."""
    return [name if log_prompts or name.rpartition(".")[2] in KNOWN else MADE_UP for name in names]
