"""How large the share of the fullest rank is of each of a checkpoint's tensors, by names and shapes alone.

That is the first rank: of whole experts and of the vocabulary's rows the last ranks may have fewer, and biases that are added
once are its own.  This file knows what checkpoints call the matrices that ranks share (models/sharding.py); all others each
rank has whole.
"""

from __future__ import annotations

import math
import re

from specdec.models.config import HeadSizes, ModelConfig
from specdec.models.schemes.size import Held

Shape = tuple[int, ...]
BY_ROWS = re.compile(
    r"(\.(q_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|gate_up_proj|w1|w3|sinks|in_proj\w*|([qkv]_)?conv1d|conv\.conv|A_log|D"
    r"|input_linear|(mamba|mixer)\.norm|linear_attn\.[kvgab]_proj|([fg]_)?b_proj)|^lm_head)$"
)
BY_KV_HEADS = re.compile(r"\.[kv]_proj$")
BY_COLUMNS = re.compile(r"\.(o_proj|out_proj|down_proj|output_linear|w2)$")
LAYER = re.compile(r"\blayers\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def heads_of_tensor(config: ModelConfig, name: str) -> HeadSizes:
    """The heads of the layer whose tensor it is; those of most layers for a tensor of none, or of an MTP layer."""
    found = LAYER.search(name)
    is_own = found is not None and int(found[1]) < config.num_layers
    return config.heads_of(int(found[1])) if found is not None and is_own else config.heads


def share_of_tensor(config: ModelConfig) -> Held:
    """From a tensor's name, or that of a quantised matrix without an ending, and its shape to the share's shape.

    config: of the first rank's share.
    """
    ranks, experts = config.shard.size, config.experts
    own = experts.own if experts is not None else None

    def held(name: str, shape: Shape) -> Shape:
        if ranks == 1:
            return shape
        matrix, is_bias = re.sub(r"\.(weight|bias)$", "", name), name.endswith("bias")
        if own is not None and experts is not None and ".experts." in matrix:
            if (number := EXPERT.search(f"{matrix}.")) is not None:
                return shape if int(number[1]) in own else (0, *shape[1:])
            return (shape[0] * len(own) // experts.count, *shape[1:])
        if name.endswith((".dt_bias", ".A_log")):  # of recurrent layers
            return (math.prod(shape) // ranks,)
        if name.endswith(".attention_sink_bias"):
            return (shape[0] // ranks,)
        matrix = matrix.removesuffix("_bias")
        if name.endswith("_bias"):  # gpt-oss's of all experts, [experts, rows]
            return (shape[0], -(-shape[1] // ranks)) if BY_ROWS.search(matrix) else shape
        if BY_ROWS.search(matrix):
            return (-(-shape[0] // ranks), *shape[1:])
        wide = config.norms_all_heads and matrix.rpartition(".")[2]
        if wide == "q_norm":
            return (shape[0] // ranks,)
        if BY_KV_HEADS.search(matrix) or wide == "k_norm":
            return (shape[0] * heads_of_tensor(config, name).kv_copies // ranks, *shape[1:])
        return (shape[0], shape[1] // ranks) if BY_COLUMNS.search(matrix) and not is_bias else shape

    return held
