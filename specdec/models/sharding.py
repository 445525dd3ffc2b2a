"""What a rank's share of a model is, in the words of its config, and whom its layers exchange with.  Knows no weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from torch import nn

from specdec.models.config import ModelConfig
from specdec.models.layers import NoNorm, RMSNorm
from specdec.models.mixtures.dividing import ExpertSharing, ExpertSizes, choose_sharing
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.parallel.group import Group
from specdec.parallel.shard import Shard
from specdec.parallel.vocabulary import Vocabulary

# What checkpoints call the matrices of experts whose columns ranks share; gpt-oss's are of all experts.
_DOWN = (
    *(f"mlp.{matrix}" for matrix in ("down_proj", "experts.down_proj", "experts.0.down_proj")), "mixer.experts.0.down_proj",
    *(f"block_sparse_moe.experts.0.{matrix}" for matrix in ("w2", "down_proj")), "feed_forward.experts.0.w2",
)  # fmt: skip
_SHARED_DOWN = (
    *(f"mlp.{shared}.down_proj" for shared in ("shared_experts", "shared_expert", "shared_mlp")),
    *("shared_mlp.output_linear", "mixer.shared_experts.down_proj", "block_sparse_moe.shared_experts.down_proj"),
)


class Shared(Protocol):
    """A target or a draft head of which each rank may hold a share."""

    group: Group
    vocabulary: Vocabulary

    def modules(self) -> Iterator[nn.Module]: ...


def share_of(config: ModelConfig, shard: Shard, whose: str = "target") -> ModelConfig:
    """The config of one rank's share: its heads, and its part of every MLP.  config: the whole model's.

    whose: which model it is, in an error's words.
    Ranks share the heads evenly, those of recurrent layers with the value heads that a key head serves.
    Where there are fewer key/value heads than ranks, neighbours hold the same one.
    Experts are cut, or divided as wholes (`ExpertsConfig.divided`).
    ValueError says which sizes do not fit, and the nearest number of ranks that does.
    """
    if shard.size == 1:
        return config
    if why := misfit(config, shard.size):
        fits = [size for size in range(shard.size, 0, -1) if not misfit(config, size)]
        raise ValueError(
            f"tensor_parallel_size must be a number of processes that can share the {whose}'s {why} evenly, got {shard.size}; "
            f"nearest setting that works: tensor_parallel_size={fits[0]}{_with_whole_experts(config, shard.size)}"
            f"{_without_groups(config, shard.size)}"
        )
    heads = config.heads.share(shard)
    own = {"num_heads": heads.num_heads, "num_kv_heads": heads.num_kv_heads, "kv_copies": heads.kv_copies}
    if _shares_intermediate(config):
        own["intermediate_size"] = shard.share(config.intermediate_size)
    unlike = tuple((kind, each.share(shard)) for kind, each in config.unlike_heads)
    experts = config.experts and _share_of_experts(config.experts, shard)
    recurrent = config.recurrent and config.recurrent.share(shard)
    return replace(config, shard=shard, experts=experts, recurrent=recurrent, unlike_heads=unlike, **own)  # type: ignore[arg-type]


def _share_of_experts(experts: ExpertsConfig, shard: Shard) -> ExpertsConfig:
    """A part of each expert, or a run of whole ones, of which the last ranks may have fewer, or none."""
    shared = experts.shared_size and shard.share(experts.shared_size)
    if not experts.divided:
        return replace(experts, intermediate_size=shard.share(experts.intermediate_size), shared_size=shared)
    return replace(experts, own=range(experts.count)[shard.piece(experts.count)], shared_size=shared)


def with_sharing(config: ModelConfig, way: ExpertSharing) -> ModelConfig:
    """The config, whose mixtures ranks are to share in that way."""
    return config if config.experts is None else replace(config, experts=replace(config.experts, divided=way.divided))


def sharing_of(config: ModelConfig, asked: str, ranks: int, tokens: int, bits: int, steps: bool) -> ExpertSharing:
    """How so many ranks are to share a target's mixtures.

    asked: "tensor" or "experts"; "auto": what the ranks can share, or, of both, what reads fewer bytes in a pass of so many
    tokens.  bits, steps: see `ExpertSizes`.
    """
    if asked != "auto":
        return ExpertSharing(asked == "experts", "asked for by name")
    ways = ExpertSharing(False, ""), ExpertSharing(True, "")
    cut, whole = (misfit(with_sharing(config, way), ranks) for way in ways)
    if bool(cut) != bool(whole):
        return ExpertSharing(bool(cut), f"{ranks} ranks can't share the target's {cut or whole} evenly")
    assert config.experts is not None
    return choose_sharing(config.experts, ExpertSizes(config.hidden_size, bits, steps), tokens, ranks)


def _with_whole_experts(config: ModelConfig, size: int) -> str:
    """Which other setting lets so many ranks share the model, where parts of experts are in their way."""
    helps = config.experts is not None and not misfit(with_sharing(config, ExpertSharing(True, "")), size)
    return ", or expert_parallel='experts'" if helps else ""


def _without_groups(config: ModelConfig, size: int) -> str:
    """Which other setting lets so many ranks share the model, where quantising at load leaves groups in their way."""
    made = config.quantization
    if made is None or not made.setting or misfit(replace(config, quantization=None), size):
        return ""
    return f", or {made.setting}='fp8', which has a scale for each row: by {made.setting} this model is in {made}"


def join(model: Shared, group: Group) -> None:
    """Tells a rank's share which ranks hold the rest: norms add up the partial sums of the layer before them."""
    model.group = group
    for module in model.modules():
        if isinstance(module, RMSNorm | NoNorm):
            module.group = group
    model.vocabulary = Vocabulary.of(model.vocabulary.size, group)


def misfit(config: ModelConfig, size: int) -> str:
    """Which size of the model `size` ranks can't share evenly; empty if they can share all."""
    for sizes in config.all_heads or (config.heads,):
        heads, kv_heads = sizes.num_heads, sizes.num_kv_heads
        if heads % size:
            return f"{heads} attention heads"
        if kv_heads % size and size % kv_heads:
            return f"{kv_heads} key/value heads"
        if config.differential and kv_heads % (2 * size):
            return f"{kv_heads} key/value heads, of which each rank needs whole pairs"
    if config.recurrent is not None and (why := config.recurrent.misfit(size)):
        return why
    if why := _broken_groups(config, size):
        return why
    return next((f"{name} {width}" for name, (width, _) in _widths(config).items() if width % size), "")


def _shares_intermediate(config: ModelConfig) -> bool:
    """Whether some layer has an ordinary MLP, whose columns ranks share."""
    return bool(config.dense_mlp_layers)


def _widths(config: ModelConfig) -> dict[str, tuple[int, tuple[str, ...]]]:
    """What ranks share of MLPs: what columns are, their number, and the matrices of a layer that may have them."""
    experts, widths = config.experts, dict[str, tuple[int, tuple[str, ...]]]()
    if _shares_intermediate(config):
        widths["intermediate_size"] = config.intermediate_size, (config.output_names.mlp,)
    if experts is not None and not experts.divided:
        has_one = experts.intermediate_size == config.intermediate_size  # of some families the only key
        widths["intermediate_size" if has_one else "moe_intermediate_size"] = experts.intermediate_size, _DOWN
    if experts is not None:
        widths["width of the shared experts"] = experts.shared_size, _SHARED_DOWN
    return widths


def _broken_groups(config: ModelConfig, size: int) -> str:
    """As `misfit`, of the columns that ranks share in matrices with a scale for each group of columns."""
    if config.quantization is None or size == 1:
        return ""
    shared = [(name, *each) for name, each in _widths(config).items()]
    shared += [("attention outputs", width, (config.output_names.attention,)) for width in config.attention_widths]
    if config.recurrent is not None:
        shared.append(("outputs of recurrent layers", config.recurrent.outputs, (config.output_names.recurrent,)))
    for name, width, matrices in shared:
        names = [f"model.layers.{layer}.{matrix}" for layer in range(config.num_layers) for matrix in matrices]
        if config.quantization.in_act_order(names):
            return f"{name}, which are in act order (desc_act, actorder),"
        for group in config.quantization.groups(names, width):
            if width % group == 0 and width // size % group:
                return f"{name} {width} in whole groups of {group}"
    return ""
