"""What a config.json says of quantised weights: the method, each matrix's format, and which matrices are left alone.

Read strictly: a key or a value that nobody here has read about is an error, since it may change the model.  Knows no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from specdec.models.checkpoints.config_values import flag, mapping, text, whole
from specdec.models.schemes.formats import MX_BLOCK, Awq, ExpertBlocks, Format, Fp4, Fp8, Gptq, PackedInts, RoundToNearest

METHODS = {  # by quant_method, and what of it is read
    "compressed-tensors": "fp8 by tensor, channel or block; int4 and int8 by group or channel, zeros or none; nvfp4, mxfp4",
    "fp8": "blocks of 128 x 128 as DeepSeek and Qwen have them, or a scale for each matrix",
    "awq": "int4 with zeros, in the gemm layout",
    "gptq": "int4 and int8 in order (desc_act false), both layouts",
    "modelopt": "fp8 and nvfp4, weights alone",
}
OF_FAMILIES = {"mxfp4": "gpt-oss's own checkpoints: experts in mxfp4, and all else in ordinary numbers"}  # by its config
ROUNDED: dict[str, RoundToNearest] = {"fp8": RoundToNearest("e4m3", 0), "int4": RoundToNearest("int4", 128)}
HEAD = "lm_head"
AT_LOAD = "rounded to nearest at load"


@dataclass(frozen=True)
class Rule:
    """A name in the words of a config: exact, a regular expression from the beginning, a wildcard, a part, or a class."""

    how: Literal["exact", "regex", "wildcard", "part", "class"]
    what: str

    def fits(self, name: str) -> bool:
        if self.how == "regex":
            return re.match(self.what, name) is not None
        if self.how == "wildcard":
            return fnmatchcase(name, self.what) or name.startswith(f"{self.what}.")
        if self.how == "part":
            return self.what in name
        return self.how == "class" or name == self.what


@dataclass(frozen=True)
class Quantization:
    """The weight scheme of a checkpoint.

    method: who wrote it, or "round to nearest".  formats: rules and the format of the matrices that they fit; exact rules
    before expressions, and those before classes.  kept: matrices that are ordinary numbers.
    optional: matrices that are quantised only where the tensors say so.
    """

    method: str
    formats: tuple[tuple[Rule, Format], ...]
    kept: tuple[Rule, ...] = ()
    optional: tuple[Rule, ...] = ()

    def format_of(self, name: str, has: Callable[[Format], bool]) -> Format | None:
        """The format of the matrix of that name; None: ordinary numbers.  has: whether the tensors look like the format."""
        if any(rule.fits(name) for rule in self.kept):
            return None
        found = next((format for rule, format in self.formats if rule.fits(name)), None)
        if found is not None and any(rule.fits(name) for rule in self.optional) and not has(found):
            return None
        return found

    def groups(self, names: Iterable[str]) -> tuple[int, ...]:
        """Columns of a scale, of each format in which matrices of these names may be and which has scales for groups."""
        found = {format for name in names if (format := self.format_of(name, lambda _: True)) is not None}
        return tuple(sorted({group for format in found if (group := _group_of(format))}))

    def __str__(self) -> str:
        kinds = ", ".join(dict.fromkeys(describe(format) for _, format in self.formats))
        return f"{kinds} ({self.method})"


def _group_of(format: Format) -> int:
    if isinstance(format, ExpertBlocks):
        return MX_BLOCK
    if isinstance(format, Fp8):
        return format.block[1] if format.per == "block" else 0
    assert isinstance(format, Awq | Fp4 | Gptq | PackedInts | RoundToNearest)
    return format.group


def describe(format: Format) -> str:
    """A format in a few words, as `specdec inspect` prints it."""
    if isinstance(format, Fp8):
        scaled = {"tensor": "matrix", "channel": "row", "block": f"{format.block[0]} x {format.block[1]} block"}[format.per]
        return f"fp8, a scale for each {scaled}"
    if isinstance(format, Fp4):
        return "nvfp4, weights alone" if format.whole else "mxfp4, weights alone"
    if isinstance(format, ExpertBlocks):
        return "experts in mxfp4, weights alone"
    if isinstance(format, RoundToNearest):
        groups = f"{format.group} columns" if format.group else "row"
        return f"{'fp8' if format.kind == 'e4m3' else format.kind}, a scale for each {groups}"
    assert isinstance(format, Awq | Gptq | PackedInts)
    bits = 4 if isinstance(format, Awq) else format.bits
    symmetric = not isinstance(format, Awq) and format.symmetric
    run = f"{format.group} columns" if format.group else "row"
    return f"int{bits}, a scale{'' if symmetric else ' and a zero'} for each {run}"


def round_to_nearest(to: str) -> Quantization:
    """What `quantize="fp8"` or "int4" makes of ordinary weights: all but the output layer, which decides between tokens."""
    return Quantization(AT_LOAD, ((Rule("class", "Linear"), ROUNDED[to]),), (Rule("exact", HEAD),))


def head_to_nearest(to: str) -> Quantization:
    """What `draft_quantize="fp8"` or "int4" makes of a draft head's ordinary weights: its output layer is rounded too."""
    return Quantization(AT_LOAD, ((Rule("regex", r"(.+\.)?(\w+_proj|fc|lm_head)$"), ROUNDED[to]),))


def parse_quantization(scheme: dict[str, Any], where: str) -> Quantization:
    """ValueError names `where`, the key, what was expected and what was found."""
    method = text(scheme, "quant_method", where)
    if method in OF_FAMILIES:
        raise ValueError(f"{where}: quant_method {method!r} is that of {OF_FAMILIES[method]}, got it for another model")
    if method not in METHODS:
        raise ValueError(
            f"{where}: quant_method must be one of {', '.join(METHODS)}, got {method!r}; nearest thing that works: the same "
            "model in one of these formats, or in bfloat16 with quantize='fp8' or quantize='int4'"
        )
    return _PARSERS[method](scheme, where)


def _refuse_unknown(scheme: dict[str, Any], known: str, where: str) -> None:
    said = {key for key, value in scheme.items() if value not in (None, {})}
    if unknown := sorted(said - set(known.split())):
        raise ValueError(f"{where}: unknown keys {', '.join(unknown)}; they may change what the weights stand for")


def _only(raw: dict[str, Any], key: str, where: str, *allowed: Any) -> Any:
    """The value, which must be one of these; the first stands for an absent one."""
    value = raw.get(key, allowed[0])
    if value not in allowed:
        raise ValueError(f"{where}: {key} must be {' or '.join(map(repr, allowed))}, got {value!r}")
    return value


def _names(raw: dict[str, Any], key: str, where: str) -> list[str]:
    value = raw.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{where}: {key} must be null or a list of names, got {value!r}")
    return value


def _rule(name: str) -> Rule:
    """compressed-tensors' way to name modules."""
    if name.startswith("re:"):
        return Rule("regex", name.removeprefix("re:"))
    return Rule("class", name) if name == "Linear" else Rule("exact", name)


# ---- compressed-tensors ----

_CT = "quant_method format config_groups ignore kv_cache_scheme quantization_status global_compression_ratio version "
_CT += "transform_config sparsity_config"
_CT_GROUP = "targets weights input_activations output_activations format"
_CT_WEIGHTS = "num_bits type symmetric strategy group_size block_structure dynamic actorder scale_dtype zp_dtype "
_CT_WEIGHTS += "observer observer_kwargs"


def _compressed_tensors(scheme: dict[str, Any], where: str) -> Quantization:
    _refuse_unknown(scheme, _CT, where)
    _only(scheme, "quantization_status", where, "compressed")
    for key in ("transform_config", "sparsity_config"):
        if mapping(scheme, key, where):
            raise ValueError(f"{where}: {key} must be absent or empty: it changes what layers compute, got {scheme[key]!r}")
    formats: list[tuple[Rule, Format]] = []
    groups = mapping(scheme, "config_groups", where)
    for name in groups:
        inside, group = f"{where}: config_groups.{name}", mapping(groups, name, where)
        _refuse_unknown(group, _CT_GROUP, inside)
        if not group.get("weights"):
            continue
        if group.get("output_activations"):
            raise ValueError(f"{inside}: output_activations must be null, got {group['output_activations']!r}")
        kind = text(group, "format", inside) or text(scheme, "format", where)
        format = _ct_format(mapping(group, "weights", inside), kind, f"{inside}.weights")
        formats += [(_rule(target), format) for target in _names(group, "targets", inside)]
    if not formats:
        raise ValueError(f"{where}: config_groups must say how weights are stored, got {groups!r}")
    formats.sort(key=lambda pair: ("exact", "regex", "class").index(pair[0].how))
    kept = tuple(_rule(name) for name in _names(scheme, "ignore", where))
    return Quantization("compressed-tensors", tuple(formats), kept)


def _ct_format(weights: dict[str, Any], kind: str | None, where: str) -> Format:
    _refuse_unknown(weights, _CT_WEIGHTS, where)
    bits, strategy = whole(weights, "num_bits", where), text(weights, "strategy", where)
    number, symmetric = _only(weights, "type", where, "int", "float"), flag(weights, "symmetric", where, True)
    if weights.get("dynamic"):
        raise ValueError(f"{where}: dynamic must be false for weights, got {weights['dynamic']!r}")
    if weights.get("actorder") not in (None, "weight", "static"):
        raise ValueError(f"{where}: actorder must be null, 'weight' or 'static', got {weights['actorder']!r}")
    if number == "float" and bits == 8 and symmetric and kind in ("float-quantized", "naive-quantized"):
        if strategy == "block":
            return Fp8("weight_scale", "block", _block(weights.get("block_structure"), where))
        if strategy in ("tensor", "channel"):
            return Fp8("weight_scale", "tensor" if strategy == "tensor" else "channel")
    if number == "float" and bits == 4 and symmetric:
        size = whole(weights, "group_size", where)
        if kind == "nvfp4-pack-quantized" and size == 16:
            return Fp4("weight_packed", 16, "weight_global_scale", divides=True)
        if kind == "mxfp4-pack-quantized" and size == 32:
            return Fp4("weight_packed", 32)
    if number == "int" and bits in (4, 8) and kind == "pack-quantized" and strategy in ("group", "channel"):
        group = whole(weights, "group_size", where) if strategy == "group" else 0
        return PackedInts(bits, _group(group, where), symmetric)
    raise ValueError(
        f"{where}: expected fp8 (float-quantized) by tensor, channel or block, 4 or 8 bit integers (pack-quantized) by group "
        f"or channel, nvfp4 or mxfp4; got {bits} bits of {number}, by {strategy}, symmetric {symmetric}, {kind}"
    )


def _block(value: Any, where: str) -> tuple[int, int]:
    sizes = [int(part) for part in value.split("x")] if isinstance(value, str) and re.fullmatch(r"\d+x\d+", value) else value
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"{where}: a block must be [rows, columns], got {value!r}")
    _group(sizes[1], where)
    return sizes[0], sizes[1]


def _group(group: int, where: str) -> int:
    """The kernels read a scale for each 32 columns, or a larger power of two of them."""
    if group and (group < 32 or group & (group - 1)):
        raise ValueError(f"{where}: a group of columns must be a power of two from 32 on, got {group}")
    return group


# ---- others ----

_KEPT_HEAD = (Rule("exact", HEAD),)
_ALL = Rule("class", "Linear")


def _fp8(scheme: dict[str, Any], where: str) -> Quantization:
    known = (
        "quant_method activation_scheme fmt weight_block_size modules_to_not_convert ignored_layers scale_fmt kv_cache_scheme"
    )
    _refuse_unknown(scheme, known, where)
    _only(scheme, "fmt", where, "e4m3", None)
    _only(scheme, "activation_scheme", where, "dynamic", "static")
    _only(scheme, "scale_fmt", where, None, "float", "ue8m0")
    blocks = scheme.get("weight_block_size")
    format = Fp8("weight_scale", "tensor") if blocks is None else Fp8("weight_scale_inv", "block", _block(blocks, where))
    kept = [*_names(scheme, "modules_to_not_convert", where), *_names(scheme, "ignored_layers", where)]
    return Quantization("fp8", ((_ALL, format),), tuple(Rule("wildcard", name) for name in kept), _KEPT_HEAD)


def _awq(scheme: dict[str, Any], where: str) -> Quantization:
    known = "quant_method bits group_size zero_point version modules_to_not_convert backend do_fuse exllama_config "
    _refuse_unknown(scheme, known + "fuse_max_seq_len modules_to_fuse", where)
    _only(scheme, "bits", where, 4)
    _only(scheme, "zero_point", where, True)
    _only(scheme, "version", where, "gemm", "GEMM")
    kept = tuple(Rule("part", name) for name in _names(scheme, "modules_to_not_convert", where))
    return Quantization("awq", ((_ALL, Awq(_group_size(scheme, where))),), kept, _KEPT_HEAD)


_GPTQ = "quant_method bits group_size desc_act sym checkpoint_format lm_head dynamic damp_percent true_sequential format mse "
_GPTQ += "static_groups model_name_or_path model_file_base_name is_marlin_format quantizer meta pack_dtype dataset tokenizer "
_GPTQ += "block_name_to_quantize module_name_preceding_first_block batch_size pad_token_id model_seqlen max_input_length "
_GPTQ += "cache_block_outputs use_cuda_fp16 backend exllama_config use_exllama disable_exllama damp_auto_increment"


def _gptq(scheme: dict[str, Any], where: str) -> Quantization:
    _refuse_unknown(scheme, _GPTQ, where)
    bits, symmetric = _only(scheme, "bits", where, 4, 8), flag(scheme, "sym", where, True)
    layout = text(scheme, "checkpoint_format", where) or text(scheme, "format", where) or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise ValueError(f"{where}: checkpoint_format must be 'gptq' or 'gptq_v2', got {layout!r}")
    kept = []
    for pattern in mapping(scheme, "dynamic", where):
        if not pattern.startswith("-:"):
            raise ValueError(f"{where}: dynamic may skip modules ('-:regex'), not change their settings, got {pattern!r}")
        kept.append(Rule("regex", pattern.removeprefix("-:")))
    format = Gptq(bits, _group_size(scheme, where), symmetric, int(layout == "gptq"))
    return Quantization("gptq", ((_ALL, format),), tuple(kept), () if flag(scheme, "lm_head", where) else _KEPT_HEAD)


def _group_size(scheme: dict[str, Any], where: str) -> int:
    size = scheme.get("group_size", 128)
    return 0 if size == -1 else _group(whole(scheme, "group_size", where, 128), where)


def _modelopt(scheme: dict[str, Any], where: str) -> Quantization:
    known = "quant_method quant_algo has_zero_point pre_quant_scale kv_cache_quant_algo kv_cache_scheme group_size ignore "
    known += "exclude_modules producer config_groups"
    _refuse_unknown(scheme, known, where)
    _only(scheme, "pre_quant_scale", where, False, None)
    _only(scheme, "has_zero_point", where, False, None)
    algorithm = _only(scheme, "quant_algo", where, "FP8", "NVFP4", "W4A16_NVFP4", "NVFP4_AWQ")
    if algorithm == "NVFP4_AWQ":
        raise ValueError(f"{where}: quant_algo must be FP8 or NVFP4, got {algorithm!r}, which scales activations")
    fp4 = Fp4("weight", 16, "weight_scale_2")
    kept = [*_names(scheme, "exclude_modules", where), *_names(scheme, "ignore", where)]
    format: Format = Fp8("weight_scale", "tensor") if algorithm == "FP8" else fp4
    rules = tuple(_rule(name) if name.startswith("re:") else Rule("wildcard", name) for name in kept)
    return Quantization("modelopt", ((_ALL, format),), rules, _KEPT_HEAD)


_PARSERS: dict[str, Callable[[dict[str, Any], str], Quantization]] = {
    "compressed-tensors": _compressed_tensors, "fp8": _fp8, "awq": _awq, "gptq": _gptq, "modelopt": _modelopt,
}  # fmt: skip
