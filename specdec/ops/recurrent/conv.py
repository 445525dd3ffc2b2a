"""A causal convolution for each channel, by path: y = silu(bias + sum over w of weight_w * the input w tokens before).

Some have no bias, and some no SiLU.

In a tree a node reads its nearest ancestors, and beyond the root the last inputs of the committed text.  On a GPU each pass
over a tree or over parts is one launch of conv_triton.py.

Shapes: as of states.py; Z = W + 1 taps, of which the last is the token's own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import use_kernels
from specdec.ops.recurrent.states import ChunkSteps, ConvStates, TreeSteps


class Convolution(NamedTuple):
    """A layer's weights.  weight_ZC: of taps, the token's own last.  bias_C: None if there is none.  silu: what comes after."""

    weight_ZC: Tensor
    bias_C: Tensor | None = None
    silu: bool = True


def tree_convolution(x_TC: Tensor, conv: Convolution, layer: ConvStates, steps: TreeSteps) -> Tensor:
    """[T, C]: each node's output.  The pending path is added to the last inputs, and the nodes leave theirs."""
    if use_kernels(x_TC):
        from specdec.ops.recurrent.conv_triton import launch_tree_convolution

        return launch_tree_convolution(x_TC, conv, layer, steps)
    (B, N), weight_ZC = steps.parents_BN.shape, conv.weight_ZC
    W, x_BNC = weight_ZC.shape[0] - 1, x_TC.view(B, N, -1)
    last_BWC = _last_inputs(layer, steps)
    layer.conv_PWC.index_copy_(0, steps.write_B, last_BWC)
    layer.x_LNC[steps.write_B, :N] = x_BNC
    known_BMC = torch.cat((last_BWC, x_BNC), dim=1)
    at_BN = torch.arange(W, W + N, dtype=torch.int64, device=x_TC.device).expand(B, N)
    above_BN = torch.cat((at_BN[:, :1] - 1, W + steps.parents_BN[:, 1:]), dim=1)  # the root follows the last input
    above_BM = torch.cat((at_BN.new_tensor([0, *range(W - 1)]).expand(B, W), above_BN), dim=1)
    y_BNC = known_BMC.gather(1, at_BN[..., None].expand_as(x_BNC)).to(_wide(x_TC)) * weight_ZC[W]
    for tap in range(W - 1, -1, -1):
        at_BN = above_BM.gather(1, at_BN)
        y_BNC = y_BNC + known_BMC.gather(1, at_BN[..., None].expand_as(x_BNC)) * weight_ZC[tap]
    return _ended(y_BNC, conv).to(x_TC.dtype).flatten(0, 1)


def _last_inputs(layer: ConvStates, steps: TreeSteps) -> Tensor:
    """[B, W, C]: the last inputs of each committed text, its pending path included."""
    conv_BWC, W = layer.conv_PWC[steps.read_B], layer.conv_PWC.shape[1]
    E, count_B = steps.path_BE.shape[1], steps.count_B.long()
    left_B = steps.read_B.where(count_B > 0, 0)
    x_BEC = layer.x_LNC[left_B].gather(1, steps.path_BE[..., None].expand(-1, -1, conv_BWC.shape[2]))
    both_BMC = torch.cat((conv_BWC, x_BEC), dim=1)
    at_BW = count_B[:, None] + torch.arange(W, dtype=torch.int64, device=count_B.device)
    assert both_BMC.shape[1] == W + E
    return both_BMC.gather(1, at_BW[..., None].expand_as(conv_BWC))


def chunk_convolution(x_TC: Tensor, conv: Convolution, layer: ConvStates, steps: ChunkSteps) -> Tensor:
    """[T, C]: each token's output; that of padding is anything."""
    if use_kernels(x_TC):
        from specdec.ops.recurrent.conv_triton import launch_chunk_convolution

        return launch_chunk_convolution(x_TC, conv, layer, steps)
    y_TC, W, cu = torch.zeros_like(x_TC), conv.weight_ZC.shape[0] - 1, steps.cu_B1.tolist()
    for b, (read, write) in enumerate(zip(steps.read_B.tolist(), steps.write_B.tolist(), strict=True)):
        begin, end = cu[b], cu[b + 1]
        known_MC = torch.cat((layer.conv_PWC[read], x_TC[begin:end]))
        if begin < end:
            y_TC[begin:end] = convolved(known_MC[None], conv)[0]
        layer.conv_PWC[write] = known_MC[len(known_MC) - W :]
        layer.conv_PWC[steps.keep_B[b]] = known_MC[int(steps.after_B[b]) :][:W]
    return y_TC


def convolved(x_BMC: Tensor, conv: Convolution) -> Tensor:
    """[B, M - W, C]: the outputs of all inputs but the first W."""
    taps_BNCZ = x_BMC.unfold(1, conv.weight_ZC.shape[0], 1).to(_wide(x_BMC))
    return _ended((taps_BNCZ * conv.weight_ZC.t()).sum(-1), conv).to(x_BMC.dtype)


def _ended(y: Tensor, conv: Convolution) -> Tensor:
    """The sums of taps with what comes after them."""
    y = y if conv.bias_C is None else y + conv.bias_C
    return F.silu(y) if conv.silu else y


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
