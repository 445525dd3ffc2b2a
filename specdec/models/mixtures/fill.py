"""How the mixtures of a family lie in checkpoints: a table of names, and what fills a mixture by it.

Every expert's projections are matrices of their own, `{experts}.{number}.{part}`.  This file knows no key of a config.json but
those that errors name.

Shapes: E experts, L rows of a router.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from specdec.models.checkpoints.checkpoint import Checkpoint, config_path
from specdec.models.checkpoints.loader import copy_, fill_float32, fill_linear, fill_parts, fill_stack
from specdec.models.config import ModelConfig
from specdec.models.layers import MLP
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.models.mixtures.router import Router


class MixtureNames(NamedTuple):
    """What a family calls the tensors of a layer's mixture, each below the name of the layer.

    correction, shared, shared_gate: read where the config has such numbers, shared experts, or a gate of them.  shared is empty
        where the family fills shared experts itself.
    parts: of an expert's projections that have other names than gate_proj, up_proj and down_proj.
    count_keys, width_keys, shared_keys: the keys of config.json that say these sizes, for errors.
    layer_keys: those that say which layers are mixtures; empty: all are.
    dense: the gate of the MLP of layers that are not.
    """

    router: str = "mlp.gate.weight"
    correction: str = "mlp.gate.e_score_correction_bias"
    correction_shape: Literal["E", "1, E"] = "E"
    experts: str = "mlp.experts"
    parts: Mapping[str, str] = {}
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate.weight"
    count_keys: str = "n_routed_experts, after first_k_dense_replace layers"
    width_keys: str = "moe_intermediate_size"
    shared_keys: str = "n_shared_experts and moe_intermediate_size"
    layer_keys: str = "first_k_dense_replace"
    dense: str = "mlp.gate_proj"


USUAL = MixtureNames()


def expect_mixture(checkpoint: Checkpoint, config: ModelConfig, *tables: MixtureNames) -> None:
    """ValueError if layers are of another kind, or if the sizes of MLPs are not those of the first layer of each kind, by the
    headers.

    tables: as of `fill_mixture`.
    """
    experts, H = config.experts, config.hidden_size
    dense = frozenset(range(config.num_layers)) if experts is None else experts.dense_layers
    _expect_kinds(checkpoint, config.num_layers, dense, tables or (USUAL,))
    if dense:
        size = (config.intermediate_size, H)
        gates = [f"model.layers.{min(dense)}.{names.dense}" for names in tables or (USUAL,)]
        gate = next((name for name in gates if f"{name}.weight" in checkpoint), gates[0])
        checkpoint.expect_matrix(gate, size, "intermediate_size and hidden_size")
    if experts is None:
        return
    layer = f"model.layers.{min(set(range(config.num_layers)) - dense)}"
    names = _table(checkpoint, layer, tables)
    checkpoint.expect(f"{layer}.{names.router}", (experts.count, H), names.count_keys)
    gate = names.parts.get("gate_proj", "gate_proj")
    checkpoint.expect_matrix(f"{layer}.{names.experts}.0.{gate}", (experts.intermediate_size, H), names.width_keys)
    if experts.shared_size and names.shared:
        checkpoint.expect_matrix(f"{layer}.{names.shared}.gate_proj", (experts.shared_size, H), names.shared_keys)


def _expect_kinds(checkpoint: Checkpoint, count: int, dense: frozenset[int], tables: tuple[MixtureNames, ...]) -> None:
    """ValueError if a layer that is dense by config.json has a router, or one that is a mixture has an ordinary MLP instead."""
    layers, keys = [f"model.layers.{index}" for index in range(count)], tables[0].layer_keys
    held = {index for index, layer in enumerate(layers) if any(f"{layer}.{names.router}" in checkpoint for names in tables)}
    sparse = set(range(count)) - dense
    if held == sparse or not keys:
        return
    names, gates = checkpoint.names(), tuple(each.dense for each in tables)
    plain = {
        index for index in sparse - held
        if any(name.startswith(tuple(f"{layers[index]}.{gate}." for gate in gates)) for name in names)
    }  # fmt: skip
    if wrong := plain | (held & dense):
        raise ValueError(
            f"{config_path(checkpoint.folder)}: layer {min(wrong)} {'is a mixture' if plain & {min(wrong)} else 'is dense'} by "
            f"{keys}, but not by its tensors; expected keys by which mixtures are {in_runs(held)}, got {in_runs(sparse)}"
        )


def in_runs(numbers: Collection[int]) -> str:
    """Layers in words: "layers 0, 2 to 47"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    return f"layer{'s' * (len(numbers) > 1)} {shown}" if runs else "no layer"


def fill_mixture(moe: MixtureOfExperts, checkpoint: Checkpoint, prefix: str, *tables: MixtureNames) -> None:
    """Each expert's gate above its up in one weight.  prefix: the layer's name and that of the module.

    tables: the names that the family's checkpoints have; of several, the one whose router is there.
    """
    layer = prefix.rpartition(".")[0]
    names = _table(checkpoint, layer, tables)
    _fill_router(moe.router, checkpoint, layer, names)
    for stack in (moe.gate_up_proj, moe.down_proj):
        fill_stack(stack, checkpoint, f"{layer}.{names.experts}", names.parts)
    leave_others(moe, checkpoint, f"{layer}.{names.experts}")
    if moe.shared is not None and names.shared:
        assert isinstance(moe.shared, MLP)
        fill_parts(moe.shared.gate_up_proj, checkpoint, f"{layer}.{names.shared}")
        fill_linear(moe.shared.down_proj, checkpoint, f"{layer}.{names.shared}.down_proj")


def leave_others(moe: MixtureOfExperts, checkpoint: Checkpoint, experts: str) -> None:
    """Leaves what other ranks read, where each has experts of its own.  experts: what their names begin with."""
    if moe.experts.own is not None:
        checkpoint.leave((f"{experts}.",))


def _table(checkpoint: Checkpoint, layer: str, tables: tuple[MixtureNames, ...]) -> MixtureNames:
    return next((names for names in tables if f"{layer}.{names.router}" in checkpoint), (*tables, USUAL)[0])


def _fill_router(router: Router, checkpoint: Checkpoint, layer: str, names: MixtureNames) -> None:
    """The rows of experts, and after them that of the shared experts' gate.  The correction stays float32 in any dtype,
    and so does the weight where the family's does."""
    weight_LH, E = router.weight.detach(), router.count
    if router.kept_float32:
        assert len(weight_LH) == E, "no family has both"
        router.weight = fill_float32(weight_LH, checkpoint, f"{layer}.{names.router}")
    else:
        copy_(weight_LH[:E], checkpoint, f"{layer}.{names.router}")
    if len(weight_LH) > E:
        copy_(weight_LH[E:], checkpoint, f"{layer}.{names.shared_gate}")
    if router.correction_E is not None:
        empty = router.correction_E if names.correction_shape == "E" else router.correction_E[None]
        router.correction_E = fill_float32(empty, checkpoint, f"{layer}.{names.correction}", flat=True)
