"""A GGUF file's keys as the config.json that Hugging Face would have of the same model.  Reads no weight.

Every key is read, known to change nothing, or an error that names it.
"""

from __future__ import annotations

from typing import Any

from specdec.models.gguf.architectures import TOP, Architecture, find_architecture
from specdec.models.gguf.file import GgufFile
from specdec.models.gguf.rope import rope_of
from specdec.models.gguf.vocabulary import GgufVocabulary

# Whose keys describe the file and its making, and change nothing that a model computes.
_ABOUT = ("general.", "quantize.", "split.", "imatrix.", "mradermacher.")  # the last: a publisher of many files
_ABOUT_TENSORS = frozenset({"tensor_data_layout", "vocab_size"})  # the shapes of tensors say as much
_REQUIRED = (
    "block_count context_length embedding_length feed_forward_length attention.head_count attention.layer_norm_rms_epsilon"
).split()
# With these values, keys say no more than that the model has nothing of the kind.
_NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}


def config_of(file: GgufFile) -> dict[str, Any]:
    """The object of a config.json.  ValueError names the file and the key that is wrong, missing or unknown."""
    architecture, where = find_architecture(file), str(file.path)
    if (kind := file.keys.get("general.type", "model")) != "model":
        raise ValueError(f"{where}: general.type must be 'model', got {kind!r}")
    if (pieces := file.keys.get("split.count", 1)) not in (0, 1):
        raise ValueError(f"{where}: split.count must be 1, got {pieces!r}: other files hold the model's other tensors")
    own = _own_keys(file)
    if missing := [key for key in _REQUIRED if own.get(key) is None]:
        raise ValueError(f"{where} lacks {', '.join(f'{file.architecture}.{key}' for key in missing)}")
    config: dict[str, Any] = {"model_type": architecture.model_type, "architectures": [architecture.model_class]}
    for key, name in architecture.sizes.items():
        if (value := own.pop(key, None)) is None:
            continue
        if name in config and config[name] != value:
            raise ValueError(f"{where}: {file.architecture}.{key} must be {config[name]!r}, as another key says, got {value!r}")
        config[name] = value
    config["vocab_size"] = file.vocab_size
    config |= _rope_and_heads(file, own, config, where)
    config |= _as_tensors_say(file, architecture)
    for key, neutral in _NEUTRAL.items():
        if (value := own.pop(key, neutral)) != neutral:
            raise ValueError(f"{where}: {file.architecture}.{key} must be {neutral!r} or left out, got {value!r}")
    if unknown := sorted(own.keys() - _ABOUT_TENSORS):
        names = ", ".join(f"{file.architecture}.{key}" for key in unknown)
        raise ValueError(f"{where}: unknown keys {names}; they may change what the model computes")
    return config | _ends(file, config["vocab_size"])


def _own_keys(file: GgufFile) -> dict[str, Any]:
    """The keys below the architecture's name.  ValueError for any that is none of these, nor known to say nothing."""
    prefix = f"{file.architecture}."
    stray = [key for key in file.keys if not key.startswith((prefix, "tokenizer.", *_ABOUT))]
    if stray:
        raise ValueError(f"{file.path}: unknown keys {', '.join(sorted(stray))}; they may change what the model computes")
    return {key.removeprefix(prefix): value for key, value in file.keys.items() if key.startswith(prefix)}


def _rope_and_heads(file: GgufFile, own: dict[str, Any], config: dict[str, Any], where: str) -> dict[str, Any]:
    """Takes the keys about heads and rope out of `own`."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    head_dim = config.get("head_dim")
    if head_dim is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        head_dim = hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := own.pop(key, head_dim)) != head_dim and head_dim is not None:  # without one, other keys are at fault
            raise ValueError(
                f"{where}: {file.architecture}.{key} must be the width of a head, {head_dim}, got {value!r}: values of another "
                "width, and heads of which a part is turned, are not computed here"
            )
    return {"head_dim": head_dim, **rope_of(file, own, head_dim)}


def _as_tensors_say(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """What a GGUF file says by having a tensor, or by how it stores one."""
    types = {tensor.type for tensor in file.tensors.values()}
    return {
        "tie_word_embeddings": next(name for name, other in TOP.items() if other == "lm_head") + ".weight" not in file.tensors,
        "torch_dtype": "float32" if types == {"F32"} else "float16" if types <= {"F16", "F32"} else "bfloat16",
        **{key: tensor in file.tensors for key, tensor in architecture.biased.items()},
        **architecture.also,
    }


def _ends(file: GgufFile, vocab_size: int) -> dict[str, Any]:
    """Every token that the file calls the end of a text, of a turn or of a message."""
    vocabulary = GgufVocabulary.of(file, vocab_size)  # which refuses what no tokenizer here could read, before a weight is read
    return {} if vocabulary is None else {"eos_token_id": list(vocabulary.end_ids), "bos_token_id": vocabulary.named.get("bos")}
