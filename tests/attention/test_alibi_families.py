"""ALiBi as its families compute it: our scoring with slopes against transformers' Bloom, MPT and Falcon attention, in float32.

Bloom and Falcon add slope * the key's position, MPT slope * the distance to the last key: within a query these differ by a
constant, which a softmax takes out.  Shapes: T tokens, H heads, D head dim.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, FalconConfig, MptConfig
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from specdec.attention.eager.dense import attend_rows
from specdec.attention.kinds import LayerKind, Scoring

T, H, D = 19, 4, 8
MASK = torch.full((1, 1, T, T), torch.finfo(torch.float32).min).triu(1)


def bloom(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(the family's output, fused qkv [1, H, T, 3, D], slopes, the output projection's weight)."""
    module = modeling_bloom.BloomAttention(BloomConfig(hidden_size=H * D, n_head=H, hidden_dropout=0.0), 0).eval()
    bias = modeling_bloom.build_alibi_tensor(torch.ones(1, T), H, torch.float32)
    out = module(x, torch.zeros_like(x), bias, MASK)[0]
    qkv = module.query_key_value(x).view(1, T, H, 3, D)
    return out, qkv, modeling_bloom._get_alibi_slopes(H, torch.device("cpu")), module.dense


def falcon(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    config = FalconConfig(
        hidden_size=H * D, num_attention_heads=H, alibi=True, multi_query=False, new_decoder_architecture=True, num_kv_heads=H,
        bias=True,
    )  # fmt: skip
    config._attn_implementation = "eager"
    module = modeling_falcon.FalconAttention(config, 0).eval()
    bias = modeling_falcon.build_alibi_tensor(torch.ones(1, T), H, torch.float32)
    out = module(x, bias, MASK)[0]
    q, k, v = module._split_heads(module.query_key_value(x))
    slopes_H = bias.view(H, T)[:, 1]  # rounded to bfloat16, and added before the scale
    return out, torch.stack((q, k, v), dim=3), slopes_H / math.sqrt(D), module.dense


def mpt(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    config = MptConfig(d_model=H * D, n_heads=H, max_seq_len=T)
    module = modeling_mpt.MptAttention(config, 0).eval()
    bias = modeling_mpt.build_mpt_alibi_tensor(H, T)
    out = module(x, bias, attention_mask=torch.ones(T, T).triu(1).bool()[None, None])[0]
    qkv = module.Wqkv(x).view(1, T, 3, H, D).transpose(2, 3)
    return out, qkv, bias[:, 0, -1] - bias[:, 0, -2], module.out_proj


@pytest.mark.parametrize("family", [bloom, falcon, mpt])
def test_a_familys_bias_is_a_slope_times_a_distance(family: Callable[[Tensor], tuple]) -> None:
    """Keeps out: a slope with the wrong sign or scale, and distances that only a constant for each query may change."""
    torch.manual_seed(0)
    x = torch.randn(1, T, H * D)
    with torch.no_grad():
        want, qkv, slopes_H, project = family(x)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        out = attend_rows(q, k, v, LayerKind(alibi=True), Scoring(slopes_H=slopes_H.float()))
        got = project(out.transpose(1, 2).flatten(2))
    assert slopes_H.shape == (H,) and bool((slopes_H > 0).all())
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
