"""What DeepSeek's fp8, AWQ, GPTQ and ModelOpt say of quantised weights in a config.json.  Read strictly; knows no tensor."""

from __future__ import annotations

from typing import Any

from specdec.models.checkpoints.config_values import flag, mapping, text, whole
from specdec.models.schemes.formats import Fp4, Fp8
from specdec.models.schemes.integers import Awq, Gptq
from specdec.models.schemes.rules import HEAD, Quantization, Rule, block, group_size, name_list, only, refuse_keys, rule_of
from specdec.models.schemes.source import Format

_OPTIONAL_HEAD = (Rule("exact", HEAD),)
_ALL = Rule("class", "Linear")


def fp8(scheme: dict[str, Any], where: str) -> Quantization:
    known = (
        "quant_method activation_scheme fmt weight_block_size modules_to_not_convert ignored_layers scale_fmt kv_cache_scheme"
    )
    refuse_keys(scheme, known, where)
    only(scheme, "fmt", where, "e4m3", None)
    only(scheme, "activation_scheme", where, "dynamic", "static")
    only(scheme, "scale_fmt", where, None, "float", "ue8m0")
    blocks = scheme.get("weight_block_size")
    format = Fp8("weight_scale", "tensor") if blocks is None else Fp8("weight_scale_inv", "block", block(blocks, where))
    kept = [*name_list(scheme, "modules_to_not_convert", where), *name_list(scheme, "ignored_layers", where)]
    return Quantization("fp8", ((_ALL, format),), tuple(Rule("wildcard", name) for name in kept), _OPTIONAL_HEAD)


def awq(scheme: dict[str, Any], where: str) -> Quantization:
    known = "quant_method bits group_size zero_point version modules_to_not_convert backend do_fuse exllama_config "
    refuse_keys(scheme, known + "fuse_max_seq_len modules_to_fuse", where)
    only(scheme, "bits", where, 4)
    only(scheme, "zero_point", where, True)
    only(scheme, "version", where, "gemm", "GEMM")
    kept = tuple(Rule("part", name) for name in name_list(scheme, "modules_to_not_convert", where))
    return Quantization("awq", ((_ALL, Awq(_group_size(scheme, where))),), kept, _OPTIONAL_HEAD)


_GPTQ = "quant_method bits group_size desc_act sym checkpoint_format lm_head dynamic damp_percent true_sequential format mse "
_GPTQ += "static_groups model_name_or_path model_file_base_name is_marlin_format quantizer meta pack_dtype dataset tokenizer "
_GPTQ += "block_name_to_quantize module_name_preceding_first_block batch_size pad_token_id model_seqlen max_input_length "
_GPTQ += "cache_block_outputs use_cuda_fp16 backend exllama_config use_exllama disable_exllama damp_auto_increment"


def gptq(scheme: dict[str, Any], where: str) -> Quantization:
    refuse_keys(scheme, _GPTQ, where)
    bits, symmetric = only(scheme, "bits", where, 4, 8), flag(scheme, "sym", where, True)
    layout = text(scheme, "checkpoint_format", where) or text(scheme, "format", where) or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise ValueError(f"{where}: checkpoint_format must be 'gptq' or 'gptq_v2', got {layout!r}")
    kept = []
    for pattern in mapping(scheme, "dynamic", where):
        if not pattern.startswith("-:"):
            raise ValueError(f"{where}: dynamic may skip modules ('-:regex'), not change their settings, got {pattern!r}")
        kept.append(Rule("regex", pattern.removeprefix("-:")))
    format = Gptq(bits, _group_size(scheme, where), symmetric, int(layout == "gptq"))
    return Quantization("gptq", ((_ALL, format),), tuple(kept), () if flag(scheme, "lm_head", where) else _OPTIONAL_HEAD)


def _group_size(scheme: dict[str, Any], where: str) -> int:
    size = scheme.get("group_size", 128)
    return 0 if size == -1 else group_size(whole(scheme, "group_size", where, 128), where)


def modelopt(scheme: dict[str, Any], where: str) -> Quantization:
    known = "quant_method quant_algo has_zero_point pre_quant_scale kv_cache_quant_algo kv_cache_scheme group_size ignore "
    known += "exclude_modules producer config_groups"
    refuse_keys(scheme, known, where)
    only(scheme, "pre_quant_scale", where, False, None)
    only(scheme, "has_zero_point", where, False, None)
    algorithm = only(scheme, "quant_algo", where, "FP8", "NVFP4", "W4A16_NVFP4", "NVFP4_AWQ")
    if algorithm == "NVFP4_AWQ":
        raise ValueError(f"{where}: quant_algo must be FP8 or NVFP4, got {algorithm!r}, which scales activations")
    fp4 = Fp4("weight", 16, "weight_scale_2")
    kept = [*name_list(scheme, "exclude_modules", where), *name_list(scheme, "ignore", where)]
    format: Format = Fp8("weight_scale", "tensor") if algorithm == "FP8" else fp4
    rules = tuple(rule_of(name) if name.startswith("re:") else Rule("wildcard", name) for name in kept)
    return Quantization("modelopt", ((_ALL, format),), rules, _OPTIONAL_HEAD)
