"""The keys of a GGUF file about its tokenizer, checked: what is read of them, and what can't be.  Makes no tokenizer."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from specdec.models.gguf.file import GgufFile
from specdec.models.gguf.pre_tokenizers import PRE_TOKENIZERS

_GGML = "tokenizer.ggml."
_NAMED = ("bos", "eos", "eot", "eom", "unknown", "padding")
_ENDS = ("eos", "eot", "eom")  # of a text, of a turn, of a message
MODELS = ("gpt2", "llama")  # pairs of bytes, and SentencePiece's pairs of characters
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # GGUF's token types
_READ = frozenset(
    "model pre tokens token_type scores merges bos_token_id eos_token_id eot_token_id eom_token_id unknown_token_id "
    "padding_token_id eos_token_ids add_bos_token add_eos_token add_space_prefix".split()
)
# Tokens for tasks that nobody asks for here, and other forms of what is read.
_UNREAD = frozenset(
    "seperator_token_id cls_token_id mask_token_id prefix_token_id suffix_token_id middle_token_id fim_pre_token_id "
    "fim_suf_token_id fim_mid_token_id fim_pad_token_id fim_rep_token_id fim_sep_token_id".split()
)
_NEUTRAL = {"add_sep_token": False, "remove_extra_whitespaces": False}
_BESIDE = ("tokenizer.chat_template", "tokenizer.huggingface.json")  # beginnings of other keys that are known


class GgufVocabulary(NamedTuple):
    """model: one of MODELS.  pre: a name of PRE_TOKENIZERS; empty for SentencePiece.

    tokens: as the file spells them.  types, scores: of each token.  merges: pairs, joined by a blank.
    named: ids by what they are for ("bos", "eos", "eot", "eom", "unknown", "padding").  end_ids: those that end a text.
    begins, ends: whether texts get the token "bos" before them and "eos" after them.
    space_first: whether a text, and what follows a special token, gets a blank at its beginning (SentencePiece).
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    named: dict[str, int]
    end_ids: tuple[int, ...]
    begins: bool
    ends: bool
    space_first: bool
    chat_template: str | None

    @classmethod
    def of(cls, file: GgufFile, vocab_size: int) -> GgufVocabulary | None:
        """None if the file has no tokenizer.  ValueError names the key that is wrong, missing or unknown.

        vocab_size: the rows of the embedding table.
        """
        keys = {key.removeprefix(_GGML): value for key, value in file.keys.items() if key.startswith(_GGML)}
        stray = [key for key in file.keys if key.startswith("tokenizer.") and not key.startswith((_GGML, *_BESIDE))]
        stray += [_GGML + key for key in keys.keys() - _READ - _UNREAD - _NEUTRAL.keys()]
        if stray:
            raise ValueError(f"{file.path}: unknown keys {', '.join(sorted(stray))}; they may change which ids a text has")
        if not keys:
            return None
        for key, neutral in _NEUTRAL.items():
            if keys.get(key, neutral) != neutral:
                raise ValueError(f"{file.path}: {_GGML}{key} must be {neutral!r} or left out, got {keys[key]!r}")
        model, pre, where = keys.get("model"), keys.get("pre", ""), f"{file.path}: {_GGML}"
        if model not in MODELS:
            raise ValueError(f"{where}model must be one of {', '.join(MODELS)}, got {model!r}")
        is_pairs = model == "gpt2"
        if is_pairs and pre not in PRE_TOKENIZERS:
            raise ValueError(
                f"{where}pre must be one of {', '.join(PRE_TOKENIZERS)}, got {pre!r}: how that model's texts are cut into "
                "pieces is not known here, and any other cut gives other ids"
            )
        tokens = _list(keys, "tokens", str, where)
        if len(tokens) > vocab_size or len(set(tokens)) < len(tokens):
            raise ValueError(
                f"{where}tokens must be distinct and at most {vocab_size}, the rows of the embeddings, got {len(tokens)}, "
                f"{len(set(tokens))} of them distinct"
            )
        template = file.keys.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise ValueError(f"{file.path}: tokenizer.chat_template must be a text, got {template!r}")
        rule, named = PRE_TOKENIZERS[pre] if is_pairs else None, _named(keys, len(tokens), where)
        begins = _flag(keys, "add_bos_token", where, rule is None or rule.begins)
        ends = _flag(keys, "add_eos_token", where, False)
        for wanted, name in ((begins, "bos"), (ends, "eos")):
            if wanted and name not in named:
                raise ValueError(f"{where}{name}_token_id is missing, but texts get that token by {where}add_{name}_token")
        types = _list(keys, "token_type", int, where, len(tokens))
        if strange := set(types) - set(range(NORMAL, BYTE + 1)):
            raise ValueError(f"{where}token_type must hold numbers from {NORMAL} to {BYTE}, got {min(strange)}")
        return cls(
            model,
            pre if is_pairs else "",
            tokens,
            types,
            [] if is_pairs else _scores(keys, types, where),
            _merges(keys, set(tokens), where) if is_pairs else [],
            named,
            _end_ids(keys, named, len(tokens), where),
            begins,
            ends,
            _flag(keys, "add_space_prefix", where, True),
            template,
        )

    def unknown(self) -> str | None:
        """The token that stands for what no other spells; None if there is none."""
        first = self.types.index(UNKNOWN) if UNKNOWN in self.types else None
        found = self.named.get("unknown", first)
        return None if found is None else self.tokens[found]


def _list(keys: dict[str, Any], key: str, kind: type, where: str, length: int | None = None) -> list[Any]:
    """A list of such values.  length: how many it must have; None: any number but 0."""
    value = keys.get(key)
    if not isinstance(value, list) or not value or not all(type(each) is kind for each in value):
        raise ValueError(f"{where}{key} must be a list of {kind.__name__}, got {str(value)[:80]}")
    if length is not None and len(value) != length:
        raise ValueError(f"{where}{key} must have {length} values, one for each token, got {len(value)}")
    return value


def _flag(keys: dict[str, Any], key: str, where: str, default: bool) -> bool:
    value = keys.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{where}{key} must be true or false, got {value!r}")
    return value


def _id(value: Any, key: str, count: int, where: str) -> int:
    if type(value) is not int or not 0 <= value < count:
        raise ValueError(f"{where}{key} must be a token id in [0, {count - 1}], got {value!r}")
    return value


def _named(keys: dict[str, Any], count: int, where: str) -> dict[str, int]:
    given = {name: keys.get(f"{name}_token_id") for name in _NAMED}
    return {name: _id(value, f"{name}_token_id", count, where) for name, value in given.items() if value is not None}


def _end_ids(keys: dict[str, Any], named: dict[str, int], count: int, where: str) -> tuple[int, ...]:
    more = [] if keys.get("eos_token_ids") is None else _list(keys, "eos_token_ids", int, where)
    own = [named[name] for name in _ENDS if name in named]
    return tuple(dict.fromkeys([*own, *(_id(token, "eos_token_ids", count, where) for token in more)]))


def _scores(keys: dict[str, Any], types: list[int], where: str) -> list[float]:
    """SentencePiece merges by them, so they must tell pieces apart: some old converters wrote one number for all."""
    scores = _list(keys, "scores", float, where, len(types))
    if not all(map(math.isfinite, scores)):
        raise ValueError(f"{where}scores must be finite numbers")
    if len({score for score, kind in zip(scores, types) if kind == NORMAL}) < 2:
        raise ValueError(f"{where}scores must say which pieces are merged first, got one number for all of them")
    return scores


def _merges(keys: dict[str, Any], tokens: set[str], where: str) -> list[str]:
    merges = _list(keys, "merges", str, where)
    for merge in merges:
        first, blank, second = merge.partition(" ")
        if not blank or not {first, second, first + second} <= tokens:
            raise ValueError(f"{where}merges must hold two tokens each, joined by a blank, that make a third, got {merge!r}")
    return merges
