"""What gpt-oss targets have of their own in checkpoints: sinks, and experts, in mxfp4 or not.  Knows names and how rows lie.

Shapes: E experts, G = 2F rows of gate and up projections, H hidden size, Q query heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.frame import Family
from specdec.models.checkpoints.loader import Parts, copy_run, expect_attention, fill_attention, fill_float32, fill_stack
from specdec.models.config import ModelConfig
from specdec.models.gpt_oss.config import parse_gpt_oss
from specdec.models.gpt_oss.modules import SinkAttention, gpt_oss_layer
from specdec.models.linear import LinearStack, Stored
from specdec.models.mixtures.fill import leave_others
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.models.schemes.formats import ExpertBlocks


def _expect(checkpoint: Checkpoint, config: ModelConfig) -> None:
    mlp, experts = "model.layers.0.mlp", config.experts
    assert experts is not None
    if config.quantization is None:
        _refuse_unsaid_quantisation(checkpoint)
    expect_attention(checkpoint, config)
    checkpoint.expect(f"{mlp}.router.weight", (experts.count, config.hidden_size), "num_local_experts and hidden_size")
    biases = (experts.count, 2 * experts.intermediate_size)
    checkpoint.expect(f"{mlp}.experts.gate_up_proj_bias", biases, "num_local_experts and intermediate_size")


def _fill_attention(attention: SinkAttention, checkpoint: Checkpoint, prefix: str) -> None:
    fill_attention(attention, checkpoint, prefix)
    first, whole = (rows // attention.head_dim for rows in attention.qkv_proj.rows_of("q_proj"))
    own = slice(first, first + attention.num_heads)
    attention.sinks_Q = fill_float32(attention.sinks_Q, checkpoint, f"{prefix}.sinks", own, whole)


def _fill_experts(experts: MixtureOfExperts, checkpoint: Checkpoint, prefix: str) -> None:
    """Gate rows, which alternate with up rows in the checkpoint, above these."""
    router, held = experts.router, experts.experts.held
    assert router.bias_E is not None and experts.gate_up_bias_EG is not None
    router.weight = fill_float32(router.weight, checkpoint, f"{prefix}.router.weight")
    router.bias_E = fill_float32(router.bias_E, checkpoint, f"{prefix}.router.bias")
    for stack, name in ((experts.gate_up_proj, "gate_up_proj"), (experts.down_proj, "down_proj")):
        if isinstance(checkpoint.format_of(f"{prefix}.experts.{name}"), ExpertBlocks):
            _fill_stack(stack, checkpoint, f"{prefix}.experts.{name}")
        else:
            fill_stack(stack, checkpoint, f"{prefix}.experts")
    leave_others(experts, checkpoint, f"{prefix}.experts")
    name, bias_EG, cut = f"{prefix}.experts.gate_up_proj_bias", experts.gate_up_bias_EG, experts.within
    width = bias_EG.shape[1] // 2
    whole_EG = checkpoint.take(name, (router.count, 2 * width * cut.size))[held.start : held.stop]
    with torch.no_grad():
        for part in range(2):
            bias_EG[:, part * width : (part + 1) * width] = whole_EG[:, part::2].narrow(1, cut.rank * width, width)
    checkpoint.landed(name, bias_EG)
    name, bias_EH = f"{prefix}.experts.down_proj_bias", experts.down_bias_EH
    if bias_EH is None:
        checkpoint.ignore(name)
    else:
        shape = (router.count, bias_EH.shape[1])
        copy_run(Stored(bias_EH, shape, start=held.start), checkpoint, name)


def _fill_stack(stack: LinearStack, checkpoint: Checkpoint, name: str) -> None:
    """A projection of all experts, in blocks.  The rows of its parts alternate."""
    format, parts = checkpoint.format_of(name), list(stack.parts.sizes)
    assert isinstance(format, ExpertBlocks)
    rows, columns = stack.shape(parts[0])
    shape = (len(parts) * rows, columns)
    for index, matrix in enumerate(format.matrices(checkpoint, name, shape, stack.device, stack.numbers)):
        for place, part in enumerate(parts):

            def every(tensor: Tensor, first: int = place) -> Tensor:
                return tensor[first :: len(parts)]

            try:
                stack.fill(index, part, matrix.arranged(every))
            except ValueError as error:
                raise ValueError(f"{checkpoint.folder}: {name}: {error}") from error


def _refuse_unsaid_quantisation(checkpoint: Checkpoint) -> None:
    """ValueError for quantised experts of which config.json says nothing."""
    if blocks := [name for name in checkpoint.names() if name.endswith("_proj_blocks")]:
        raise ValueError(
            f"{checkpoint.folder}: {len(blocks)} tensors hold experts in mxfp4 ({blocks[0]}, ...), but config.json does not "
            'say so; nearest setting that works: "quantization_config": {"quant_method": "mxfp4"} in config.json, which '
            "gpt-oss's own checkpoints have"
        )


PARTS: Parts = {SinkAttention: _fill_attention, MixtureOfExperts: _fill_experts}
UNSAID = {
    "tie_word_embeddings": "false: the output layer is a matrix of its own",
    "max_position_embeddings": "131072",
    "rms_norm_eps": "1e-5",
}
FAMILY = Family(parse_gpt_oss, gpt_oss_layer, _expect, PARTS, UNSAID)
