"""How checkpoints store latent attention, with an indexer or without.  Knows names and fusing."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import Arrange, copy_, fill_dense, fill_linear, fill_norm
from specdec.models.latent.attention import LatentAttention
from specdec.models.latent.config import LatentConfig
from specdec.models.linear import ONLY


def expect_latents(checkpoint: Checkpoint, config: LatentConfig, layer: int = 0) -> None:
    """ValueError if a config's sizes are not those of that layer's attention, by the headers."""
    H, C, hidden, query_dim = config.num_heads, config.latent_rank, config.hidden_size, config.nope_dim + config.head_dim
    matrix, attention = checkpoint.expect_matrix, f"model.layers.{layer}.self_attn"
    queries = "num_attention_heads, qk_nope_head_dim, qk_rope_head_dim and q_lora_rank"
    if config.q_rank is None:
        matrix(f"{attention}.q_proj", (H * query_dim, hidden), queries)
    else:
        matrix(f"{attention}.q_a_proj", (config.q_rank, hidden), "q_lora_rank and hidden_size")
        matrix(f"{attention}.q_b_proj", (H * query_dim, config.q_rank), queries)
    matrix(f"{attention}.kv_a_proj_with_mqa", (C + config.head_dim, hidden), "kv_lora_rank and qk_rope_head_dim")
    keys_values = "num_attention_heads, qk_nope_head_dim, v_head_dim and kv_lora_rank"
    matrix(f"{attention}.kv_b_proj", (H * (config.nope_dim + config.value_dim), C), keys_values)
    if (index := config.indexer) is not None:
        sizes = "index_n_heads, index_head_dim and q_lora_rank"
        matrix(f"{attention}.indexer.wq_b", (index.heads * index.head_dim, config.q_rank or 0), sizes)
        matrix(f"{attention}.indexer.wk", (index.head_dim, hidden), "index_head_dim and hidden_size")
        matrix(f"{attention}.indexer.weights_proj", (index.heads, hidden), "index_n_heads and hidden_size")


def fill_latents(attention: LatentAttention, checkpoint: Checkpoint, prefix: str) -> None:
    """Queries (or what they come from), the latent and the indexer's part in one weight; rotated pairs as halves of a head.

    What expands latents is dequantised: it is multiplied head by head.
    """
    config, sizes, norm = attention.config, attention.in_proj.parts.sizes, attention.k_norm
    rotated = config.head_dim if config.interleaved else 0
    queries = partial(halved, size=attention.query_dim, rotated=rotated)
    names = {"q": f"{prefix}.q_proj", "latent": f"{prefix}.kv_a_proj_with_mqa"}
    arrange: dict[str, Arrange] = {"q": queries, "latent": partial(halved, size=sizes["latent"], rotated=rotated)}
    without_bias = {"q"}  # transformers gives q_proj and the indexer none
    q_b_names, q_b_arrange = {"q": f"{prefix}.q_b_proj"}, {"q": queries}
    if attention.q_b_proj is not None:
        assert attention.q_a_layernorm is not None
        names["q"], without_bias = f"{prefix}.q_a_proj", set()
        del arrange["q"]
        fill_norm(attention.q_a_layernorm, checkpoint, f"{prefix}.q_a_layernorm")
    if norm is not None:
        index = config.indexer
        assert index is not None and attention.q_b_proj is not None
        index_rotated = config.head_dim if index.interleaved else 0
        turned = partial(halved, size=index.head_dim, rotated=index_rotated, first=True)
        names["index_key"], arrange["index_key"] = f"{prefix}.indexer.wk", turned
        without_bias |= {"index_key", "index_weights"}
        if attention.weights_proj is None:
            names["index_weights"] = f"{prefix}.indexer.weights_proj"
        else:
            fill_linear(attention.weights_proj, checkpoint, f"{prefix}.indexer.weights_proj")
        q_b_names["index_q"], q_b_arrange["index_q"] = f"{prefix}.indexer.wq_b", turned
        for name, vector in norm.named_parameters():
            copy_(vector, checkpoint, f"{prefix}.indexer.k_norm.{name}", turned)
    fill_linear(attention.in_proj, checkpoint, names, arrange, without_bias)
    if attention.q_b_proj is not None:
        fill_linear(attention.q_b_proj, checkpoint, q_b_names, q_b_arrange)
    fill_norm(attention.kv_a_layernorm, checkpoint, f"{prefix}.kv_a_layernorm")
    fill_dense(attention.kv_b_proj, checkpoint, f"{prefix}.kv_b_proj")
    fill_linear(attention.o_proj, checkpoint, f"{prefix}.o_proj")


def latents_of(attention: LatentAttention) -> dict[str, Tensor]:
    """The tensors of attention without an indexer, as a checkpoint holds them: what `fill_latents` has read."""
    config, in_proj = attention.config, attention.in_proj
    assert attention.k_norm is None and config.shard.size == 1, "shares and indexers are not written"
    rotated = config.head_dim if config.interleaved else 0
    named = {
        "kv_a_proj_with_mqa": (in_proj, "latent", in_proj.parts.sizes["latent"]),
        "kv_b_proj": (attention.kv_b_proj, ONLY, 0),
    }
    named |= {"o_proj": (attention.o_proj, ONLY, 0), "q_proj": (in_proj, "q", attention.query_dim)}
    norms = {"kv_a_layernorm": attention.kv_a_layernorm}
    if attention.q_b_proj is not None:
        assert attention.q_a_layernorm is not None
        del named["q_proj"]
        named |= {"q_a_proj": (in_proj, "q", 0), "q_b_proj": (attention.q_b_proj, "q", attention.query_dim)}
        norms["q_a_layernorm"] = attention.q_a_layernorm
    written = {f"{name}.weight": norm.weight for name, norm in norms.items()}
    for name, (matrix, part, size) in named.items():
        weight = matrix.tensors(part)["weight"].tensor
        written[f"{name}.weight"] = side_by_side(weight, size, rotated) if size else weight
    return written


def side_by_side(rows: Tensor, size: int, rotated: int) -> Tensor:
    """What `halved` made these rows of."""
    if not rotated:
        return rows
    by_head, R = rows.unflatten(0, (-1, size)), rotated
    turned = by_head[:, -R:].unflatten(1, (2, R // 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((by_head[:, :-R], turned), dim=1).flatten(0, 1)


def halved(rows: Tensor, size: int, rotated: int, first: bool = False) -> Tensor:
    """Rows of heads of that size (of a weight or a bias) with other pairs for rotation.

    The last `rotated` rows of a head (first: the first ones) are rotated in pairs that lie side by side: there the pairs' first
    members move before their second ones.  Queries and keys alike, so that their products stay as they are.
    """
    if not rotated:
        return rows
    by_head, R = rows.unflatten(0, (-1, size)), rotated
    turned, rest = (by_head[:, :R], by_head[:, R:]) if first else (by_head[:, -R:], by_head[:, :-R])
    turned = turned.unflatten(1, (R // 2, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((turned, rest) if first else (rest, turned), dim=1).flatten(0, 1)
