"""How a layer of Mamba-2 lies in checkpoints: z, x, B, C, dt in one matrix, and x, B, C in the convolution."""

from __future__ import annotations

from functools import partial

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import copy_run, fill_float32, fill_linear
from specdec.models.config import ModelConfig
from specdec.models.linear import Stored
from specdec.models.mamba.mixer import Mamba2
from specdec.models.recurrent.fill import by_ranks, expect_rates, fill_taps
from specdec.models.recurrent.sizes import RuleSizes


def fill_mamba(net: Mamba2, checkpoint: Checkpoint, prefix: str) -> None:
    """prefix: what the names of the layer's tensors begin with.  Rows come into our order: C, B, x, z, dt."""
    ranks, rank = net.shard.size, net.shard.rank
    whole = net.sizes.times(ranks)
    C_rows, B_rows, x_rows = whole.kinds
    files = (x_rows, x_rows, B_rows, C_rows, whole.value_heads)
    arrange = partial(by_ranks, sizes=files, ranks=ranks, order=(3, 2, 1, 0, 4))
    fill_linear(net.in_proj, checkpoint, {"in_proj": f"{prefix}.in_proj"}, arrange)
    fill_linear(net.out_proj, checkpoint, f"{prefix}.out_proj")
    channels_first = partial(by_ranks, sizes=files[1:4], ranks=ranks, order=(2, 1, 0))
    fill_taps(net.conv_ZC, checkpoint, f"{prefix}.conv1d.weight", net.shard, channels_first)
    if net.conv_bias_C is not None:
        C = net.conv_bias_C.shape[0]
        bias = Stored(net.conv_bias_C.detach(), (C * ranks,), start=C * rank)
        copy_run(bias, checkpoint, f"{prefix}.conv1d.bias", channels_first)
    if net.norm_Y is not None:
        norm = Stored(net.norm_Y.detach(), (whole.outputs,), start=net.sizes.outputs * rank)
        copy_run(norm, checkpoint, f"{prefix}.norm.weight")
    expect_rates(checkpoint, f"{prefix}.A_log", (whole.value_heads,))
    own = net.shard.piece(whole.value_heads)
    net.A_log_V, net.D_V, net.dt_bias_V = (
        fill_float32(empty, checkpoint, f"{prefix}.{name}", own, whole.value_heads)
        for empty, name in ((net.A_log_V, "A_log"), (net.D_V, "D"), (net.dt_bias_V, "dt_bias"))
    )


def expect_mamba(checkpoint: Checkpoint, config: ModelConfig, prefix: str, keys: str) -> None:
    """ValueError if a config's sizes are not those of a layer, by the headers.  keys: those of config.json, for errors."""
    sizes = config.recurrent
    assert sizes is not None and isinstance(sizes.rule, RuleSizes)
    rows = sizes.channels + sizes.outputs + sizes.rule.value_heads
    checkpoint.expect_matrix(f"{prefix}.in_proj", (rows, config.hidden_size), f"{keys} and hidden_size")
    checkpoint.expect(f"{prefix}.conv1d.weight", (sizes.channels, 1, sizes.taps), keys)
    checkpoint.expect(f"{prefix}.A_log", (sizes.rule.value_heads,), keys)
