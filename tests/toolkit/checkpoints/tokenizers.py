"""Tiny tokenizers: one whose tokens are whole ASCII words, one of bytes, where characters span tokens."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz"
CHARACTERS = "é日本🙂ß€"  # two to four bytes each


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Token i is a word like xYx, whose first two and last two letters are its own; no spaces: stops can cross tokens."""
    words = [f"{LETTERS[i % 26]}{LETTERS[i // 26].upper()}{LETTERS[i % 26]}" for i in range(vocab_size)]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def byte_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Every byte is a token, and so is the first part of every character of CHARACTERS; the rest are pairs of letters."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocab = {symbol: i for i, symbol in enumerate(sorted(alphabet))}
    merges = []
    pairs = [byte_symbols(c)[:2] for c in CHARACTERS] + [f"{a}{b}" for a in "abcdefghijkl" for b in "mnopqrstuvwx"]
    for pair in pairs:
        if len(vocab) < vocab_size and pair not in vocab:
            vocab[pair] = len(vocab)
            merges.append((pair[0], pair[1]))
    inner = Tokenizer(models.BPE(vocab, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def byte_symbols(text: str) -> str:
    """The text as the byte-level alphabet writes it: one symbol a byte."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


WORDS = ["a", "big", "box", "had", "cat", "é", "ß", ".", ",", "ing"]
SPECIALS = ["<s>", "</s>", "<|user|>", "<|assistant|>"]


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: a space is written ▁, unknown characters fall back to bytes, and decoding strips the first space."""
    pieces = ["▁", "▁▁", *("▁" + word for word in WORDS), *WORDS]
    vocab = {piece: i for i, piece in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])}
    inner = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    return _with_specials(inner)


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """As T5's: the decoder drops the space of the first token, whatever it is."""
    pieces = ["▁", *("▁" + word for word in WORDS), *WORDS]
    inner = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="▁"))
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    return _with_specials(inner)


def wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    """As BERT's: words are joined by spaces, parts that begin with ## are not, nor is punctuation."""
    pieces = ["[UNK]", *WORDS, *("##" + word for word in WORDS)]
    inner = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return _with_specials(inner)


def suffix_tokenizer() -> PreTrainedTokenizerFast:
    """As the first GPT's: the last part of a word says that a space follows, unless it is the last token of all."""
    pieces = ["<unk>", *WORDS, *(word + "</w>" for word in WORDS)]
    inner = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    inner.decoder = decoders.BPEDecoder(suffix="</w>")
    return _with_specials(inner)


def _with_specials(inner: Tokenizer) -> PreTrainedTokenizerFast:
    inner.add_special_tokens(SPECIALS)
    return PreTrainedTokenizerFast(tokenizer_object=inner)
