"""Makes transformers' models of a config, empty or with their weights, and splits them into pieces.

transformers makes a model of another dtype by setting torch's default, which every thread of the process sees: a decoder that
runs meanwhile would compute in it, and two loads at once can leave it so.  Here a model's own thread alone sees another dtype
(`InDtype`), on torch's meta device, and every other change that transformers makes to the process is made by one thread at a
time (`alone`).  Knows no checkpoint and no attention.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from copy import deepcopy
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
from transformers.utils import logging as its_logging

from specdec.models.transformers_backend.attention import NAME
from specdec.models.transformers_backend.encoder_parts import EncoderDecoderParts
from specdec.models.transformers_backend.experts import EXPERTS
from specdec.models.transformers_backend.own_attention.forwards import register_own_classes
from specdec.models.transformers_backend.parts import ModelParts

_LOCK = RLock()  # of all that makes a transformers model
_FUNCTIONS = {"attn_implementation": NAME, "experts_implementation": EXPERTS}
_OF_SIZES: set[Callable[..., Tensor]] = {
    torch.empty, torch.empty_permuted, torch.empty_strided, torch.eye, torch.linspace, torch.logspace, torch.normal, torch.ones,
    torch.rand, torch.randn, torch.zeros,
}  # fmt: skip
_OF_VALUES: set[Callable[..., Tensor]] = {  # whose default is torch's default dtype for floats alone
    torch.arange, torch.as_tensor, torch.asarray, torch.full, torch.range, torch.scalar_tensor, torch.tensor,
}  # fmt: skip
_is_silent: ContextVar[bool] = ContextVar("is_silent", default=False)


class InDtype(TorchFunctionMode):
    """Inside, constructors of floats that name no dtype take this one, in this thread alone.

    What torch makes of integers by arithmetic, and code that asks for the default dtype, still take the process's.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is not None or (args and isinstance(args[0], Tensor | np.ndarray)):
            return func(*args, **kwargs)
        if func in _OF_SIZES:
            return func(*args, **{**kwargs, "dtype": self._dtype})
        made = func(*args, **kwargs)
        if func in _OF_VALUES and made.is_floating_point() and made.dtype != self._dtype:
            return func(*args, **{**kwargs, "dtype": self._dtype})
        return made


@contextmanager
def usual_defaults() -> Iterator[None]:
    """Inside, transformers' code finds torch's usual defaults of device and dtype in this thread, whatever the caller's are."""
    with torch.device("cpu"), InDtype(torch.float32):
        yield


@contextmanager
def alone() -> Iterator[None]:
    """Inside, no other thread makes a transformers model through specdec.

    transformers replaces functions of torch.nn.init while it loads, and shows progress by a switch of the whole process.
    """
    with _LOCK, usual_defaults():
        yield


def make_parts(model: Any) -> ModelParts:
    """The pieces of a language model.  Unsupported says why it can't be a target."""
    return EncoderDecoderParts(model) if getattr(model.config, "is_encoder_decoder", False) else ModelParts(model)


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """A language model that calls our attention, without weights, on torch's meta device."""
    with alone(), torch.device("meta"), InDtype(dtype):
        return _class_of(config)._from_config(deepcopy(config), **_FUNCTIONS, dtype=None)


def filled_model(
    folder: Path, config: Any, dtype: torch.dtype, names: tuple[tuple[str, str], ...] = ()
) -> tuple[Any, dict[str, Any]]:
    """The same with the folder's weights, on the CPU, and transformers' report of tensors that it missed or left over.

    names: what names in a wrapper's files begin with, and what that is in the text model.
    """
    mapped = {f"^{re.escape(begin)}": own for begin, own in names} or None
    with alone(), _silence():
        model, report = _made_quietly(_class_of(config)).from_pretrained(
            folder, config=config, dtype=dtype, **_FUNCTIONS, output_loading_info=True, ignore_mismatched_sizes=True,
            local_files_only=True, key_mapping=mapped,
        )  # fmt: skip
    model.__class__ = _class_of(config)
    return model, report


def _class_of(config: Any) -> Any:
    """transformers' class of language models of this config."""
    if config.model_type == "falcon":
        register_own_classes()
    is_pair = getattr(config, "is_encoder_decoder", False)
    return (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if is_pair else MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]


def _made_quietly(own_class: type) -> Any:
    """A model's class with another way to make its empty modules before they are filled; its name and all else stay."""

    def get_init_context(cls: Any, dtype: torch.dtype, *_: Any, **__: Any) -> list[AbstractContextManager[Any]]:
        return [torch.device("meta"), InDtype(dtype)]

    own = {"__module__": own_class.__module__, "get_init_context": classmethod(get_init_context)}
    return type(own_class.__name__, (own_class,), own)


@contextmanager
def _silence() -> Iterator[None]:
    """Inside, transformers draws no progress bar, which would stand in the middle of what the command line prints, and lists
    no tensors that it leaves out or makes up: they are a drafter's, or refused by name.
    """
    shown, token = its_logging.is_progress_bar_enabled(), _is_silent.set(True)
    if shown:
        its_logging.disable_progress_bar()
    try:
        yield
    finally:
        _is_silent.reset(token)
        if shown:
            its_logging.enable_progress_bar()


# Its logger has this for good; it asks the thread that logs, so nobody else's messages are lost.
logging.getLogger("transformers.modeling_utils").addFilter(lambda _: not _is_silent.get())
