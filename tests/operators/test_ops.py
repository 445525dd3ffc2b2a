"""The operators of products, norms and top tokens: results, gradients and traces, on a CPU and on a GPU."""

import pytest
import torch
from toolkit.operators.products import CASES
from torch import Tensor

import specdec.ops.norm as norm
import specdec.ops.products.dense as products

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_an_operator_computes_its_function(name: str, device: str) -> None:
    """Keeps out: arguments in another order than the function's, and another kernel for the operator than for the function."""
    operator, function, make = CASES[name]
    args = make(torch.device(device))
    with torch.no_grad():
        torch.testing.assert_close(operator(*args), function(*args), rtol=0, atol=0, check_stride=False)


def test_an_operator_refuses_gradients() -> None:
    """Keeps out: training through an operator, which would leave gradients out in silence."""
    x, weight = torch.randn(2, 8, requires_grad=True), torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="specdec::linear has no gradient.*no_grad"):
        products.LINEAR(x, weight)
    with torch.no_grad():
        products.LINEAR(x, weight)


class Block(torch.nn.Module):
    """A norm and a product, as a model strings them together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_H, self.weight_OH = torch.nn.Parameter(torch.rand(8)), torch.nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return products.gated_linear(norm.rms_norm(x, self.norm_H, 1e-6), self.weight_OH)


def test_a_trace_with_gradients_records_definitions() -> None:
    """Keeps out: a compiled training step that fails in its backward pass, because an operator has no gradient."""
    block, x = Block(), torch.randn(3, 8)
    with torch.no_grad():
        names = {str(node.target) for node in torch.export.export(block, (x,)).graph.nodes}
    assert {"specdec.rms_norm.default", "specdec.gated_linear.default"} <= names
    names = {str(node.target) for node in torch.export.export(block, (x,)).graph.nodes}
    assert not any(name.startswith("specdec.") for name in names)
    torch._dynamo.reset()
    gradients = []
    for call in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        block.zero_grad()
        call(x).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in block.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == 2
    torch.testing.assert_close(gradients[1], gradients[0])


def test_another_thread_s_trace_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a decoder that takes the detour over operators while another thread of the process compiles."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # what other threads see during a compilation
    monkeypatch.setattr(products, "LINEAR", None)
    assert torch.compiler.is_compiling()
    with torch.no_grad():
        assert products.linear(torch.ones(1, 4), torch.ones(2, 4)).tolist() == [[4.0, 4.0]]
