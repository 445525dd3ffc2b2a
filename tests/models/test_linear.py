"""Matrices of named parts: what a loader fills is what a product reads."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.linear import Linear, LinearStack


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("bias", [False, True])
def test_each_part_computes_its_own_rows(bias: bool) -> None:
    """Keeps out: a part that is filled into another part's rows, or a bias that does not follow its part."""
    sizes, x = {"q": 6, "none": 0, "k": 2, "v": 3}, rand(4, 5)
    fused = Linear(5, sizes, bias)
    given = {name: {ending: torch.empty_like(stored) for ending, stored in fused.tensors(name).items()} for name in sizes}
    for name, endings in given.items():
        for ending in endings:
            endings[ending] = rand(*fused.tensors(name)[ending].shape) + len(name)
            fused.tensors(name)[ending].copy_(endings[ending])
    want = torch.cat([F.linear(x, part["weight"], part.get("bias")) for part in given.values()], dim=-1)
    assert fused.out_features == 11 and torch.allclose(fused(x), want, atol=1e-6)
    assert torch.equal(fused.rows(torch.tensor([6, 0])), torch.stack([given["k"]["weight"][0], given["q"]["weight"][0]]))
    assert fused.num_bytes == 4 * (11 * 5 + 11 * bias)


def test_a_gate_opens_the_other_half() -> None:
    """Keeps out: gate and up in the wrong order."""
    fused, x = Linear(5, {"gate": 3, "up": 3}), rand(4, 5)
    gate, up = rand(3, 5), rand(3, 5) + 1
    fused.tensors("up")["weight"].copy_(up)
    fused.tensors("gate")["weight"].copy_(gate)
    with torch.no_grad():
        assert torch.allclose(fused.gated(x), F.silu(x @ gate.T) * (x @ up.T), atol=1e-5)


def test_a_shared_weight_is_one_tensor() -> None:
    """Keeps out: tied embeddings that are copied, so that one of the two stays as it was."""
    table = nn.Embedding(7, 5)
    head = Linear.of(table.weight)
    table.weight.data.fill_(2.0)
    assert head.holds(table.weight) and torch.equal(head(torch.ones(1, 5)), torch.full((1, 7), 10.0))
    assert not Linear(5, 7).holds(table.weight)


def test_a_stack_keeps_matrices_apart() -> None:
    """Keeps out: an expert that is filled into another one's rows."""
    stack = LinearStack(2, 5, {"gate": 3, "up": 3})
    for index in range(2):
        for place, part in enumerate(("gate", "up")):
            stack.tensors(index, part)["weight"].fill_(10 * index + place)
    assert stack.weight_NOI[..., 0].tolist() == [[0, 0, 0, 1, 1, 1], [10, 10, 10, 11, 11, 11]]
