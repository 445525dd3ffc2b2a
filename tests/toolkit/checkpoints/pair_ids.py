"""Ids of byte-level pair encoding, computed the slow way: no code of `tokenizers`, cuts by Python's `regex`."""

import unicodedata
from collections.abc import Iterator
from inspect import signature

import regex
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""  # openai/gpt-2, encoder.py
LLAMA3 = signature(TikTokenConverter).parameters["pattern"].default
# openai/tiktoken, o200k_base; mistral-common, tekken: a word ends before a capital that follows small letters.
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{UPPER}*{LOWER}+|{UPPER}+{LOWER}*)%s"
O200K += r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS = {
    "gpt-2": GPT2, "smollm": GPT2, "llama-bpe": LLAMA3, "qwen2": PRETOKENIZE_REGEX,
    "gpt-4o": O200K % (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"), "tekken": O200K % ("", r"\p{N}"),
}  # fmt: skip
WHOLE_WORDS = ("llama-bpe", "gpt-4o", "tekken")
BYTES = bytes_to_unicode()


def pieces(pre: str, text: str) -> Iterator[str]:
    """What is merged apart.  SmolLM cuts out each digit first."""
    text = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    parts = regex.split(r"(\p{N})", text) if pre == "smollm" else [text]
    for part in filter(None, parts):
        yield from (match[0] for match in regex.finditer(CUTS[pre], part))


def pair_ids(pre: str, text: str, ids: dict[str, int], ranks: dict[tuple[str, str], int]) -> list[int]:
    found = []
    for piece in pieces(pre, text):
        symbols = [BYTES[byte] for byte in piece.encode()]
        if pre in WHOLE_WORDS and "".join(symbols) in ids:
            symbols = ["".join(symbols)]
        while True:
            ranked = [(ranks[pair], at) for at, pair in enumerate(zip(symbols, symbols[1:])) if pair in ranks]
            if not ranked:
                break
            at = min(ranked)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        found += [ids[symbol] for symbol in symbols if symbol in ids]
    return found
