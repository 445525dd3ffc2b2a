"""The keys of a GGUF file about its tokenizer, checked: what is read of them, and what can't be.  Makes no tokenizer."""

from __future__ import annotations

from typing import Any, NamedTuple

from specdec.models.gguf.file import GgufFile
from specdec.models.gguf.pre_tokenizers import PRE_TOKENIZERS

_GGML = "tokenizer.ggml."
END_KEYS = tuple(f"{_GGML}{name}_token_id" for name in ("eos", "eot", "eom"))  # of a text, of a turn, of a message
MODELS = ("gpt2", "llama")  # pairs of bytes, and SentencePiece's pairs of characters
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # GGUF's token types
_READ = frozenset(
    "model pre tokens token_type scores merges bos_token_id eos_token_id eot_token_id eom_token_id unknown_token_id "
    "padding_token_id add_bos_token add_eos_token add_space_prefix".split()
)
# Tokens for tasks that nobody asks for here, and other forms of what is read.
_UNREAD = frozenset(
    "seperator_token_id cls_token_id mask_token_id prefix_token_id suffix_token_id middle_token_id fim_pre_token_id "
    "fim_suf_token_id fim_mid_token_id fim_pad_token_id fim_rep_token_id fim_sep_token_id".split()
)
_NEUTRAL = {"add_sep_token": False, "remove_extra_whitespaces": False}
_BESIDE = ("tokenizer.chat_template", "tokenizer.huggingface.json")  # beginnings of other keys that are known


class Vocabulary(NamedTuple):
    """model: one of MODELS.  pre: a name of PRE_TOKENIZERS; empty for SentencePiece.

    tokens: as the file spells them.  types, scores: of each token.  merges: pairs, joined by a blank.
    named: ids by what they are for ("bos", "eos", "unknown", "padding").  begins, ends: whether texts get these tokens.
    space_first: whether a text gets a blank at its beginning (SentencePiece).
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    named: dict[str, int]
    begins: bool
    ends: bool
    space_first: bool
    chat_template: str | None

    @classmethod
    def of(cls, file: GgufFile, vocab_size: int) -> Vocabulary | None:
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
        rule = PRE_TOKENIZERS[pre] if is_pairs else None
        return cls(
            model,
            pre if is_pairs else "",
            tokens,
            _list(keys, "token_type", int, where, len(tokens)),
            [] if is_pairs else _list(keys, "scores", float, where, len(tokens)),
            _list(keys, "merges", str, where) if is_pairs else [],
            _named(keys, len(tokens), where),
            _flag(keys, "add_bos_token", where, rule is None or rule.begins),
            _flag(keys, "add_eos_token", where, False),
            _flag(keys, "add_space_prefix", where, True),
            file.keys.get("tokenizer.chat_template"),
        )


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


def _named(keys: dict[str, Any], count: int, where: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        value = keys.get(f"{name}_token_id")
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < count:
            raise ValueError(f"{where}{name}_token_id must be a token id in [0, {count - 1}], got {value!r}")
        found[name] = value
    return found
