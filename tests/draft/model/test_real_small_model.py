"""SmolLM2-135M, as a package ships it, drafts for a larger llama of its vocabulary, made of it with layers that add nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from toolkit.checkpoints.real import smollm2

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.gguf.config import config_of
from specdec.models.gguf.file import open_gguf
from specdec.models.gguf.tokenizer import gguf_tokenizer


def save_larger(folder: Path, more: int = 2) -> Path:
    """The model with `more` layers that leave the residual stream as it is."""
    folder.mkdir()
    file, config = Checkpoint(smollm2()), config_of(open_gguf(smollm2()))
    tensors = {name: file.take(name).float().contiguous() for name in file.names() if name != "lm_head.weight"}
    first, layers = "model.layers.0.", config["num_hidden_layers"]
    for name in [name for name in tensors if name.startswith(first)]:
        ends = name.endswith(("o_proj.weight", "down_proj.weight"))
        for index in range(layers, layers + more):
            copy = torch.zeros_like(tensors[name]) if ends else tensors[name].clone()
            tensors[f"model.layers.{index}.{name.removeprefix(first)}"] = copy
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers + more}))
    gguf_tokenizer(smollm2()).save_pretrained(folder)
    return folder


@pytest.mark.slow_cases(keep=0)
def test_it_drafts_what_the_larger_model_writes(tmp_path: Path) -> None:
    """Keeps out: a tokenizer of a GGUF file that is told from a folder's, weights in 4 bits that a drafter reads otherwise."""
    options = dict(device="cpu", dtype="float32", max_seq_len=128, max_batch_size=2)
    with SpecDecoder.from_pretrained(save_larger(tmp_path / "larger"), smollm2(), SpecConfig(3, 1, 4), **options) as decoder:
        assert "a small model of the target's vocabulary: llama, 30 layers" in decoder.head.description  # type: ignore[union-attr]
        assert decoder.settings.first_accepted is not None and decoder.settings.first_accepted > 0.99
        (out,) = decoder.generate(["The sun rises in the"], SamplingParams(max_tokens=13, ignore_eos=True))
        assert out.stats.accepted_per_round == [3, 3, 3]
        (plain,) = decoder.generate(["The sun rises in the"], SamplingParams(max_tokens=13, ignore_eos=True), speculate=False)
        assert out.token_ids == plain.token_ids
