"""How texts are cut into pieces before pairs of bytes are merged, by the name that `tokenizer.ggml.pre` gives.

A wrong cut gives wrong ids for ordinary texts (digits above all), so a name that is not listed is an error.  The expressions
are those of the publishers' own tokenizers; tests hold each against its own rules, written another way.
"""

from __future__ import annotations

from typing import NamedTuple

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"  # %s: a run of digits
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


def _by_case(ending: str, digits: str) -> str:
    """Words that end where a capital follows a small letter."""
    words = f"{_BEFORE}{_UPPER}*{_LOWER}+{ending}|{_BEFORE}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"


class PreTokenizer(NamedTuple):
    """cuts: expressions, each of which cuts what the one before it has left.

    whole_words: whether a piece that is a token is that token, whatever its merges are.  composed: whether texts are brought to
    Unicode's composed form (NFC) first.  begins: whether a text begins with the token that says so, where no key says it.
    """

    cuts: tuple[str, ...]
    whole_words: bool = False
    composed: bool = False
    begins: bool = False


_LLAMA3 = PreTokenizer((_WORDS % r"\p{N}{1,3}",), whole_words=True, begins=True)
_QWEN2 = PreTokenizer((_WORDS % r"\p{N}",), composed=True)

PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "gpt-4o": PreTokenizer((_by_case(f"{_ENDINGS}?", r"\p{N}{1,3}"),), whole_words=True),
    "tekken": PreTokenizer((_by_case("", r"\p{N}"),), whole_words=True, begins=True),
}
