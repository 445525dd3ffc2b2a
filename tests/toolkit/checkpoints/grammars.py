"""Small grammars over a vocabulary of bytes, and masks by brute force.

Shapes: X words of a mask.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models

from specdec.config import GrammarKind
from specdec.grammar.library import Grammars
from specdec.steps import Grammar
from toolkit.checkpoints.tokenizers import byte_tokenizer

V, EOS, STOP = 384, 300, 301  # the tokenizer has fewer ids than the model, whose matrices are padded
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "n": {"type": "integer"}, "kind": {"enum": ["a", "bc"]}},
        "required": ["name", "n", "kind"],
        "additionalProperties": False,
    }
)
RULES: dict[GrammarKind, str] = {
    "json_schema": SCHEMA,
    "regex": "(ab|cd[0-9]{1,3}é)+",
    "grammar": 'start: item ("," item)*\nitem: "(" start ")" | /[a-c]+/',
}


def tokenizer_json() -> str:
    tokenizer = byte_tokenizer(300)
    tokenizer.add_special_tokens({"eos_token": "</s>", "pad_token": "<stop>"})
    assert tokenizer.convert_tokens_to_ids(["</s>", "<stop>"]) == [EOS, STOP]
    return tokenizer.backend_tokenizer.to_str()


def allowed(mask_X: np.ndarray) -> list[int]:
    return np.nonzero(np.unpackbits(mask_X.view(np.uint8), bitorder="little"))[0].tolist()


def mask_after(grammars: Grammars, kind: GrammarKind, tokens: list[int]) -> np.ndarray:
    """The mask after the whole text, of a matcher that has seen nothing else."""
    matcher, mask = grammars.matcher(Grammar(kind, RULES[kind], (STOP, EOS))), np.zeros((1, V // 32), np.int32)
    matcher.take(tokens)
    matcher.fill(mask)
    return mask[0]


def first_id(text: str) -> int:
    return int(byte_tokenizer(300).encode(text, add_special_tokens=False)[0])


def letters_json(vocab_size: int, pairs: Sequence[str] = ()) -> str:
    """A tokenizer whose tokens are letters and digits, for targets of a small vocabulary; the last id ends a text.

    pairs: of letters, which are tokens too: the last ones.
    """
    symbols = [*"abcdefghijklmnopqrstuvwxyz0123456789ABCDEF"[: vocab_size - 1 - len(pairs)], *pairs]
    merges = [(pair[0], pair[1]) for pair in pairs]
    inner = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(symbols)}, merges))
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["</s>"])
    return str(inner.to_str())


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens from the root, without it, to each node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths
