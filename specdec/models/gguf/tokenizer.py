"""A tokenizer of transformers from a GGUF file's vocabulary: the model's own ids, and its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.models.gguf.file import open_gguf
from specdec.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from specdec.models.gguf.vocabulary import CONTROL, NORMAL, USER_DEFINED, GgufVocabulary

_BLANK = "\u2581"  # how SentencePiece writes a space
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def gguf_tokenizer(path: Path) -> Any:
    """The tokenizer of a GGUF file; None if it has none."""
    file = open_gguf(path)
    vocabulary = GgufVocabulary.of(file, file.vocab_size)
    return None if vocabulary is None else tokenizer_of(vocabulary)


def tokenizer_of(vocabulary: GgufVocabulary) -> Any:
    """A transformers.PreTrainedTokenizerFast."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    core = _pairs_of_bytes(vocabulary) if vocabulary.model == "gpt2" else _sentence_piece(vocabulary)
    for kind in (USER_DEFINED, CONTROL):
        added = [token for token, own in zip(vocabulary.tokens, vocabulary.types) if own == kind]
        core.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False) for token in added])
    named = {_NAMES[name]: vocabulary.tokens[token] for name, token in vocabulary.named.items() if name in _NAMES}
    around = [(vocabulary.begins, "bos_token"), (vocabulary.ends, "eos_token")]
    before, after = ([named[name]] if wanted else [] for wanted, name in around)
    if before or after:
        ids = [(token, core.token_to_id(token)) for token in {*before, *after}]
        core.post_processor = TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)
    made = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **named)
    made.chat_template = vocabulary.chat_template
    return made


def _pairs_of_bytes(vocabulary: GgufVocabulary) -> Any:
    """GPT-2's scheme: bytes stand as characters, and pairs are merged within pieces."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    rule = PRE_TOKENIZERS[vocabulary.pre]
    merges = [(first, second) for first, _, second in (merge.partition(" ") for merge in vocabulary.merges)]
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    core = Tokenizer(models.BPE(ids, merges, ignore_merges=rule.whole_words))
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in rule.cuts]
    bytes_as_characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_as_characters])
    core.decoder = decoders.ByteLevel()
    if rule.composed:
        core.normalizer = normalizers.NFC()
    return core


def _sentence_piece(vocabulary: GgufVocabulary) -> Any:
    """SentencePiece's pairs: those are merged first whose piece has the highest score; bytes stand for unknown characters."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers.convert_slow_tokenizer import generate_merges

    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    scores = list(zip(vocabulary.tokens, vocabulary.scores))
    apart = {token for token, kind in zip(vocabulary.tokens, vocabulary.types) if kind not in (NORMAL, USER_DEFINED)}
    merges, unknown = generate_merges(ids, scores, apart), vocabulary.unknown()
    core = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    first = [normalizers.Prepend(_BLANK)] if vocabulary.space_first else []
    core.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _BLANK)])
    strip = [decoders.Strip(" ", 1, 0)] if vocabulary.space_first else []
    core.decoder = decoders.Sequence([decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return core
