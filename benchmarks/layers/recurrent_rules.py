"""What layers.recurrent measures of each rule: published widths, inputs as the models' projections lay them, and tiles to try.

Every rule is launched by the same names here, whatever its own module calls them.  This file times nothing.

Shapes: as of specdec/ops/recurrent/states.py; T tokens, Y all channels of values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.models.recurrent.sizes import RecurrentConfig, RuleSizes
from specdec.ops.recurrent.chunks.launch import ChunkTiles, chunk_tiles, launch_chunk_rule, launch_prepare, launch_scan
from specdec.ops.recurrent.conv import Convolution, tree_convolution
from specdec.ops.recurrent.gated_delta import Gates
from specdec.ops.recurrent.gates.gated_norm import DELTA, KIMI, MAMBA, NormForm, gated_norm
from specdec.ops.recurrent.kimi.launch import KimiHopperTiles, KimiTiles, kimi_hopper_tiles, kimi_tiles, launch_kimi_trees
from specdec.ops.recurrent.kimi.parts.launch import (
    KimiChunkTiles,
    kimi_chunk_tiles,
    launch_kimi_parts,
    launch_kimi_prepare,
    launch_kimi_scan,
)
from specdec.ops.recurrent.kimi_delta import KimiGates
from specdec.ops.recurrent.mamba.launch import launch_ssd_parts, launch_ssd_prepare, launch_ssd_scan, ssd_chunk_tiles
from specdec.ops.recurrent.mamba.ssd_hopper_tiles import SsdHopperTiles, ssd_hopper_tiles
from specdec.ops.recurrent.mamba.ssd_hopper_tiles import takes as takes_ssd
from specdec.ops.recurrent.mamba.ssd_step_triton import StepTiles, launch_convolved_step, step_tiles
from specdec.ops.recurrent.mamba.ssd_tree_triton import SsdTiles, launch_ssd_tree, ssd_tiles
from specdec.ops.recurrent.ssd import SsdGates
from specdec.ops.recurrent.states import ChunkSteps, LayerStates, RuleStates, TreeSteps
from specdec.ops.recurrent.trees.hopper_tiles import HopperTiles, hopper_tiles, takes
from specdec.ops.recurrent.trees.rule_triton import RuleTiles, launch_tree_rule, tree_tiles

EPS = 1e-6


def halves(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def floats(device: torch.device, *shape: int) -> Tensor:
    return torch.rand(*shape, device=device, dtype=torch.float32).mul_(0.1)


class Inputs(NamedTuple):
    """Of tokens.  z_T: gates of outputs, shaped as the norm reads them.  gates: of the rule."""

    x_TC: Tensor
    z_T: Tensor
    gates: Any


def first_of(gates: Any, tokens: int) -> Any:
    """The gates of the first tokens.  What is of tokens has a name that ends in T and more letters."""
    of_tokens = [name for name in gates._fields if name.rpartition("_")[2].startswith("T")]
    return gates._replace(**{name: getattr(gates, name)[:tokens] for name in of_tokens})


class MeasuredRule(ABC):
    """sizes: of a layer.  gate_numbers: of a token, in the model's dtype.  biased: whether the convolution has a bias.

    form: of the gated norm, which norms each of norm_heads apart with a weight of norm_weight.
    """

    form: NormForm
    biased = False
    step_tiles: Sequence[Any]  # of one node
    few_tiles: Sequence[Any]  # of at most 8
    many_tiles: Sequence[Any]
    chunk_tiles: Sequence[Any]

    def __init__(self, sizes: RecurrentConfig) -> None:
        assert sizes.rule is not None
        self.sizes, self.rule = sizes, sizes.rule
        self.norm_heads, self.norm_weight = self.rule.value_heads, [self.rule.value_width]

    @property
    @abstractmethod
    def gate_numbers(self) -> int: ...

    @abstractmethod
    def inputs(self, tokens: int, device: torch.device) -> Inputs: ...

    def is_joined(self, nodes: int) -> bool:
        """Whether the convolution over trees of so many nodes, and the rule, are one launch."""
        return False

    @abstractmethod
    def trees(self, y_TC: Tensor, gates: Any, memory: RuleStates, steps: TreeSteps, tiles: Any = None) -> Tensor:
        """Outputs [T, H, V]."""

    def convolved_trees(
        self, x_TC: Tensor, conv: Convolution, gates: Any, layer: LayerStates, steps: TreeSteps, tiles: Any = None
    ) -> Tensor:
        """The same, of what the convolution reads, as a layer launches it."""
        assert layer.rule is not None
        return self.trees(tree_convolution(x_TC, conv, layer.conv, steps), gates, layer.rule, steps, tiles)

    @abstractmethod
    def own_tiles(self, y_TC: Tensor, memory: RuleStates, rows: int, nodes: int) -> Any:
        """Those that trees of so many nodes take."""

    @abstractmethod
    def own_chunk_tiles(self, y_TC: Tensor) -> Any: ...

    @abstractmethod
    def prepare(self, y_TC: Tensor, gates: Any, memory: RuleStates, steps: ChunkSteps, tiles: Any) -> Any: ...

    @abstractmethod
    def scan(self, y_TC: Tensor, prepared: Any, memory: RuleStates, steps: ChunkSteps, tiles: Any, out_THV: Tensor) -> None: ...

    @abstractmethod
    def parts(self, y_TC: Tensor, gates: Any, memory: RuleStates, steps: ChunkSteps, tiles: Any) -> Tensor: ...

    def tried_tiles(self, y_TC: Tensor, memory: RuleStates, nodes: int) -> Sequence[Any]:
        return self.step_tiles if nodes == 1 else self.few_tiles if nodes <= 8 else self.many_tiles

    def norm(self, out_THV: Tensor, z_T: Tensor, weight: Tensor) -> Tensor:
        return gated_norm(out_THV.reshape(z_T.shape), z_T, weight, EPS, self.form)

    def memory(self, numbers: int, nodes: int, device: torch.device) -> RuleStates:
        G, H, K, V = self.rule.key_heads, self.rule.value_heads, self.rule.key_width, self.rule.value_width
        fading = (H, K) if self.rule.by_channel else (H,)
        return RuleStates(
            floats(device, numbers, H, K, V), floats(device, numbers, nodes, G, K), floats(device, numbers, nodes, H, V),
            -floats(device, numbers, nodes, *fading).cumsum(1),
        )  # fmt: skip


class GatedDelta(MeasuredRule):
    """Qwen3.5-27B's."""

    form = DELTA
    step_tiles = [RuleTiles(*each) for each in ((16, 32, 1), (32, 32, 1), (64, 32, 4), (128, 32, 4))]
    few_tiles = [RuleTiles(*each) for each in (
        (16, 64, 1, 1, 3), (16, 128, 1, 1, 3), (16, 64, 1, 1, 4), (32, 64, 2, 1, 3), (64, 64, 4, 1, 3), (64, 64, 4, 2, 3),
    )]  # fmt: skip
    many_tiles = [RuleTiles(*each) for each in (
        (32, 128, 4, 2), (32, 128, 4, 4), (32, 128, 4, 8), (32, 64, 4, 4), (16, 128, 4, 4), (32, 128, 8, 4), (64, 128, 4, 4),
        (32, 128, 4, 4, 3),
    )]  # fmt: skip
    on_hopper = [HopperTiles(*each) for each in (
        (4, 0, 0, 1), (4, 0, 0, 4), (4, 0, 1, 1), (4, 168, 1, 1), (4, 168, 2, 4), (4, 128, 1, 1), (8, 0, 0, 4), (8, 0, 1, 1),
        (8, 128, 1, 1),
        (4, 128, 2, 4, True), (8, 128, 2, 4, True),
    )]  # fmt: skip
    chunk_tiles = [ChunkTiles(*each) for each in (
        (64, 64, 4, 3, 8), (64, 64, 4, 2, 4), (64, 128, 8, 2, 4), (64, 128, 8, 3, 4), (64, 32, 8, 2, 4), (32, 64, 4, 3, 4),
        (32, 64, 4, 5, 4), (32, 128, 8, 3, 8),
    )]  # fmt: skip

    @property
    def gate_numbers(self) -> int:
        return 2 * self.rule.value_heads

    def inputs(self, tokens: int, device: torch.device) -> Inputs:
        C, Y, H = self.sizes.channels, self.sizes.outputs, self.rule.value_heads
        x, z, a, b = halves(device, tokens, C + Y + 2 * H).split((C, Y, H, H), dim=1)
        return Inputs(x, z.unflatten(1, (H, -1)), Gates(a, b, floats(device, H), floats(device, H)))

    def trees(self, y_TC: Tensor, gates: Any, memory: RuleStates, steps: TreeSteps, tiles: Any = None) -> Tensor:
        return launch_tree_rule(y_TC, gates, memory, steps, tiles=tiles)

    def own_tiles(self, y_TC: Tensor, memory: RuleStates, rows: int, nodes: int) -> Any:
        H, K = memory.state_PHKV.shape[1:3]
        return hopper_tiles(rows, nodes, H, K) if takes(y_TC, memory, nodes) else tree_tiles(rows, nodes, H)

    def tried_tiles(self, y_TC: Tensor, memory: RuleStates, nodes: int) -> Sequence[Any]:
        return [*super().tried_tiles(y_TC, memory, nodes), *(self.on_hopper if takes(y_TC, memory, nodes) else ())]

    def own_chunk_tiles(self, y_TC: Tensor) -> Any:
        return chunk_tiles(y_TC, self.rule.key_width)

    def prepare(self, y_TC: Tensor, gates: Any, memory: RuleStates, steps: ChunkSteps, tiles: Any) -> Any:
        return launch_prepare(y_TC, gates, memory, steps, tiles)

    def scan(self, y_TC: Tensor, prepared: Any, memory: RuleStates, steps: ChunkSteps, tiles: Any, out_THV: Tensor) -> None:
        launch_scan(y_TC, prepared, memory, steps, tiles, out_THV)

    def parts(self, y_TC: Tensor, gates: Any, memory: RuleStates, steps: ChunkSteps, tiles: Any) -> Tensor:
        return launch_chunk_rule(y_TC, gates, memory, steps, tiles)


class KimiDelta(MeasuredRule):
    """Kimi-Linear-48B-A3B's, whose decays and outputs' gates come from matrices of their own."""

    form = KIMI
    step_tiles = [KimiTiles(*each) for each in ((16, 32, 1), (32, 32, 1), (32, 32, 2), (32, 32, 4), (64, 32, 2), (64, 32, 4))]
    few_tiles = [KimiTiles(*each) for each in (
        (32, 64, 4, 8, 3, 128), (64, 64, 4, 4, 3, 64), (32, 64, 4, 4, 3, 64), (32, 32, 2, 8, 2, 128), (32, 32, 2, 4, 2, 128),
        (32, 64, 2, 1, 2, 32), (64, 64, 4, 2, 3, 64), (64, 128, 4, 4, 3, 64),
    )]  # fmt: skip
    many_tiles = [KimiTiles(*each) for each in (
        (64, 64, 4, 4), (32, 32, 4, 8, 3, 64), (32, 64, 4, 2), (32, 64, 4, 4, 2, 64), (32, 32, 8, 8), (32, 64, 4, 8, 2, 64),
        (32, 32, 4, 4, 2, 64), (64, 64, 4, 8, 2, 64), (64, 64, 8, 4), (16, 64, 2, 4, 2, 32),
    )]  # fmt: skip
    on_hopper = [KimiHopperTiles(*each) for each in (
        (4, 0), (4, 128, True), (4, 168, True), (8, 0), (8, 0, True), (8, 128, True), (8, 128, True, True),
    )]  # fmt: skip
    chunk_tiles = [KimiChunkTiles(*each) for each in (
        (64, 64, 4, 2, 4, 32), (64, 64, 4, 1, 8, 32), (64, 64, 8, 2, 8, 64), (64, 32, 8, 2, 4, 64), (64, 32, 4, 2, 4, 64),
        (32, 64, 4, 3, 4, 32), (32, 64, 4, 2, 4, 64), (64, 64, 4, 2, 4, 32, 32, True), (64, 32, 8, 2, 4, 32, 32, True),
    )]  # fmt: skip

    @property
    def gate_numbers(self) -> int:
        return self.rule.value_heads * (self.rule.key_width + 1)

    def inputs(self, tokens: int, device: torch.device) -> Inputs:
        C, Y, H, E = self.sizes.channels, self.sizes.outputs, self.rule.value_heads, self.rule.key_width
        x, _, b, _ = halves(device, tokens, C + E + H + E).split((C, E, H, E), dim=1)
        a, z = halves(device, tokens, H * E), halves(device, tokens, Y)
        return Inputs(x, z.unflatten(1, (H, -1)), KimiGates(a, b, floats(device, H), floats(device, H * E)))

    def trees(self, y_TC: Tensor, gates: Any, memory: RuleStates, steps: TreeSteps, tiles: Any = None) -> Tensor:
        return launch_kimi_trees(y_TC, gates, memory, steps, tiles=tiles)

    def own_tiles(self, y_TC: Tensor, memory: RuleStates, rows: int, nodes: int) -> Any:
        H = self.rule.value_heads
        return kimi_hopper_tiles(rows, nodes, H) if takes(y_TC, memory, nodes) else kimi_tiles(rows, nodes, H)

    def tried_tiles(self, y_TC: Tensor, memory: RuleStates, nodes: int) -> Sequence[Any]:
        return [*super().tried_tiles(y_TC, memory, nodes), *(self.on_hopper if takes(y_TC, memory, nodes) else ())]

    def own_chunk_tiles(self, y_TC: Tensor) -> Any:
        return kimi_chunk_tiles(y_TC, self.rule.key_width)

    def prepare(self, y_TC: Tensor, gates: Any, memory: RuleStates, steps: ChunkSteps, tiles: Any) -> Any:
        return launch_kimi_prepare(y_TC, gates, memory, steps, tiles)

    def scan(self, y_TC: Tensor, prepared: Any, memory: RuleStates, steps: ChunkSteps, tiles: Any, out_THV: Tensor) -> None:
        launch_kimi_scan(prepared, memory, steps, tiles, out_THV)

    def parts(self, y_TC: Tensor, gates: Any, memory: RuleStates, steps: ChunkSteps, tiles: Any) -> Tensor:
        return launch_kimi_parts(y_TC, gates, memory, steps, tiles)


class Ssd(MeasuredRule):
    """Nemotron-3-Nano's, which norms each group of channels."""

    form = MAMBA
    biased = True
    step_tiles = [StepTiles(*each) for each in ((64, 2), (64, 4), (32, 1), (32, 2), (32, 4), (16, 1), (64, 2, 2), (64, 2, 4))]
    few_tiles = [SsdTiles(*each) for each in (
        (32, 128, 2), (32, 64, 4), (32, 64, 2), (64, 64, 4), (64, 128, 4), (16, 64, 1), (16, 128, 1), (32, 64, 2, 2),
    )]  # fmt: skip
    many_tiles = [SsdTiles(*each) for each in (
        (64, 64, 4), (64, 64, 8), (64, 32, 8), (64, 128, 4), (64, 32, 4), (32, 64, 4), (32, 128, 4), (32, 32, 4), (32, 64, 2),
    )]  # fmt: skip
    on_hopper = [SsdHopperTiles(*each) for each in (
        (0,), (128,), (168,), (0, True), (128, True), (168, True),
    )]  # fmt: skip
    chunk_tiles = [ChunkTiles(*each) for each in (
        (64, 64, 4, 2, 8), (64, 64, 4, 2, 4), (64, 64, 4, 3, 8), (64, 64, 8, 2, 8), (64, 32, 4, 3, 8), (64, 32, 4, 2, 8),
        (32, 64, 4, 3, 4), (128, 64, 4, 1, 8),
    )]  # fmt: skip

    def __init__(self, sizes: RecurrentConfig) -> None:
        super().__init__(sizes)
        self.norm_heads = self.rule.key_heads
        self.norm_weight = [self.norm_heads, self.rule.outputs // self.norm_heads]

    @property
    def gate_numbers(self) -> int:
        return self.rule.value_heads

    def inputs(self, tokens: int, device: torch.device) -> Inputs:
        C, Y, H = self.sizes.channels, self.sizes.outputs, self.rule.value_heads
        x, z, dt = halves(device, tokens, C + Y + H).split((C, Y, H), dim=1)
        return Inputs(x, z.unflatten(1, (self.norm_heads, -1)), SsdGates(dt, *(floats(device, H) for _ in range(3))))

    def trees(self, y_TC: Tensor, gates: Any, memory: RuleStates, steps: TreeSteps, tiles: Any = None) -> Tensor:
        return launch_ssd_tree(y_TC, gates, memory, steps, tiles=tiles)

    def is_joined(self, nodes: int) -> bool:
        return nodes == 1

    def convolved_trees(
        self, x_TC: Tensor, conv: Convolution, gates: Any, layer: LayerStates, steps: TreeSteps, tiles: Any = None
    ) -> Tensor:
        if self.is_joined(steps.parents_BN.shape[1]):
            return launch_convolved_step(x_TC, conv, gates, layer, steps, tiles)
        return super().convolved_trees(x_TC, conv, gates, layer, steps, tiles)

    def own_tiles(self, y_TC: Tensor, memory: RuleStates, rows: int, nodes: int) -> Any:
        H, K = self.rule.value_heads, self.rule.key_width
        if nodes == 1:
            return step_tiles(rows, H, K)
        return (
            ssd_hopper_tiles(rows, nodes, H, self.rule.value_width)
            if takes_ssd(y_TC, memory, nodes)
            else ssd_tiles(rows, nodes, H, K)
        )

    def tried_tiles(self, y_TC: Tensor, memory: RuleStates, nodes: int) -> Sequence[Any]:
        return [*super().tried_tiles(y_TC, memory, nodes), *(self.on_hopper if takes_ssd(y_TC, memory, nodes) else ())]

    def own_chunk_tiles(self, y_TC: Tensor) -> Any:
        return ssd_chunk_tiles(y_TC, self.rule.key_width)

    def prepare(self, y_TC: Tensor, gates: Any, memory: RuleStates, steps: ChunkSteps, tiles: Any) -> Any:
        return launch_ssd_prepare(y_TC, gates, memory, steps, tiles)

    def scan(self, y_TC: Tensor, prepared: Any, memory: RuleStates, steps: ChunkSteps, tiles: Any, out_THV: Tensor) -> None:
        launch_ssd_scan(y_TC, prepared, memory, steps, tiles, out_THV)

    def parts(self, y_TC: Tensor, gates: Any, memory: RuleStates, steps: ChunkSteps, tiles: Any) -> Tensor:
        return launch_ssd_parts(y_TC, gates, memory, steps, tiles)


RULES: dict[str, MeasuredRule] = {
    "gated": GatedDelta(RecurrentConfig(4, RuleSizes(16, 48, 128, 128))),
    "kimi": KimiDelta(RecurrentConfig(4, RuleSizes(32, 32, 128, 128, by_channel=True))),
    "mamba": Ssd(RecurrentConfig(4, RuleSizes(8, 64, 128, 64))),
}
