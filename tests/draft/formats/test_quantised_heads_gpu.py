"""Heads in 8 and 4 bits on a GPU, as wide as small published ones: kernels over quantised values, and captured rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toolkit.checkpoints.load import load_target, read_target_config
from toolkit.driver import Driver
from toolkit.heads.quantised import draft_scores, fast, head_files, in_few_bits
from toolkit.heads.writers import save
from toolkit.models import Zoo, ragged_prompts

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.draft.load import load_head
from specdec.models.linear import Linear

pytestmark = pytest.mark.gpu

SIZES = dict(hidden_size=1024, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=2, head_dim=128)
OF_HEAD = dict(hidden=1024, target_hidden=1024, mlp=2048, heads=8, kv_heads=2, head_dim=128)
SPECS = {
    "eagle3": SpecConfig(5, 4, 16),
    "p-eagle": SpecConfig(5, 1, 6),
    "dflash2": SpecConfig(5, 4, 16),
    "dspark": SpecConfig(5, 1, 6),
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("real-widths"), **SIZES)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("scheme", ["fp8 channel", "w4a16 g128", "nvfp4"])
@torch.inference_mode()
def test_scores_and_captured_rounds(tmp_path: Path, zoo: Zoo, kind: str, scheme: str) -> None:
    """Keeps out: a kernel that reads a head's shapes wrongly, and a captured round that reads quantised values elsewhere."""
    files, left = head_files(kind, zoo, **OF_HEAD)
    few, dense = (save(tmp_path / name, each) for name, each in zip(("few", "dense"), in_few_bits(files, fast(scheme), left)))
    folder = zoo.target("llama")
    config, gpu = read_target_config(folder), torch.device("cuda")
    wide = load_target(folder, config, 64, torch.device("cpu"), torch.float64)
    walks = kind != "dflash2"  # whose candidates may change places within rounding
    wanted = draft_scores(load_head(dense, wide, 64, torch.device("cpu"), torch.float64), walks)
    target = load_target(folder, config, 64, gpu, torch.bfloat16)
    heads = [load_head(each, target, 64, gpu, torch.bfloat16) for each in (few, dense)]
    assert sum(isinstance(module, Linear) and bool(module.quantised) for module in heads[0].modules()) >= 4
    errors = [float((draft_scores(head, walks).double() - wanted).norm() / wanted.norm()) for head in heads]
    print(f"{kind} {scheme}: relative error {errors[0]:.4f}, of a head in bfloat16 {errors[1]:.4f}")
    assert errors[0] < 1.5 * errors[1] + 0.002
    del heads, target
    options = dict(device="cuda", dtype="bfloat16", max_seq_len=128, max_batch_size=4, smoke=False, cuda_graphs="round")
    prompts = ragged_prompts(40, 4, seed=11)
    with SpecDecoder.from_pretrained(folder, few, SPECS[kind], **options) as decoder:  # type: ignore[arg-type]
        found = decoder.verify(prompts, SamplingParams(max_tokens=16))
        assert found.passed and Driver(decoder).num_graphs("round") > 0, found.prompts
