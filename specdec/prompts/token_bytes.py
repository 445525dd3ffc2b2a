"""The bytes that each token of a vocabulary stands for within a text, by what its tokenizer's decoder does to it.

Knows the decoders of byte-level and of SentencePiece vocabularies, and those that write tokens as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from specdec.prompts.tokenizer import Tokenizer

BLANK = "\u2581"  # how SentencePiece writes a space
BYTE = re.compile("<0x([0-9A-F]{2})>")
AS_THEY_ARE = {"Fuse", "Strip"}  # decoders that change no token within a text


class VocabularyBytes(NamedTuple):
    """of: the bytes of each id.  spare: ids that stand for a byte where no other token has it, as SentencePiece's <0x41>.

    begin, end: the tokens that begin and end texts; None: there is none.
    """

    of: dict[int, bytes]
    spare: frozenset[int]
    begin: int | None
    end: int | None

    @property
    def ids(self) -> dict[bytes, int]:
        """The id of each text that is one token."""
        ordered = sorted(
            self.of, key=lambda token: (token not in self.spare, -token)
        )  # of two alike the lower one, spare or not
        return {self.of[token]: token for token in ordered if self.of[token]}


def bytes_of(tokenizer: Tokenizer, where: Path) -> VocabularyBytes:
    """ValueError for a vocabulary whose tokens mean something else beside other tokens.  where: what errors call it."""
    raw = json.loads(tokenizer.as_json("a drafter of other tokens"))
    kinds = set(_decoders(raw.get("decoder")))
    added = {each["id"]: each["content"] for each in raw.get("added_tokens") or ()}
    tokens = {token: piece for token, piece in (tokenizer.tokens() or {}).items() if token not in added}
    found, spare = {token: piece.encode() for token, piece in added.items()}, set[int]()
    if "ByteLevel" in kinds:
        symbols = _byte_symbols()
        found |= {token: bytes(symbols[c] for c in piece) for token, piece in tokens.items() if symbols.keys() >= {*piece}}
    elif kinds <= {"Replace", "ByteFallback", "Metaspace", *AS_THEY_ARE}:
        space = " " if kinds & {"Replace", "Metaspace"} else BLANK
        for token, piece in tokens.items():
            if "ByteFallback" in kinds and (byte := BYTE.fullmatch(piece)):
                spare.add(token)
                found[token] = bytes([int(byte[1], 16)])
            else:
                found[token] = piece.replace(BLANK, space).encode()
    else:
        named = ", ".join(sorted(kinds))
        raise ValueError(
            f"draft: {where} has a tokenizer whose tokens depend on those beside them ({named}), so that they can't "
            "be compared with another one's; nearest thing that works: a model with the target's tokenizer, or draft='ngram'"
        )
    return VocabularyBytes(found, frozenset(spare), tokenizer.begin, tokenizer.eos)


def _decoders(raw: Any) -> Iterator[str]:
    if isinstance(raw, dict):
        if raw["type"] != "Sequence":
            yield raw["type"]
        for each in raw.get("decoders") or ():
            yield from _decoders(each)


def _byte_symbols() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: GPT-2's table.

    Bytes that print stand for themselves, the others for characters from 256 on, in their order.
    """
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + index): byte for index, byte in enumerate(others)}
