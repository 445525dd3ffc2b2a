"""Loads a target through transformers' code, and checks that all tensors are there, and that tokens meet in attention alone.

Shapes: T tokens, R rows asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec.attention.encoder.inputs import CrossInputs
from specdec.attention.inputs import LayerInputs
from specdec.attention.kinds import PLAIN, Scoring
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.config_values import one_line
from specdec.models.checkpoints.mtp_names import mtp_prefixes
from specdec.models.config import ModelConfig
from specdec.models.keys.wrapper_table import WRAPPERS
from specdec.models.transformers_backend.config import load_hf_config
from specdec.models.transformers_backend.encoder_decoder import EncoderDecoderTarget
from specdec.models.transformers_backend.make import empty_model, filled_model, usual_defaults
from specdec.models.transformers_backend.target import TransformersTarget
from specdec.ops.cuda_graph import GraphSet, on_device

CHECK_TOKENS = 8
MAX_MADE_UP = 4  # times the checkpoint's weights: what transformers may take memory for before missing ones are refused
MAX_MIXED = 1e-2  # of a hidden state, relative: rounding of one row among others stays far below


def load_transformers_target(
    checkpoint: Checkpoint, config: ModelConfig, device: torch.device, dtype: torch.dtype, cuda_graphs: bool
) -> TransformersTarget:
    """The model of a folder.  ValueError names tensors missing, left over or of another shape, and what can't run here.

    checkpoint: its tensors, after `check_sizes`.
    """
    folder = checkpoint.folder
    hf_config, wrapper = load_hf_config(folder), WRAPPERS.get(config.wrapper)
    try:
        model, report = filled_model(folder, hf_config, dtype, () if wrapper is None else wrapper.names)
    except Exception as error:  # of any kind: the code that loads is the model's own
        raise ValueError(f"{folder}: transformers can't load its weights: {one_line(error)}") from error
    elsewhere = mtp_prefixes(config) + (() if wrapper is None else wrapper.passed_over)
    _refuse_tensors(report, str(folder), elsewhere)
    model = model.to(device).eval().requires_grad_(False)
    for name, weight in model.named_parameters():  # their names may be transformers' own, as for experts that it fuses
        checkpoint.landed(name, weight)
    checkpoint.refuse_not_finite()
    target = (TransformersTarget if config.encoder is None else EncoderDecoderTarget)(model, config)
    with usual_defaults():
        check_tokens_are_apart(target, str(folder))
        target.cuts_rows = rows_are_enough(target)
        if cuda_graphs:
            check_capturable(target, str(folder))
    return target


def check_sizes(checkpoint: Checkpoint) -> None:
    """ValueError if tensors or layers are of other numbers than the config's: transformers would take memory for its sizes.

    Tensors that transformers renames are not compared one by one, but all together.  Which are missing or left over, it says as
    it loads them.  Headers alone are read.
    """
    hf_config = load_hf_config(checkpoint.folder)
    shapes = {name: tuple(p.shape) for name, p in empty_model(hf_config, torch.bfloat16).named_parameters()}
    for name in checkpoint.names():
        if name in shapes:
            checkpoint.expect(name, shapes[name], "its sizes")
        if name in shapes or name.endswith(".weight"):  # others may be old masks, which are booleans
            checkpoint.expect_kind(name, "floating-point numbers")
    wanted, held = (sum(map(math.prod, sizes)) for sizes in (shapes.values(), map(checkpoint.shape, checkpoint.names())))
    if wanted > MAX_MADE_UP * held:
        raise ValueError(
            f"{checkpoint.folder / 'config.json'} describes a model of {wanted:,} weights, but the checkpoint holds {held:,}: "
            "expected sizes of one model"
        )


def _refuse_tensors(report: dict[str, Any], where: str, elsewhere: tuple[str, ...]) -> None:
    """What transformers would make up or leave out, with a warning.  elsewhere: how names of other models' tensors begin."""
    if wrong := sorted((name, tuple(got), tuple(wanted)) for name, got, wanted in report["mismatched_keys"]):
        name, got, wanted = wrong[0]
        raise ValueError(f"{where}: tensor {name!r} must have shape {wanted}, got {got} ({len(wrong)} tensors are wrong)")
    for key, what in (("missing_keys", "missing"), ("unexpected_keys", "not part of this architecture")):
        if names := sorted(name for name in report[key] if key == "missing_keys" or not name.startswith(elsewhere)):
            raise ValueError(f"{where}: {len(names)} tensors are {what}: {', '.join(names[:8])}")


@torch.inference_mode()
def check_tokens_are_apart(target: TransformersTarget, where: str) -> None:
    """ValueError if a token's state depends on other tokens but through attention: as a convolution's or a recurrence's does.

    Runs some tokens in two orders with an attention in which each token reads itself alone.
    """
    run, order = lone_pass(target)
    states = run(order)
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), dtype=torch.int64, device=order.device))
    apart = run(torch.arange(len(order), dtype=torch.int64, device=order.device)).float()
    error = (states.index_select(0, back).float() - apart).norm() / apart.norm()
    if not error < MAX_MIXED:
        raise ValueError(
            f"{where}: this {target.config.family} model mixes tokens outside of attention (relative change {float(error):.2g} "
            "in another order), as convolutions and state-space layers do; expected a model that does so by attention alone"
        )


@torch.inference_mode()
def rows_are_enough(target: TransformersTarget) -> bool:
    """Whether layers that share keys give some tokens the states of a whole pass if they run these tokens alone."""
    if target.config.first_sharing_layer == target.config.num_layers:
        return False
    run, order = lone_pass(target)
    rows_R = order[1::2]
    whole = run(order).index_select(0, rows_R).float()
    try:
        some = run(order, rows_R).float()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, AssertionError):  # a layer that takes its tokens in another way
        return False
    return some.shape == whole.shape and bool((some - whole).norm() / whole.norm() < MAX_MIXED)


@torch.inference_mode()
def check_capturable(target: TransformersTarget, where: str) -> None:
    """ValueError if the forward pass can't be recorded in a CUDA graph."""
    run, order = lone_pass(target)
    try:
        with on_device(order.device):
            GraphSet(True).run("check", lambda: run(order), [])
    except Exception as error:  # of any kind: the code is the model's own
        first = str(error.__context__ or error).partition("\n")[0]  # before the end of the capture failed too
        raise ValueError(
            f"{where}: this {target.config.family} model can't be captured in a CUDA graph ({first}); nearest setting that "
            "works: cuda_graphs=False"
        ) from error


def lone_pass(target: TransformersTarget) -> tuple[Callable[..., Tensor], Tensor]:
    """(hidden states [T, H] of a few tokens in an order, or of rows of them; an order), each token reading itself alone."""
    device, config, T = target.embed_tokens.weight.device, target.config, CHECK_TOKENS
    ids_T = torch.arange(1, T + 1, dtype=torch.int64, device=device) * 7919 % config.vocab_size
    positions_T = torch.arange(T, dtype=torch.int64, device=device) * 613 % config.max_position

    values: dict[int, Tensor] = {}

    def own_value(layer: int, inputs: LayerInputs, rows_R: Tensor | None = None, scoring: Scoring = PLAIN) -> Tensor:
        if isinstance(inputs, CrossInputs):
            return inputs.q_TQD
        source = config.kv_source[layer]
        if layer == source:
            values[layer] = inputs.dense().v_TKE
        own_TKE = values[source] if rows_R is None else values[source].index_select(0, rows_R)
        return own_TKE.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1)

    def run(order_T: Tensor, rows_R: Tensor | None = None) -> Tensor:
        tokens = ids_T.index_select(0, order_T), positions_T.index_select(0, order_T)
        return target(*tokens, own_value, rows_R=rows_R).hidden_TH

    return run, torch.arange(T - 1, -1, -1, dtype=torch.int64, device=device)
