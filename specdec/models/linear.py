"""Matrices of weights, each of named parts: queries, keys and values of a projection, or a gate and what it opens.

A layer multiplies through `Linear` and reads none of its bytes.  A loader asks for the tensors of one part, by their names in a
checkpoint, and fills them; or it hands over a quantised part (schemes/rows.py), and the matrix is stored in 8 or 4 bits
(schemes/parameters.py).  A dense matrix that was filled can be kept once more, in 12 bits without loss.  So this file alone
knows how a matrix is stored.  It knows no checkpoint and no model.

Shapes: T tokens, K columns, N rows, F rows of a gate, E matrices of a stack, R rows asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from specdec.models.making import made_now, making, new_weight
from specdec.models.schemes.parameters import LosslessParameters, QuantisedParameters
from specdec.models.schemes.rows import QuantisedRows
from specdec.models.schemes.stacks import StackParameters
from specdec.ops.products.dense import DenseWeight
from specdec.ops.products.formats.experts import QuantisedStack
from specdec.ops.products.formats.lossless import ALIGN_N, encode_lossless
from specdec.ops.products.gpus import GpuKind
from specdec.ops.products.lossless import LosslessWeight
from specdec.ops.products.numerics import FAST, Numerics
from specdec.ops.products.partials import Partials
from specdec.ops.products.quantised import QuantisedWeight
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
    """x W^T + bias, from [..., K] to [..., N].

    The weights stay uninitialised until a loader fills them: random initial values would never be read, and computing them
    would be the slowest part of a start.
    in_features: K.  parts: rows of the parts, as of `PartRows`; N is their sum.

    Ranks that share a model hold a cut of a matrix each.  `column`: some rows of each part, so that a rank has some of the
    outputs.  `row`: some columns, so that the ranks' products add up to the output.  All sizes are the rank's own.
    unread: endings of tensors of the checkpoint of which this rank holds nothing.
    weight, quantised: the matrix if it is dense, or if it is quantised; the other one is None.
    lossless: the dense matrix once more in 12 bits, for products of few rows; None unless `keep_lossless` was called.
    may_be_lossless: whether it may be kept so: not if the weight is read by head alone (`by_head`).
    """

    def __init__(self, in_features: int, parts: int | Mapping[str, int], bias: bool = False) -> None:
        super().__init__()
        self.parts = PartRows(parts)
        self.in_features, self.out_features = in_features, self.parts.total
        self._late = _late_device()
        self.weight: nn.Parameter | None = new_weight(self.out_features, in_features, late=self._late is not None)
        self.quantised: QuantisedParameters | None = None
        self.lossless: LosslessParameters | None = None
        self.may_be_lossless = True
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
    def of(cls, weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
        """A matrix without parts over weights that another module owns too."""
        with making(torch.device("meta"), weight_NK.dtype):
            shared = cls(weight_NK.shape[1], weight_NK.shape[0])
        assert isinstance(weight_NK, nn.Parameter) and (bias_N is None or isinstance(bias_N, nn.Parameter))
        shared.weight, shared.bias = weight_NK, bias_N
        return shared

    def forward(self, x: Tensor, partials: bool = False) -> Tensor | Partials:
        """partials: whether the caller can add up split-K partials, as RMSNorm.add does.  Ranks that share columns get sums."""
        return self.stored.matmul(x, self.bias, self.numerics, partials=partials and self.shape()[1] == self.in_features)

    def gated(self, x_TK: Tensor) -> Tensor:
        """silu(gate) * up: [T, F], where the gate is the product with the first half of the rows, and up with the second."""
        return self.stored.gated(x_TK, self.bias, self.numerics)

    @property
    def stored(self) -> Weight:
        """The weight as it multiplies."""
        if self.quantised is not None:
            return QuantisedWeight(self.quantised.weight, self.quantised.order_K)
        dense = DenseWeight(self._dense)
        return dense if self.lossless is None else LosslessWeight(dense, self.lossless.weight)

    @property
    def is_quantised(self) -> bool:
        """Whether the weight is stored in 8 or 4 bits."""
        return self.quantised is not None

    @property
    def _dense(self) -> nn.Parameter:
        assert self.weight is not None, "quantised"
        return self.weight

    def by_head(self, heads: int) -> Tensor:
        """The weight [heads, N / heads, K], for products with each head's rows.  A quantised weight can't be read so."""
        return self._dense.unflatten(0, (heads, -1))

    def rows(self, ids_R: Tensor) -> Tensor:
        """The dense rows [R, K] of these indices, counted over all parts."""
        return self.stored.rows(ids_R)

    @property
    def device(self) -> torch.device:
        """Where the matrix lies, or will lie when it is filled."""
        return self._late or next(self.parameters()).device

    def tensors(self, part: str = ONLY) -> dict[str, Stored]:
        """What is stored of a part, by the ending of its name in checkpoints.  Filling it fills a dense matrix."""
        if self._late is not None:
            self.weight = nn.Parameter(torch.empty_like(self._dense, device=self._late), requires_grad=False)
            self._late = None
        return {"weight": self._cuts[part].stored(self._dense.detach()[self.parts.rows[part]])} | self.bias_tensors(part)

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

    def fill(self, part: str, whole: QuantisedRows) -> None:
        """Stores a quantised part, given the checkpoint's whole matrix.

        ValueError if the part is not quantised like the parts before it, or ranks can't share it.
        """
        rows, cut = self.parts.rows[part], self._cuts[part]
        own = whole.run(cut.dim, cut.start, self.in_features if cut.dim else rows.stop - rows.start)
        if self.quantised is None:
            self.quantised = QuantisedParameters(self.out_features, self.in_features, own)
            self.weight, self._late = None, None
        elif why := self.quantised.unlike(own):
            raise ValueError(f"parts of one matrix ({', '.join(self.parts.sizes)}) must be stored alike, got {why}")
        self.quantised.put(rows, own)

    def keep_lossless(self) -> None:
        """Keeps the dense weight once more in 12 bits, if it can be (`encode_lossless`).  It must not change then."""
        if self.weight is not None and self.may_be_lossless and self.out_features % ALIGN_N == 0:
            matrix = encode_lossless(self.weight)
            self.lossless = None if matrix is None else LosslessParameters(matrix)

    def holds(self, table: Tensor) -> bool:
        """Whether the weight is this very tensor, as the language-model head of a model with tied embeddings is."""
        return self.weight is not None and self.weight.data_ptr() == table.data_ptr()

    def read_bytes(self, rows: int, kind: GpuKind | None = None) -> int:
        """Bytes that a product of that many rows reads of the matrix.  kind: of GPU; None: of the one where the matrix lies."""
        of_bias = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        return self.stored.read_bytes(rows, kind) + of_bias


def use_numerics(model: nn.Module, numerics: Numerics) -> None:
    """Makes all of a model's products follow that policy."""
    for module in model.modules():
        if isinstance(module, Multiplying):
            module.numerics = numerics


def keep_lossless_copies(*models: nn.Module) -> int:
    """Keeps all matrices of these models in 12 bits too that can be, shared ones once, and says how many these are."""
    matrices = {id(part): part for model in models for part in model.modules() if isinstance(part, Linear)}
    for matrix in matrices.values():
        matrix.keep_lossless()
    return sum(matrix.lossless is not None for matrix in matrices.values())


class LinearStack(nn.Module):
    """E matrices of one shape and with the same parts, such as one projection of all experts of a layer.  No bias.

    dense, qweight: who multiplies with them chooses the product by their number and dtype (models/mixtures/products.py).
    shard, role: of all matrices, as `Linear.column` and `Linear.row` cut one.
    numbers: which of the checkpoint's matrices these are; `count` of them, perhaps none.
    weight_ENK, quantised: the matrices if they are dense, or, one above the other, if they are quantised; the other one is
    None.
    """

    def __init__(
        self, numbers: range | int, in_features: int, parts: Mapping[str, int], shard: Shard, role: Role
    ) -> None:  # fmt: skip
        super().__init__()
        self.parts, self._shard, self._role = PartRows(parts), shard, role
        self.numbers = range(numbers) if isinstance(numbers, int) else numbers
        self.count, self.in_features = len(self.numbers), in_features
        self._late = _late_device() if self.numbers else None
        size = self.count, self.parts.total, in_features
        self.weight_ENK: nn.Parameter | None = new_weight(*size, late=self._late is not None)
        self.quantised: StackParameters | None = None

    @property
    def device(self) -> torch.device:
        """Where the matrices lie, or will lie when they are filled."""
        return self._late or next(self.parameters()).device

    @property
    def _own(self) -> nn.Parameter:
        assert self.weight_ENK is not None, "quantised"
        return self.weight_ENK

    def dense(self, dtype: torch.dtype) -> Tensor:
        """All matrices [E, N, K]: the weight itself, or the matrices dequantised to that dtype."""
        return self._own if self.qweight is None else self.qweight.dense(dtype)

    @property
    def qweight(self) -> QuantisedStack | None:
        """The quantised matrices; None: they are dense."""
        return None if self.quantised is None else self.quantised.weight

    def shape(self, part: str) -> tuple[int, int]:
        """Rows and columns of the checkpoint's matrices of a part, of which this rank's are a part."""
        rows, columns = self.parts.sizes[part], self.in_features
        return (rows * self._shard.size, columns) if self._role == "column" else (rows, columns * self._shard.size)

    def tensors(self, index: int, part: str) -> dict[str, Stored]:
        """What is stored of a part of matrix number `index`.  See `Linear.tensors`."""
        if self._late is not None:
            self.weight_ENK = nn.Parameter(torch.empty_like(self._own, device=self._late), requires_grad=False)
            self._late = None
        weight_PK = self._own.detach()[index, self.parts.rows[part]]
        dim = 0 if self._role == "column" else 1
        size = weight_PK.shape[dim]
        return {"weight": _Cut(dim, self._shard.rank * size, self._shard.size * size).stored(weight_PK)}

    def fill(self, index: int, part: str, whole: QuantisedRows) -> None:
        """Stores a quantised part of matrix number `index`.  See `Linear.fill`."""
        rows, dim = self.parts.rows[part], 0 if self._role == "column" else 1
        size = self.in_features if dim else self.parts.sizes[part]
        own = whole.run(dim, self._shard.rank * size, size)
        assert own.order_K is None, "experts in act order are refused by their format (checkpoints/loader.py)"
        if self.quantised is None:
            self.quantised = StackParameters(self.count, self.parts.total, self.in_features, own)
            self.weight_ENK, self._late = None, None
        elif why := self.quantised.unlike(own):
            raise ValueError(f"all matrices of experts are stored alike, got {why}")
        first = index * self.parts.total
        self.quantised.put(slice(first + rows.start, first + rows.stop), own)
