"""What the load benchmark asks for: requests by number, and a tokenizer from whose text a client can count tokens.

Requests follow from their numbers alone, so that `generate` and clients in other processes run the very same ones.  This file
imports neither torch nor specdec, because clients import it too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOWER = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Work:
    """All requests have prompts of `prompt_tokens` random ids and ask for `max_tokens` tokens.

    model: what the server calls the model.  vocab_size: the target's.
    groups: of requests whose prompts begin alike, with `shared_tokens` ids; 0: all prompts differ.
    chat: fields of a chat besides its message, which then has so many random words, and its max_tokens; None: no chats.
    """

    model: str
    vocab_size: int
    prompt_tokens: int
    max_tokens: int
    groups: int = 0
    shared_tokens: int = 0
    chat: dict[str, Any] | None = None

    def prompt(self, number: int) -> list[int]:
        """Token ids of the prompt of a request; its seed is its number."""
        shared = self._ids(f"group {number % self.groups}", self.shared_tokens) if self.groups else []
        return shared + self._ids(number, self.prompt_tokens - len(shared))

    def _ids(self, seed: int | str, count: int) -> list[int]:
        return random.Random(seed).choices(range(min(256, self.vocab_size // 2), self.vocab_size), k=count)

    def session(self, number: int) -> dict[str, str]:
        """Headers that name a request's group, for a router that has each group answered in one place."""
        return {"x-session-id": f"group {number % self.groups}"} if self.groups else {}

    def fields(self, number: int) -> dict[str, Any]:
        """What the request asks for: arguments of the client's `create`, of completions or of chats."""
        shared: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "seed": number,
            "stream": True,
        }
        shared["extra_headers"] = self.session(number)
        if self.chat is None:
            return {**shared, "prompt": self.prompt(number), "stream_options": {"include_usage": True}}
        chance = random.Random(number)
        words = "".join(f" {chance.choice(LOWER)}{chance.choice(LOWER)}" for _ in range(self.prompt_tokens))
        usage = {"include_usage": True, "continuous_usage_stats": True}
        return {**shared, "messages": [{"role": "user", "content": words}], "stream_options": usage, **self.chat}


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a byte-level BPE tokenizer of exactly this size: all bytes, then an ASCII character and 1 to 3 lower-case letters.

    So nearly every id is one character that is no lower-case letter, with letters after it, and its text is 3.6 characters
    long on average at 128,256 ids: what decoding costs is what it costs users.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def symbols(text: str) -> str:  # the alphabet of byte-level BPE, in which a space is another character
        return "".join(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0])

    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    words = [symbols(chr(code)) for code in range(32, 127) if chr(code) not in LOWER]
    while len(vocab) < vocab_size:
        longer = [(word, letter) for word in words for letter in LOWER][: vocab_size - len(vocab)]
        merges += longer
        words = [word + letter for word, letter in longer]
        vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    inner = Tokenizer(models.BPE(vocab, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder)


def count_tokens(text: str) -> int:
    """How many tokens of `save_tokenizer` the text holds: one for each character that is no lower-case letter.

    Too few by the tokens that are a single lower-case letter, which are 26 of all ids.
    """
    return sum(character not in LOWER for character in text)
