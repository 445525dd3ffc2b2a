"""Random heads of one pass, which the zoo has by name once this file is imported; and what such a head drafts along a path, by
its definition.

Shapes: T tokens, H hidden, F features side by side.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from toolkit import models
from toolkit.heads.block_parts import BlockOptions, BlockParts, random_block_parts, with_copies
from toolkit.heads.block_writers import BLOCK_WRITERS
from toolkit.heads.writers import save
from toolkit.models import Zoo

PRUNED: dict[str, Any] = dict(draft_vocab=26, own_lm_head=True)
HEADS: dict[str, tuple[str, dict[str, Any]]] = {  # name: (layout, options)
    "p-eagle": (
        "speculators",
        dict(PRUNED, kind="p-eagle", skips=False, own_embeddings=True, qk_norm=False, layers=2, size=5),
    ),
    "p-eagle-window": (
        "specforge",
        dict(PRUNED, kind="p-eagle", skips=False, own_embeddings=True, layers=2, windows=(4, 4), qk_norm=False),
    ),
    "dflash": ("z-lab", dict(size=6)),
    "dflash-pruned": ("speculators", dict(PRUNED, size=7, windows=(8, None), rule="anchor", causal=(True, False))),
    "dflash-causal": ("modelopt", dict(size=6, causal=(True, True), windows=(6, 6))),
    "dflash-mixed": ("z-lab", dict(size=6, windows=(6, None), more={"is_causal": False})),
    "dflash2": ("z-lab", dict(kind="dflash2", size=6, rank=5, windows=(8, None), more={"is_causal": False})),
    "dflash2-anchored": (
        "speculators",
        dict(kind="dflash2", size=5, rank=7, taps=3, group=4, candidates=9, skips=False, windows=(8, None), rule="anchor"),
    ),
    "dspark": ("speculators", dict(PRUNED, kind="dspark", skips=False, size=5, rank=6, markov="vanilla")),
    "dspark-gated": (
        "deepspec",
        dict(kind="dspark", skips=False, size=5, rank=6, markov="gated", own_embeddings=True, own_lm_head=True),
    ),
    "dspark-rnn": ("speculators", dict(kind="dspark", skips=False, size=5, rank=6, markov="rnn", confidence="markov")),
}  # fmt: skip


def parts_of(target: Path, name: str, **changes: Any) -> BlockParts:
    """The head of that name for a target in a folder.  changes: to its BlockOptions."""
    raw = json.loads((target / "config.json").read_text())
    sizes = {"vocab": raw["vocab_size"], "target_hidden": raw["hidden_size"], "hidden": raw["hidden_size"]}
    options = BlockOptions(**{**HEADS[name][1], **sizes, "aux": (0, 1, 2), "max_position": 256, **changes})
    parts = random_block_parts(options, seed=3)
    return with_copies(parts, target) if HEADS[name][0] == "deepspec" else parts


def save_block_head(folder: Path, target: Path, name: str, **changes: Any) -> Path:
    return save(folder, BLOCK_WRITERS[HEADS[name][0]](parts_of(target, name, **changes)))


models.MORE_HEADS |= {name: partial(save_block_head, name=name) for name in HEADS}


class AlonePath:
    """A head after a text, whose last token has no features yet: log-probabilities of the next token along any path."""

    def __init__(self, zoo: Zoo, target: str, name: str, text: list[int], steps: int) -> None:
        self.parts, hf = parts_of(zoo.target(target), name), copy.deepcopy(zoo.hf(target)).double()
        embed, self.lm_head = (part.weight.detach() for part in (hf.get_input_embeddings(), hf.get_output_embeddings()))
        features = features_of(hf, text[:-1], self.parts.options.aux)
        anchor = len(text) - 1
        self.hidden_SH = self.parts.drafts(features, text, anchor, self.parts.options.size, embed)
        if self.parts.options.kind == "p-eagle":
            self.hidden_SH = self.parts.drafts(features, text, anchor, steps, embed)
        self.last = text[-1]

    def log_probs(self, path: tuple[int, ...]) -> Tensor:
        """[W] float64, of the draft vocabulary, after the path."""
        before = [self.last, *path]
        return self.parts.logits(self.hidden_SH[: len(before)], self.lm_head, before)[-1].log_softmax(-1)

    def children(self, path: tuple[int, ...], k: int) -> Iterator[tuple[int, float]]:
        """The k likeliest tokens, as ids of the target."""
        values, places = self.log_probs(path).topk(k)
        ids = places if self.parts.draft_ids is None else self.parts.draft_ids[places]
        yield from zip(ids.tolist(), values.tolist(), strict=True)


def features_of(hf: PreTrainedModel, ids: list[int], layers: tuple[int, ...]) -> Tensor:
    """[T, F] outputs of these layers, from transformers."""
    captured: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, out: Any) -> None:
        captured.append((out[0] if isinstance(out, tuple) else out).detach().view(len(ids), -1))

    hooks = [hf.model.layers[layer].register_forward_hook(keep) for layer in layers]
    with torch.no_grad():
        hf(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.cat(captured, dim=-1)
