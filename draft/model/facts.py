"""What a small model's files hold, in our own terms, for `specdec inspect`."""

from __future__ import annotations

from specdec.draft.kind import Facts
from specdec.draft.model.translation import Translation
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.config import ModelConfig
from specdec.models.registry import TargetChoice


def facts_of(chosen: TargetChoice, checkpoint: Checkpoint, target_ids: int, words: Translation | None) -> Facts:
    """target_ids: how many tokens the target's vocabulary has.  words: how the model reads them, if not by their ids."""
    model = chosen.config
    meanings = {} if words is None else meanings_of(words)
    windows = [kind.window for kind in model.layer_kinds]
    head: dict[str, object] = {
        "kind": "model",
        "family": model.family,
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "heads": [model.num_heads, model.num_kv_heads, model.head_dim],
        **({"latents": f"rank {model.latent_rank}, {model.head_dim} rotated"} if model.keeps_latents else {}),
        **({"layers with states": len(model.recurrent_layers)} if model.recurrent_layers else {}),
        "features": "none: it reads token ids alone",
        "vocab_size": model.vocab_size,
        "tokens that both have": min(model.vocab_size, target_ids) if words is None else len(words.drafts),
        "embeddings": "own",
        "lm_head": "its embeddings" if model.tie_embeddings else "own",
        "weights": stored_as(model),
        "windows": windows if any(windows) else "none",
        "trained_length": model.max_position,
    }
    shapes = {name: list(checkpoint.shape(name)) for name in checkpoint.names()}
    return Facts("model", "its own publisher", head, meanings, shapes, {})


def stored_as(model: ModelConfig) -> str:
    """How its weights are stored, in words."""
    return str(model.quantization or model.dtype or "not said")


def meanings_of(words: Translation) -> dict[str, str]:
    """What becomes of the target's tokens, in words."""
    alone, several = sum(len(each) == 1 for each in words.reads), sum(len(each) > 1 for each in words.reads)
    return {
        "the target's tokens": f"{alone} read as a token of its own, {several} as the mean of those that spell them, "
        f"{len(words.reads) - alone - several} not at all",
        "drafts": f"the {len(words.drafts)} tokens that both have",
    }
