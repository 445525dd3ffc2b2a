"""Matrices of weights, each of named parts: queries, keys and values of a projection, or a gate and what it opens.

A layer multiplies through `Linear` and reads none of its bytes.  A loader asks for the tensors of one part, by their names in a
checkpoint, and fills them; or it hands over a part as codes (schemes/rows.py), and the matrix is stored in 8 or 4 bits
(schemes/planes.py).  A matrix that was filled can be kept once more, packed.  So this file alone knows how a matrix is stored.
It knows no checkpoint and no model.

Shapes: T tokens, I columns, O rows, F rows of a gate, N matrices of a stack, R rows asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from specdec.models.making import made_now, making, new_weight
from specdec.models.schemes.planes import PackedPlanes, Planes
from specdec.models.schemes.rows import CodedRows
from specdec.models.schemes.stacks import StackPlanes
from specdec.ops.products.dense import DenseWeight
from specdec.ops.products.formats.experts import StackedCodes
from specdec.ops.products.formats.lossless import EIGHT, pack_weight
from specdec.ops.products.gpus import Kind
from specdec.ops.products.lossless import LosslessWeight
from specdec.ops.products.numerics import FAST, Numerics
from specdec.ops.products.quantised import QuantisedWeight
from specdec.ops.products.terms import Terms
from specdec.ops.products.weight import Weight
from specdec.parallel.shard import Shard

Role = Literal["column", "row"]
ONLY = ""  # the name of the only part of a matrix that has no parts


class PartRows:
    """The rows of each part of a matrix, in the order in which the parts lie one above the other.

    sizes: rows of each part by its name, or the rows of a matrix without parts.
    """

    def __init__(self, sizes: int | Mapping[str, int]) -> None:
        self.sizes = {ONLY: sizes} if isinstance(sizes, int) else dict(sizes)
        ends = list(accumulate(self.sizes.values()))
        self.rows = {name: slice(end - size, end) for (name, size), end in zip(self.sizes.items(), ends)}
        self.total = ends[-1]


class Stored(NamedTuple):
    """What a rank holds of one of a checkpoint's tensors.

    tensor: to be filled.  shape: of the checkpoint's tensor, of which this is the run along dimension `dim` from `start` on.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0

    def run(self, whole: Tensor) -> Tensor:
        """The part of the checkpoint's tensor that belongs here."""
        return whole.narrow(self.dim, self.start, self.tensor.shape[self.dim])


class _Cut(NamedTuple):
    """The run of a part along dimension `dim` of the checkpoint's tensor, which is `whole` long there."""

    dim: int
    start: int
    whole: int

    def stored(self, tensor: Tensor) -> Stored:
        shape = (*tensor.shape[: self.dim], self.whole, *tensor.shape[self.dim + 1 :])
        return Stored(tensor, shape, self.dim, self.start)


def _late_device() -> torch.device | None:
    """Where a matrix that is made now takes its memory as it is filled; None: it takes it at once."""
    now = made_now()
    return now.device if now.late else None


class Multiplying(nn.Module):
    """A module with products of its own.  numerics: the policy that chooses them for each number of rows."""

    numerics: Numerics = FAST


class Linear(Multiplying):
    """x W^T + bias, from [..., I] to [..., O].

    The weights stay uninitialised until a loader fills them: random initial values would never be read, and computing them
    would be the slowest part of a start.
    in_features: I.  parts: rows of the parts, as of `PartRows`; O is their sum.

    Ranks that share a model hold a cut of a matrix each.  `column`: some rows of each part, so that a rank has some of the
    outputs.  `row`: some columns, so that each rank's product is one of the terms of the output.  All sizes are the rank's own.
    unread: endings of tensors of the checkpoint of which this rank holds nothing.
    weight, planes: the numbers, or the codes that stand for them; the other one is None.
    packed: the numbers once more, for products of few rows; None unless `pack` was called.
    packs: whether it may be packed: not if the numbers are read by head alone (`by_head`).
    """

    def __init__(self, in_features: int, parts: int | Mapping[str, int], bias: bool = False) -> None:
        super().__init__()
        self.parts = PartRows(parts)
        self.in_features, self.out_features = in_features, self.parts.total
        self._late = _late_device()
        self.weight: nn.Parameter | None = new_weight(self.out_features, in_features, late=self._late is not None)
        self.planes: Planes | None = None
        self.packed: PackedPlanes | None = None
        self.packs = True
        self.bias = new_weight(self.out_features) if bias else None
        self._cuts = {part: _Cut(0, 0, size) for part, size in self.parts.sizes.items()}
        self.unread: tuple[str, ...] = ()

    @classmethod
    def column(
        cls,
        in_features: int,
        parts: Mapping[str, int],
        shard: Shard,
        bias: bool = False,
        copies: Mapping[str, int] | None = None,
    ) -> Linear:
        """Some rows of each part.  copies: for a part, how many neighbouring ranks hold the same rows of it; 1 if left out."""
        matrix = cls(in_features, parts, bias)
        for part, size in parts.items():
            same = (copies or {}).get(part, 1)
            matrix._cuts[part] = _Cut(0, shard.rank // same * size, shard.size // same * size)
        return matrix

    @classmethod
    def row(cls, in_features: int, out_features: int, shard: Shard, bias: bool = False) -> Linear:
        """Some columns.  The first rank alone has the bias, for the outputs of all ranks are summed."""
        matrix = cls(in_features, out_features, bias and shard.rank == 0)
        matrix._cuts[ONLY] = _Cut(1, shard.rank * in_features, shard.size * in_features)
        matrix.unread = ("bias",) if bias and shard.rank > 0 else ()
        return matrix

    @classmethod
    def vocabulary(cls, in_features: int, rows: int, shard: Shard) -> Linear:
        """Some of the rows, one for each token: a run of them on each rank, of which the last ones may be shorter."""
        own = shard.piece(rows)
        matrix = cls(in_features, own.stop - own.start)
        matrix._cuts[ONLY] = _Cut(0, own.start, rows)
        return matrix

    @classmethod
    def of(cls, weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
        """A matrix without parts over weights that another module owns too."""
        with making(torch.device("meta"), weight_OI.dtype):
            shared = cls(weight_OI.shape[1], weight_OI.shape[0])
        assert isinstance(weight_OI, nn.Parameter) and (bias_O is None or isinstance(bias_O, nn.Parameter))
        shared.weight, shared.bias = weight_OI, bias_O
        return shared

    def forward(self, x: Tensor, terms: bool = False) -> Tensor | Terms:
        """terms: whether the reader can add up terms, as norms do (RMSNorm.add).  Ranks that share columns exchange sums."""
        return self.stored.matmul(x, self.bias, self.numerics, terms=terms and self.shape()[1] == self.in_features)

    def gated(self, x_TI: Tensor) -> Tensor:
        """silu(gate) * up: [T, F], where the gate is the product with the first half of the rows, and up with the second."""
        return self.stored.gated(x_TI, self.bias, self.numerics)

    @property
    def stored(self) -> Weight:
        """The weight as it multiplies."""
        if self.planes is not None:
            return QuantisedWeight(self.planes.weight, self.planes.order_I)
        dense = DenseWeight(self._numbers)
        return dense if self.packed is None else LosslessWeight(dense, self.packed.weight)

    @property
    def is_quantised(self) -> bool:
        """Whether codes stand for the weight's numbers."""
        return self.planes is not None

    @property
    def _numbers(self) -> nn.Parameter:
        assert self.weight is not None, "stored as codes"
        return self.weight

    def by_head(self, heads: int) -> Tensor:
        """The weight [heads, O / heads, I], for products with each head's rows.  Codes are no use here: see `fill`."""
        return self._numbers.unflatten(0, (heads, -1))

    def rows(self, ids_R: Tensor) -> Tensor:
        """The rows [R, I] of these numbers, counted over all parts."""
        return self.stored.rows(ids_R)

    @property
    def device(self) -> torch.device:
        """Where the matrix lies, or will lie when it is filled."""
        return self._late or next(self.parameters()).device

    def tensors(self, part: str = ONLY) -> dict[str, Stored]:
        """What is stored of a part, by the ending of its name in checkpoints.  Filling it fills the matrix, with numbers."""
        if self._late is not None:
            self.weight = nn.Parameter(torch.empty_like(self._numbers, device=self._late), requires_grad=False)
            self._late = None
        return {"weight": self._cuts[part].stored(self._numbers.detach()[self.parts.rows[part]])} | self.bias_tensors(part)

    def bias_tensors(self, part: str = ONLY) -> dict[str, Stored]:
        """Of `tensors`, those beside the weight."""
        if self.bias is None:
            return {}
        bias_P, cut = self.bias.detach()[self.parts.rows[part]], self._cuts[part]
        return {"bias": cut.stored(bias_P) if cut.dim == 0 else Stored(bias_P, tuple(bias_P.shape))}

    def shape(self, part: str = ONLY) -> tuple[int, int]:
        """Rows and columns of the checkpoint's matrix, of which this rank's are a part."""
        cut = self._cuts[part]
        return self.rows_of(part)[1], cut.whole if cut.dim else self.in_features

    def rows_of(self, part: str) -> tuple[int, int]:
        """The first row that this rank holds of a part, counted in the checkpoint's matrix, and how many that matrix has."""
        cut = self._cuts[part]
        return (cut.start, cut.whole) if cut.dim == 0 else (0, self.parts.sizes[part])

    def fill(self, part: str, whole: CodedRows) -> None:
        """Stores a part as codes, given those of the checkpoint's whole matrix.

        ValueError if the part's codes are not like those of the parts before it, or ranks can't share them.
        """
        rows, cut = self.parts.rows[part], self._cuts[part]
        own = whole.run(cut.dim, cut.start, self.in_features if cut.dim else rows.stop - rows.start)
        if self.planes is None:
            self.planes = Planes(self.out_features, self.in_features, own)
            self.weight, self._late = None, None
        elif why := self.planes.unlike(own):
            raise ValueError(f"parts of one matrix ({', '.join(self.parts.sizes)}) must be stored alike, got {why}")
        self.planes.put(rows, own)

    def pack(self) -> None:
        """Keeps numbers that can be packed (`pack_weight`) once more, for products of few rows.  They must not change then."""
        if self.weight is not None and self.packs and self.out_features % EIGHT == 0:
            packed = pack_weight(self.weight)
            self.packed = None if packed is None else PackedPlanes(packed)

    def holds(self, table: Tensor) -> bool:
        """Whether the weight is this very tensor, as the language-model head of a model with tied embeddings is."""
        return self.weight is not None and self.weight.data_ptr() == table.data_ptr()

    def read_bytes(self, rows: int, kind: Kind | None = None) -> int:
        """Bytes that a product of that many rows reads of the matrix.  kind: of GPU; None: of the one where the matrix lies."""
        of_bias = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        return self.stored.read_bytes(rows, kind) + of_bias


def use_numerics(model: nn.Module, numerics: Numerics) -> None:
    """Makes all of a model's products follow that policy."""
    for module in model.modules():
        if isinstance(module, Multiplying):
            module.numerics = numerics


def pack_matrices(*models: nn.Module) -> int:
    """Packs all matrices of these models that can be packed, shared ones once, and says how many these are."""
    matrices = {id(part): part for model in models for part in model.modules() if isinstance(part, Linear)}
    for matrix in matrices.values():
        matrix.pack()
    return sum(matrix.packed is not None for matrix in matrices.values())


class LinearStack(nn.Module):
    """N matrices of one shape and with the same parts, such as one projection of all experts of a layer.  No bias.

    numbers, codes: who multiplies with them chooses the product by their number and dtype (models/experts.py).
    shard, role: of all matrices, as `Linear.column` and `Linear.row` cut one.
    weight_NOI, planes: the numbers, or the codes of all matrices one above the other; the other one is None.
    """

    def __init__(self, count: int, in_features: int, parts: Mapping[str, int], shard: Shard, role: Role) -> None:
        super().__init__()
        self.parts, self._shard, self._role = PartRows(parts), shard, role
        self.count, self.in_features = count, in_features
        self._late = _late_device()
        self.weight_NOI: nn.Parameter | None = new_weight(count, self.parts.total, in_features, late=self._late is not None)
        self.planes: StackPlanes | None = None

    @property
    def device(self) -> torch.device:
        """Where the matrices lie, or will lie when they are filled."""
        return self._late or next(self.parameters()).device

    @property
    def _own(self) -> nn.Parameter:
        assert self.weight_NOI is not None, "stored as codes"
        return self.weight_NOI

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """All matrices [N, O, I]: the weight itself, or numbers computed of the codes."""
        return self._own if self.codes is None else self.codes.numbers(dtype)

    @property
    def codes(self) -> StackedCodes | None:
        """The codes of all matrices; None: they are stored as numbers."""
        return None if self.planes is None else self.planes.weight

    def shape(self, part: str) -> tuple[int, int]:
        """Rows and columns of the checkpoint's matrices of a part, of which this rank's are a part."""
        rows, columns = self.parts.sizes[part], self.in_features
        return (rows * self._shard.size, columns) if self._role == "column" else (rows, columns * self._shard.size)

    def tensors(self, index: int, part: str) -> dict[str, Stored]:
        """What is stored of a part of matrix number `index`.  See `Linear.tensors`."""
        if self._late is not None:
            self.weight_NOI = nn.Parameter(torch.empty_like(self._own, device=self._late), requires_grad=False)
            self._late = None
        weight_PI = self._own.detach()[index, self.parts.rows[part]]
        dim = 0 if self._role == "column" else 1
        size = weight_PI.shape[dim]
        return {"weight": _Cut(dim, self._shard.rank * size, self._shard.size * size).stored(weight_PI)}

    def fill(self, index: int, part: str, whole: CodedRows) -> None:
        """Stores a part of matrix number `index` as codes.  See `Linear.fill`."""
        rows, dim = self.parts.rows[part], 0 if self._role == "column" else 1
        size = self.in_features if dim else self.parts.sizes[part]
        own = whole.run(dim, self._shard.rank * size, size)
        assert own.order_I is None, "experts in act order are refused by their format (checkpoints/loader.py)"
        if self.planes is None:
            self.planes = StackPlanes(self.count, self.parts.total, self.in_features, own)
            self.weight_NOI, self._late = None, None
        elif why := self.planes.unlike(own):
            raise ValueError(f"all matrices of experts are stored alike, got {why}")
        first = index * self.parts.total
        self.planes.put(slice(first + rows.start, first + rows.stop), own)
