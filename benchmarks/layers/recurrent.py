"""How long a recurrent layer's round takes: convolution, gated delta rule and gated norm, and parts of prompts.

    python benchmarks layers.recurrent --out benchmarks/layers/results/recurrent_h200.json    # about 2 minutes
    python benchmarks layers.recurrent --only rounds --rows 32 --nodes 32 --all
    python benchmarks layers.recurrent --only prompt --all

Qwen3.5-27B's widths: 16 key and 48 value heads of 128, bf16, states in float32.  Times are medians of replays of CUDA graphs of
CALLS layers, each with states of its own, so that none lies in the L2 cache.  The limit is the time to move at 4.48 TB/s one
read and one write of each row's state, the nodes' inputs and outputs, what PENDING of the nodes before have left, and what the
nodes leave.  --all tries other tiles: choose `tree_tiles` (specdec/ops/recurrent/trees/rule_triton.py), `hopper_tiles`
(hopper_tiles.py beside it), `chunk_tiles` (chunks/launch.py) and ONE, CHAIN, TREE, CHUNK (conv_triton.py) from them.

Shapes: B rows, N nodes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import triton
from graph_timing import replay_us
from triton.runtime.errors import OutOfResources

from specdec.ops.recurrent.chunks.launch import ChunkTiles, chunk_tiles, launch_chunk_rule, launch_prepare, launch_scan
from specdec.ops.recurrent.conv import Convolution, chunk_convolution, tree_convolution
from specdec.ops.recurrent.conv_triton import ConvTiles, launch_chunk_convolution, launch_tree_convolution
from specdec.ops.recurrent.gated_delta import Gates
from specdec.ops.recurrent.gates.gated_norm import gated_norm
from specdec.ops.recurrent.states import ChunkSteps, ConvStates, LayerStates, RuleStates, TreeSteps
from specdec.ops.recurrent.trees.hopper_tiles import HopperTiles, hopper_tiles, takes
from specdec.ops.recurrent.trees.rule_triton import RuleTiles, launch_tree_rule, tree_tiles

BANDWIDTH = 4.48e12  # of an H200, as rounds/round_8b.py has it
G, H, WIDTH, TAPS, CALLS, PENDING, PROMPT = 16, 48, 128, 4, 8, 3, 8192
CHANNELS = (2 * G + H) * WIDTH
SHAPES = {1: (1, 0, 1), 6: (6, 5, 6), 32: (32, 5, 6), 60: (60, 7, 8)}  # nodes, depth, places of a path
# By nodes: one, at most 8, more.
STEP_TILES = [RuleTiles(*each) for each in ((16, 32, 1), (32, 32, 1), (64, 32, 4), (128, 32, 4))]
FEW_TILES = [
    RuleTiles(*each)
    for each in (
        (16, 64, 1, 1, 3),
        (16, 128, 1, 1, 3),
        (16, 64, 1, 1, 4),
        (32, 64, 2, 1, 3),
        (64, 64, 4, 1, 3),
        (64, 64, 4, 2, 3),
    )
]
MANY_TILES = [
    RuleTiles(*each)
    for each in (
        (32, 128, 4, 2), (32, 128, 4, 4), (32, 128, 4, 8), (32, 64, 4, 4), (16, 128, 4, 4), (32, 128, 8, 4), (64, 128, 4, 4),
        (32, 128, 4, 4, 3),
    )
]  # fmt: skip
HOPPER_TILES = [HopperTiles(*each) for each in (
    (4, 0, 0, 1), (4, 0, 0, 4), (4, 0, 1, 1), (4, 168, 1, 1), (4, 168, 2, 4), (4, 128, 1, 1), (8, 0, 0, 4), (8, 0, 1, 1),
    (8, 128, 1, 1),
)]  # fmt: skip
CHUNK_TILES = [ChunkTiles(*each) for each in (
    (64, 64, 4, 3, 8), (64, 64, 4, 2, 4), (64, 128, 8, 2, 4), (64, 128, 8, 3, 4), (64, 32, 8, 2, 4), (32, 64, 4, 3, 4),
    (32, 64, 4, 5, 4), (32, 128, 8, 3, 8),
)]  # fmt: skip
CONV_TILES = {
    1: [ConvTiles(128, 1, 1), ConvTiles(256, 1, 1), ConvTiles(256, 2, 1), ConvTiles(512, 2, 1), ConvTiles(256, 4, 1)],
    6: [ConvTiles(*each) for each in (
        (256, 4, 4, 1056), (256, 4, 4, 2640), (256, 4, 8, 1056), (256, 2, 4, 1056), (512, 4, 4, 1056), (512, 4, 8, 1056),
    )],
    PROMPT: [ConvTiles(*each) for each in (
        (1024, 4, 8), (1024, 4, 16), (512, 4, 8), (512, 4, 16), (512, 4, 32), (512, 2, 16), (256, 2, 16), (256, 2, 32),
    )],
}  # fmt: skip


class World:
    """CALLS layers, what their projections give for so many tokens, and their weights."""

    def __init__(self, numbers: int, nodes: int, tokens: int) -> None:
        def halves(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        def floats(*shape: int) -> torch.Tensor:
            return torch.rand(*shape, device="cuda").mul_(0.1)

        self.layers = [
            LayerStates(
                ConvStates(halves(numbers, TAPS - 1, CHANNELS), halves(numbers, nodes, CHANNELS)),
                RuleStates(
                    floats(numbers, H, WIDTH, WIDTH), floats(numbers, nodes, G, WIDTH), floats(numbers, nodes, H, WIDTH),
                    -floats(numbers, nodes, H).cumsum(1),
                ),
            ) for _ in range(CALLS)
        ]  # fmt: skip
        self.conv, self.norm = Convolution(halves(TAPS, CHANNELS)), halves(WIDTH)
        self.x, z, a, b = halves(tokens, CHANNELS + H * WIDTH + 2 * H).split((CHANNELS, H * WIDTH, H, H), dim=1)
        self.z, self.gates = z.unflatten(1, (H, WIDTH)), Gates(a, b, floats(H), floats(H))


def time_calls(call: Callable[[int], object]) -> float:
    """Microseconds of a call, which is given its number."""
    call(0)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            call(number)
    return replay_us(graph, 9) / CALLS


def tree_of(B: int, N: int) -> TreeSteps:
    _, depth, places = SHAPES[N]
    numbers_B = torch.arange(2, 2 + 2 * B, 2, device="cuda")
    parents_N = torch.tensor(
        [0, *((n - 1 if N == depth + 1 or n <= depth else (n - 1) // 2) for n in range(1, N))], device="cuda"
    )
    path_BE = torch.arange(places, device="cuda").expand(B, places).contiguous()
    count_B = torch.full((B,), min(PENDING, places), dtype=torch.int32, device="cuda")
    return TreeSteps(numbers_B, numbers_B + 1, parents_N.expand(B, N).contiguous(), depth, N == depth + 1, path_BE, count_B)


def limit_us(B: int, N: int) -> float:
    """See the top of this file."""
    state = 2 * 4 * H * WIDTH * WIDTH + 2 * 2 * (TAPS - 1) * CHANNELS
    left = 4 * (G * WIDTH + H * WIDTH + H) + 2 * CHANNELS  # of a node
    node = 2 * (CHANNELS + 2 * H + 2 * H * WIDTH) + left
    return 1e6 * B * (state + N * node + min(PENDING, SHAPES[N][2]) * left) / BANDWIDTH


def measure_tree(B: int, N: int, every: bool) -> dict[str, Any]:
    world, steps = World(2 + 2 * B, N if N > 8 else 8, B * N), tree_of(B, N)
    y, out = torch.empty_like(world.x), torch.empty_like(world.z)

    def rule(call: int, tiles: RuleTiles | HopperTiles | None) -> torch.Tensor:
        return launch_tree_rule(y, world.gates, world.layers[call].rule, steps, tiles=tiles)

    def whole(call: int) -> None:
        convolved = tree_convolution(world.x, world.conv, world.layers[call].conv, steps)
        gated_norm(launch_tree_rule(convolved, world.gates, world.layers[call].rule, steps), world.z, world.norm, 1e-6)

    y.copy_(tree_convolution(world.x, world.conv, world.layers[0].conv, steps))
    layers, conv = world.layers, world.conv
    on_hopper = takes(y, layers[0].rule, N)
    own_tiles = hopper_tiles(B, N, H, WIDTH) if on_hopper else tree_tiles(B, N, H)
    row = {
        "rows": B, "nodes": N, "limit": limit_us(B, N), "tiles": own_tiles, "layer": time_calls(whole),
        "convolution": time_calls(lambda call: tree_convolution(world.x, conv, layers[call].conv, steps)),
        "rule": time_calls(lambda call: rule(call, None)),
        "norm": time_calls(lambda _: gated_norm(out, world.z, world.norm, 1e-6)),
    }  # fmt: skip
    tried, all_tiles = {}, STEP_TILES if N == 1 else FEW_TILES if N <= 8 else MANY_TILES
    for tiles in [*all_tiles, *(HOPPER_TILES if on_hopper else ())] if every else ():
        with suppress(OutOfResources):
            tried[str(tuple(tiles))] = time_calls(lambda call: rule(call, tiles))  # noqa: B023
    for own in CONV_TILES[min(N, 6)] if every else ():
        tried[f"convolution {tuple(own)}"] = time_calls(
            lambda call: launch_tree_convolution(world.x, conv, layers[call].conv, steps, own)  # noqa: B023
        )
    return row | ({"tried": tried} if every else {})


def part_of(tokens: int) -> ChunkSteps:
    """One, of whose states none is kept."""
    numbers = torch.tensor([2, 3, 1], device="cuda").split(1)
    cu_B1, none = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in ([0, tokens], [0]))
    return ChunkSteps(numbers[0], numbers[1], cu_B1, numbers[2], none, tokens)


def measure_rule(world: World, y: torch.Tensor, tiles: ChunkTiles) -> dict[str, float]:
    """Microseconds of what is prepared, of the scan, and of both."""
    steps, gates, layers, out = part_of(len(y)), world.gates, world.layers, y.new_empty(len(y), H, WIDTH)
    gates = gates._replace(a_TH=gates.a_TH[: len(y)], b_TH=gates.b_TH[: len(y)])
    prepared = launch_prepare(y, gates, layers[0].rule, steps, tiles)
    return {
        "prepare": time_calls(lambda call: launch_prepare(y, gates, layers[call].rule, steps, tiles)),
        "scan": time_calls(lambda call: launch_scan(y, prepared, layers[call].rule, steps, tiles, out)),
        "rule": time_calls(lambda call: launch_chunk_rule(y, gates, layers[call].rule, steps, tiles)),
    }


def measure_prompt(every: bool) -> dict[str, Any]:
    world, steps = World(4, 1, PROMPT), part_of(PROMPT)
    y = chunk_convolution(world.x, world.conv, world.layers[0].conv, steps)
    own = chunk_tiles(y, WIDTH)
    row = {"tokens": PROMPT, "tiles": own, "convolution": time_calls(
        lambda call: chunk_convolution(world.x, world.conv, world.layers[call].conv, steps)
    )} | measure_rule(world, y, own)  # fmt: skip
    row |= {f"rule of {tokens}": measure_rule(world, y[:tokens], own)["rule"] for tokens in (1, 64, 512)}
    tried = {}
    for tiles in CHUNK_TILES if every else ():
        with suppress(OutOfResources):
            tried[str(tuple(tiles))] = measure_rule(world, y, tiles)
    for conv in CONV_TILES[PROMPT] if every else ():
        tried[f"convolution {tuple(conv)}"] = time_calls(
            lambda call: launch_chunk_convolution(world.x, world.conv, world.layers[call].conv, steps, conv)  # noqa: B023
        )
    return row | ({"tried": tried} if every else {})


def print_prompt(prompt: dict[str, Any]) -> None:
    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name} {shown(each)}" for name, each in value.items())
        return f"{value:.1f}" if isinstance(value, float) else str(value)

    print(f"a prompt: {shown({name: value for name, value in prompt.items() if name != 'tried'})}")
    for name, value in prompt.get("tried", {}).items():
        print(f"    {name:34} {shown(value)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--nodes", type=int, nargs="+", choices=SHAPES, default=[1, 6, 32])
    parser.add_argument("--only", choices=("rounds", "prompt"))
    parser.add_argument("--all", action="store_true", help="other tiles, too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began, rows, prompt = time.perf_counter(), [], None
    print("us a layer: rows nodes |  limit |  layer  ratio | convolution    rule    norm")
    with torch.inference_mode():
        for B in args.rows if args.only != "prompt" else ():
            for N in args.nodes:
                rows.append(row := measure_tree(B, N, args.all))
                times = f"{row['convolution']:11.1f} {row['rule']:7.1f} {row['norm']:7.1f}"
                print(
                    f"{B:16} {N:5} | {row['limit']:6.1f} | {row['layer']:6.1f} {row['layer'] / row['limit']:6.2f} | {times}",
                    flush=True,
                )
                for tiles, us in row.get("tried", {}).items():
                    print(f"    {tiles:34} {us:8.1f}", flush=True)
        if args.only != "rounds":
            print_prompt(prompt := measure_prompt(args.all))
    print(f"{time.perf_counter() - began:.0f} s in all")
    if args.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                 "date": time.strftime("%Y-%m-%d"), "rows": rows, "prompt": prompt}  # fmt: skip
        args.out.write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    main()
