"""What a draft head's files hold, in our own terms, for `specdec inspect`."""

from __future__ import annotations

from typing import Any

from specdec.draft.formats.empty import own_matrices, wanted_tensors
from specdec.draft.formats.open import OpenHead
from specdec.draft.formats.spec import HeadSpec
from specdec.draft.formats.stored import beside_quantised, formats_of, how_stored, stored_tensors
from specdec.draft.kind import Facts
from specdec.models.config import ModelConfig

UNKNOWN = "not known without --target"
EAGLE_ONLY = ("norm before fc", "fc bias", "residual", "recycled", "logits read")  # what heads over blocks of context lack


def facts_of(opened: OpenHead, is_target_known: bool) -> Facts:
    """is_target_known: whether the head was opened for a target."""
    parsed, checkpoint = opened.parsed, opened.files.checkpoint
    is_rope_told = parsed.meanings.get("rope", "as written").startswith("as written")
    formats = formats_of(checkpoint, own_matrices(parsed.spec, parsed.names))
    stored = stored_tensors(checkpoint, wanted_tensors(parsed.spec, parsed.names), formats)
    extra = sorted(name for name in beside_quantised(formats) if name in checkpoint)
    return Facts(
        opened.format.name,
        opened.format.title,
        {**spec_facts(parsed.spec, is_target_known, is_rope_told), "weights": weights_of(opened)},
        dict(parsed.meanings),
        {name: list(shape) for name, shape in stored.items()},
        {**parsed.beside, **dict.fromkeys(extra, "beside quantised values; inputs of products stay in 16 bits or more")},
    )


def _latents(model: ModelConfig) -> dict[str, Any]:
    """What a head with latent attention keeps of a token."""
    return {"latents": f"rank {model.latent_rank}, {model.head_dim} rotated"} if model.keeps_latents else {}


def weights_of(opened: OpenHead) -> str:
    """How the head's own matrices are stored, by the head's own scheme; those that it leaves alone by name."""
    checkpoint, matrices = opened.files.checkpoint, own_matrices(opened.parsed.spec, opened.parsed.names)
    formats = formats_of(checkpoint, matrices)
    plain = [name for name in matrices if name not in formats]
    if not formats:
        return ", ".join(how_stored(checkpoint, plain, formats))
    assert checkpoint.quantization is not None
    quantised = f"{', '.join(how_stored(checkpoint, formats, formats))} ({checkpoint.quantization.method})"
    return f"{quantised}; {', '.join(how_stored(checkpoint, plain, formats))}: {', '.join(plain)}" if plain else quantised


def spec_facts(spec: HeadSpec, is_target_known: bool, is_rope_told: bool) -> dict[str, Any]:
    """The normal form.  is_rope_told: whether the head's own config says its rope."""
    model = spec.model
    rope = {"type": model.rope.kind, "theta": model.rope.theta, "factor": model.rope.factor}
    windows, ids = [kind.window for kind in model.layer_kinds], spec.draft_ids
    silent, block = not is_target_known and not spec.aux_layers and not spec.reads_final_state, spec.block
    facts = {
        "kind": spec.kind,
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "target_hidden_size": spec.target_hidden_size,
        "intermediate_size": model.intermediate_size,
        "heads": [model.num_heads, model.num_kv_heads, model.head_dim],
        **_latents(model),
        "features": UNKNOWN if silent else list(spec.aux_layers) or "final hidden state",
        "norm before fc": spec.feature_norm,
        "fc bias": spec.fc_bias,
        "residual": "normed feature" if spec.norm_before_residual else "raw feature",
        "recycled": "normed output" if spec.recycles_normed else "raw output",
        "logits read": "normed output" if spec.norms_logits and not spec.reads_final_state else "raw output",
        "norms of q and k": model.qk_norm,
        "biases of attention": model.qkv_bias,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "draft ids": "the target's" if ids is None else f"{ids[0]} .. {ids[-1]}, by d2t",
        "embeddings": "own" if spec.own_embeddings else "the target's",
        "lm_head": "own" if spec.own_lm_head else "the target's",
        "rms_norm_eps": model.rms_norm_eps,
        "rope": rope if is_rope_told or is_target_known else UNKNOWN,
        "windows": windows if any(windows) else "none",
        "trained_length": spec.trained_length,
        "dtype": model.dtype,
    }
    if block is None:
        return facts
    if not spec.reads_pairs:
        facts = {key: value for key, value in facts.items() if key not in EAGLE_ONLY}
    markov = f"{block.markov} of rank {block.markov_rank}" if block.markov != "none" else "none"
    reads = {"none": "none", "hidden": "of the row", "markov": "of the row and the token before"}
    more: dict[str, Any] = {}
    if block.selection is not None:
        taps = block.convolution
        more = {
            "convolutions": f"{taps.taps} rows, groups of {taps.group} columns" if taps else "none",
            "candidates of a row": f"{block.selection.candidates}, scored by tables of rank {block.selection.rank}",
        }
    if (block.logit_scale, block.softcap) != (1.0, None):
        more["logits"] = f"times {block.logit_scale:g}" + (f", softcap {block.softcap:g}" if block.softcap else "")
    return {**facts, **more} | {
        "rows of a block": block.size or "not said",
        "mask token": block.mask_id,
        "first row": "drafts nothing" if block.skips_anchor else "drafts the next token",
        "causal blocks": list(block.causal),
        "markov head": markov,
        "estimate of acceptance": reads[block.confidence],
    }
