"""Ranks that share heads whose norms see all heads of a token: each has its heads as one rank has them."""

from pathlib import Path

import pytest
import torch
from toolkit.checkpoints.load import load_target
from toolkit.checkpoints.mixtures import save_mixture
from toolkit.parallel.ranks import ThreadGroup, on_ranks
from torch import Tensor

from specdec.models.mixtures.wide_norms import WideNormAttention
from specdec.models.registry import choose_target
from specdec.models.sharding import join
from specdec.parallel.shard import Shard


@pytest.mark.parametrize("name", ["minimax", "olmoe"])
def test_ranks_norm_their_heads_by_all_heads(tmp_path: Path, name: str) -> None:
    """On 4 ranks two hold each kv head.  Keeps out: a rank's own mean, a kv head that counts twice, weights of other heads."""
    folder = save_mixture(tmp_path / "m", name, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    config = choose_target(folder).config
    x_TH = torch.randn(7, config.hidden_size, generator=torch.Generator().manual_seed(0))

    def heads(shard: Shard, group: ThreadGroup | None = None) -> Tensor:
        model = load_target(folder, config, 64, torch.device("cpu"), torch.float32, shard)
        if group is not None:
            join(model, group)
        (attention,) = (part for part in model.modules() if isinstance(part, WideNormAttention))
        with torch.inference_mode():
            return attention.project(x_TH)

    whole_TXD = heads(Shard())
    for size in (2, 4):
        for rank, own in enumerate(on_ranks(size, lambda group: heads(Shard(group.rank, group.size), group), in_turns=True)):
            q, kv = 4 // size, rank * 2 // size
            want = [*range(rank * q, rank * q + q), 4 + kv, 6 + kv]
            torch.testing.assert_close(own, whole_TXD[:, want], atol=1e-5, rtol=1e-5)
