"""Targets in GGUF files are the models that they were made of: every tensor, every logit, every text.

The oracle of tensors is `gguf`'s own dequantisation, and transformers' reading of the same file; that of texts transformers.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.checkpoints.gguf_files import GPT_OSS_ROPE, SIZES, save_as_stored, write_gguf
from toolkit.checkpoints.gpt_oss import save_gpt_oss
from toolkit.checkpoints.load import read_target_config
from toolkit.models import LLAMA3_ROPE, save_target
from transformers import AutoModelForCausalLM

from specdec import SamplingParams, SpecDecoder
from specdec.models.checkpoints.checkpoint import Checkpoint, resolve_target
from specdec.models.registry import choose_target, load_chosen
from specdec.models.target import Target

FAMILIES = {
    "llama": {},
    "llama-dim80-biases": dict(head_dim=32, num_attention_heads=4, num_key_value_heads=2),
    "llama3-tied-dim8": dict(rope_parameters={**LLAMA3_ROPE, "original_max_position_embeddings": 8192, "factor": 32.0}),
    "llama-linear-8-layers": dict(num_hidden_layers=3),
    "qwen2": dict(use_sliding_window=False, sliding_window=None),
    "qwen3": {},
}
MIXED = ("Q4_1", "Q8_0", "F16", "Q5_0", "BF16", "Q4_0", "Q5_1", "F32")


def mixed(name: str) -> str:
    """Another type for each kind of matrix."""
    return MIXED[sum(map(ord, name.split(".")[-2])) % len(MIXED)]


def save(tmp_path: Path, family: str, **changes: Any) -> Path:
    return save_target(tmp_path / "folder", family, **{**SIZES, **FAMILIES[family], **changes})


def load(place: Path, quantize: str = "none") -> Target:
    chosen = choose_target(place, quantize=quantize)
    return load_chosen(chosen, place, 64, torch.device("cpu"), torch.float32, cuda_graphs=False)


def expect_equal(found: Target, wanted: Target) -> None:
    pairs = zip(found.named_parameters(), wanted.named_parameters(), strict=True)
    for (name, own), (other, expected) in pairs:
        assert name == other and torch.equal(own, expected), name


@pytest.mark.slow_cases(keep=5)
@pytest.mark.parametrize("types", [lambda name: "F32", lambda name: "Q8_0", mixed], ids=["F32", "Q8_0", "mixed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_the_model_that_it_was_made_of(tmp_path, family, types):
    """Keeps out: rows of queries left in llama.cpp's order, swapped gate and up, a bias or a norm of a family left out, a scale
    of a block read beside its place, rope keys that are not read, embeddings tied where the file has an output layer.
    """
    folder = save(tmp_path, family)
    path, plain = write_gguf(folder, tmp_path / "m.gguf", types), save_as_stored(folder, tmp_path / "plain", types)
    found, wanted = choose_target(path).config, read_target_config(plain)
    for key in (
        "head_dim",
        "rope",
        "max_position",
        "rms_norm_eps",
        "tie_embeddings",
        "qkv_bias",
        "o_bias",
        "mlp_bias",
        "qk_norm",
    ):
        assert getattr(found, key) == getattr(wanted, key), key
    expect_equal(load(path), load(plain))


def test_a_file_of_sub_blocks_is_the_model_that_it_was_made_of(tmp_path):
    """Keeps out: Q4_K_M, the mixture of types that most files are in, read with rows or columns of blocks in another order."""
    types = lambda name: {"q": "Q4_K", "k": "Q5_K", "v": "Q6_K", "d": "Q6_K"}.get(name.split(".")[-2][0], "Q4_K")  # noqa: E731
    folder = save(tmp_path, "llama", hidden_size=256, intermediate_size=512, head_dim=64)
    path, plain = write_gguf(folder, tmp_path / "m.gguf", types), save_as_stored(folder, tmp_path / "plain", types)
    expect_equal(load(path), load(plain))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_same_of_a_file(tmp_path, family):
    """Keeps out: names or orders that our reader and our writer of test files get wrong alike."""
    head_dim = {"head_dim": 128} if family == "qwen3" else {}  # transformers reads no other from a Qwen3's file
    path = write_gguf(save(tmp_path, family, **head_dim), tmp_path / "m.gguf", mixed)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).state_dict()
    checkpoint = Checkpoint(path)
    for name in checkpoint.names():
        assert torch.equal(checkpoint.take(name).float(), theirs[name]), name
    assert set(theirs) - set(checkpoint.names()) <= {"lm_head.weight"}


def test_texts_are_those_of_transformers(tmp_path):
    """Keeps out: a decoder that reads a file well and then runs another model, such as one with other rope."""
    folder = save(tmp_path, "llama3-tied-dim8")
    path, plain = write_gguf(folder, tmp_path / "m.gguf", mixed), save_as_stored(folder, tmp_path / "plain", mixed)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    prompt = [3, 1, 4, 1, 5, 9]
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None)[0, 6:].tolist()
    for draft in (None, "ngram"):
        with SpecDecoder.from_pretrained(path, draft, device="cpu", max_seq_len=64) as decoder:
            assert decoder.generate(prompt, SamplingParams(max_tokens=40))[0].token_ids == wanted


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0", "MXFP4"])
def test_blocks_that_stay_give_the_dense_values(tmp_path, type):
    """Keeps out: quantised values in memory that mean something else than the file's, in any of the three types that stay."""
    folder, types = save(tmp_path, "llama"), lambda name: "F32" if "embed" in name else type
    path, plain = write_gguf(folder, tmp_path / "m.gguf", types), load(save_as_stored(folder, tmp_path / "plain", types))
    chosen = choose_target(path, quantize="blocks")
    assert type in str(chosen.config.quantization) and choose_target(path).config.quantization is None
    model = load_chosen(chosen, path, 64, torch.device("cpu"), torch.float32, cuda_graphs=False)
    for layer, expected in zip(model.layers, plain.layers, strict=True):
        for matrix, numbers in (
            (layer.self_attn.qkv_proj, expected.self_attn.qkv_proj), (layer.self_attn.o_proj, expected.self_attn.o_proj),
            (layer.mlp.gate_up_proj, expected.mlp.gate_up_proj), (layer.mlp.down_proj, expected.mlp.down_proj),
        ):  # fmt: skip
            assert matrix.weight is None and torch.equal(matrix(torch.eye(matrix.in_features)).T, numbers.weight)
    assert torch.equal(model.lm_head(torch.eye(64)).T, plain.lm_head.weight)


def test_neighbours_of_unlike_types_become_numbers(tmp_path):
    """Keeps out: a file of mixed types that is refused because queries and values can't be one quantised matrix."""
    types = {"q_proj": "Q8_0", "k_proj": "Q8_0", "v_proj": "Q4_1", "o_proj": "Q8_0", "gate_proj": "Q8_0", "up_proj": "Q4_0"}
    path = write_gguf(save(tmp_path, "llama"), tmp_path / "m.gguf", lambda name: types.get(name.split(".")[-2], "F16"))
    kept = choose_target(path, quantize="blocks").config.quantization
    assert {rule.what.rpartition(".")[2] for rule, _ in kept.formats} == {"o_proj"}
    load(path, quantize="blocks")


@pytest.mark.parametrize("quantize", ["fp8", "int4"])
def test_quantize_rounds_the_numbers_of_a_file(tmp_path, quantize):
    """Keeps out: an option that is refused, or silently nothing, for files whose matrices are in blocks already."""
    types = lambda name: "Q8_0"  # noqa: E731
    folder = save(tmp_path, "llama")
    path, plain = write_gguf(folder, tmp_path / "m.gguf", types), save_as_stored(folder, tmp_path / "plain", types)
    expect_equal(load(path, quantize), load(plain, quantize))


def test_blocks_that_are_not_there_are_refused(tmp_path):
    """Keeps out: an option that saves no memory and says nothing."""
    folder = save(tmp_path, "llama")
    for place in (folder, write_gguf(folder, tmp_path / "m.gguf", lambda name: "Q4_1")):
        with pytest.raises(
            ValueError, match=r"keeps matrices of a GGUF file in Q8_0, Q4_0, MXFP4, but .*(no such file|\(F32, Q4_1\))"
        ):
            choose_target(place, quantize="blocks")


def test_gpt_oss_is_the_checkpoint_that_it_was_made_of(tmp_path):
    """Keeps out: nibbles or rows of experts in ggml's order, biases of gate and up swapped, a window or a sink left out."""
    quantised, _ = save_gpt_oss(tmp_path, rope_parameters=GPT_OSS_ROPE)
    path = write_gguf(quantised, tmp_path / "m.gguf", lambda name: "F32")
    found, wanted = choose_target(path).config, choose_target(quantised).config
    for key in ("rope", "layer_kinds", "experts", "intermediate_size", "qkv_bias", "o_bias", "has_sinks"):
        assert getattr(found, key) == getattr(wanted, key), key
    own, other = load(path), load(quantised)
    expect_equal(own, other)
    for (name, buffer), (_, expected) in zip(own.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name


def test_a_folder_with_one_file_is_that_file(tmp_path):
    """Keeps out: a package's or a download's folder that must be searched by hand; and a guess where there are two."""
    folder = save(tmp_path, "llama")
    (tmp_path / "one").mkdir()
    path = write_gguf(folder, tmp_path / "one" / "m.gguf")
    assert resolve_target(tmp_path / "one", "target") == path
    assert resolve_target(folder, "target") == folder, "weights in Hugging Face layout go first"
    write_gguf(folder, tmp_path / "one" / "n.gguf")
    with pytest.raises(ValueError, match=r"2 GGUF files \(m.gguf, n.gguf\); expected one"):
        resolve_target(tmp_path / "one", "target")
