"""The kernels of Kimi's rule at Kimi-Linear-48B-A3B's widths, in bfloat16, against the definition in float64."""

from __future__ import annotations

import random

import pytest
import torch
from toolkit.inside.captures import capturing
from toolkit.recurrent.kimi import KimiWidths
from toolkit.recurrent.made import path_to, random_tree, steps_of, trash_steps, turn_numbers
from torch import Tensor

from specdec.ops.recurrent.kimi.launch import launch_kimi_trees
from specdec.ops.recurrent.kimi.parts.launch import launch_kimi_parts
from specdec.ops.recurrent.kimi_delta import KimiGates, chunk_outputs, tree_outputs
from specdec.ops.recurrent.states import ChunkSteps, RuleStates, TreeSteps

pytestmark = pytest.mark.gpu
SIZES = KimiWidths(32, 128)
ROWS, NODES, MOST, PATH = 8, 32, 100, 6


def memory_of(numbers: int, nodes: int) -> RuleStates:
    H, K = SIZES
    left = (numbers, nodes, H, K)
    return RuleStates(
        torch.randn(numbers, H, K, K, device="cuda").mul(0.3),
        torch.nn.functional.normalize(torch.randn(left, device="cuda"), dim=-1),
        torch.randn(left, device="cuda"), -torch.rand(left, device="cuda").cumsum(1),
    )  # fmt: skip


def tokens_of(count: int) -> tuple[Tensor, KimiGates]:
    """Some channels of one token have log-decays of -100 and less."""
    H, K = SIZES
    y_TC, a_TC, b_TH = (torch.randn(count, width, device="cuda").mul(2).bfloat16() for width in (3 * H * K, H * K, H))
    a_TC[count // 2, ::3] += 90
    return y_TC, KimiGates(a_TC, b_TH, torch.rand(H, device="cuda").mul(2.9), torch.rand(H * K, device="cuda"))


def doubled(gates: KimiGates) -> KimiGates:
    """With strengths as bfloat16 rounds them: what the definition does in float64 begins after that."""
    beta_TH = gates.b_TH.sigmoid().double()
    return KimiGates(
        gates.a_TC.double(), (beta_TH / (1 - beta_TH)).log(), gates.A_log_H.double(), gates.dt_bias_C.double()
    )  # fmt: skip


def exact(memory: RuleStates) -> RuleStates:
    return RuleStates(*(each.double() for each in memory))


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def trees(kind: str, seed: int) -> TreeSteps:
    """Of rows that read numbers 2, 4, ... and write those after them."""
    sizes = {"plain": 1, "chain": 6, "tree": NODES, "long chain": NODES, "large tree": MOST, "longest chain": MOST}
    rng, nodes = random.Random(seed), sizes[kind]
    made = [random_tree(nodes, rng, True) for _ in range(ROWS)]
    if kind.endswith("tree"):  # of depth 5 at most
        for tree in made:
            tree[1:] = [0] * (nodes - 1)
            for node in range(1, nodes):
                tree[node] = rng.choice([above for above in range(node) if len(path_to(tree, above)) < 6])
    paths = [list(range(rng.randrange(PATH + 1))) for _ in range(ROWS)]
    return steps_of(made, [(2 + 2 * row, 3 + 2 * row) for row in range(ROWS)], paths, PATH, "cuda")


@pytest.mark.parametrize("kind", ["plain", "chain", "tree", "long chain", "large tree", "longest chain"])
def test_trees_of_real_widths(kind: str) -> None:
    """Keeps out: products that lose float32's accuracy, and a program that reads what another one writes."""
    steps = trees(kind, 1)
    memory = memory_of(2 + 2 * ROWS, max(NODES, steps.parents_BN.shape[1]))
    wide = exact(memory)
    y, gates = tokens_of(steps.parents_BN.numel())
    with torch.inference_mode():
        out = launch_kimi_trees(y, gates, memory, steps)
        want = tree_outputs(y.double(), doubled(gates), wide, steps)
    N, here = steps.parents_BN.shape[1], steps.write_B
    errors = {"states": error(memory.state_PHKV[here], wide.state_PHKV[here])}
    for name in ("k_LNGK", "u_LNHV", "decay_LNH"):
        errors[name] = error(getattr(memory, name)[here, :N], getattr(wide, name)[here, :N])
    print(f"{kind}: outputs {error(out, want):.1e},", {name: f"{value:.1e}" for name, value in errors.items()})
    assert error(out, want) < 3e-3 and max(errors.values()) < 5e-6


@pytest.mark.parametrize("lengths", [[4096], [1, 700, 64, 33]])
def test_parts_of_real_widths(lengths: list[int]) -> None:
    """Keeps out: an error that grows from block to block, and halves of which the compiler leaves nothing to the second."""
    B = len(lengths)
    memory = memory_of(3 + 2 * B, 1)
    wide = exact(memory)
    read_B, write_B = torch.tensor([[2 + 2 * b, 3 + 2 * b] for b in range(B)], device="cuda").T.contiguous()
    cu_B1 = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    keep_B, after_B = (each.cuda() for each in trash_steps(B))
    keep_B[-1], after_B[-1] = 2 + 2 * B, lengths[-1] - 16
    steps = ChunkSteps(read_B, write_B, cu_B1, keep_B, after_B, max(lengths))
    y, gates = tokens_of(sum(lengths))
    with torch.inference_mode():
        out = launch_kimi_parts(y, gates, memory, steps)
        want = chunk_outputs(y.double(), doubled(gates), wide, steps)
    written_B = torch.cat((write_B, keep_B[-1:]))
    states = error(memory.state_PHKV[written_B], wide.state_PHKV[written_B])
    print(f"{lengths}: outputs {error(out, want):.1e}, states {states:.1e}")
    assert error(out, want) < 4e-3 and states < 6e-5


def test_a_captured_round_moves_numbers() -> None:
    """Keeps out: a number that a capture has kept, and a kernel that reads a state before the round before has written it."""
    steps, memory = trees("tree", 2)._replace(max_depth=5), memory_of(2 + 2 * ROWS, NODES)
    y, gates = tokens_of(ROWS * NODES)
    with torch.inference_mode():
        launch_kimi_trees(y, gates, RuleStates(*(each.clone() for each in memory)), steps)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            out = launch_kimi_trees(y, gates, memory, steps)
        for turn in range(4):
            own = RuleStates(*(each.clone() for each in memory))
            torch.cuda.synchronize()
            want = launch_kimi_trees(y, gates, own, steps)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, want) and all(map(torch.equal, memory, own)), turn
            assert out.isfinite().all()
            turn_numbers(steps, trees("tree", 3 + turn), random.Random(turn))
