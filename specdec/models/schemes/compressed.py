"""What compressed-tensors says of quantised weights in a config.json.  Read strictly; knows no tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.models.checkpoints.config_values import flag, mapping, text, whole
from specdec.models.schemes.formats import Fp4, Fp8
from specdec.models.schemes.integers import PackedInts
from specdec.models.schemes.rules import Quantization, Rule, block, check_group, name_list, only, refuse_keys, rule_of
from specdec.models.schemes.source import WeightFormat

_KNOWN = "quant_method format config_groups ignore kv_cache_scheme quantization_status global_compression_ratio version "
_KNOWN += "transform_config sparsity_config"
GROUP_KEYS = "targets weights input_activations output_activations format"
_ACT_ORDER = ("group", "dynamic", True)  # of older files: a group's columns are no neighbours, and weight_g_idx names them
_IN_ORDER = (None, False, "weight", "static")  # which change only how weights were rounded
WEIGHT_KEYS = "num_bits type symmetric strategy group_size block_structure dynamic actorder scale_dtype zp_dtype "
WEIGHT_KEYS += "observer observer_kwargs"


def compressed_tensors(scheme: dict[str, Any], where: str) -> Quantization:
    refuse_keys(scheme, _KNOWN, where)
    only(scheme, "quantization_status", where, "compressed")
    refuse_changes(scheme, where)
    if kv := mapping(scheme, "kv_cache_scheme", where):
        only(kv, "num_bits", f"{where}: kv_cache_scheme", 8)
        only(kv, "type", f"{where}: kv_cache_scheme", "float")
    everywhere, formats = text(scheme, "format", where), list[tuple[Rule, WeightFormat]]()
    groups = mapping(scheme, "config_groups", where)
    for name in groups:
        inside, group = f"{where}: config_groups.{name}", mapping(groups, name, where)
        refuse_keys(group, GROUP_KEYS, inside)
        mapping(group, "input_activations", inside)
        if not mapping(group, "weights", inside):
            continue
        if group.get("output_activations"):
            raise ValueError(f"{inside}: output_activations must be null, got {group['output_activations']!r}")
        kind = text(group, "format", inside) or everywhere
        format = _format(mapping(group, "weights", inside), kind, f"{inside}.weights")
        for target in name_list(group, "targets", inside):
            rule = rule_of(target, "targets", inside)
            if any(rule == other and format != own for other, own in formats):
                raise ValueError(f"{inside}: targets must name each matrix once, but an earlier group has {target!r} too")
            formats.append((rule, format))
    if not formats:
        raise ValueError(f"{where}: config_groups must say how weights are stored, got {groups!r}")
    formats.sort(key=lambda pair: ("exact", "regex", "class").index(pair[0].how))
    kept = tuple(rule_of(name, "ignore", where) for name in name_list(scheme, "ignore", where))
    return Quantization("compressed-tensors", tuple(formats), kept)


def compressed_keys_and_values(scheme: dict[str, Any], where: str) -> bool:
    """Whether the scheme has fp8 scales of keys and values alone, and no weights."""
    kv, groups = mapping(scheme, "kv_cache_scheme", where), mapping(scheme, "config_groups", where)
    is_fp8 = kv.get("num_bits") == 8 and kv.get("type") == "float" and kv.get("symmetric", True) and not kv.get("dynamic")
    members = [mapping(groups, name, where) for name in groups]
    if not is_fp8 or any(group.get("weights") or "Linear" in str(group.get("targets")) for group in members):
        return False
    refuse_keys(scheme, _KNOWN, where)
    refuse_keys(kv, WEIGHT_KEYS, f"{where}: kv_cache_scheme")
    for name, group in zip(groups, members, strict=True):
        refuse_keys(group, GROUP_KEYS, f"{where}: config_groups.{name}")
    refuse_changes(scheme, where)
    return True


def refuse_changes(scheme: dict[str, Any], where: str) -> None:
    """ValueError for keys of which weights are not what layers compute with: rotations, and sparse matrices stored packed."""
    if mapping(scheme, "transform_config", where):
        found = scheme["transform_config"]
        raise ValueError(f"{where}: transform_config must be absent or empty: it changes what layers compute, got {found!r}")
    sparsity = mapping(scheme, "sparsity_config", where)
    if sparsity and sparsity.get("format") != "dense":
        raise ValueError(
            f"{where}: sparsity_config must be absent, empty or of format 'dense', in which zeros are stored as any other "
            f"number, got {sparsity!r}"
        )


def _format(weights: dict[str, Any], kind: str | None, where: str) -> WeightFormat:
    refuse_keys(weights, WEIGHT_KEYS, where)
    format, order = _in_order(weights, kind, where), only(weights, "actorder", where, *_IN_ORDER, *_ACT_ORDER)
    if order not in _ACT_ORDER:
        return format
    if isinstance(format, PackedInts) and format.group_size:
        return replace(format, in_act_order=True)
    raise ValueError(
        f"{where}: actorder must be {' or '.join(map(repr, _IN_ORDER))} for {format.describe()}, since act order is of "
        f"integers with a scale for each group of columns, got {order!r}"
    )


def _in_order(weights: dict[str, Any], kind: str | None, where: str) -> WeightFormat:
    """The format but for the order of columns."""
    bits, strategy = whole(weights, "num_bits", where), text(weights, "strategy", where)
    number, symmetric = only(weights, "type", where, "int", "float"), flag(weights, "symmetric", where, True)
    if weights.get("dynamic"):
        raise ValueError(f"{where}: dynamic must be false for weights, got {weights['dynamic']!r}")
    if number == "float" and bits == 8 and symmetric and kind in ("float-quantized", "naive-quantized"):
        if strategy == "block":
            return Fp8("weight_scale", "block", block(weights, "block_structure", where))
        if strategy in ("tensor", "channel"):
            return Fp8("weight_scale", "tensor" if strategy == "tensor" else "channel")
    if number == "float" and bits == 4 and symmetric and strategy in ("group", "tensor_group"):
        size = whole(weights, "group_size", where)
        if kind == "nvfp4-pack-quantized" and size == 16:
            return Fp4("weight_packed", 16, "weight_global_scale", divides=True)
        if kind == "mxfp4-pack-quantized" and size == 32:
            return Fp4("weight_packed", 32)
    if number == "int" and bits in (4, 8) and kind == "pack-quantized" and strategy in ("group", "channel"):
        if strategy == "channel":
            only(weights, "group_size", where, None, -1)
            return PackedInts(bits, 0, symmetric)
        group = whole(weights, "group_size", where)
        check_group(group, f"{where}: group_size")
        return PackedInts(bits, group, symmetric)
    raise ValueError(
        f"{where}: expected fp8 (float-quantized) by tensor, channel or block, 4 or 8 bit integers (pack-quantized) by group "
        f"or channel, nvfp4 or mxfp4; got {bits} bits of {number}, by {strategy}, symmetric {symmetric}, {kind}"
    )
