"""A thought as the one text that a client brings back of it (`encrypted_content`).  It is packed, and hidden from nobody."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode

MARK = "specdec-thought-"  # other servers' texts do not begin with it


def pack(thought: str) -> str:
    return MARK + urlsafe_b64encode(thought.encode("utf-8")).decode("ascii")


def unpack(packed: object) -> str | None:
    """The thought; None: this is none of `pack`'s texts, as those of other servers are not."""
    if not isinstance(packed, str) or not packed.startswith(MARK):
        return None
    try:
        return urlsafe_b64decode(packed.removeprefix(MARK)).decode("utf-8")
    except ValueError:  # somebody has cut or changed it; bytes of half a surrogate pair are no text, here as in bodies
        return None
