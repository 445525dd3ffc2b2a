"""The layouts of weights that are integers of 8 or 4 bits: those of compressed-tensors, AWQ and GPTQ.

This file knows tensors and names, and neither config files nor models.

Shapes: N rows, K columns, G groups of a row's columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.models.schemes.rows import QuantisedRows
from specdec.models.schemes.source import Outline, TensorSource, check_groups, take_indices, take_scale, take_words
from specdec.ops.products.formats.quantised import Kind

ADDED = {4: 8, 8: 128}  # to signed integers of so many bits, to store them unsigned
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word holds, the lowest first


@dataclass(frozen=True)
class PackedInts:
    """compressed-tensors' "pack-quantized" integers: W4A16 and W8A16.

    group_size: columns of a scale; 0: all of a row.  in_act_order: whether weight_g_idx must say which group each column is in.
    """

    bits: int
    group_size: int
    symmetric: bool
    in_act_order: bool = False
    packs: ClassVar[bool] = True
    may_end: ClassVar[tuple[str, ...]] = ("weight_g_idx",)

    def endings(self, source: TensorSource, name: str) -> tuple[str, ...]:
        return "weight_packed", "weight_scale", "weight_shape", *(() if self.symmetric else ("weight_zero_point",))

    def has(self, source: TensorSource, name: str) -> bool:
        return f"{name}.weight_packed" in source

    def read(self, source: TensorSource, name: str, shape: tuple[int, int], device: torch.device) -> QuantisedRows | None:
        (N, K), pack_factor = shape, 32 // self.bits
        check_groups(source, f"{name}.weight_packed", K, self.group_size)
        words = take_words(source, f"{name}.weight_packed", (N, -(-K // pack_factor))).to(device)
        shape_2 = take_indices(source, f"{name}.weight_shape", (2,))
        groups_K = self._groups(source, name, K)
        G = K // (self.group_size or K)
        scales_NG = take_scale(source, f"{name}.weight_scale", (N, G), device)
        packed = None
        if not self.symmetric:
            packed = take_words(source, f"{name}.weight_zero_point", (-(-N // pack_factor), G)).to(device)
        if not source.has_data:
            return None
        if groups_K is not None and bool((groups_K == -1).all()):  # which compressed-tensors writes where there is no order
            groups_K = None
        key = "actorder 'group'"
        order_K = _order(source, f"{name}.weight_g_idx", groups_K, self.group_size or K, self.in_act_order, key)
        if (said := shape_2.tolist()) != [N, K]:
            raise source.refuse(f"{name}.weight_shape", f"must be {[N, K]}, got {said}")
        zero_points_NG = None if packed is None else _signed(_fields(packed.T, self.bits)[:, :N].T, self.bits)
        return _rows(self.bits, _fields(words, self.bits)[:, :K], scales_NG, zero_points_NG, self.group_size, order_K)

    def _groups(self, source: TensorSource, name: str, columns: int) -> Tensor | None:
        own = f"{name}.weight_g_idx"
        if own in source:
            return take_indices(source, own, (columns,))
        if self.in_act_order:
            raise source.refuse(own, _missing("actorder"))
        return None

    def outline(self, source: TensorSource, name: str) -> Outline:
        (rows, words), scale_bytes = source.shape(f"{name}.weight_packed"), source.itemsize(f"{name}.weight_scale")
        return Outline(_integers(self.bits), rows, words * 32 // self.bits, self.group_size, scale_bytes, not self.symmetric)

    def group_size_of(self, columns: int) -> int:
        return self.group_size

    def describe(self) -> str:
        return _describe(self.bits, self.group_size, self.symmetric, self.in_act_order)


@dataclass(frozen=True)
class Awq:
    """AutoAWQ's "gemm" layout: 4 bits, eight neighbouring rows of the matrix in a word, with zero points."""

    group_size: int
    packs: ClassVar[bool] = True
    in_act_order: ClassVar[bool] = False
    may_end: ClassVar[tuple[str, ...]] = ()

    def endings(self, source: TensorSource, name: str) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales"

    def has(self, source: TensorSource, name: str) -> bool:
        return f"{name}.qweight" in source

    def read(self, source: TensorSource, name: str, shape: tuple[int, int], device: torch.device) -> QuantisedRows | None:
        N, K = shape
        group_size = self.group_size or K
        check_groups(source, f"{name}.qweight", K, group_size)
        if N % 8:
            raise source.refuse(f"{name}.qweight", f"packs eight rows in a word, but the matrix has {N}")
        words_KN8 = take_words(source, f"{name}.qweight", (K, N // 8)).to(device)
        zero_points_GN8 = take_words(source, f"{name}.qzeros", (K // group_size, N // 8)).to(device)
        scales_GN = take_scale(source, f"{name}.scales", (K // group_size, N), device)
        if not source.has_data:
            return None
        qvalues_KN, zero_points_GN = (
            _fields(words, 4).unflatten(1, (-1, 8))[..., _inverse()].flatten(1) for words in (words_KN8, zero_points_GN8)
        )
        zero_points_NG = _signed(zero_points_GN.T, 4)
        return QuantisedRows("int4", qvalues_KN.T.contiguous(), scales_GN.T.contiguous(), zero_points_NG, self.group_size)

    def outline(self, source: TensorSource, name: str) -> Outline:
        (columns, words), scale_bytes = source.shape(f"{name}.qweight"), source.itemsize(f"{name}.scales")
        return Outline("int4", 8 * words, columns, self.group_size, scale_bytes, has_zero_points=True)

    def group_size_of(self, columns: int) -> int:
        return self.group_size

    def describe(self) -> str:
        return _describe(4, self.group_size, symmetric=False)


@dataclass(frozen=True)
class Gptq:
    """GPTQ's layout: neighbouring columns in a word.

    added: 1 where the file holds zero points minus 1 (the older format).  symmetric: all zero points are the middle value then,
    in either format, since some files that say so hold those of the other one.  in_act_order: whether g_idx must say which
    group each column is in.
    """

    bits: int
    group_size: int
    symmetric: bool
    added: int
    in_act_order: bool = False
    packs: ClassVar[bool] = True
    may_end: ClassVar[tuple[str, ...]] = ("g_idx", "bias")  # AutoGPTQ writes biases of zeros where a model has none

    def endings(self, source: TensorSource, name: str) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales"

    def has(self, source: TensorSource, name: str) -> bool:
        return f"{name}.qweight" in source

    def read(self, source: TensorSource, name: str, shape: tuple[int, int], device: torch.device) -> QuantisedRows | None:
        (N, K), pack_factor, group_size = shape, 32 // self.bits, self.group_size or shape[1]
        check_groups(source, f"{name}.qweight", K, group_size)
        if N % pack_factor or K % pack_factor:
            raise source.refuse(f"{name}.qweight", f"packs {pack_factor} values in a word, but the matrix is {N} x {K}")
        words = take_words(source, f"{name}.qweight", (K // pack_factor, N)).to(device)
        zero_words = take_words(source, f"{name}.qzeros", (K // group_size, N // pack_factor)).to(device)
        scales_GN = take_scale(source, f"{name}.scales", (K // group_size, N), device)
        groups_K = take_indices(source, f"{name}.g_idx", (K,)) if f"{name}.g_idx" in source else None
        if groups_K is None and self.in_act_order and group_size < K:
            raise source.refuse(f"{name}.g_idx", _missing("desc_act"))
        if not source.has_data:
            return None
        keys = "desc_act true, static_groups false"
        order_K = _order(source, f"{name}.g_idx", groups_K, group_size, self.in_act_order, keys)
        zero_points_NG, stored_GN, middle = None, _fields(zero_words, self.bits).int(), 1 << (self.bits - 1)
        if not self.symmetric:
            zero_points_NG = _signed(((stored_GN + self.added) % (1 << self.bits)).T, self.bits)
        elif not bool((stored_GN == middle).all() or (stored_GN == middle - 1).all()):
            raise source.refuse(
                f"{name}.qzeros", f"must hold {middle} alone, or {middle - 1} in the older format, since config.json says sym "
                f"true, got {int(stored_GN.min())} to {int(stored_GN.max())}; nearest thing that works: sym false, if the "
                "checkpoint was made so"
            )  # fmt: skip
        qvalues_NK = _fields(words.T.contiguous(), self.bits)
        return _rows(self.bits, qvalues_NK, scales_GN.T.contiguous(), zero_points_NG, self.group_size, order_K)

    def outline(self, source: TensorSource, name: str) -> Outline:
        (words, rows), scale_bytes = source.shape(f"{name}.qweight"), source.itemsize(f"{name}.scales")
        return Outline(_integers(self.bits), rows, words * 32 // self.bits, self.group_size, scale_bytes, not self.symmetric)

    def group_size_of(self, columns: int) -> int:
        return self.group_size

    def describe(self) -> str:
        return _describe(self.bits, self.group_size, self.symmetric, self.in_act_order)


_NEAREST = "nearest thing that works: a checkpoint without act order"


def _describe(bits: int, group_size: int, symmetric: bool, in_act_order: bool = False) -> str:
    run = f"{group_size} columns" if group_size else "row"
    return (
        f"int{bits}, a scale{'' if symmetric else ' and a zero point'} for each {run}{', in act order' if in_act_order else ''}"
    )


def _missing(key: str) -> str:
    return f"is missing, which must say the group of each column, since config.json says act order ({key}); {_NEAREST}"


def _order(
    source: TensorSource, name: str, groups_K: Tensor | None, group_size: int, in_act_order: bool, keys: str
) -> Tensor | None:  # fmt: skip
    """The columns sorted by their groups, those of a group in their own order; None if they lie so.

    groups_K: None if no tensor names them.  in_act_order: whether config.json says that they may lie in another order.
    keys: by which it does.
    ValueError if they lie in another order and it does not, or if groups are not of so many columns each.
    """
    if groups_K is None:
        return None
    K = len(groups_K)
    in_order_K, order_K = torch.arange(K, dtype=torch.int64, device="cpu") // group_size, groups_K.argsort(stable=True)
    if not torch.equal(groups_K[order_K], in_order_K):
        found, counts = groups_K.unique(return_counts=True)
        raise source.refuse(
            name, f"must name each of the groups 0 to {K // group_size - 1} for {group_size} columns, got {len(found)} groups, "
            f"{found.min()} to {found.max()}, of {counts.min()} to {counts.max()} columns; {_NEAREST}"
        )  # fmt: skip
    if torch.equal(groups_K, in_order_K):
        return None
    if not in_act_order:
        raise source.refuse(
            name, f"gives columns to groups out of order (act order), which config.json must say by {keys} if it is meant; "
            f"{_NEAREST}"
        )  # fmt: skip
    return order_K


def _rows(
    bits: int, qvalues_NK: Tensor, scales_NG: Tensor, zero_points_NG: Tensor | None, group_size: int, order_K: Tensor | None
) -> QuantisedRows:  # fmt: skip
    if order_K is not None:
        order_K = order_K.to(qvalues_NK.device, torch.int32)
        qvalues_NK = qvalues_NK[:, order_K]
    return QuantisedRows(_integers(bits), qvalues_NK, scales_NG, zero_points_NG, group_size, order_K)


def _integers(bits: int) -> Kind:
    return "int4" if bits == 4 else "int8"


def _fields(words: Tensor, bits: int) -> Tensor:
    """Unsigned integers of so many bits, from words [R, W] that hold them lowest bits first, in uint8 [R, W * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def _signed(zero_points: Tensor, bits: int) -> Tensor:
    """Unsigned zero points as the signed integers that they stand for, int8."""
    return (zero_points.int() - ADDED[bits]).to(torch.int8).contiguous()


def _inverse() -> list[int]:
    return [AWQ_ORDER.index(column) for column in range(8)]
