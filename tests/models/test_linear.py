"""Matrices of named parts: what a loader fills is what a product reads."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.linear import Linear, LinearStack, keep_lossless_copies
from specdec.models.making import making
from specdec.models.schemes.rows import QuantisedRows
from specdec.ops.products.formats.lossless import decode_lossless
from specdec.ops.products.formats.quantised import Kind
from specdec.ops.products.gpus import H200
from specdec.parallel.shard import Shard


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("bias", [False, True])
def test_each_part_computes_its_own_rows(bias: bool) -> None:
    """Keeps out: a part that is filled into another part's rows, or a bias that does not follow its part."""
    sizes, x = {"q": 6, "none": 0, "k": 2, "v": 3}, rand(4, 5)
    fused = Linear(5, sizes, bias)
    given = {
        name: {ending: torch.empty_like(stored.tensor) for ending, stored in fused.tensors(name).items()} for name in sizes
    }
    for name, endings in given.items():
        for ending in endings:
            endings[ending] = rand(*fused.tensors(name)[ending].shape) + len(name)
            fused.tensors(name)[ending].tensor.copy_(endings[ending])
    want = torch.cat([F.linear(x, part["weight"], part.get("bias")) for part in given.values()], dim=-1)
    assert fused.out_features == 11 and torch.allclose(fused(x), want, atol=1e-6)
    assert torch.equal(fused.rows(torch.tensor([6, 0])), torch.stack([given["k"]["weight"][0], given["q"]["weight"][0]]))
    assert fused.read_bytes(1) == 4 * (11 * 5 + 11 * bias)


def test_a_gate_opens_the_other_half() -> None:
    """Keeps out: gate and up in the wrong order."""
    fused, x = Linear(5, {"gate": 3, "up": 3}), rand(4, 5)
    gate, up = rand(3, 5), rand(3, 5) + 1
    fused.tensors("up")["weight"].tensor.copy_(up)
    fused.tensors("gate")["weight"].tensor.copy_(gate)
    with torch.no_grad():
        assert torch.allclose(fused.gated(x), F.silu(x @ gate.T) * (x @ up.T), atol=1e-5)


def test_a_shared_weight_is_one_tensor() -> None:
    """Keeps out: tied embeddings that are copied, so that one of the two stays as it was."""
    table = nn.Embedding(7, 5)
    head = Linear.of(table.weight)
    table.weight.data.fill_(2.0)
    assert head.holds(table.weight) and torch.equal(head(torch.ones(1, 5)), torch.full((1, 7), 10.0))
    assert not Linear(5, 7).holds(table.weight)


def test_a_lossless_copy_is_the_matrix_once_more() -> None:
    """Keeps out: a copy that is a weight of the model, that a change of dtype turns into other values, of a quantised matrix or
    of one that no kernel reads; and bytes that a round is said to read and does not.
    """
    torch.manual_seed(0)
    table = nn.Embedding(64, 256, dtype=torch.bfloat16)
    model = nn.ModuleList([Linear(256, {"q": 24, "k": 8}, bias=True), Linear(72, 8), Linear.of(table.weight)]).to(
        torch.bfloat16
    )
    model[0].weight.data.normal_(std=0.02)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    want = [matrix(x) for matrix in (model[0], model[2])]
    model.append(Linear(256, 12).to(torch.bfloat16))  # 12 rows
    model.append(Linear(256, 16).to(torch.bfloat16))
    model[4].may_be_lossless = False  # read by head
    assert keep_lossless_copies(nn.ModuleList([model[0]]), model) == 2
    assert [matrix.lossless is not None for matrix in model] == [True, False, True, False, False]
    assert before == [parameter.data_ptr() for parameter in model[:3].parameters()] and not model[0].lossless.state_dict()
    assert all(torch.equal(matrix(x), y) for matrix, y in zip((model[0], model[2]), want))
    lossless = model[0].lossless.weight
    assert torch.equal(decode_lossless(lossless), model[0].weight)
    assert 0.75 < lossless.num_bytes / model[0].weight.nbytes < 0.8
    assert model[0].read_bytes(1) == 2 * (32 * 256 + 32)  # on a CPU nothing reads the copy
    assert model[0].read_bytes(32, H200) == lossless.num_bytes + 64  # as tiles/lossless.py has it
    assert model[0].read_bytes(33, H200) == 2 * (32 * 256 + 32)
    model.float()
    assert torch.equal(decode_lossless(model[0].lossless.weight).float(), model[0].weight)
    matrix = Linear(256, 8)
    matrix.fill("", QuantisedRows("int8", torch.zeros(8, 256, dtype=torch.uint8), torch.ones(8, 1), None, 0))
    assert keep_lossless_copies(matrix) == 0


def test_a_stack_keeps_matrices_apart() -> None:
    """Keeps out: an expert that is filled into another one's rows."""
    stack = LinearStack(2, 5, {"gate": 3, "up": 3}, Shard(), "column")
    for index in range(2):
        for place, part in enumerate(("gate", "up")):
            stack.tensors(index, part)["weight"].tensor.fill_(10 * index + place)
    assert stack.weight_ENK[..., 0].tolist() == [[0, 0, 0, 1, 1, 1], [10, 10, 10, 11, 11, 11]]


def quantised_rows(kind: Kind, rows: int, columns: int, group: int) -> QuantisedRows:
    """Random quantised values, the largest of them among the 4-bit ones."""
    generator = torch.Generator().manual_seed(rows)
    qvalues = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    scales = torch.rand(rows, columns // (group or columns), generator=generator)
    zero_points = torch.randint(-8, 8, scales.shape, dtype=torch.int8, generator=generator) if kind == "int4" else None
    return QuantisedRows(kind, qvalues, scales, zero_points, group)


@pytest.mark.parametrize(("kind", "group"), [("int4", 32), ("e4m3", 0), ("e2m1", 32)])
def test_ranks_hold_cuts_of_quantised_matrices(kind: Kind, group: int) -> None:
    """Keeps out: scales that are not cut with their columns, or rows of a part that are another rank's."""
    x, whole = rand(3, 128), {"gate": quantised_rows(kind, 8, 128, group), "up": quantised_rows(kind, 12, 128, group)}
    want = torch.cat([x @ part.dense(torch.float32).T for part in whole.values()], dim=-1).split([8, 12], dim=-1)
    found, summed = [], torch.zeros(3, 8)
    for rank in range(2):
        columns = Linear.column(128, {"gate": 4, "up": 6}, Shard(rank, 2))
        for name, part in whole.items():
            columns.fill(name, part)
        found.append(columns(x).split([4, 6], dim=-1))
        rows = Linear.row(64, 8, Shard(rank, 2))
        rows.fill("", whole["gate"])
        summed += rows(x[:, 64 * rank : 64 * rank + 64])
    for part, parts in zip(want, zip(*found)):
        torch.testing.assert_close(torch.cat(parts, dim=-1), part)
    torch.testing.assert_close(summed, want[0])


@pytest.mark.parametrize("kind", ["int4", "e4m3"])
def test_rows_are_dequantised(kind: Kind) -> None:
    """Keeps out: rows of a quantised output layer, by which a head is trained, without their zero points and scales."""
    matrix, part, ids = Linear(64, 8), quantised_rows(kind, 8, 64, 32), torch.tensor([6, 1, 6])
    matrix.fill("", part)
    torch.testing.assert_close(matrix.rows(ids), part.dense(torch.float32)[ids])


def test_scales_of_columns_that_are_not_there_are_written(poisoned_new_memory: None) -> None:
    """Keeps out: NaN in a scale that a kernel multiplies by the quantised values of padding, which are 0."""
    stack, part = LinearStack(2, 96, {"gate": 3}, Shard(), "column"), quantised_rows("e2m1", 3, 96, 32)
    part = part._replace(scales_PG=torch.full((3, 3), 0.5))
    for index in range(2):
        stack.fill(index, "gate", part)
    assert stack.quantised is not None and stack.quantised.has_powers
    assert stack.quantised.scales_RG.tolist() == [[126, 126, 126, 0]] * 6
    torch.testing.assert_close(stack.dense(torch.float32)[1], part.dense(torch.float32))


def test_a_cut_inside_of_a_group_is_refused() -> None:
    """Keeps out: half a group's columns under a scale that is the other rank's too."""
    with pytest.raises(ValueError, match="128 columns in runs of 64: a scale is for 128 columns"):
        Linear.row(64, 8, Shard(1, 2)).fill("", quantised_rows("int4", 8, 128, 128))


def test_a_change_of_dtype_leaves_quantised_parameters_alone() -> None:
    """Keeps out: scales rounded, or bytes made into 16 bits, by a module's .to(dtype)."""
    matrix = Linear(64, 8, bias=True)
    matrix.fill("", quantised_rows("int4", 8, 64, 32))
    assert matrix.quantised is not None
    before = [tensor.clone() for tensor in matrix.quantised.parameters()]
    matrix.to(torch.bfloat16)
    assert matrix.bias is not None and matrix.bias.dtype == torch.bfloat16
    assert all(torch.equal(old, new) and old.dtype == new.dtype for old, new in zip(before, matrix.quantised.parameters()))
    assert matrix.read_bytes(1) == 8 * 32 + 8 * 2 * (4 + 1) + 8 * 2  # quantised values, scales and zero points, and the bias


def test_unlike_parts_are_refused() -> None:
    """Keeps out: keys under the queries' number of columns a scale."""
    matrix = Linear(64, {"q": 8, "k": 8})
    matrix.fill("q", quantised_rows("int4", 8, 64, 32))
    with pytest.raises(ValueError, match=r"one matrix \(q, k\) must be stored alike, got columns of a scale 32 and 64"):
        matrix.fill("k", quantised_rows("int4", 8, 64, 64))


def test_memory_is_taken_when_it_is_known_what_for() -> None:
    """Keeps out: memory for all weights in 16 bits before the first of them is read in 4."""
    with making(torch.device("cpu"), torch.float32, late=True):
        matrix, stack = Linear(64, 8), LinearStack(2, 64, {"a": 8}, Shard(), "column")
    assert matrix.weight is not None and matrix.weight.is_meta and not Linear(64, 8).tensors()["weight"].tensor.is_meta
    assert matrix.tensors()["weight"].tensor.device.type == stack.tensors(0, "a")["weight"].tensor.device.type == "cpu"
    assert matrix.tensors()["weight"].tensor.data_ptr() == matrix.tensors()["weight"].tensor.data_ptr()


def test_a_quantised_stack_keeps_matrices_apart() -> None:
    """Keeps out: an expert under another one's scales."""
    stack, whole = LinearStack(2, 64, {"gate": 4, "up": 4}, Shard(), "column"), {}
    for index, (place, part) in product(range(2), enumerate(("gate", "up"))):
        whole[index, place] = quantised_rows("int4", 4 + 4 * index + 8 * place, 64, 32).run(0, 0, 4)
        stack.fill(index, part, whole[index, place])
    want = torch.stack([torch.cat([whole[i, place].dense(torch.float32) for place in (0, 1)]) for i in range(2)])
    assert torch.equal(stack.dense(torch.float32), want)
    assert torch.equal(stack.qweight.dense_of(torch.tensor([[1, 0]]), torch.float32), want[[1, 0]][None])
