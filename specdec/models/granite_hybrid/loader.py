"""How Granite 4's hybrids lie in checkpoints: names of Mamba-2's tensors, of mixtures and of the shared MLP."""

from __future__ import annotations

from functools import partial

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.frame import Family
from specdec.models.checkpoints.loader import Parts, fill_attention, fill_linear
from specdec.models.config import ModelConfig
from specdec.models.granite_hybrid.config import parse_granite_hybrid
from specdec.models.granite_hybrid.modules import INPUT, FusedMLP, GraniteAttention, GraniteLayer, GraniteMixture
from specdec.models.mamba.filling import expect_mamba, fill_mamba
from specdec.models.mamba.mixer import Mamba2
from specdec.models.mixtures.fill import MixtureNames, fill_mixture
from specdec.models.recurrent.fill import by_ranks, expect_kinds

SIZES = "the mamba_* sizes, layer_types"
NAMES = MixtureNames("block_sparse_moe.router.layer.weight", experts="block_sparse_moe.experts", shared="", layer_keys="")
UNSAID = {"layer_types": "mamba for all layers", "position_embedding_type": "null: layers know no positions"}


def _fill_mamba(net: Mamba2, checkpoint: Checkpoint, prefix: str) -> None:
    fill_mamba(net, checkpoint, f"{prefix.rpartition('.')[0]}.mamba")


def _fill_mlp(mlp: FusedMLP, checkpoint: Checkpoint, prefix: str) -> None:
    shared = f"{prefix.rpartition('.')[0]}.shared_mlp"
    rows = mlp.gate_up_proj.rows_of(INPUT)[1]
    halves = partial(by_ranks, sizes=(rows // 2, rows // 2), ranks=rows // mlp.gate_up_proj.out_features)
    fill_linear(mlp.gate_up_proj, checkpoint, {INPUT: f"{shared}.{INPUT}"}, halves)
    fill_linear(mlp.down_proj, checkpoint, f"{shared}.output_linear")


def _fill_mixture(moe: GraniteMixture, checkpoint: Checkpoint, prefix: str) -> None:
    fill_mixture(moe, checkpoint, prefix, NAMES)
    assert isinstance(moe.shared, FusedMLP)
    _fill_mlp(moe.shared, checkpoint, prefix)


def _expect(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """ValueError if a config's sizes are not those of the first layer of each kind, by the headers."""
    H, D, experts = config.hidden_size, config.head_dim, config.experts
    recurrent = config.recurrent_layers
    marks = "self_attn.q_proj.weight", "mamba.A_log"
    expect_kinds(checkpoint, config, marks, ("attention", "mamba"), "layer_types (absent: all mamba)")
    first = f"model.layers.{min(set(range(config.num_layers)) - set(recurrent))}.self_attn"
    checkpoint.expect_matrix(f"{first}.q_proj", (config.num_heads * D, H), "num_attention_heads, head_dim and hidden_size")
    checkpoint.expect_matrix(f"{first}.k_proj", (config.num_kv_heads * D, H), "num_key_value_heads, head_dim, hidden_size")
    if recurrent:
        expect_mamba(checkpoint, config, f"model.layers.{recurrent[0]}.mamba", SIZES)
    width = config.intermediate_size if experts is None else experts.shared_size
    checkpoint.expect_matrix(f"model.layers.0.shared_mlp.{INPUT}", (2 * width, H), "shared_intermediate_size and hidden_size")
    if experts is not None:
        checkpoint.expect(f"model.layers.0.{NAMES.router}", (experts.count, H), "num_local_experts and hidden_size")
        gate = f"model.layers.0.{NAMES.experts}.0.gate_proj"
        checkpoint.expect_matrix(gate, (experts.intermediate_size, H), "intermediate_size and hidden_size")


PARTS: Parts = {
    GraniteAttention: fill_attention, Mamba2: _fill_mamba, FusedMLP: _fill_mlp, GraniteMixture: _fill_mixture,
}  # fmt: skip
FAMILY = Family(parse_granite_hybrid, GraniteLayer, _expect, PARTS, UNSAID)
