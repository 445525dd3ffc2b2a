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
from specdec.models.gguf.vocabulary import GgufVocabulary
from specdec.models.registry import choose_target
from specdec.prompts.tokenizer import Tokenizer as Prompts

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


def vocabulary(tmp_path: Path, keys: dict[str, Any]) -> GgufVocabulary:
    folder = save_target(tmp_path / "folder", "llama", **SIZES, vocab_size=len(keys["tokens"]))
    path = write_gguf(folder, tmp_path / "m.gguf", vocabulary=keys)
    found = GgufVocabulary.of(open_gguf(path), len(keys["tokens"]))
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
    assert made.encode("a b")[0] == model.bos_id(), "a text begins with <s> where no key says otherwise"


def test_blanks_around_special_tokens(tmp_path):
    """Keeps out: another blank after a special token than llama.cpp and the tokenizer.json of Llama 2 put there."""
    model, keys = sentence_pieces()
    made, think = tokenizer_of(vocabulary(tmp_path, keys)), model.piece_to_id("<think>")
    for before, after in (("a", "b"), ("a ", " b"), ("", "b c")):
        wanted = [*(model.encode(before) if before else []), think, *model.encode(after)]
        assert made.encode(f"{before}<think>{after}", add_special_tokens=False) == wanted


@pytest.mark.parametrize("change", ["no unknown type", "no blank", "an unused piece"])
def test_less_common_vocabularies_of_sentencepiece(tmp_path, change):
    """Keeps out: <unk> that a converter wrote as a control token, a first blank where the file says none, and a merge that
    makes a piece which no text may have.
    """
    model, keys = sentence_pieces()
    if change == "no unknown type":
        keys["token_type"][model.unk_id()] = 3
    if change == "no blank":
        keys["add_space_prefix"] = False
    whole = model.encode("the", out_type=str)[-1]
    if change == "an unused piece":
        assert whole == "▁the"
        keys["token_type"][model.piece_to_id(whole)] = 5
    made = tokenizer_of(vocabulary(tmp_path, keys))
    ids = made.encode("the cat", add_special_tokens=False)
    if change == "no unknown type":
        assert ids == model.encode("the cat")
    if change == "no blank":
        assert made.convert_ids_to_tokens(ids)[0][0] == "t" and made.decode(ids) == "the cat"
    if change == "an unused piece":
        assert whole not in made.convert_ids_to_tokens(ids) and made.decode(ids) == "the cat"


def test_all_ends_that_a_file_names_end_a_text(tmp_path):
    """Keeps out: Llama 3's <|eot_id|>, which is the end of a turn beside that of a text, left out."""
    keys = pairs_of_bytes("llama-bpe")
    end = keys["eos_token_id"]
    folder = save_target(tmp_path / "folder", "llama", **SIZES, vocab_size=len(keys["tokens"]))
    more = {"eot_token_id": end - 1, "eom_token_id": end, "eos_token_ids": [end, 7]}
    assert choose_target(write_gguf(folder, tmp_path / "m.gguf", vocabulary=keys | more)).config.eos_ids == (end, end - 1, 7)


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken", "qwen2"])
@pytest.mark.parametrize("begins", [True, False, None])
def test_what_a_text_begins_and_ends_with(tmp_path, begins, pre):
    """Keeps out: a token that begins texts where the file says that there is none, or none where the family has one."""
    keys = pairs_of_bytes(pre) | {"add_eos_token": True} | ({} if begins is None else {"add_bos_token": begins})
    found = vocabulary(tmp_path, keys)
    ids = tokenizer_of(found).encode("The cat")
    wanted = pre != "qwen2" if begins is None else begins
    assert (ids[0] == found.named["bos"]) == wanted and ids[-1] == found.named["eos"]


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
        ({"merges": ["zz zz"]}, "merges must hold two tokens each, joined by a blank, that make a third, got 'zz zz'"),
        ({"merges": ["ab"]}, "merges must hold two tokens each"),
        ({"eos_token_id": 99999}, "eos_token_id must be a token id in"),
        ({"eot_token_id": 99999}, "eot_token_id must be a token id in"),
        ({"eos_token_ids": [99999]}, "eos_token_ids must be a token id in"),
        ({"tokenizer.chat_template": 7}, "chat_template must be a text, got 7"),
        ({"model": "llama", "scores": [0.0] * 705}, "scores must say which pieces are merged first"),
        ({"add_bos_token": 1}, "add_bos_token must be true or false"),
        ({"token_type": [99] * 705}, "token_type must hold numbers from 1 to 6, got 99"),
        ({"model": "llama", "scores": [float("nan")] * 705}, "scores must be finite numbers"),
    ],
)
def test_keys_that_are_wrong_are_named_before_weights_are_read(tmp_path, changes, problem):
    """Keeps out: a file whose texts would get other ids than the model's, accepted in silence."""
    keys = pairs_of_bytes("smollm")
    folder = save_target(tmp_path / "folder", "llama", **SIZES, vocab_size=len(keys["tokens"]))
    path = write_gguf(folder, tmp_path / "m.gguf", vocabulary=keys | changes)
    with pytest.raises(ValueError, match=problem):
        choose_target(path)
