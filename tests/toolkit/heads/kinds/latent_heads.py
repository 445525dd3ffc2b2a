"""EAGLE-3 heads with latent attention, which the zoo has by name once this file is imported; and what one drafts along a path.

Shapes: T pairs, H hidden.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from toolkit.deepseek import save_deepseek
from toolkit.heads.parts import YARN, Latents, Options, Parts, random_parts
from toolkit.heads.writers import Files, modelopt_latent, save, torchspec
from toolkit.models import MORE_HEADS, MORE_TARGETS
from toolkit.oracles.heads import layer_output

LATENT_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}
Heads = tuple[Callable[[Parts], Files], dict[str, Any]]
LATENT_HEADS: dict[str, Heads] = {  # a writer, and what the head is
    "latent": (modelopt_latent, dict(rope=LATENT_YARN)),
    "latent-two-layers": (modelopt_latent, dict(layers=2, own_embeddings=True, draft_vocab=40)),
    "latent-no-q": (partial(modelopt_latent, generation="midlayer"), dict(latent=Latents(None, interleaved=False))),
    "latent-31": (
        partial(torchspec, for_vllm=True),
        dict(aux=(0, 1), feature_norm="each", recycles_normed=True, draft_vocab=40),
    ),  # fmt: skip
    "latent-eighths": (modelopt_latent, dict(latent=Latents(q=24, kv=16, rope=8), draft_vocab=24)),  # rows for 4 bits
    "latent-wide": (torchspec, dict(latent=Latents(kv=128, rope=6), before_residual=True)),
}


def parts_of(kind: str) -> Parts:
    own = {"latent": Latents(), **LATENT_HEADS[kind][1]}
    return random_parts(Options(**own), seed=11 + list(LATENT_HEADS).index(kind))


def save_latent(folder: Path, target: Path, kind: str) -> Path:
    """A random head for a target of 40 tokens and hidden size 32."""
    assert json.loads((target / "config.json").read_text())["hidden_size"] == 32
    return save(folder, LATENT_HEADS[kind][0](parts_of(kind)))


MORE_HEADS |= {kind: partial(save_latent, kind=kind) for kind in LATENT_HEADS}
LATENT_TARGETS = {"v3": "v3", "v3-tied": "v3-dense-tied"}
MORE_TARGETS |= {name: partial(save_deepseek, name=full) for name, full in LATENT_TARGETS.items()}


class LatentDrafter:
    """A head by its definition, in float64, run over whole texts: no cache, no page.  In the words of `PathDrafter`.

    hf: the target in transformers, in float64.  text: all committed tokens, then the bonus token.
    """

    def __init__(self, parts: Parts, hf: PreTrainedModel, text: list[int]) -> None:
        self.parts, self.text = parts, text
        self.embed = hf.get_input_embeddings().weight.detach()
        self.lm_head = hf.get_output_embeddings().weight.detach()
        states = states_of(hf, text[:-1])
        self.fused = parts.fuse(parts.features(states, states[-1]))
        self._hidden: dict[tuple[int, ...], Tensor] = {}

    def hidden(self, path: tuple[int, ...]) -> Tensor:
        """[H]: the head's output at the path's last token; the empty path ends at the bonus token."""
        if path not in self._hidden:
            drafted = [self.hidden(path[:i]) for i in range(len(path))]
            ids = torch.tensor(self.text[1:] + list(path))
            fused = torch.cat((self.fused, torch.stack(drafted))) if drafted else self.fused
            self._hidden[path] = self.parts.hidden(ids, fused, self.embed)[-1]
        return self._hidden[path]

    def log_probs(self, path: tuple[int, ...]) -> dict[int, float]:
        logp, ids = self.parts.logits(self.hidden(path), self.lm_head).log_softmax(-1).tolist(), self.parts.draft_ids
        return dict(enumerate(logp)) if ids is None else dict(zip(ids.tolist(), logp, strict=True))


@torch.no_grad()
def states_of(hf: PreTrainedModel, ids: list[int]) -> list[Tensor]:
    """[T, H]: the output of each of the target's layers."""
    captured: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _m, _i, out: captured.append(layer_output(out))) for layer in hf.model.layers]
    hf.model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return captured
