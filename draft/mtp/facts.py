"""What the files of a target's MTP layers hold, in our own terms, for `specdec inspect`."""

from __future__ import annotations

from typing import Any

from specdec.draft.kind import Facts
from specdec.draft.mtp.spec import MtpSpec
from specdec.draft.mtp.tensors import copies, how_stored, stored_tensors
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.mtp_names import count_key
from specdec.models.config import NO_ROPE, ModelConfig


def facts_of(checkpoint: Checkpoint, spec: MtpSpec) -> Facts:
    model, experts, rules = spec.model, spec.model.experts, spec.rules
    mlp = "dense"
    if experts is not None:
        shared = f", and shared ones of width {experts.shared_size}" if experts.shared_size else ""
        mlp = f"{experts.count} experts of width {experts.intermediate_size}, {experts.router.top_k} a token{shared}"
    held = {name: own for name, own in copies(spec).items() if name in checkpoint}
    head: dict[str, object] = {
        "kind": "mtp",
        "layers": model.num_layers,
        "weights": how_stored(checkpoint, spec),
        **({} if model.num_layers == 1 else {"each layer reads": spec.read_by_layers}),
        "levels beyond the layers": "drafted by the last layer again",
        "hidden_size": model.hidden_size,
        "attention": f"latent, rank {model.latent_rank}" if model.keeps_latents else _heads(model),
        "heads": [model.num_heads, model.num_kv_heads, model.head_dim],
        "mlp": mlp,
        "features": "final hidden state, after the target's final norm",
        "join": "hidden state, embedding" if rules.hidden_first else "embedding, hidden state",
        "first embedding": "zero" if rules.zeroes_first else "kept",
        "recycled": "normed output" if rules.recycles_normed else "raw output",
        "vocab_size": model.vocab_size,
        "embeddings": "the target's",
        "lm_head": "the target's",
        "rms_norm_eps": model.rms_norm_eps,
        "rope": _rope(model),
    }
    return Facts(
        spec.family,
        "the target's publisher, with the target",
        head,
        {count_key(spec.family): f"{model.num_layers}, in {', '.join(f'{prefix}*' for prefix in spec.prefixes)}"},
        {name: list(shape) for name, shape in stored_tensors(checkpoint, spec).items()},
        {name: f"repeats {own}" for name, own in held.items()},
    )


def _heads(model: ModelConfig) -> str:
    window, sinks = model.layer_kinds[0].window, ", with sinks" if model.has_sinks else ""
    return f"heads that read a window of {window} tokens{sinks}" if window else f"heads{sinks}"


def _rope(model: ModelConfig) -> dict[str, Any] | str:
    if model.rope.kind == NO_ROPE:
        return "none: layers know no positions"
    return {"type": model.rope.kind, "theta": model.rope.theta, "rotated": model.rope.rotated or "all"}
