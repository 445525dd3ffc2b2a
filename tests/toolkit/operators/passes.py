"""Decode passes and their inputs, and the direct pass that they are compared with."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from specdec.attention.attend import PagedAttention, PassTables, make_backend
from specdec.attention.caches.fp8_latent import dequantise_latents, quantise_latents
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.quant_cache import QuantView
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment
from specdec.attention.segment import AttentionPlan
from specdec.models.config import ModelConfig
from specdec.models.registry import choose_target, load_chosen
from specdec.models.target import Target
from specdec.operators import DecodePass
from specdec.operators.given_cache import SCALE

PAGE, VOCAB = 4, 40
Inputs = tuple[Tensor, Tensor, Tensor, list[dict[str, Tensor]]]


def load(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Target:
    """A target of our own modules."""
    return load_chosen(choose_target(folder, "native"), folder, 128, torch.device(device), dtype, False)


def inputs(decode: DecodePass, lens: list[int], N: int = 1, seed: int = 0, extra: int = 2) -> Inputs:
    """Sequences of these lengths over scattered pages; what they have stored is random, and all other slots hold NaN."""
    generator, device = torch.Generator().manual_seed(seed), decode.target.lm_head.weight.device
    B, W = len(lens), -(-(max(lens) + N) // PAGE) + extra
    table_BW = torch.randperm(B * W, generator=generator).view(B, W)
    cache = decode.new_cache(B * W * PAGE)
    slots = [int(table_BW[b, p // PAGE]) * PAGE + p % PAGE for b, n in enumerate(lens) for p in range(n)]
    for name, buffer in ((name, buffer) for layer in cache for name, buffer in layer.items()):
        if name == SCALE:
            buffer.copy_(torch.rand(buffer.shape, generator=generator) / 40 + 0.01)
        else:
            fill(buffer, slots, generator, decode.target.config)
    tokens_BN = torch.randint(VOCAB, (B, N), generator=generator)
    return tokens_BN.to(device), table_BW.int().to(device), torch.tensor(lens, dtype=torch.int32, device=device), cache


def fill(buffer: Tensor, slots: list[int], generator: torch.Generator, config: ModelConfig) -> None:
    """Random values in these slots of a layer's buffer, and NaN in the others (in int8, which has none, 127)."""
    if buffer.dtype == torch.uint8:
        latents = torch.randn(len(slots), config.latent_rank + config.head_dim, generator=generator)
        stored = quantise_latents(latents, config.latent_rank)
    else:
        scale = {torch.int8: 30, torch.float8_e4m3fn: 60}.get(buffer.dtype, 1)
        stored = (torch.randn(len(slots), *buffer.shape[1:], generator=generator) * scale).to(buffer.dtype)
    is_bytes = buffer.dtype.itemsize == 1  # neither indexing nor filling takes float8
    to, stored = (buffer.view(torch.uint8), stored.view(torch.uint8)) if is_bytes else (buffer, stored)
    to.fill_((255 if buffer.dtype == torch.uint8 else 127) if is_bytes else torch.nan)
    to[slots] = stored.to(buffer.device)


def copied(given: Inputs) -> Inputs:
    return (*given[:3], [{name: buffer.clone() for name, buffer in layer.items()} for layer in given[3]])


@torch.no_grad()
def directly(decode: DecodePass, given: Inputs) -> Tensor:
    """The logits of the same tokens, as the verifier computes them: by a backend's kernels over a cache of the runtime."""
    tokens_BN, table_BW, lens_B, layers = given
    model, pages, N = decode.target, PageTable(table_BW, PAGE), tokens_BN.shape[1]
    cache = KVCache(
        decode.layout, model.config.layer_kinds, len(layers[0][next(iter(layers[0]))]), device=lens_B.device,
        kv_layers=model.config.kv_source,
    )  # fmt: skip
    stored = sorted(set(model.config.kv_source))
    buffers = [  # the runtime's buffer of each layer, and the given one
        (cache.buffers[each.name][held.index(layer)], layers[stored.index(layer)][each.name.partition(" ")[0]])
        for each in decode.layout.buffers
        for held in [[layer for layer in stored if each.held_by(layer)]]
        for layer in held
    ]
    for own, given_buffer in buffers:
        own.copy_(given_buffer)
    for layer, tensors in zip(stored, layers, strict=True):
        if SCALE in tensors:
            view = cache.view(layer)
            assert isinstance(view, QuantView) and view.scale_2K is not None
            view.scale_2K.copy_(tensors[SCALE])
            view.needs_scale = False
    new = pages.next_tokens(lens_B, N)
    plan = AttentionPlan((causal_segment(pages, lens_B + N, N),), new.positions.flatten())
    backend = make_backend("triton" if lens_B.is_cuda else "torch")
    attn = PagedAttention(backend, cache, PassTables(plan, new.slots.flatten()))
    out = model(tokens_BN.flatten(), new.positions.flatten(), attn)
    for own, given_buffer in buffers:
        given_buffer.copy_(own)
    return model.logits(out.hidden_TH).unflatten(0, tokens_BN.shape)


@torch.no_grad()
def check(decode: DecodePass, program: Callable[..., Tensor], given: Inputs, tolerance: float = 1e-5) -> None:
    """The program's logits, and everything in its cache, are those of the direct pass."""
    other = copied(given)
    want, got = directly(decode, given), program(*other)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(other[3], given[3], strict=True):
        for name in mine:
            x, y = (dense(each[name], decode.target.config.latent_rank) for each in (mine, theirs))
            rtol, atol = tolerance, 1.0 if x.dtype == torch.int8 else tolerance
            if mine[name].dtype in (torch.uint8, torch.float8_e4m3fn):  # the next quantised value
                rtol, atol = 0.13, 0.002
            torch.testing.assert_close(x, y, rtol=rtol, atol=atol, equal_nan=True)


def dense(buffer: Tensor, rank: int) -> Tensor:
    """What a layer's buffer holds, float8 in float32."""
    if buffer.dtype == torch.uint8:
        return dequantise_latents(buffer, rank, torch.float32)
    return buffer.float() if buffer.dtype == torch.float8_e4m3fn else buffer
