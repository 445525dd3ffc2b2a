"""What DiffLlama targets have of their own in checkpoints: the order of heads, and the vectors of each layer's lambda."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.frame import Family
from specdec.models.checkpoints.loader import Parts, fill_linear, fill_mlp, fill_parts
from specdec.models.diffllama.config import parse_diffllama
from specdec.models.diffllama.modules import DifferentialAttention, diffllama_layer
from specdec.models.layers import MLP
from specdec.models.llama.loader import UNSAID, expect_llama

_NORM = "subln.weight"  # the name in the code of arXiv 2410.05258; transformers' layers have no such weight


def _fill_attention(attention: DifferentialAttention, checkpoint: Checkpoint, prefix: str) -> None:
    """Stacks q, k and v in one weight, the heads of a pair side by side; q alone where an earlier layer's k and v are read."""
    fill_parts(attention.qkv_proj, checkpoint, prefix, partial(paired, num_kv_heads=attention.all_kv_heads))
    fill_linear(attention.o_proj, checkpoint, f"{prefix}.o_proj")
    attention.factor = nn.Buffer(_factor(attention, checkpoint, prefix))
    if f"model.layers.0.self_attn.{_NORM}" in checkpoint:  # then every layer must have one
        weight_E = checkpoint.take(f"{prefix}.{_NORM}", (2 * attention.head_dim,)).to(attention.factor.device, torch.float32)
        checkpoint.landed(f"{prefix}.{_NORM}", weight_E)
        attention.norm_weight = weight_E.contiguous()


def paired(rows: Tensor, num_kv_heads: int) -> Tensor:
    """Rows of heads, of which the checkpoint holds the first half of the pairs' heads before the second half, in our order.

    Pair i's heads are moved together: to 2i and 2i + 1 of keys and values, and to these keys' groups of queries.
    num_kv_heads: of all ranks.
    """
    return rows.unflatten(0, (2, num_kv_heads // 2, -1)).transpose(0, 1).flatten(0, 2)


def _factor(attention: DifferentialAttention, checkpoint: Checkpoint, prefix: str) -> Tensor:
    """The layer's lambda, summed in float32: exp(q1 . k1) - exp(q2 . k2) + lambda_init."""
    vectors: dict[str, Tensor] = {}
    device = attention.factor.device
    for name in ("q1", "k1", "q2", "k2"):
        vectors[name] = checkpoint.take(f"{prefix}.lambda_{name}", (attention.head_dim,)).float()
        checkpoint.landed(f"{prefix}.lambda_{name}", vectors[name].to(device))
    if not checkpoint.has_data:
        return attention.factor
    first, second = ((vectors[f"q{half}"] * vectors[f"k{half}"]).sum().exp() for half in (1, 2))
    factor = first - second + attention.lambda_init
    if not factor.isfinite() and all(bool(vector.isfinite().all()) for vector in vectors.values()):
        raise ValueError(
            f"{checkpoint.folder}: {prefix} has a lambda of {float(factor)}; expected smaller vectors lambda_q, _k"
        )
    return factor.to(device)


PARTS: Parts = {DifferentialAttention: _fill_attention, MLP: fill_mlp}
FAMILY = Family(parse_diffllama, diffllama_layer, expect_llama, PARTS, UNSAID | {"rms_norm_eps": "1e-5"})
