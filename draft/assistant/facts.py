"""What an assistant's files hold, in our own terms, for `specdec inspect`."""

from __future__ import annotations

from specdec.draft.assistant.config import AssistantConfig
from specdec.draft.kind import Facts
from specdec.models.checkpoints.checkpoint import Checkpoint


def facts_of(config: AssistantConfig, read: tuple[int, ...], checkpoint: Checkpoint) -> Facts:
    """read: for each layer, the target's layer whose keys and values it reads."""
    model, own = config.model, config.centroids
    heads = [model.heads_of(index) for index in range(model.num_layers)]
    head = {
        "kind": "assistant",
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "heads": [[each.num_heads, each.num_kv_heads, each.head_dim] for each in heads],
        "keys and values": "the target's",
        "target layers read": list(read),
        "windows": [kind.window for kind in model.layer_kinds],
        "features": "final hidden state, after the target's final norm",
        "join": "embedding, hidden state",
        "recycled": "normed output, projected to the target's width",
        "position": "the root's, at every level",
        "vocab_size": model.vocab_size,
        "embeddings": "the target's, as the target scales them",
        "lm_head": "own" if own is None else f"own, of the tokens of {own.top_k} of {own.count} lists",
        "rms_norm_eps": model.rms_norm_eps,
        "trained_length": model.max_position,
    }
    meanings = {
        "sliding_window": "a draft reads as many of the last committed keys",
        "final_logit_softcapping": "not read: it moves no draft's rank, and transformers applies none here",
        "num_kv_shared_layers": "all: no layer has keys of its own",
    }
    shapes = {name: list(checkpoint.shape(name)) for name in checkpoint.names()}
    return Facts("assistant", "Google, beside each Gemma 4", head, meanings, shapes, {})
