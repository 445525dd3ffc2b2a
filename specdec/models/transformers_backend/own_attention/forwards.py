"""Makes models that compute attention in code of their own call specdec's: BLOOM, MPT and Falcon.

Their modules do not call transformers' attention interface.  Each attention module of such a model gets another forward pass,
which makes queries, keys and values as the family's own code does, calls the interface, and projects the result.  Everything
else of the model stays transformers' code.

Shapes: T tokens, X width of fused queries, keys and values, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specdec.models.keys.slopes import Slopes, slopes_of_bloom, slopes_of_falcon, slopes_of_mpt
from specdec.models.transformers_backend.attention import NAME, attend

Result = tuple[Tensor, None]  # a module's output [1, T, hidden size], and no attention weights


def call_our_attention(decoder: nn.Module, config: Any) -> None:
    """Makes a model's attention modules call the attention interface, if the model's code does not do so by itself.

    config: transformers' config of the model.
    """
    for module in decoder.modules():
        make = _FORWARDS.get(type(module).__name__)
        if make is not None:
            module.forward = make(module, config)
    if config.model_type == "mpt":
        decoder.build_mpt_alibi_tensor = lambda *_, **__: None  # type: ignore[assignment]  # its biases are not read
        decoder.register_forward_pre_hook(_with_mask, with_kwargs=True)


def register_own_classes() -> None:
    """Lets transformers make Falcon models under our attention's name, which that family looks up in a table of its own."""
    from transformers.models.falcon import modeling_falcon

    classes = getattr(modeling_falcon, "FALCON_ATTENTION_CLASSES", {})
    classes.setdefault(NAME, modeling_falcon.FalconAttention)


def _with_mask(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """MPT's code converts the mask that it makes, so it must have one; a mask of four dimensions is passed on as it is."""
    return args, kwargs | {"attention_mask": kwargs["input_ids"].new_ones((1, 1, 1, 1), dtype=torch.bool)}


def _attended(
    module: nn.Module, heads: tuple[Tensor, Tensor, Tensor], scale: float, slopes: Slopes | None
) -> Tensor:  # fmt: skip
    """[1, T, H * D] of queries [1, T, H, D], keys and values [1, T, K, D]."""
    q, k, v = (x.transpose(1, 2) for x in heads)
    slopes_H = None if slopes is None else slopes.on(q.device)
    return attend(module, q, k, v, None, scaling=scale, slopes_H=slopes_H)[0].flatten(2)


def _thirds(qkv_1TX: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each head's query, key and value lie side by side: [1, T, H, D] three times."""
    q, k, v = qkv_1TX.unflatten(-1, (heads, 3, -1)).unbind(3)
    return q, k, v


def _bloom(module: Any, config: Any) -> Callable[..., Result]:
    slopes = Slopes(slopes_of_bloom(module.num_heads))

    def forward(hidden: Tensor, residual: Tensor, **_: Any) -> Result:
        heads = _thirds(module.query_key_value(hidden), module.num_heads)
        return residual + module.dense(_attended(module, heads, module.inv_norm_factor, slopes)), None

    return forward


def _mpt(module: Any, config: Any) -> Callable[..., Result]:
    slopes = Slopes(slopes_of_mpt(module.n_heads, config.attn_config.alibi_bias_max))

    def forward(hidden: Tensor, **_: Any) -> Result:
        qkv_1TX = module.Wqkv(hidden)
        if module.clip_qkv:
            qkv_1TX = qkv_1TX.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        q, k, v = qkv_1TX.unflatten(-1, (3, module.n_heads, -1)).unbind(2)
        return module.out_proj(_attended(module, (q, k, v), module.softmax_scale, slopes)), None

    return forward


def _falcon(module: Any, config: Any) -> Callable[..., Result]:
    scale, heads, kv_heads = module.inv_norm_factor, module.num_heads, module.num_kv_heads
    slopes = Slopes(slopes_of_falcon(heads, scale)) if config.alibi else None
    split: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    if module.new_decoder_architecture or module.multi_query:
        split = partial(_grouped, kv_heads=kv_heads, group=heads // kv_heads)
    else:
        split = partial(_thirds, heads=heads)

    def forward(hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Result:
        q, k, v = split(module.query_key_value(hidden))
        if slopes is None:
            q, k = (_rotated(x, *position_embeddings) for x in (q, k))
        return module.dense(_attended(module, (q, k, v), scale, slopes)), None

    return forward


def _grouped(qkv_1TX: Tensor, kv_heads: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """The queries of each kv head, its key and its value lie side by side: [1, T, H, D], and [1, T, K, D] twice."""
    q, k, v = qkv_1TX.unflatten(-1, (kv_heads, group + 2, -1)).split((group, 1, 1), dim=3)
    return q.flatten(2, 3), k[:, :, :, 0], v[:, :, :, 0]


def _rotated(x_1THD: Tensor, cos_1TD: Tensor, sin_1TD: Tensor) -> Tensor:
    first, second = x_1THD.chunk(2, dim=-1)
    return x_1THD * cos_1TD[:, :, None] + torch.cat((-second, first), dim=-1) * sin_1TD[:, :, None]


_FORWARDS: dict[str, Callable[[Any, Any], Callable[..., Result]]] = {
    "BloomAttention": _bloom,
    "MptAttention": _mpt,
    "FalconAttention": _falcon,
}
