"""Notices weights of 8 or 4 bits of which a config.json says nothing: a file of keys beside it was not read, or keys were lost.

Knows the marks of the formats in names and headers, and nothing that would load them.
"""

from __future__ import annotations

from specdec.models.checkpoints.checkpoint import Checkpoint

SIDECARS = ("quantize_config.json", "quant_config.json", "quantization_config.json")  # of AutoGPTQ, AutoAWQ and AutoRound
_BYTES = ("F8_E4M3", "F8_E5M2", "U8", "I8")


def refuse_unsaid_quantisation(checkpoint: Checkpoint) -> None:
    """ValueError if tensors look quantised.  Asked where the config says that no weights are."""
    found = next(filter(None, (_kind_of(checkpoint, name) for name in checkpoint.names())), None)
    if found is None:
        return
    name, kind, methods = found
    folder = checkpoint.folder
    beside = next((file for file in SIDECARS if (folder / file).is_file()), None)
    keys = f"the keys of {beside}, which lies beside it," if beside else "the keys of the tool that wrote the weights"
    raise ValueError(
        f"{checkpoint.file(name)}: tensor {name!r} looks like a quantised weight ({kind}), but {folder / 'config.json'} lacks "
        f"quantization_config, which says how they are stored; expected there {keys} and quant_method {methods}"
    )


def _kind_of(checkpoint: Checkpoint, name: str) -> tuple[str, str, str] | None:
    """The tensor's name, what has tensors so named, and its quant_method; None for ordinary tensors."""
    matrix, _, ending = name.rpartition(".")
    if ending == "qweight" and f"{matrix}.scales" in checkpoint:
        words, scales = checkpoint.shape(name), checkpoint.shape(f"{matrix}.scales")
        return (name, "GPTQ", "'gptq'") if words[-1:] == scales[-1:] else (name, "AWQ", "'awq'")
    if ending == "weight_packed":
        return name, "compressed-tensors", "'compressed-tensors'"
    own = f"{matrix}.weight"
    if ending not in ("weight_scale", "weight_scale_inv") or own not in checkpoint or checkpoint.dtype(own) not in _BYTES:
        return None
    if f"{matrix}.weight_scale_2" in checkpoint:
        return own, "ModelOpt", "'modelopt'"
    if ending == "weight_scale_inv":
        return own, "fp8 with a scale for each block or matrix", "'fp8'"
    return own, "fp8", "'compressed-tensors', 'modelopt' or 'fp8'"
