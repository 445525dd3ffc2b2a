"""Every key and tensor of a GGUF file is read, known to change nothing, or refused by name; and so is what no file can do."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from toolkit.checkpoints.gguf_files import SIZES, finish, put, write_gguf
from toolkit.checkpoints.plans import plan_memory
from toolkit.models import LLAMA3_ROPE, save_target

from specdec import SpecConfig, SpecDecoder
from specdec.cli import main
from specdec.loading.pair import weights_bytes
from specdec.models.registry import check_chosen, choose_target
from specdec.options import EngineOptions
from specdec.prompts.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_target(tmp_path / "folder", "llama", **SIZES)


def rewritten(path: Path, out: Path, keys: dict[str, Any] = {}, **tensors: np.ndarray | None) -> Path:  # noqa: B006
    """The file with other keys, and with tensors added (__ for a dot) or, with None, left out."""
    reader = gguf.GGUFReader(path)
    values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")} | keys
    writer = gguf.GGUFWriter(out, values.pop("general.architecture"))
    for name, value in values.items():
        put(writer, name, value)
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    for each in reader.tensors:
        if each.name not in named:
            writer.add_tensor(each.name, np.array(each.data), raw_dtype=each.tensor_type)
    for name, tensor in named.items():
        if tensor is not None:
            writer.add_tensor(name, tensor)
    return finish(writer, out)


def check(path: Path) -> None:
    check_chosen(choose_target(path), path)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"general.architecture": "gemma3"}, "general.architecture must be one of llama, qwen2, qwen3, gpt-oss .*'gemma3'"),
        ({"general.type": "mmproj"}, "general.type must be 'model', got 'mmproj'"),
        ({"split.count": 3}, "split.count must be 1, got 3"),
        ({"llama.mystery": 3}, "unknown keys llama.mystery; they may change what the model computes"),
        ({"adapter.type": "lora"}, "unknown keys adapter.type"),
        ({"llama.expert_count": 8}, "llama.expert_count must be 0 or left out, got 8"),
        ({"llama.attention.sliding_window": 4096}, "unknown keys llama.attention.sliding_window"),
        ({"llama.attention.causal": False}, "llama.attention.causal must be True"),
        ({"llama.attention.value_length": 8}, "value_length must be the width of a head, 16, got 8"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count must be the width of a head, 16, got 8"),
        ({"llama.rope.scaling.type": "yarn"}, "rope type must be default, linear or llama3, got 'yarn'"),
        ({"llama.rope.scaling.type": "linear"}, "rope type .linear. needs factor"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "attn_factor must be 1 or left out, got 2.0"),
        ({"llama.rope.scaling.factor": 8.0, "llama.rope.scale_linear": 2.0}, "scale_linear must be equal, got 8.0 and 2.0"),
        ({"llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor must be 1 or left out"),
        ({"llama.attention.head_count": [4, 4, 4, 4]}, "num_attention_heads must be a whole number"),
        ({"llama.attention.head_count": 3}, "no whole pairs of 3 heads|must be a multiple"),
        ({"llama.block_count": float("nan")}, "num_hidden_layers must be a whole number of at least 1, got nan"),
        ({"llama.embedding_length": "x"}, "hidden_size must be a whole number"),
        ({"llama.block_count": 9}, r"m\.gguf: num_hidden_layers is 9, but the checkpoint holds 4 layers"),
        ({"llama.feed_forward_length": 64}, "must have shape"),
        ({"general.alignment": 12}, "general.alignment must be a multiple of 8"),
    ],
)
def test_keys_that_change_the_model_are_refused(tmp_path, folder, keys, problem):
    """Keeps out: a key that nobody has read about, or a value that is not computed, passed over in silence."""
    path = rewritten(write_gguf(folder, tmp_path / "plain.gguf"), tmp_path / "m.gguf", keys)
    with pytest.raises(ValueError, match=problem) as error:
        check(path)
    assert str(path) in str(error.value)


def test_a_sound_file_says_nothing_more_by_other_keys(tmp_path, folder):
    """Keeps out: a description, a licence or a way of making a file taken for something that changes the model."""
    keys = {
        "general.name": "x", "general.license": "mit", "general.base_model.0.name": "y", "general.tags": ["a", "b"],
        "general.quantization_version": 2, "general.file_type": 7, "quantize.imatrix.file": "i", "split.count": 0,
        "llama.expert_count": 0, "llama.tensor_data_layout": "Meta AI original pth", "llama.rope.scaling.type": "none",
        "llama.rope.scaling.finetuned": False, "general.type": "model", "mradermacher.quantize_version": "2",
    }  # fmt: skip
    check(rewritten(write_gguf(folder, tmp_path / "plain.gguf"), tmp_path / "m.gguf", keys))


@pytest.mark.parametrize(
    "key", ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.layer_norm_rms_epsilon"]
)
def test_a_key_that_is_missing_is_named(tmp_path, folder, key):
    """Keeps out: a size that is guessed, or a KeyError."""
    path = write_gguf(folder, tmp_path / "m.gguf", **{key: None})
    with pytest.raises(ValueError, match=rf"m\.gguf lacks llama\.{key}"):
        choose_target(path)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (
            {"blk__0__attn_q_norm__weight": np.ones(16, np.float32)},
            "1 tensors are not part of a llama model: blk.0.attn_q_norm",
        ),
        ({"mystery__weight": np.ones(16, np.float32)}, "not part of a llama model: mystery.weight"),
        ({"output__bias": np.ones(40, np.float32)}, "not part of a llama model: output.bias"),
        ({"blk__1__ffn_up__weight": None}, "tensor 'model.layers.1.mlp.up_proj.weight' is missing"),
        ({"token_embd__weight": None}, "tensor 'token_embd.weight' must be a matrix, a row for each token, got none"),
        ({"rope_freqs__weight": np.linspace(1, 8, 8, dtype=np.float32)}, "must hold the factors of Llama 3.1's scaling"),
        (
            {"rope_freqs__weight": np.ones(4, np.float32)},
            r"one F32 number for each two values of a head, got F32 of shape \(4,\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, folder, tensors, problem):
    """Keeps out: a tensor left over or missing, and rope factors that are read as no scaling at all."""
    path = rewritten(write_gguf(folder, tmp_path / "plain.gguf"), tmp_path / "m.gguf", **tensors)
    with pytest.raises(ValueError, match=problem):
        check(path)


def test_numbers_that_are_not_finite_are_refused(tmp_path, folder):
    """Keeps out: a block whose scale is infinite, which would make every text nonsense."""
    for type in ("F32", "Q8_0", "Q4_1"):
        path = write_gguf(folder, tmp_path / f"{type}.gguf", lambda name, type=type: "F32" if "embed" in name else type)
        tensor = next(each for each in gguf.GGUFReader(path).tensors if each.name == "blk.2.ffn_down.weight")
        data = bytearray(path.read_bytes())
        data[tensor.data_offset : tensor.data_offset + 4] = b"\x00\x7c\x00\x7c" if type != "F32" else b"\x00\x00\x80\x7f"
        path.write_bytes(data)
        with pytest.raises(ValueError, match="'model.layers.2.mlp.down_proj.weight' holds NaN or infinity"):
            SpecDecoder.from_pretrained(path, device="cpu", max_seq_len=32)


def test_linear_rope_by_either_key(tmp_path, folder):
    """Keeps out: a scaling of older files that is passed over."""
    ways: list[dict[str, Any]] = [
        dict(rope__scale_linear=2.0), dict(rope__scaling__type="linear", rope__scaling__factor=2.0),
        dict(rope__scaling__factor=2.0), dict(rope__scaling__factor=2.0, rope__scale_linear=2.0),
    ]  # fmt: skip
    for number, keys in enumerate(ways):
        rope = choose_target(write_gguf(folder, tmp_path / f"{number}.gguf", **keys)).config.rope
        assert (rope.kind, rope.factor) == ("linear", 2.0), keys


def test_what_a_key_that_is_left_out_means(tmp_path, folder):
    """Keeps out: another number of key heads, width of a head or rope than llama.cpp takes where a file does not say."""
    many = save_target(tmp_path / "many", "llama", **{**SIZES, "num_key_value_heads": 4})
    left_out = dict.fromkeys(("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base"))
    found = choose_target(write_gguf(many, tmp_path / "m.gguf", **left_out)).config
    assert (found.num_kv_heads, found.head_dim, found.rope.theta) == (4, 16, 10000.0)
    check(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("types", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")]
)
def test_the_dtype_holds_what_the_file_holds(tmp_path, folder, types, dtype):
    """Keeps out: numbers of a file in float16 or float32 that are rounded to bfloat16 on a GPU."""
    assert choose_target(write_gguf(folder, tmp_path / "m.gguf", lambda name: types)).config.dtype == dtype


def test_what_no_gguf_file_can_do(tmp_path, folder, capsys):
    """Keeps out: errors about a config.json or a hub for a file that has neither."""
    path = write_gguf(folder, tmp_path / "m.gguf")
    with pytest.raises(ValueError, match="backend='transformers' reads folders .*nearest setting that works: backend='native'"):
        choose_target(path, "transformers")
    with pytest.raises(ValueError, match=r"target: expected an existing GGUF file, got '/nowhere/m.GGUF'"):
        SpecDecoder.from_pretrained("/nowhere/m.GGUF")
    assert choose_target(folder.rename(tmp_path / "folder.gguf")).config.hidden_size == 64, "a folder, whatever its name"
    with pytest.raises(ValueError, match="tensor 'token_embd.weight' must be a matrix"):
        Tokenizer(rewritten(path, tmp_path / "n.gguf", token_embd__weight=None))
    with pytest.raises(
        ValueError, match="draft: .* is the target itself, and a model does not draft for itself; nearest .* draft='ngram'"
    ):
        SpecDecoder.from_pretrained(path, path, SpecConfig(), device="cpu")
    with pytest.raises(ValueError, match=r"m\.gguf: draft='mtp'|draft='mtp' runs"):
        SpecDecoder.from_pretrained(path, "mtp", device="cpu")
    assert main(["generate", "--target", str(path), "--max-tokens", "4", "hello"]) == 2
    assert "no tokenizer" in capsys.readouterr().err


def test_plans_and_ranks_count_a_file(tmp_path, folder):
    """Keeps out: a plan, or a share of a rank, that counts no bytes of a GGUF file, or blocks as bytes of a matrix."""
    plain, quantised, powers = (
        write_gguf(folder, tmp_path / f"{t}.gguf", lambda name, t=t: t) for t in ("F32", "Q8_0", "MXFP4")
    )
    assert weights_bytes(plain) == plain.stat().st_size

    def planned(path: Path, **settings: str) -> int:
        options = EngineOptions(device="cpu", dtype="float32", max_seq_len=64, **settings)
        return plan_memory(path, None, None, options, 1 << 40).parts["weights of the target"]

    assert planned(plain) == planned(quantised)
    sizes = planned(plain), planned(quantised, quantize="blocks")
    matrices = 4 * (64 * (64 + 2 * 32 + 64) + 3 * 64 * 96) + 40 * 64
    assert sizes[0] - sizes[1] == matrices * 4 - (matrices + matrices // 32 * 2)
    padded = matrices // 2 + 4 * 64 * 16  # rows of 96 columns lie in runs of 64
    assert planned(plain) - planned(powers, quantize="blocks") == matrices * 4 - (padded + matrices // 32 * 4)


def test_llama3_scaling_is_found(tmp_path):
    """Keeps out: a Llama 3.1 that turns positions as a Llama 3 does, because no key of its file says otherwise."""
    rope = {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}
    folder = save_target(tmp_path / "folder", "llama", **SIZES, rope_parameters=rope)
    found = choose_target(write_gguf(folder, tmp_path / "m.gguf")).config.rope
    assert (found.kind, found.factor, found.original_max_position) == ("llama3", 8.0, 8192)
