"""A real model that nobody here made: its tensors, ids, texts and chats.  See toolkit/checkpoints/real.py."""

from collections.abc import Iterator

import gguf
import pytest
import torch
from gguf.quants import dequantize
from toolkit.checkpoints.odd_texts import odd_texts
from toolkit.checkpoints.pair_ids import pair_ids
from toolkit.checkpoints.real import smollm2
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.gguf.file import open_gguf
from specdec.models.gguf.tensors import names_of
from specdec.prompts.tokenizer import Tokenizer

PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "1 2 3 4 5", "List three fruits:\n1."]
HEADS = {"attn_q": 9, "attn_k": 3}


def transformers_order(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """As transformers' loader of GGUF files un-permutes a Llama's queries and keys."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1).swapaxes(2, 1).reshape(rows.shape)


@pytest.fixture(scope="module")
def numbers() -> dict[str, torch.Tensor]:
    """All tensors by `gguf`'s own dequantisation, by Hugging Face's names."""
    file, found = open_gguf(smollm2()), {}
    for name, other in names_of(file).items():
        tensor = file.tensors[name]
        own = torch.from_numpy(dequantize(file.read(name), gguf.GGMLQuantizationType[tensor.type])).view(tensor.shape)
        heads = HEADS.get(name.split(".")[2]) if name.startswith("blk.") else None
        found[other] = own if heads is None else transformers_order(own, heads)
    return found


@pytest.fixture(scope="module")
def decoder() -> Iterator[SpecDecoder]:
    spec = SpecConfig(3, 1, 4)
    with SpecDecoder.from_pretrained(smollm2(), "ngram", spec, device="cpu", max_seq_len=256, max_batch_size=4) as made:
        yield made


def test_every_tensor_is_that_of_gguf(numbers):
    """Keeps out: a block, a name or an order of rows that is right in small files alone."""
    checkpoint = Checkpoint(smollm2())
    assert set(checkpoint.names()) == set(numbers) and len(numbers) == 272
    for name, wanted in numbers.items():
        assert torch.equal(checkpoint.take(name).float(), wanted), name


def test_ids_are_those_of_smollms_own_rules():
    """Keeps out: digits that are not cut one by one, as transformers' reading of the same file does not cut them."""
    path = smollm2()
    keys, tokenizer = open_gguf(path).keys, Tokenizer(path)
    ids = {token: number for number, token in enumerate(keys["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(keys["tokenizer.ggml.merges"])}
    for text in odd_texts(200):
        assert tokenizer.encode(text) == pair_ids("smollm", text, ids, ranks), text
    assert len(tokenizer.encode("2024")) == 4


@pytest.mark.slow_cases(keep=0)
def test_texts_are_those_of_transformers(numbers, decoder):
    """Keeps out: a real model that writes other texts than its own, with speculation or without."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(numbers | {"lm_head.weight": numbers["model.embed_tokens.weight"]}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # whose table is no tensor of the file
    answers = {flag: decoder.generate(PROMPTS, SamplingParams(max_tokens=16), speculate=flag) for flag in (True, False)}
    for plain, speculative in zip(answers[False], answers[True], strict=True):
        ids = torch.tensor([plain.prompt_token_ids])
        theirs = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=2, pad_token_id=2)
        assert plain.token_ids == speculative.token_ids == theirs[0, ids.shape[1] :].tolist(), plain.text


def test_a_chat_ends_with_its_turn(decoder):
    """Keeps out: a chat that writes the next turn itself: "<|im_end|> user ..."."""
    chat = [{"role": "user", "content": "Say hello in one word."}]
    (answer,) = decoder.generate([chat], SamplingParams(max_tokens=100))
    assert answer.finish_reason == "eos" and answer.token_ids[-1] == decoder.tokenizer.turn_end() == 2
    assert "user" not in answer.text and "<|" not in answer.text
