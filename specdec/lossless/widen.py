"""A model whose weights hold other numbers for a moment: the same in a wider dtype, or those of the embedding a little off.

Captured CUDA graphs know weights by their addresses, so every tensor gets back exactly what it held before.  This file knows no
family of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from specdec.lossless.passage import around_forward

SMALL = 1 << 20  # numbers; such tensors (norms, biases, routers) are widened for as long as the model is


@contextmanager
def widened(model: nn.Module, dtype: torch.dtype, small: int = SMALL) -> Iterator[None]:
    """Inside, the model computes in that dtype.  The values of its weights stay: only what is computed is rounded less.

    Nothing else may use the model meanwhile.  A layer's large weights are widened when its forward pass begins, and dropped
    when that ends, so that one layer at a time is held twice.  Weights that belong to no layer, such as the embedding, and
    ones (of at most `small` numbers) stay wide inside the whole block: layers read some of each other's norms.
    """
    layers = list(layers_of(model))
    late = {id(tensor) for layer in layers for tensor in _held(layer) if tensor.numel() > small}

    def widen(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.element_size() < dtype.itemsize else tensor

    with ExitStack() as stack:
        stack.enter_context(replaced([tensor for tensor in _held(model) if id(tensor) not in late], widen))
        for layer in layers:
            _replace_while_it_runs(stack, layer, [tensor for tensor in _held(layer) if id(tensor) in late], widen)
        yield


@contextmanager
def replaced(tensors: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, each of these tensors holds what `change` makes of it."""
    before = [tensor.data for tensor in tensors]
    try:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = change(data)
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The entries of the outermost lists of modules, such as a model's layers."""
    for child in model.children():
        yield from child if isinstance(child, nn.ModuleList) else layers_of(child)


def _held(module: nn.Module) -> list[Tensor]:
    """The module's parameters and buffers of floating-point numbers, each once."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()}
    return list(tensors.values())


def _replace_while_it_runs(
    stack: ExitStack, layer: nn.Module, tensors: list[Tensor], change: Callable[[Tensor], Tensor]
) -> None:
    """Until the stack ends, these tensors of the layer are replaced during the layer's forward pass."""

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with replaced(tensors, change):
            return forward(*args, **kwargs)

    stack.enter_context(around_forward(layer, run))
