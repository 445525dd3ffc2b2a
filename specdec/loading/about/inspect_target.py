"""What a target's folder or GGUF file holds, in specdec's own terms: the facts of `specdec inspect`.

Reads configs, headers of weight files and the tokenizer.  No weight is read, and no GPU is used.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from specdec.draft.kinds import all_kinds, kinds_by_files
from specdec.loading.build import unnamed_turn
from specdec.models.checkpoints.checkpoint import Checkpoint, resolve_target
from specdec.models.checkpoints.loader import DTYPES
from specdec.models.checkpoints.mistaken import head_mark, tensor_mark
from specdec.models.checkpoints.mtp_names import count_key, mtp_prefixes
from specdec.models.config import NO_ROPE, HeadSizes, ModelConfig, RopeConfig, read_json
from specdec.models.described import target_json
from specdec.models.gguf.file import is_gguf, open_gguf
from specdec.models.kv import token_bytes_by_kind
from specdec.models.mixtures.fill import in_runs
from specdec.models.registry import TargetChoice, check_chosen, choose_target
from specdec.models.schemes.size import matrix_size, quantised_and_dense
from specdec.prompts.tokenizer import Tokenizer

# Keys of configs that say how experts are chosen, by what they say.
EXPERTS = {
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "of a token": ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_top_k", "moe_k"),
    "shared": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "size of one": ("moe_intermediate_size", "moe_ffn_hidden_size"),
}


def is_head(place: Path) -> bool:
    """Whether a folder holds a draft head, by its config, or by the names of its tensors.  ValueError if it holds no model."""
    if is_gguf(place):
        return False
    return bool(head_mark(read_json(place / "config.json")) or tensor_mark(Checkpoint(place).names()))


def target_facts(target: str | Path) -> dict[str, Any]:
    """Everything, as plain data.  ValueError as when the target is loaded: by the config, a key, or a tensor."""
    place = resolve_target(target, "MODEL")
    chosen = choose_target(place)
    checkpoint, raw, config = check_chosen(chosen, place), target_json(place), chosen.config
    tokenizer, drafters = Tokenizer(place), _drafters(place, config)
    return {
        "folder": str(place),
        "kind": "target",
        "family": config.family,
        **({"wrapper": config.wrapper} if config.wrapper else {}),
        "architectures": raw.get("architectures"),
        "backend": chosen.backend,
        "why": chosen.reason,
        "target": _sizes(config, raw),
        "weights": _weights(checkpoint, config, place),
        "text": _text(tokenizer, config),
        "drafters": drafters,
        "meanings": _meanings(chosen, raw, drafters["mtp"]),
    }


def stored_as(config: ModelConfig) -> str:
    """How a target's weights are stored, in the words of `specdec plan`."""
    return str(config.quantization or config.dtype or "a dtype that its config does not name")


def _sizes(config: ModelConfig, raw: dict[str, Any]) -> dict[str, Any]:
    kinds = Counter(map(str, config.layer_kinds))
    stored = len(set(config.key_sources))
    experts = _experts(raw, config)
    return {
        "layers": config.num_layers,
        "layers read": "all keys" if set(kinds) == {"full"} else ", ".join(f"{n} x {kind}" for kind, n in kinds.items()),
        **({"layers that store keys": stored} if stored < config.num_layers else {}),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention": _attention(config),
        "heads, kv heads, head_dim": _heads(config),
        **({"softcap": config.softcap} if config.softcap else {}),
        **({"sinks": True} if config.has_sinks else {}),
        **({"experts": experts} if experts.get("experts") else {}),
        **({"encoder": f"reads up to {config.encoder.max_tokens} tokens"} if config.encoder else {}),
        "vocab_size": config.vocab_size,
        "embeddings": "tied to the output layer" if config.tie_embeddings else "apart from the output layer",
        "rope": _turning(config),
        "context": f"{config.max_position} ({config.max_position_why})",
        **_token_bytes(config),
        **_states(config),
    }


def _experts(raw: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """The mixtures as our own modules compute them, or what the keys say of those that transformers' code does."""
    own = config.experts
    if own is None:
        return {name: raw[key] for name, keys in EXPERTS.items() for key in keys if isinstance(raw.get(key), int)}
    said = {"experts": own.count, "of a token": own.router.top_k, "size of one": own.intermediate_size}
    shared = {"size of shared ones": own.shared_size} if own.shared_size else {}
    shared |= {"over latents of": own.latent_size} if own.latent_size else {}
    return {**said, **shared, **({"dense": in_runs(config.dense_mlp_layers)} if config.dense_mlp_layers else {})}


def _attention(config: ModelConfig) -> str:
    if config.differential:
        return "heads in pairs, one softmax minus another"
    return f"latents of rank {config.latent_rank}" if config.keeps_latents else "heads"


def _turning(config: ModelConfig) -> dict[str, Any] | str:
    """How positions reach attention."""
    if all(kind.alibi for kind in config.key_kinds):
        return _alibi(config)
    if not config.unlike_heads:
        return _rope(config.rope)
    return {str(config.layer_kinds[layer]): _rope(config.heads_of(layer).rope) for layer in config.key_layers}


def _alibi(config: ModelConfig) -> str:
    return "none: ALiBi of roots of distances" if config.sqrt_alibi else "none: ALiBi"


def _rope(rope: RopeConfig) -> dict[str, Any] | str:
    """The type, theta, and what else is not as usual."""
    if rope.kind == NO_ROPE:
        return "none: layers know no positions"
    usual = asdict(type(rope)())
    others = {name: value for name, value in asdict(rope).items() if value != usual[name] and name not in ("kind", "theta")}
    return {"type": rope.kind, "theta": rope.theta, **others}


def _heads(config: ModelConfig) -> Any:
    """Three numbers, and the width of values where it is another; by kind of layer where these have unlike heads."""

    def shown(heads: HeadSizes) -> list[Any]:
        values = [f"values {heads.value_width}"] if heads.value_width else []
        return [heads.num_heads, heads.num_kv_heads, heads.head_dim, *values]

    if not config.unlike_heads:
        return shown(config.heads)
    return {str(config.layer_kinds[layer]): shown(config.heads_of(layer)) for layer in config.key_layers}


def _token_bytes(config: ModelConfig) -> dict[str, Any]:
    """Of all layers that store some, in the dtype of the checkpoint, or in 16 bits where it names none."""
    kinds = token_bytes_by_kind(config, "auto", DTYPES.get(config.dtype or "", torch.bfloat16))
    by_kind = {"by kind of layer": kinds} if len(kinds) > 1 else {}
    return {"bytes of a token's keys and values": sum(kinds.values()), **by_kind}


def _states(config: ModelConfig) -> dict[str, Any]:
    """What recurrent layers keep of a text, over all of them; nothing if there are none."""
    recurrent = config.recurrent
    if recurrent is None:
        return {}
    layers, dtype = len(config.recurrent_layers), DTYPES.get(config.dtype or "", torch.bfloat16)
    named = "channels of recurrent layers" if recurrent.rule is None else "key heads, value heads of recurrent layers"
    return {
        named: str(recurrent),
        "bytes of a text's state": layers * recurrent.state_bytes(dtype),
        "bytes of a draft token in them": layers * recurrent.node_bytes(dtype),
    }


def _weights(checkpoint: Checkpoint, config: ModelConfig, place: Path) -> dict[str, Any]:
    """How they are stored, and how many there are, MTP layers apart."""
    mtp = mtp_prefixes(config)
    layers = [name for name in checkpoint.names() if name.startswith(mtp)]
    tied = {"lm_head.weight"} if config.tie_embeddings else set()
    own = [name for name in checkpoint.names() if name not in {*layers, *tied}]
    if is_gguf(place):
        types = Counter(tensor.type for tensor in open_gguf(place).tensors.values())
        blocks = ", ".join(f"{count} x {type}" for type, count in types.most_common())
        how = f"{blocks}; {stored_as(config)} in memory, unless quantize='blocks' keeps some"
    else:
        how = stored_as(config)
    facts = {
        "stored as": how,
        "parameters": count_parameters(checkpoint, own),
        "bytes of the files": _file_bytes(checkpoint, place),
        "tensors": len(checkpoint.names()),
    }
    if over := len(checkpoint.passed_over):
        facts["passed over, of images"] = f"{over} tensors, {checkpoint.passed_over_bytes:,} bytes"
    return facts | ({"parameters of MTP layers": count_parameters(checkpoint, layers)} if layers else {})


def count_parameters(checkpoint: Checkpoint, names: list[str]) -> int:
    """How many parameters these tensors stand for: of a quantised matrix rows times columns, without scales and zero points."""
    kept = [name for name in names if not name.endswith(("rotary_emb.inv_freq", ".k_scale", ".v_scale"))]
    formats, plain = quantised_and_dense(checkpoint, kept)
    quantised = sum(matrix_size(format, checkpoint, name).values for name, format in formats.items())
    return quantised + sum(math.prod(checkpoint.shape(name)) for name in plain)


def _file_bytes(checkpoint: Checkpoint, place: Path) -> int:
    if is_gguf(place):
        return sum(tensor.rows * tensor.row_bytes for tensor in open_gguf(place).tensors.values())
    return sum(math.prod(checkpoint.shape(name)) * checkpoint.itemsize(name) for name in checkpoint.names())


def _text(tokenizer: Tokenizer, config: ModelConfig) -> dict[str, Any]:
    """The tokenizer, and which tokens end a text, with the files that say so."""
    named = dict(reversed(config.ends_by_file)) or {"GGUF keys": config.eos_ids}
    turn = unnamed_turn(tokenizer, config)
    ends = []
    for token in (*config.eos_ids, *([] if turn is None else [turn])):
        by = [file for file, ids in named.items() if token in ids] + (["the chat template"] if token == turn else [])
        piece = f"{tokenizer.piece(token)!r}, " if tokenizer.is_present else ""
        ends.append(f"{token} ({piece}by {' and '.join(by)})")
    passed = sorted({token for ids in named.values() for token in ids} - {*config.eos_ids, turn})
    return {
        "tokenizer": "present" if tokenizer.is_present else "none: prompts must be token ids",
        "chat template": "present" if tokenizer.has_chat_template else "none: chats can't be prompts",
        "texts end at": ends or "no token: max_tokens alone ends them",
        **({"named as ends, and not taken": passed} if passed else {}),
    }


def _drafters(place: Path, config: ModelConfig) -> dict[str, str]:
    """What can draft for the target, by how it is named."""
    sizes = f"made for hidden_size {config.hidden_size}, {config.num_layers} layers and {config.vocab_size} tokens"
    found = {"a head's folder": f"no: {config.features_refusal}" if config.features_refusal else f"one {sizes}"}
    found |= {kind.title: kind.offer(config) for kind in kinds_by_files()}
    for kind in all_kinds():
        why = kind.refusal(place, config)
        found[kind.name] = f"no: {why}" if why else kind.offer(config)
    return found


def _meanings(chosen: TargetChoice, raw: dict[str, Any], mtp: str) -> dict[str, str]:
    """What keys that are absent were taken to mean; transformers' own classes know theirs.  mtp: see `_drafters`."""
    config = chosen.config
    family = chosen.native
    unsaid = {**family.unsaid, "head_dim": str(config.head_dim)} if family and family.unsaid else {}
    if raw.get("per_layer_config") is not None:  # which says it
        unsaid.pop("global_head_dim", None)
    found = {key: f"absent: {meaning}" for key, meaning in unsaid.items() if raw.get(key) is None}
    width = raw.get("intermediate_size")
    if family and isinstance(width, int) and width != config.intermediate_size and config.dense_mlp_layers:
        found["intermediate_size"] = f"{width}, but with the file's other keys MLPs are {config.intermediate_size} wide"
    if config.dtype is None:
        found["dtype"] = "absent: bfloat16 on a GPU, float32 on a CPU"
    if config.mtp_layers:
        runs = ", which draft='mtp' runs" if mtp.startswith("yes") else ""
        found[count_key(config.family)] = f"{config.mtp_layers}: not part of the target{runs}"
    return found
