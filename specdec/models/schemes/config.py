"""What a config.json says of quantised weights: the method, each matrix's format, and which matrices are left alone.

Read strictly: a key or a value that nobody here has read about is an error, since it may change the model.  Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec.models.checkpoints.config_values import mapping, text
from specdec.models.schemes.compressed import compressed_keys_and_values, compressed_tensors
from specdec.models.schemes.formats import RoundToNearest
from specdec.models.schemes.methods import awq, fp8, gptq, modelopt, modelopt_keys_and_values
from specdec.models.schemes.rules import HEAD, Quantization, Rule

METHODS = {  # by quant_method, and what of it is read
    "compressed-tensors": "fp8 by tensor, channel or block; int4, int8 by group or channel, zero points or none; nvfp4, mxfp4",
    "fp8": "blocks of 128 x 128 as DeepSeek and Qwen have them, or a scale for each matrix",
    "awq": "int4 with zero points, in the gemm layout",
    "gptq": "int4 and int8, both layouts, in act order (desc_act) or not",
    "modelopt": "fp8 and nvfp4, weights alone",
}
OF_FAMILIES = {"mxfp4": "gpt-oss's own checkpoints: experts in mxfp4, and all else unquantised"}  # by its config
ROUNDED: dict[str, RoundToNearest] = {"fp8": RoundToNearest("e4m3", 0), "int4": RoundToNearest("int4", 128)}
SIDECAR = "hf_quant_config.json"  # of ModelOpt's older files
KEYS = ("quantization_config", "compression_config")  # of config.json; the latter is an older name
AT_LOAD = "rounded to nearest at load"


def round_to_nearest(to: str) -> Quantization:
    """What `quantize="fp8"` or "int4" makes of ordinary weights: all but the output layer, which decides between tokens, and
    the few rows of recurrent layers that decide how long these remember.
    """
    kept = Rule("exact", HEAD), Rule("regex", r".+\.(in_proj_(ba|b|a)|(f_)?[ab]_proj)$")
    return Quantization(AT_LOAD, ((Rule("class", "Linear"), ROUNDED[to]),), kept, setting="quantize")


def head_to_nearest(to: str) -> Quantization:
    """What `draft_quantize="fp8"` or "int4" makes of a draft head's ordinary weights: its output layer is rounded too."""
    rule = Rule("regex", r"(.+\.)?((?!kv_b)\w+_proj(_with_mqa)?|fc|lm_head)$")
    return Quantization(AT_LOAD, ((rule, ROUNDED[to]),), setting="draft_quantize")


def scheme_of(raw: dict[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """What a config.json says of weights of few bits, empty if nothing, and where.  ValueError if it says two things."""
    said = {key: scheme for key in KEYS if (scheme := mapping(raw, key, where))}
    if len(said) == 2 and said[KEYS[0]] != said[KEYS[1]]:
        raise ValueError(f"{where}: {' and '.join(KEYS)} must be equal where both are there, but they differ")
    key = next(iter(said), KEYS[0])
    return said.get(key, {}), f"{where}: {key}"


def quantization_of(raw: dict[str, Any], where: str) -> Quantization | None:
    """How a config.json says that weights are stored in 8 or 4 bits; None: they are unquantised."""
    scheme, where = scheme_of(raw, where)
    return _of_weights(scheme, where) if scheme else None


def _of_weights(scheme: dict[str, Any], where: str) -> Quantization | None:
    return None if _is_of_keys_and_values(scheme, where) else parse_quantization(scheme, where)


def _is_of_keys_and_values(scheme: dict[str, Any], where: str) -> bool:
    """Whether a scheme says no more than that there are fp8 scales of keys and values.

    Without kv_cache_dtype="fp8" they are not used.  ValueError if such a scheme has keys that nobody has read about.
    """
    method = text(scheme, "quant_method", where)
    if method == "modelopt":
        return modelopt_keys_and_values(scheme, where)
    return method == "compressed-tensors" and compressed_keys_and_values(scheme, where)


def read_sidecar(beside: dict[str, Any], raw: dict[str, Any], where: str, config: str) -> dict[str, Any] | None:
    """What hf_quant_config.json says, in the words of a quantization_config; None: config.json says the same.

    beside, raw: the objects in the two files.  where, config: their names.  ValueError names what is wrong in it.
    """
    said, (scheme, key) = {"quant_method": "modelopt", **mapping(beside, "quantization", where)}, scheme_of(raw, config)
    own = _of_weights(said, place := f"{where}: quantization")
    if not scheme:
        return said
    for ours, theirs in zip(_in_words(own), _in_words(_of_weights(scheme, key)), strict=True):
        if ours != theirs:
            raise ValueError(f"{place} says {ours}, but {key} says {theirs}; expected one of them, or both alike")
    return None


def _in_words(made: Quantization | None) -> tuple[str, str]:
    """How weights are stored, and which are not; the output layer aside where its tensors say so."""
    if made is None:
        return "that weights are unquantised", ""
    kept = sorted({rule.what for rule in made.kept} - {rule.what for rule in made.optional})
    return f"that weights are in {made}", f"that {', '.join(kept) or 'no matrices'} stay unquantised"


def parse_quantization(scheme: dict[str, Any], where: str) -> Quantization:
    """ValueError names `where`, the key, what was expected and what was found."""
    method = text(scheme, "quant_method", where)
    if method in OF_FAMILIES:
        raise ValueError(f"{where}: quant_method {method!r} is that of {OF_FAMILIES[method]}, got it for another model")
    if method not in METHODS:
        raise ValueError(
            f"{where}: quant_method must be one of {', '.join(METHODS)}, got {method!r}; nearest thing that works: the same "
            "model in one of these formats, or in bfloat16 with quantize='fp8' or quantize='int4', of a head draft_quantize"
        )
    return _PARSERS[method](scheme, where)


_PARSERS: dict[str, Callable[[dict[str, Any], str], Quantization]] = {
    "compressed-tensors": compressed_tensors, "fp8": fp8, "awq": awq, "gptq": gptq, "modelopt": modelopt,
}  # fmt: skip
