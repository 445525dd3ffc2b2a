"""What DeepSeek's fp8, AWQ, GPTQ and ModelOpt say of quantised weights in a config.json.  Read strictly; knows no tensor."""

from __future__ import annotations

import re
from typing import Any

from specdec.models.checkpoints.config_values import flag, mapping, text, whole
from specdec.models.schemes.compressed import GROUP_KEYS, WEIGHT_KEYS
from specdec.models.schemes.formats import Fp4, Fp8
from specdec.models.schemes.integers import Awq, Gptq
from specdec.models.schemes.rules import (
    HEAD,
    Quantization,
    Rule,
    block,
    check_group,
    name_list,
    neutral,
    only,
    refuse_keys,
    regex_rule,
    rule_of,
)
from specdec.models.schemes.source import WeightFormat

_OPTIONAL_HEAD = (Rule("exact", HEAD),)
_ALL = Rule("class", "Linear")
_SKIPS = "modules_to_not_convert"

# ---- fp8 ----

_FP8 = "quant_method activation_scheme fmt weight_block_size modules_to_not_convert ignored_layers scale_fmt kv_cache_scheme "
_FP8 += "dequantize modules_to_convert expert_dtype"
_PER_MATRIX = Fp8("weight_scale", "tensor", or_scale="weight_scale_inv")  # the latter is transformers' name
_FP8_NEUTRAL = {"dequantize": False, "modules_to_convert": [], "expert_dtype": "fp8"}


def fp8(scheme: dict[str, Any], where: str) -> Quantization:
    refuse_keys(scheme, _FP8, where)
    neutral(scheme, where, _FP8_NEUTRAL)
    only(scheme, "fmt", where, "e4m3", "float8_e4m3fn")
    only(scheme, "activation_scheme", where, "dynamic", "static")
    only(scheme, "scale_fmt", where, "float", "ue8m0")
    mapping(scheme, "kv_cache_scheme", where)
    has_blocks = scheme.get("weight_block_size") is not None
    format = Fp8("weight_scale_inv", "block", block(scheme, "weight_block_size", where)) if has_blocks else _PER_MATRIX
    kept = [*name_list(scheme, "modules_to_not_convert", where), *name_list(scheme, "ignored_layers", where)]
    return Quantization("fp8", ((_ALL, format),), tuple(Rule("wildcard", name) for name in kept), _OPTIONAL_HEAD, _SKIPS)


# ---- AWQ and GPTQ, which the same tools write ----

# Of how weights were quantised, of what wrote them, and of kernels: optimum, AutoGPTQ, gptqmodel, AutoRound, transformers.
_PROCESS = "damp_percent damp_auto_increment true_sequential static_groups mse act_group_aware meta quantizer tokenizer "
_PROCESS += "dataset model_name_or_path model_file_base_name block_name_to_quantize module_name_preceding_first_block "
_PROCESS += "batch_size pad_token_id model_seqlen max_input_length cache_block_outputs use_cuda_fp16 backend exllama_config "
_PROCESS += "use_exllama disable_exllama pack_impl do_fuse fuse_max_seq_len modules_to_fuse "
_PROCESS += "autoround_version provider iters nsamples seqlen lr low_gpu_mem_usage enable_quanted_input model_free "
_PROCESS += "amp enable_minmax_tuning enable_norm_bias_tuning gradient_accumulate_steps minmax_lr scale_dtype "
_PROCESS += "act_data_type act_dynamic act_group_size act_sym "  # of activations, which act_bits says are not rounded
_INTEGERS = "quant_method method bits group_size sym desc_act format checkpoint_format lm_head dynamic pack_dtype "
_INTEGERS += "modules_in_block_to_quantize data_type packing_format act_bits "
_INTEGERS_NEUTRAL = {"pack_dtype": "int32", "data_type": "int", "act_bits": 16}
_AWQ_NAMES = {"q_group_size": "group_size", "w_bit": "bits"}  # of AutoAWQ's own quant_config.json


def awq(scheme: dict[str, Any], where: str) -> Quantization:
    refuse_keys(scheme, _PROCESS + _INTEGERS + "zero_point version modules_to_not_convert q_group_size w_bit", where)
    scheme = _by_one_name(scheme, _AWQ_NAMES, where)
    neutral(scheme, where, {**_INTEGERS_NEUTRAL, "method": "awq", "packing_format": "auto_awq", "zero_point": True})
    neutral(scheme, where, {"bits": 4, "desc_act": False})
    if text(scheme, "backend", where) == "llm-awq":
        raise ValueError(f"{where}: backend must be another than 'llm-awq', whose layout is not gemm")
    flag(scheme, "sym", where)  # which transformers writes as true: zero points are read whatever it says
    _layout(scheme, ("version", "format", "checkpoint_format"), where, "gemm")
    kept = tuple(Rule("part", name) for name in name_list(scheme, "modules_to_not_convert", where))
    return _of_integers("awq", scheme, Awq(_group_size(scheme, where)), kept, where)


def gptq(scheme: dict[str, Any], where: str) -> Quantization:
    refuse_keys(scheme, _PROCESS + _INTEGERS + "is_marlin_format", where)
    neutral(scheme, where, {**_INTEGERS_NEUTRAL, "method": "gptq", "is_marlin_format": False})
    only(scheme, "packing_format", where, "auto_gptq", "auto_round:auto_gptq")
    bits, symmetric = only(scheme, "bits", where, 4, 8), flag(scheme, "sym", where, True)
    layout = _layout(scheme, ("checkpoint_format", "format"), where, "gptq", "gptq_v2")
    group = _group_size(scheme, where)
    # Groups that were chosen before columns were sorted, and a group of all columns, are of neighbours.
    in_act_order = flag(scheme, "desc_act", where) and not flag(scheme, "static_groups", where) and group > 0
    format = Gptq(bits, group, symmetric, int(layout == "gptq"), in_act_order)
    return _of_integers("gptq", scheme, format, (), where)


def _by_one_name(scheme: dict[str, Any], names: dict[str, str], where: str) -> dict[str, Any]:
    """The scheme with other names of keys turned into ours.  ValueError if both names are there and say different things."""
    found = dict(scheme)
    for other, name in names.items():
        value = found.pop(other, None)
        if value is None:
            continue
        if found.get(name) not in (None, value):
            raise ValueError(
                f"{where}: {name} and {other} must be equal where both are there, got {found[name]!r} and {value!r}"
            )
        found[name] = value
    return found


def _layout(scheme: dict[str, Any], keys: tuple[str, ...], where: str, *allowed: str) -> str:
    """The layout of quantised values, which several keys may name; the first allowed one where none does."""
    said = {key: value.lower() for key in keys if (value := text(scheme, key, where)) is not None}
    for key, value in said.items():
        if value not in allowed:
            raise ValueError(f"{where}: {key} must be {' or '.join(map(repr, allowed))}, got {scheme[key]!r}")
    if len(set(said.values())) > 1:
        raise ValueError(f"{where}: {' and '.join(said)} must be equal, got {' and '.join(map(repr, said.values()))}")
    return next(iter(said.values()), allowed[0])


def _of_integers(
    method: str, scheme: dict[str, Any], format: Awq | Gptq, kept: tuple[Rule, ...], where: str
) -> Quantization:  # fmt: skip
    """kept: matrices that keys of this method alone leave unquantised."""
    for pattern in mapping(scheme, "dynamic", where):
        if not pattern.startswith("-:"):
            raise ValueError(f"{where}: dynamic may skip modules ('-:regex'), not change their settings, got {pattern!r}")
        kept += (regex_rule(pattern.removeprefix("-:"), "dynamic", where),)
    runs = [] if scheme.get("modules_in_block_to_quantize") is None else scheme["modules_in_block_to_quantize"]
    if not isinstance(runs, list) or not all(isinstance(run, list) and all(isinstance(n, str) for n in run) for run in runs):
        raise ValueError(f"{where}: modules_in_block_to_quantize must be null or a list of lists of names, got {runs!r}")
    named = tuple(Rule("regex", rf".*\.{re.escape(name)}$") for run in runs for name in run)  # all others are unquantised
    has_head = flag(scheme, "lm_head", where)
    rules = (*named, Rule("exact", HEAD)) if named else (_ALL,)
    optional, skips = () if has_head else _OPTIONAL_HEAD, _SKIPS if method == "awq" else "dynamic ('-:regex'), or lm_head false"
    return Quantization(method, tuple((rule, format) for rule in rules), kept, optional, skips)


def _group_size(scheme: dict[str, Any], where: str) -> int:
    if scheme.get("group_size", 128) == -1:
        return 0
    size = whole(scheme, "group_size", where, 128)
    check_group(size, f"{where}: group_size")
    return size


# ---- ModelOpt ----

_MODELOPT = "quant_method quant_algo has_zero_point pre_quant_scale kv_cache_quant_algo kv_cache_scheme group_size ignore "
_MODELOPT += "exclude_modules producer config_groups"
_ALGORITHMS = {"FP8": (8, (None, 0)), "NVFP4": (4, (16, None)), "W4A16_NVFP4": (4, (16, None))}  # bits, and columns of a scale


def modelopt(scheme: dict[str, Any], where: str) -> Quantization:
    refuse_keys(scheme, _MODELOPT, where)
    neutral(scheme, where, {"pre_quant_scale": False, "has_zero_point": False})
    only(scheme, "kv_cache_quant_algo", where, None, "FP8")
    mapping(scheme, "kv_cache_scheme", where)
    algorithm = text(scheme, "quant_algo", where)
    if algorithm not in _ALGORITHMS:
        why = ", which scales activations" if algorithm == "NVFP4_AWQ" else ""
        raise ValueError(f"{where}: quant_algo must be {' or '.join(map(repr, _ALGORITHMS))}, got {algorithm!r}{why}")
    _expect_of_algorithm(scheme, algorithm, where)
    fp4 = Fp4("weight", 16, "weight_scale_2")
    kept = [*name_list(scheme, "exclude_modules", where), *name_list(scheme, "ignore", where)]
    format: WeightFormat = Fp8("weight_scale", "tensor") if algorithm == "FP8" else fp4
    rules = tuple(rule_of(name, "ignore", where) if name.startswith("re:") else Rule("wildcard", name) for name in kept)
    return Quantization("modelopt", ((_ALL, format),), rules, _OPTIONAL_HEAD)


def _expect_of_algorithm(scheme: dict[str, Any], algorithm: str, where: str) -> None:
    """ValueError if other keys say other weights than quant_algo does."""
    bits, sizes = _ALGORITHMS[algorithm]
    groups = mapping(scheme, "config_groups", where)
    said: dict[str, tuple[Any, ...]] = {where: (scheme.get("group_size"), None, None, None)}
    for name in groups:
        group, inside = mapping(groups, name, where), f"{where}: config_groups.{name}"
        refuse_keys(group, GROUP_KEYS, inside)
        weights = mapping(group, "weights", inside)
        refuse_keys(weights, WEIGHT_KEYS, f"{inside}.weights")
        said[inside] = (*(weights.get(key) for key in ("group_size", "num_bits", "type")), group.get("targets"))
    for place, (size, own_bits, kind, targets) in said.items():
        if size not in sizes:
            raise ValueError(f"{place}: group_size must be {sizes[0]} or left out with quant_algo {algorithm!r}, got {size!r}")
        if own_bits not in (None, bits) or kind not in (None, "float") or targets not in (None, ["Linear"]):
            raise ValueError(
                f"{place} must say {bits} bits, type 'float' and targets ['Linear'] with quant_algo {algorithm!r}, got "
                f"num_bits {own_bits!r}, type {kind!r} and targets {targets!r}"
            )


def modelopt_keys_and_values(scheme: dict[str, Any], where: str) -> bool:
    """Whether the scheme has fp8 scales of keys and values alone, and no weights."""
    if scheme.get("kv_cache_quant_algo") != "FP8" or scheme.get("quant_algo") or mapping(scheme, "config_groups", where):
        return False
    refuse_keys(scheme, _MODELOPT, where)
    return True
