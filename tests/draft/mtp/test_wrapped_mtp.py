"""MTP layers of a text model that lies in a wrapper: the same drafts as of the text model alone.

Keeps out: layers that are looked for below the text model's own names, keys that are read at the wrapper's top, and layers that
count as quantised although the file stores them as they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.mtp_layers.targets import save_mtp_target
from toolkit.oracles.quantised import SCHEMES, as_quantised

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.draft.mtp.load import OpenMtp
from specdec.models.registry import choose_target


def wrap(text: Path, folder: Path, **more: Any) -> Path:
    """The text model's folder as Kimi-K2.5's is: names below `language_model.`, its config inside, a vision tower."""
    raw = json.loads((text / "config.json").read_text())
    folder.mkdir()
    outer = dict(
        model_type="kimi_k25", text_config=raw | {"model_type": "kimi_k2"}, vision_config={}, tie_word_embeddings=False
    )
    (folder / "config.json").write_text(json.dumps(outer | more))
    tensors = {f"language_model.{name}": x for name, x in load_file(text / "model.safetensors").items()}
    save_file(tensors | {"vision_tower.patch.weight": torch.zeros(4)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def drafted(folder: Path) -> tuple[list[int], int, int]:
    with SpecDecoder.from_pretrained(
        folder, "mtp", SpecConfig(3, 2, 7), device="cpu", dtype="float32", max_seq_len=64, smoke=False
    ) as decoder:
        (out,) = decoder.generate([[1, 2, 3, 4, 5, 6, 7]], SamplingParams(max_tokens=16))
        return out.token_ids, out.stats.rounds, out.stats.accepted


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["v3", "v3-two"])
def test_a_wrapper_s_layers_draft_as_the_text_model_s(tmp_path: Path, name: str) -> None:
    text = save_mtp_target(tmp_path / "text", name)
    assert drafted(wrap(text, tmp_path / "wrapped")) == drafted(text)


def test_layers_that_stay_as_they_are_in_a_quantised_wrapper(tmp_path: Path) -> None:
    text = save_mtp_target(tmp_path / "text", "v3")
    layers = json.loads((text / "config.json").read_text())["num_hidden_layers"]
    wrapped, scheme = wrap(text, tmp_path / "wrapped"), SCHEMES["deepseek fp8"]
    folder = as_quantised(wrapped, tmp_path / "few", scheme, rf"layers\.{layers}\.|lm_head|vision|embed")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["modules_to_not_convert"] = ["language_model.lm_head", "vision_tower"]
    (folder / "config.json").write_text(json.dumps(raw))
    chosen = choose_target(folder)
    opened = OpenMtp(folder, chosen.config)
    assert chosen.config.quantization is not None
    assert opened.checkpoint.format_of("model.layers.1.self_attn.o_proj") is not None
    assert opened.checkpoint.format_of(f"model.layers.{layers}.self_attn.o_proj") is None
