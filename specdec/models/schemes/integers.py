"""The layouts of weights that are integers of 8 or 4 bits: those of compressed-tensors, AWQ and GPTQ.

This file knows tensors and names, and neither config files nor models.

Shapes: O rows, I columns, G groups of a row's columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.models.schemes.rows import CodedRows
from specdec.models.schemes.source import Outline, TensorSource, check_groups, take_indices, take_scale, take_words
from specdec.ops.products.formats.quantised import Kind

ADDED = {4: 8, 8: 128}  # to signed integers of so many bits, to store them unsigned
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word holds, the lowest first


@dataclass(frozen=True)
class PackedInts:
    """compressed-tensors' "pack-quantized" integers: W4A16 and W8A16.

    group: columns of a scale; 0: all of a row.  in_act_order: whether weight_g_idx must say which group each column is in.
    """

    bits: int
    group: int
    symmetric: bool
    in_act_order: bool = False
    packs: ClassVar[bool] = True
    may_end: ClassVar[tuple[str, ...]] = ("weight_g_idx",)

    def endings(self, source: TensorSource, name: str) -> tuple[str, ...]:
        return "weight_packed", "weight_scale", "weight_shape", *(() if self.symmetric else ("weight_zero_point",))

    def has(self, source: TensorSource, name: str) -> bool:
        return f"{name}.weight_packed" in source

    def read(self, source: TensorSource, name: str, shape: tuple[int, int], device: torch.device) -> CodedRows | None:
        (O, I), a_word = shape, 32 // self.bits
        check_groups(source, f"{name}.weight_packed", I, self.group)
        words = take_words(source, f"{name}.weight_packed", (O, -(-I // a_word))).to(device)
        shape_2 = take_indices(source, f"{name}.weight_shape", (2,))
        groups_I = self._groups(source, name, I)
        G = I // (self.group or I)
        scales_OG = take_scale(source, f"{name}.weight_scale", (O, G), device)
        packed = None
        if not self.symmetric:
            packed = take_words(source, f"{name}.weight_zero_point", (-(-O // a_word), G)).to(device)
        if not source.has_numbers:
            return None
        if groups_I is not None and bool((groups_I == -1).all()):  # which compressed-tensors writes where there is no order
            groups_I = None
        key = "actorder 'group'"
        order_I = _order(source, f"{name}.weight_g_idx", groups_I, self.group or I, self.in_act_order, key)
        if (said := shape_2.tolist()) != [O, I]:
            raise source.refuse(f"{name}.weight_shape", f"must be {[O, I]}, got {said}")
        zeros_OG = None if packed is None else _relative(_fields(packed.T, self.bits)[:, :O].T, self.bits)
        return _rows(self.bits, _fields(words, self.bits)[:, :I], scales_OG, zeros_OG, self.group, order_I)

    def _groups(self, source: TensorSource, name: str, columns: int) -> Tensor | None:
        own = f"{name}.weight_g_idx"
        if own in source:
            return take_indices(source, own, (columns,))
        if self.in_act_order:
            raise source.refuse(own, _missing("actorder"))
        return None

    def outline(self, source: TensorSource, name: str) -> Outline:
        (rows, words), scale_bytes = source.shape(f"{name}.weight_packed"), source.itemsize(f"{name}.weight_scale")
        return Outline(_integers(self.bits), rows, words * 32 // self.bits, self.group, scale_bytes, not self.symmetric)

    def group_of(self, columns: int) -> int:
        return self.group

    def describe(self) -> str:
        return _describe(self.bits, self.group, self.symmetric, self.in_act_order)


@dataclass(frozen=True)
class Awq:
    """AutoAWQ's "gemm" layout: 4 bits, eight neighbouring rows of the matrix in a word, with zeros."""

    group: int
    packs: ClassVar[bool] = True
    in_act_order: ClassVar[bool] = False
    may_end: ClassVar[tuple[str, ...]] = ()

    def endings(self, source: TensorSource, name: str) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales"

    def has(self, source: TensorSource, name: str) -> bool:
        return f"{name}.qweight" in source

    def read(self, source: TensorSource, name: str, shape: tuple[int, int], device: torch.device) -> CodedRows | None:
        O, I = shape
        group = self.group or I
        check_groups(source, f"{name}.qweight", I, group)
        if O % 8:
            raise source.refuse(f"{name}.qweight", f"packs eight rows in a word, but the matrix has {O}")
        words_IO8 = take_words(source, f"{name}.qweight", (I, O // 8)).to(device)
        zeros_GO8 = take_words(source, f"{name}.qzeros", (I // group, O // 8)).to(device)
        scales_GO = take_scale(source, f"{name}.scales", (I // group, O), device)
        if not source.has_numbers:
            return None
        codes_IO, zeros_GO = (
            _fields(words, 4).unflatten(1, (-1, 8))[..., _inverse()].flatten(1) for words in (words_IO8, zeros_GO8)
        )
        return CodedRows("int4", codes_IO.T.contiguous(), scales_GO.T.contiguous(), _relative(zeros_GO.T, 4), self.group)

    def outline(self, source: TensorSource, name: str) -> Outline:
        (columns, words), scale_bytes = source.shape(f"{name}.qweight"), source.itemsize(f"{name}.scales")
        return Outline("int4", 8 * words, columns, self.group, scale_bytes, has_zeros=True)

    def group_of(self, columns: int) -> int:
        return self.group

    def describe(self) -> str:
        return _describe(4, self.group, symmetric=False)


@dataclass(frozen=True)
class Gptq:
    """GPTQ's layout: neighbouring columns in a word.

    added: 1 where the file holds zeros minus 1 (the older format).  symmetric: then all zeros are the middle code, in either
    format, since some files that say so hold those of the other one.  in_act_order: whether g_idx must say which group each
    column is in.
    """

    bits: int
    group: int
    symmetric: bool
    added: int
    in_act_order: bool = False
    packs: ClassVar[bool] = True
    may_end: ClassVar[tuple[str, ...]] = ("g_idx", "bias")  # AutoGPTQ writes biases of zeros where a model has none

    def endings(self, source: TensorSource, name: str) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales"

    def has(self, source: TensorSource, name: str) -> bool:
        return f"{name}.qweight" in source

    def read(self, source: TensorSource, name: str, shape: tuple[int, int], device: torch.device) -> CodedRows | None:
        (O, I), a_word, group = shape, 32 // self.bits, self.group or shape[1]
        check_groups(source, f"{name}.qweight", I, group)
        if O % a_word or I % a_word:
            raise source.refuse(f"{name}.qweight", f"packs {a_word} numbers in a word, but the matrix is {O} x {I}")
        words = take_words(source, f"{name}.qweight", (I // a_word, O)).to(device)
        zeros = take_words(source, f"{name}.qzeros", (I // group, O // a_word)).to(device)
        scales_GO = take_scale(source, f"{name}.scales", (I // group, O), device)
        groups_I = take_indices(source, f"{name}.g_idx", (I,)) if f"{name}.g_idx" in source else None
        if groups_I is None and self.in_act_order and group < I:
            raise source.refuse(f"{name}.g_idx", _missing("desc_act"))
        if not source.has_numbers:
            return None
        keys = "desc_act true, static_groups false"
        order_I = _order(source, f"{name}.g_idx", groups_I, group, self.in_act_order, keys)
        zeros_OG, stored_GO, middle = None, _fields(zeros, self.bits).int(), 1 << (self.bits - 1)
        if not self.symmetric:
            zeros_OG = _relative(((stored_GO + self.added) % (1 << self.bits)).T, self.bits)
        elif not bool((stored_GO == middle).all() or (stored_GO == middle - 1).all()):
            raise source.refuse(
                f"{name}.qzeros", f"must hold {middle} alone, or {middle - 1} in the older format, since config.json says sym "
                f"true, got {int(stored_GO.min())} to {int(stored_GO.max())}; nearest thing that works: sym false, if the "
                "checkpoint was made so"
            )  # fmt: skip
        codes_OI = _fields(words.T.contiguous(), self.bits)
        return _rows(self.bits, codes_OI, scales_GO.T.contiguous(), zeros_OG, self.group, order_I)

    def outline(self, source: TensorSource, name: str) -> Outline:
        (words, rows), scale_bytes = source.shape(f"{name}.qweight"), source.itemsize(f"{name}.scales")
        return Outline(_integers(self.bits), rows, words * 32 // self.bits, self.group, scale_bytes, not self.symmetric)

    def group_of(self, columns: int) -> int:
        return self.group

    def describe(self) -> str:
        return _describe(self.bits, self.group, self.symmetric, self.in_act_order)


_NEAREST = "nearest thing that works: a checkpoint without act order"


def _describe(bits: int, group: int, symmetric: bool, in_act_order: bool = False) -> str:
    run = f"{group} columns" if group else "row"
    return f"int{bits}, a scale{'' if symmetric else ' and a zero'} for each {run}{', in act order' if in_act_order else ''}"


def _missing(key: str) -> str:
    return f"is missing, which must say the group of each column, since config.json says act order ({key}); {_NEAREST}"


def _order(
    source: TensorSource, name: str, groups_I: Tensor | None, group: int, in_act_order: bool, keys: str
) -> Tensor | None:  # fmt: skip
    """The columns sorted by their groups, those of a group in their own order; None if they lie so.

    groups_I: None if no tensor names them.  in_act_order: whether config.json says that they may lie in another order.
    keys: by which it does.
    ValueError if they lie in another order and it does not, or if groups are not of so many columns each.
    """
    if groups_I is None:
        return None
    I = len(groups_I)
    in_order_I, order_I = torch.arange(I, dtype=torch.int64, device="cpu") // group, groups_I.argsort(stable=True)
    if not torch.equal(groups_I[order_I], in_order_I):
        found, counts = groups_I.unique(return_counts=True)
        raise source.refuse(
            name, f"must name each of the groups 0 to {I // group - 1} for {group} columns, got {len(found)} groups, "
            f"{found.min()} to {found.max()}, of {counts.min()} to {counts.max()} columns; {_NEAREST}"
        )  # fmt: skip
    if torch.equal(groups_I, in_order_I):
        return None
    if not in_act_order:
        raise source.refuse(
            name, f"gives columns to groups out of order (act order), which config.json must say by {keys} if it is meant; "
            f"{_NEAREST}"
        )  # fmt: skip
    return order_I


def _rows(
    bits: int, codes_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor | None, group: int, order_I: Tensor | None
) -> CodedRows:  # fmt: skip
    if order_I is not None:
        order_I = order_I.to(codes_OI.device, torch.int32)
        codes_OI = codes_OI[:, order_I]
    return CodedRows(_integers(bits), codes_OI, scales_OG, zeros_OG, group, order_I)


def _integers(bits: int) -> Kind:
    return "int4" if bits == 4 else "int8"


def _fields(words: Tensor, bits: int) -> Tensor:
    """Unsigned numbers of so many bits, from words [R, W] that hold them lowest bits first, in uint8 [R, W * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def _relative(zeros: Tensor, bits: int) -> Tensor:
    """Unsigned zeros relative to the code of 0, as int8."""
    return (zeros.int() - ADDED[bits]).to(torch.int8).contiguous()


def _inverse() -> list[int]:
    return [AWQ_ORDER.index(column) for column in range(8)]
