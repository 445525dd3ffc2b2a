"""What a draft head's folder holds, in specdec's own terms: the facts of `specdec inspect`.

Reads the config and the headers of weight files; of the tensors the vocabulary map alone, and the norms of heads whose
converter may have lost a layer.  No GPU is used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from specdec.draft.formats.open import HowToRead, OpenHead, open_head
from specdec.draft.formats.reading import wanted_tensors
from specdec.draft.formats.spec import HeadSpec
from specdec.draft.kinds import is_name
from specdec.draft.mtp.load import open_mtp
from specdec.draft.mtp.tensors import copies, how_stored, stored_tensors
from specdec.loading.about.inspect_target import stored_as
from specdec.loading.about.pairs import pairs
from specdec.models.checkpoints.checkpoint import resolve_folder, resolve_target
from specdec.models.config import ModelConfig
from specdec.models.keys.shared import MTP_COUNT
from specdec.models.registry import choose_target

UNKNOWN = "not known without --target"
EAGLE_ONLY = ("norm before fc", "fc bias", "residual", "recycled", "logits read")  # what heads over blocks of context lack


def head_facts(head: str | Path, target: str | Path | None, how: HowToRead) -> dict[str, Any]:
    """Everything, as plain data.  ValueError as when the head is loaded: by the config, a tensor, or against the target."""
    if is_name(head):
        raise ValueError(f"MODEL: {head!r} is a drafter without files; nearest thing that works: the folder of a head, or mtp")
    folder = resolve_folder(head, "MODEL")
    config = None if target is None else choose_target(resolve_target(target, "--target")).config
    opened = open_head(folder, config, how)
    stored = UNKNOWN if config is None else stored_as(config)
    rope = opened.reading.meanings.get("rope", "as written")
    return {
        "folder": str(folder),
        "kind": "head",
        "target_weights": stored,
        "format": opened.format.name,
        "format_named": how.format != "auto",
        "published_by": opened.format.title,
        "head": spec_facts(opened.reading.spec, config, is_rope_told=rope.startswith("as written")),
        "meanings": dict(opened.reading.meanings),
        "tensors": _tensors(opened),
        "beside": dict(opened.reading.beside),
    }


def mtp_facts(target: str | Path | None) -> dict[str, Any]:
    """Everything of a target's own MTP layers.  ValueError as when they are loaded."""
    if target is None:
        raise ValueError("inspect mtp needs --target, whose own layers these are; or give the folder of a head")
    folder = resolve_target(target, "--target")
    config = choose_target(folder).config
    checkpoint, spec = open_mtp(folder, config)
    model, experts, rules = spec.model, spec.model.experts, spec.rules
    held = {name: own for name, own in copies(spec).items() if name in checkpoint}
    return {
        "folder": str(folder),
        "kind": "head",
        "target_weights": stored_as(config),
        "format": spec.family,
        "format_named": False,
        "published_by": "the target's publisher, with the target",
        "head": {
            "kind": "mtp",
            "layers": model.num_layers,
            "weights": how_stored(checkpoint, spec),
            "levels beyond the layers": "drafted by the last layer again",
            "hidden_size": model.hidden_size,
            "attention": f"latent, rank {model.latent_rank}" if model.keeps_latents else "heads",
            "heads": [model.num_heads, model.num_kv_heads, model.head_dim],
            "mlp": "dense"
            if experts is None
            else f"{experts.count} experts, {experts.chosen} a token, {experts.shared} shared",
            "features": "final hidden state, after the target's final norm",
            "join": "hidden state, embedding" if rules.hidden_first else "embedding, hidden state",
            "first embedding": "zero" if rules.zeroes_first else "kept",
            "recycled": "normed output" if rules.recycles_normed else "raw output",
            "vocab_size": model.vocab_size,
            "embeddings": "the target's",
            "lm_head": "the target's",
            "rms_norm_eps": model.rms_norm_eps,
            "rope": {"type": model.rope.kind, "theta": model.rope.theta, "rotated": model.rope.rotated or "all"},
        },
        "meanings": {MTP_COUNT: f"{model.num_layers}, in {', '.join(f'{prefix}.*' for prefix in spec.prefixes)}"},
        "tensors": {name: list(shape) for name, shape in stored_tensors(checkpoint, spec).items()},
        "beside": {name: f"repeats {own}" for name, own in held.items()},
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
    """As tables: of a head, or of a target."""
    if facts["kind"] == "target":
        _print_target(facts, console)
        return
    by = "named" if facts["format_named"] else "detected"
    console.print(Text(f"{facts['folder']}: layout {facts['format']} ({by}), as published by {facts['published_by']}", "bold"))
    console.print(Text(f"the target's weights: {facts['target_weights']}"))
    for title, rows in (("Head", facts["head"]), ("Taken to mean", facts["meanings"]), ("Beside weights", facts["beside"])):
        if rows:
            console.print()
            console.print(pairs(title, ((key, _shown(value)) for key, value in rows.items())))
    console.print()
    shapes = {name: " x ".join(map(str, shape)) for name, shape in facts["tensors"].items()}
    console.print(pairs(f"Weights ({len(shapes)})", shapes.items()))


def _print_target(facts: dict[str, Any], console: Console) -> None:
    named = ", ".join(facts["architectures"] or ())
    console.print(Text(f"{facts['folder']}: a {facts['family']} target{named and f' ({named})'}", "bold"))
    code = {"native": "specdec's own module", "transformers": "transformers' code with specdec's attention"}
    console.print(Text(f"runs through {code[facts['backend']]}: {facts['why']}"))
    weights = {key: f"{value:,}" if isinstance(value, int) else value for key, value in facts["weights"].items()}
    weights["bytes of the files"] += f" ({facts['weights']['bytes of the files'] / 1e9:.3g} GB)"
    tables = {
        "Sizes": facts["target"], "Weights": weights, "Text": facts["text"], "What drafts for it": facts["drafters"],
        "Taken to mean": facts["meanings"],
    }  # fmt: skip
    for title, rows in tables.items():
        if rows:
            console.print()
            console.print(pairs(title, ((key, _shown(value)) for key, value in rows.items())))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) or value is None:
        return value or "not said"
    return json.dumps(value).strip("[]{}").replace('"', "")
