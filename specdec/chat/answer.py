"""What a decoder answers in a chat."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.chat.reply import Reply
from specdec.generation import Generation


@dataclass(frozen=True)
class ChatAnswer(Reply):
    """An answer in its parts, and the generation of which it was read."""

    generation: Generation
