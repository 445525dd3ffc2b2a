"""Custom operators of torch under `specdec::`: how a function becomes one, and when the operator is called in its place.

A graph of `torch.export` or `torch.compile` can't hold a Triton launch with everything that its launcher decides, but it can
hold an operator.  An operator has a schema, which names the tensors that it changes; an implementation, which is the function
itself on a CPU and on a GPU; and a fake, which says what the results look like without computing them.  While a pass is
traced, functions call their operators; in every other call they compute directly, because an operator's dispatch costs time.
This module knows no operator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "specdec"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_PLAIN = (Tensor, torch.nn.Parameter)


def is_traced(x: Tensor) -> bool:
    """Whether torch.compile or torch.export is recording this call, which then computes nothing.

    torch.compiler.is_compiling() does not answer this: it is also True in threads that compute while another one compiles.
    Tensors of a trace are of a type of their own, and have no memory that a kernel could read.
    """
    return torch.compiler.is_dynamo_compiling() or type(x) not in _PLAIN


def use_operator(x: Tensor) -> bool:
    """Whether a function of x calls its operator: while a pass is traced and no gradient is recorded.

    Operators have no gradients.  With gradients a trace records the function's definition.
    """
    return is_traced(x) and not torch.is_grad_enabled()


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Defines the operator `specdec::<schema>` and returns it.

    schema: in torch's notation, for example "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor".  It marks every
        tensor that the function changes; no result may share memory with an argument.
    function: computes the results on a CPU or a GPU.  The operator makes them contiguous, whichever way they were computed.
    fake: gives empty contiguous results of the same shapes and dtypes, on any device; sizes may be symbolic.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, _kernel(name, function), device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def nothing_fake(*_: object) -> None:
    """The result of an operator that only changes its arguments."""


def _kernel(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under no_grad, so that it may launch kernels.  Tensors that require a gradient are refused."""

    @wraps(function)
    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return _contiguous(function(*args))
        if any(isinstance(x, Tensor) and x.requires_grad for x in args):
            raise RuntimeError(
                f"{NAMESPACE}::{name} has no gradient, and got a tensor that requires one: call the program under "
                "torch.no_grad(), or trace it with gradients enabled, so that it holds the differentiable definition"
            )
        with torch.no_grad():
            return _contiguous(function(*args))

    return run


def _contiguous(results: Any) -> Any:
    if isinstance(results, tuple):
        return tuple(x.contiguous() for x in results)
    return results if results is None else results.contiguous()
