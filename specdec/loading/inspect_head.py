"""What a draft head's folder holds, in specdec's own terms: the facts of `specdec inspect`.

Reads the config and the headers of weight files, and of the tensors the vocabulary map alone.  No GPU is used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.draft.formats.open import HowToRead, OpenHead, open_head
from specdec.draft.formats.reading import wanted_tensors
from specdec.draft.formats.spec import HeadSpec
from specdec.models.checkpoints.checkpoint import resolve_folder
from specdec.models.config import ModelConfig
from specdec.models.registry import choose_target

UNKNOWN = "not known without --target"
EAGLE_ONLY = ("norm before fc", "fc bias", "residual", "recycled", "logits read")  # what heads over blocks of context lack


def head_facts(head: str | Path, target: str | Path | None, how: HowToRead) -> dict[str, Any]:
    """Everything, as plain data.  ValueError as when the head is loaded: by the config, a tensor, or against the target."""
    folder = resolve_folder(head, "HEAD")
    config = None if target is None else choose_target(resolve_folder(target, "--target")).config
    opened = open_head(folder, config, how)
    return {
        "folder": str(folder),
        "format": opened.format.name,
        "format_named": how.format != "auto",
        "published_by": opened.format.title,
        "head": spec_facts(opened.reading.spec, config, is_rope_told="rope" not in opened.reading.meanings),
        "meanings": dict(opened.reading.meanings),
        "tensors": _tensors(opened),
        "beside": dict(opened.reading.beside),
    }


def spec_facts(spec: HeadSpec, target: ModelConfig | None, is_rope_told: bool) -> dict[str, Any]:
    """The normal form.  target: None if it is not known.  is_rope_told: whether the head's own config says its rope."""
    model = spec.model
    rope = {"type": model.rope.kind, "theta": model.rope.theta, "factor": model.rope.factor}
    windows, ids = [kind.window for kind in model.layer_kinds], spec.draft_ids
    silent, block = target is None and not spec.aux_layers and spec.kind != "eagle1", spec.block
    facts = {
        "kind": spec.kind,
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "target_hidden_size": spec.target_hidden_size,
        "intermediate_size": model.intermediate_size,
        "heads": [model.num_heads, model.num_kv_heads, model.head_dim],
        "features": UNKNOWN if silent else list(spec.aux_layers) or "final hidden state",
        "norm before fc": spec.feature_norm,
        "fc bias": spec.fc_bias,
        "residual": "normed feature" if spec.norm_before_residual else "raw feature",
        "recycled": "normed output" if spec.recycles_normed else "raw output",
        "logits read": "normed output" if spec.kind in ("eagle3", "p-eagle") and spec.norms_logits else "raw output",
        "norms of q and k": model.qk_norm,
        "biases of attention": model.qkv_bias,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "draft ids": "the target's" if ids is None else f"{ids[0]} .. {ids[-1]}, by d2t",
        "embeddings": "own" if spec.own_embeddings else "the target's",
        "lm_head": "own" if spec.own_lm_head else "the target's",
        "rms_norm_eps": model.rms_norm_eps,
        "rope": rope if is_rope_told or target is not None else UNKNOWN,
        "windows": windows if any(windows) else "none",
        "trained_length": spec.trained_length,
        "dtype": model.dtype,
    }
    if block is None:
        return facts
    if spec.kind != "p-eagle":
        facts = {key: value for key, value in facts.items() if key not in EAGLE_ONLY}
    markov = f"{block.markov} of rank {block.markov_rank}" if block.markov != "none" else "none"
    reads = {"none": "none", "hidden": "of the row", "markov": "of the row and the token before"}
    return facts | {
        "rows of a block": block.size or "not said",
        "mask token": block.mask_id,
        "first row": "drafts nothing" if block.skips_anchor else "drafts the next token",
        "causal blocks": list(block.causal),
        "markov head": markov,
        "estimate of acceptance": reads[block.confidence],
    }


def _tensors(opened: OpenHead) -> dict[str, list[int]]:
    """The tensors that are read, with their shapes."""
    return {name: list(shape) for name, shape in wanted_tensors(opened.reading.spec, opened.reading.names).items()}


def print_facts(facts: dict[str, Any], console: Console) -> None:
    """As tables."""
    by = "named" if facts["format_named"] else "detected"
    console.print(Text(f"{facts['folder']}: layout {facts['format']} ({by}), as published by {facts['published_by']}", "bold"))
    for title, rows in (("Head", facts["head"]), ("Taken to mean", facts["meanings"]), ("Beside weights", facts["beside"])):
        if rows:
            console.print()
            console.print(_table(title, {key: _shown(value) for key, value in rows.items()}))
    console.print()
    shapes = {name: " x ".join(map(str, shape)) for name, shape in facts["tensors"].items()}
    console.print(_table(f"Weights ({len(shapes)})", shapes))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) or value is None:
        return value or "not said"
    return json.dumps(value).strip("[]{}").replace('"', "")


def _table(title: str, rows: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2), show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table
