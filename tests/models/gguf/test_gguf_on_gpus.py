"""Targets in GGUF files on a GPU: blocks that stay quantised write the texts of dequantised ones, in all graph modes."""

from pathlib import Path

import pytest
from toolkit.checkpoints.gguf_files import GPT_OSS_ROPE, SIZES, write_gguf
from toolkit.checkpoints.gpt_oss import save_gpt_oss
from toolkit.checkpoints.real import smollm2
from toolkit.models import ragged_prompts, save_eagle3, save_target

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.config import GraphMode

pytestmark = pytest.mark.gpu

TREE, CHAIN = SpecConfig(5, 4, 16), SpecConfig(5, 1, 6)
CELLS: tuple[tuple[GraphMode, SpecConfig], ...] = (("round", TREE), ("step", CHAIN))
LARGE = dict(num_hidden_layers=3, hidden_size=1024, intermediate_size=2048, head_dim=64)  # for kernels of few rows
PROMPTS = ragged_prompts(40, 5, seed=11)
PARAMS = SamplingParams(max_tokens=24)
TYPES = {
    "Q8_0": "Q8_0", "Q4_0": "Q4_0", "MXFP4": "MXFP4", "unlike": "Q4_1",  # the type of values, beside Q8_0 of all else
}  # fmt: skip


def expect_one_text(path: Path, head: Path | str, kept: str) -> None:
    """In float32 a GPU's texts of quantised weights are those of dense weights on a CPU; in bfloat16 up to near-ties."""
    settings = {"max_seq_len": 128, "max_batch_size": 4, "smoke": False}
    quantised = {**settings, "quantize": "blocks"}
    with SpecDecoder.from_pretrained(path, head, TREE, device="cpu", dtype="float32", **settings) as decoder:
        wanted = [out.token_ids for out in decoder.generate(PROMPTS, PARAMS, speculate=False)]
    for mode, spec in CELLS:
        with SpecDecoder.from_pretrained(path, head, spec, dtype="float32", cuda_graphs=mode, **quantised) as decoder:
            assert kept in str(decoder.model.config.quantization)
            for speculate in (True, True, False):  # the second time everything is replayed
                outputs = decoder.generate(PROMPTS, PARAMS, speculate=speculate)
                assert [out.token_ids for out in outputs] == wanted, (mode, spec)
        with SpecDecoder.from_pretrained(path, head, spec, cuda_graphs=mode, dtype="bfloat16", **quantised) as decoder:
            found = decoder.verify(PROMPTS, PARAMS)
            assert found.passed, (mode, spec, found.prompts)


@pytest.mark.parametrize("size", [SIZES, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("name", TYPES)
def test_a_file_writes_one_text_everywhere(tmp_path, name, size):
    """Keeps out: blocks whose scales in float16, or whose groups of 32 columns, a kernel reads as something else."""
    folder = save_target(tmp_path / "folder", "llama", **size)
    odd = TYPES[name] if name == "unlike" else "Q8_0"
    whole = "Q8_0" if name == "unlike" else TYPES[name]
    types = lambda each: "F32" if "embed" in each else odd if name == "unlike" and "v_proj" in each else whole  # noqa: E731
    path = write_gguf(folder, tmp_path / "m.gguf", types)
    with SpecDecoder.from_pretrained(path, dtype="bfloat16", max_seq_len=64, quantize="blocks") as decoder:
        projections = [layer.self_attn.qkv_proj for layer in decoder.model.layers]
        assert all((each.quantised is None) == (name == "unlike") for each in projections)
        assert all(layer.mlp.down_proj.quantised is not None for layer in decoder.model.layers)
    expect_one_text(path, save_eagle3(tmp_path / "head", folder), whole)


def test_gpt_oss_writes_one_text_everywhere(tmp_path):
    """Keeps out: experts of a GGUF file that the kernel of experts reads in another order than the checkpoint's."""
    quantised, plain = save_gpt_oss(tmp_path, rope_parameters=GPT_OSS_ROPE)
    expect_one_text(write_gguf(quantised, tmp_path / "m.gguf", lambda name: "Q8_0"), "ngram", "experts in mxfp4")


def test_a_real_model_is_verified():
    """Keeps out: a real model whose texts in bfloat16, with trees, are not its own."""
    with SpecDecoder.from_pretrained(smollm2(), "ngram", TREE, max_seq_len=512) as decoder:
        asks = ["Are dogs real?", "Name three planets.", "Copy this: a b c d e f g h i j k"]
        found = decoder.verify([[{"role": "user", "content": ask}] for ask in asks], SamplingParams(max_tokens=64))
    assert found.passed, found.prompts
