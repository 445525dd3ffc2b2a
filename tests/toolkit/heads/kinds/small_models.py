"""Small models as drafters, which the zoo has by name once this file is imported; and what such a model drafts along a path.

Shapes: H hidden.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from toolkit.deepseek import save_deepseek
from toolkit.models import MORE_HEADS, MORE_TARGETS, Zoo, save_target
from toolkit.recurrent import mamba_targets, more_targets, targets

assert targets and mamba_targets and more_targets  # which these imports give the zoo


def save_near(folder: Path, target: Path, noise: float, **changes: Any) -> Path:
    """A copy of the target with noise on its weights, so that its drafts are often right.  changes: of its config.json."""
    shutil.copytree(target, folder)
    (file,) = folder.glob("*.safetensors")
    generator = torch.Generator().manual_seed(7)
    tensors = {name: t + noise * t.std() * torch.randn(t.shape, generator=generator) for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    if changes:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | changes))
    return folder


def save_other(folder: Path, target: Path, name: str, **changes: Any) -> Path:
    """A model of that name, with the target's tokenizer if it has one."""
    save_target(folder, name, **changes)
    for file in target.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def save_permuted(folder: Path, target: Path, more: int = 16) -> Path:
    """A copy of the target whose tokens have other ids, among some that it has for itself."""
    shutil.copytree(target, folder)
    tensors, raw = load_file(folder / "model.safetensors"), json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    V = config["vocab_size"] + more
    new_V = torch.randperm(V, generator=torch.Generator().manual_seed(3))[: V - more]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.randn(V, tensors[name].shape[1], generator=torch.Generator().manual_seed(4))
        tensors[name] = rows.index_copy(0, new_V, tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": V}))
    raw["model"]["vocab"] = {token: int(new_V[index]) for token, index in raw["model"]["vocab"].items()}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    return folder


def save_latents(folder: Path, target: Path, name: str) -> Path:
    """A DeepSeek of that name, which keeps latents."""
    return save_deepseek(folder, name)


SMALL = {
    "model-copy": partial(save_near, noise=0.0),
    "model-near": partial(save_near, noise=0.15),
    "model-llama": partial(save_other, name="llama", num_hidden_layers=2, hidden_size=16),
    "model-window": partial(save_other, name="mistral", num_hidden_layers=2),  # every layer has a window
    "model-mixed": partial(save_other, name="qwen2"),  # some have
    "model-narrow": partial(save_other, name="narrow", num_hidden_layers=2),  # a window below the depth of trees
    "model-differential": partial(save_other, name="diffllama", num_hidden_layers=2),
    "model-more-ids": partial(save_other, name="llama", num_hidden_layers=2, vocab_size=560),  # for the target "words"
    "model-permuted": save_permuted,  # for the target "bytes"
    "model-latent": partial(save_latents, name="v3"),  # for targets with ordinary heads
    "model-fewer-ids": partial(save_other, name="llama", num_hidden_layers=2, vocab_size=490),
}
MORE_HEADS |= SMALL


def save_hybrid(folder: Path, target: Path, name: str) -> Path:
    """A model of that name, of which the zoo has targets."""
    return MORE_TARGETS[name](folder)


HYBRIDS = [f"hybrid-{name}" for name in ("qwen3_5_text", "lfm2", "nemotron_h", "granitemoehybrid", "falcon_h1")]
MORE_HEADS |= {kind: partial(save_hybrid, name=kind.removeprefix("hybrid-")) for kind in HYBRIDS}
MORE_HEADS |= {f"{kind} wide": partial(save_hybrid, name=f"{kind.removeprefix('hybrid-')} wide") for kind in HYBRIDS}


class AloneModel:
    """The model in transformers, in float64, run over whole texts: no cache, no page.  In the words of `PathDrafter`.

    text: all committed tokens, then the bonus token.
    """

    def __init__(self, zoo: Zoo, target: str, kind: str, text: list[int]) -> None:
        self.text = text
        self.model = AutoModelForCausalLM.from_pretrained(zoo.head(target, kind), dtype=torch.float64).eval()
        self._hidden: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def hidden(self, path: tuple[int, ...]) -> Tensor:
        """[H]: the final hidden state after the path's last token."""
        if path not in self._hidden:
            self._hidden[path] = self.model.model(torch.tensor([[*self.text, *path]])).last_hidden_state[0, -1]
        return self._hidden[path]

    @torch.no_grad()
    def log_probs(self, path: tuple[int, ...]) -> dict[int, float]:
        return dict(enumerate(self.model.lm_head(self.hidden(path)).log_softmax(-1).tolist()))
