"""A tokenizer made of a GGUF file's keys gives the model's own ids, and an unknown way to cut texts is an error."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from toolkit.checkpoints.gguf_files import SIZES, write_gguf
from toolkit.checkpoints.odd_texts import odd_texts
from toolkit.checkpoints.pair_ids import CUTS, pair_ids
from toolkit.models import save_target
from toolkit.paths import ROOT

from specdec import SamplingParams, SpecDecoder
from specdec.models.gguf.file import open_gguf
from specdec.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from specdec.models.gguf.tokenizer import tokenizer_of
from specdec.models.gguf.vocabulary import Vocabulary
from specdec.models.registry import choose_target
from specdec.prompts import Tokenizer as Prompts

TEXT = (ROOT / "README.md").read_text()
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
UNMERGED = "zqx"  # a token that no merges lead to, as Llama 3's vocabulary has some
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def pairs_of_bytes(pre: str) -> dict[str, Any]:
    """The keys of a small vocabulary that was trained on this project's README."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [text.replace(UNMERGED, "") for text in (TEXT, *odd_texts(50, 9))]
    core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet))
    ids, merges = core.get_vocab(), json.loads(core.to_str())["model"]["merges"]
    words = [*sorted(ids, key=ids.__getitem__), UNMERGED]
    tokens = [*words, *SPECIALS, "<think>"]
    types = [1] * len(words) + [3] * len(SPECIALS) + [4]
    return {
        "model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": [" ".join(merge) for merge in merges],
        "bos_token_id": len(words), "eos_token_id": len(words) + 2,
    }  # fmt: skip


def vocabulary(tmp_path: Path, keys: dict[str, Any]) -> Vocabulary:
    folder = save_target(tmp_path / "folder", "llama", **SIZES, vocab_size=len(keys["tokens"]))
    path = write_gguf(folder, tmp_path / "m.gguf", vocabulary=keys)
    found = Vocabulary.of(open_gguf(path), len(keys["tokens"]))
    assert found is not None
    return found


@pytest.mark.parametrize("pre", CUTS)
def test_ids_are_those_of_the_names_own_rules(tmp_path, pre):
    """Keeps out: digits, cases, blanks or marks cut as another model cuts them; a whole word merged in place of looked up."""
    found = vocabulary(tmp_path, pairs_of_bytes(pre))
    made = tokenizer_of(found)
    ids = {token: number for number, token in enumerate(found.tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(found.merges)}
    for text in odd_texts(200):
        assert made.encode(text, add_special_tokens=False) == pair_ids(pre, text, ids, ranks), text


def test_every_name_has_a_rule_that_is_tested():
    """Keeps out: a name that is accepted and cuts as nobody checked."""
    tested = {PRE_TOKENIZERS[name] for name in CUTS}
    assert set(PRE_TOKENIZERS.values()) == tested


def sentence_pieces() -> tuple[sentencepiece.SentencePieceProcessor, dict[str, Any]]:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXT.splitlines(), *odd_texts(50, 9)]), model_writer=out, model_type="bpe", vocab_size=900,
        byte_fallback=True, remove_extra_whitespaces=False, normalization_rule_name="identity",
        user_defined_symbols=["<think>"], allow_whitespace_only_pieces=True, split_digits=True, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    ids = range(model.get_piece_size())
    kinds = [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in ids]
    kinds[model.piece_to_id("<think>")] = 4
    return model, {
        "model": "llama", "tokens": [model.id_to_piece(i) for i in ids], "scores": [float(model.get_score(i)) for i in ids],
        "token_type": kinds, "bos_token_id": model.bos_id(), "eos_token_id": model.eos_id(),
        "unknown_token_id": model.unk_id(),
    }  # fmt: skip


def test_ids_are_those_of_sentencepiece(tmp_path):
    """Keeps out: pieces merged in another order than their scores say, bytes of unknown characters, the first blank."""
    model, keys = sentence_pieces()
    made = tokenizer_of(vocabulary(tmp_path, keys))
    for text in odd_texts(200):
        got = made.encode(text, add_special_tokens=False)
        assert got == model.encode(text), text
        assert made.decode(got) == model.decode(got)
    assert made.encode("a <think> b")[0] == model.bos_id(), "a text begins with <s> where no key says otherwise"
    assert model.piece_to_id("<think>") in made.encode("a<think>b")


@pytest.mark.parametrize("begins", [True, False, None])
def test_what_a_text_begins_and_ends_with(tmp_path, begins):
    """Keeps out: a token that begins texts where the file says that there is none, or none where the family has one."""
    keys = pairs_of_bytes("llama-bpe") | {"add_eos_token": True} | ({} if begins is None else {"add_bos_token": begins})
    found = vocabulary(tmp_path, keys)
    ids = tokenizer_of(found).encode("The cat")
    assert (ids[0] == found.named["bos"]) == (begins is not False) and ids[-1] == found.named["eos"]


def test_special_tokens_and_chats(tmp_path):
    """Keeps out: special tokens cut into letters or shown in texts, and a chat that writes on after its turn."""
    keys = pairs_of_bytes("smollm") | {"tokenizer.chat_template": TEMPLATE}
    count = len(keys["tokens"])
    folder = save_target(tmp_path / "folder", "llama", **SIZES, vocab_size=count)
    path = write_gguf(folder, tmp_path / "m.gguf", vocabulary=keys)
    with SpecDecoder.from_pretrained(path, "ngram", device="cpu", max_seq_len=128) as decoder:
        tokenizer = decoder.tokenizer
        ids = tokenizer.encode_chat([{"role": "user", "content": "Hello 12"}], "prompt")
        assert ids.count(count - 3) == 2 and ids.count(count - 2) == 1
        assert tokenizer.decode(ids) == "user\nHello 12\nassistant\n"
        assert tokenizer.piece(count - 1) == "<think>" and tokenizer.decode([count - 1]) == "<think>"
        assert tokenizer.turn_end() == count - 2 and decoder.eos_ids == {count - 2}
        chat = [{"role": "user", "content": "Hello"}]
        (answer,) = decoder.generate([chat], SamplingParams(max_tokens=60, logit_bias={count - 2: 100.0}))
        assert (answer.finish_reason, answer.token_ids, answer.text) == ("eos", [count - 2], "")


def test_a_file_without_a_tokenizer_takes_ids(tmp_path):
    """Keeps out: a vocabulary that is asked for where none is needed."""
    path = write_gguf(save_target(tmp_path / "folder", "llama", **SIZES), tmp_path / "m.gguf")
    assert not Prompts(path).is_present


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pre": "deepseek-v9"}, r"tokenizer\.ggml\.pre must be one of gpt-2, smollm, .*got 'deepseek-v9'"),
        ({"pre": "default"}, "any other cut gives other ids"),
        ({"model": "bert"}, r"tokenizer\.ggml\.model must be one of gpt2, llama, got 'bert'"),
        ({"add_magic": True}, r"unknown keys tokenizer\.ggml\.add_magic"),
        ({"tokenizer.rwkv.world": "x"}, r"unknown keys tokenizer\.rwkv\.world"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces must be False or left out"),
        ({"token_type": [1, 2]}, r"token_type must have \d+ values"),
        ({"tokens": ["a", "a"]}, "tokens must be distinct"),
        ({"merges": [1, 2]}, "merges must be a list of str"),
        ({"eos_token_id": 99999}, "eos_token_id must be a token id in"),
        ({"add_bos_token": 1}, "add_bos_token must be true or false"),
    ],
)
def test_keys_that_are_wrong_are_named_before_weights_are_read(tmp_path, changes, problem):
    """Keeps out: a file whose texts would get other ids than the model's, accepted in silence."""
    keys = pairs_of_bytes("smollm")
    folder = save_target(tmp_path / "folder", "llama", **SIZES, vocab_size=len(keys["tokens"]))
    path = write_gguf(folder, tmp_path / "m.gguf", vocabulary=keys | changes)
    with pytest.raises(ValueError, match=problem):
        choose_target(path)
