"""What a small model's files hold, in our own terms, for `specdec inspect`."""

from __future__ import annotations

from specdec.draft.kind import Facts
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.registry import TargetChoice


def facts_of(chosen: TargetChoice, checkpoint: Checkpoint, target_ids: int) -> Facts:
    """target_ids: how many tokens the target's vocabulary has."""
    model = chosen.config
    windows = [kind.window for kind in model.layer_kinds]
    head = {
        "kind": "model",
        "family": model.family,
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "heads": [model.num_heads, model.num_kv_heads, model.head_dim],
        "features": "none: it reads token ids alone",
        "vocab_size": model.vocab_size,
        "tokens that both have": min(model.vocab_size, target_ids),
        "embeddings": "own",
        "lm_head": "its embeddings" if model.tie_embeddings else "own",
        "weights": str(model.quantization or model.dtype or "not said"),
        "windows": windows if any(windows) else "none",
        "trained_length": model.max_position,
    }
    shapes = {name: list(checkpoint.shape(name)) for name in checkpoint.names()}
    return Facts("model", "its own publisher", head, {}, shapes, {})
