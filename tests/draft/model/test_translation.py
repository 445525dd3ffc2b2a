"""How a small model of other tokens reads and drafts its target's, against brute force; and the bytes behind tokens, against
what tokenizers decode.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from toolkit.checkpoints import tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import shipped
from specdec.draft.model.translation import spelled, translate
from specdec.prompts.token_bytes import bytes_of
from specdec.prompts.tokenizer import Tokenizer

MADE = {
    "words": lambda: tokenizers.word_tokenizer(90),
    "bytes": lambda: tokenizers.byte_tokenizer(384),
    "sentencepiece": tokenizers.sentencepiece_tokenizer,
    "metaspace": tokenizers.metaspace_tokenizer,
}


@pytest.mark.parametrize("name", [*MADE, "shipped"])
def test_bytes_are_those_that_a_text_gets(name: str, tmp_path: Path) -> None:
    """Keeps out: spaces that stay blanks, byte symbols taken for characters.  The oracle: what decoding a longer text adds."""
    folder = shipped.target_folder() if name == "shipped" else tmp_path
    if name != "shipped":
        MADE[name]().save_pretrained(folder)
    tokenizer = Tokenizer(folder)
    found, inner = bytes_of(tokenizer, folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert found.of.keys() == (tokenizer.tokens() or {}).keys()
    before = next(token for token, text in found.of.items() if text.isalpha() and token not in found.spare)
    seen = 0
    for token, text in found.of.items():
        alone, both = (inner.decode(ids, clean_up_tokenization_spaces=False) for ids in ([before], [before, token]))
        if token in inner.all_special_ids or "\ufffd" in both:  # a part of a character
            continue
        assert both == alone + text.decode(), token
        seen += 1
    assert seen > 20
    for text, token in found.ids.items():
        same = {other for other, own in found.of.items() if own == text}
        assert token == min(same - found.spare or same)


def test_tokens_are_spelled_by_the_longest_that_fit() -> None:
    own = {b"a": 1, b"ab": 2, b"abc": 3, b"d": 4, b"bcd": 5}
    cases = {b"abcd": (3, 4), b"abd": (2, 4), b"bcd": (5,), b"xabx": (2,), b"": (), b"zz": ()}
    assert {text: spelled(text, own, 3) for text in cases} == cases


def test_each_token_is_read_and_drafted_as_its_text_says() -> None:
    """Keeps out: a draft id that leads to another token than its text, means over others' rows, ids beyond the target's."""
    generator = random.Random(5)
    texts = [bytes(generator.choices(b"abcd", k=generator.randint(1, 4))) for _ in range(300)]
    own_texts, its_texts = (list(dict.fromkeys(generator.sample(texts, 200))) for _ in range(2))
    own_texts += [each for each in (b"a", b"b", b"c", b"d") if each not in own_texts]
    own = {text: index for index, text in enumerate(own_texts)}
    target = {index + 3: text for index, text in enumerate(its_texts) if index != 7}  # one id is padding
    V = max(target) - 5  # the tokenizer names more ids than the model has
    begin = min(target)  # which is spelled otherwise in the own vocabulary
    words = translate(own, target, {text: token for token, text in target.items()}, V, {1: 2})
    assert words.reads[0] == () and words.reads[1] == (2,) and words.drafts[1] == 2
    common = {token: own[text] for token, text in target.items() if text in own and token < V}
    assert words.drafts == dict(sorted(({1: 2} | common).items())) and begin < V
    embeddings_OH = torch.randn(len(own), 6, dtype=torch.float64)
    read_VH = words.embeddings(embeddings_OH)
    for token in range(2, V):
        if (text := target.get(token)) is None:
            assert not read_VH[token].any()
            continue
        pieces = words.reads[token]
        assert b"".join(own_texts[piece] for piece in pieces) == text and (text not in own or pieces == (own[text],))
        assert torch.allclose(read_VH[token], embeddings_OH[list(pieces)].mean(0), atol=1e-6)
    cpu = torch.device("cpu")
    ids_n = torch.arange(len(words.drafts)) + words.offsets(cpu)
    assert dict(zip(ids_n.tolist(), words.own_ids(cpu).tolist(), strict=True)) == words.drafts
