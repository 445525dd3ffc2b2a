"""How long a recurrent layer's round takes: convolution, rule and gated norm, and parts of prompts.

    python benchmarks layers.recurrent --out benchmarks/layers/results/recurrent_h200.json    # about 2 minutes
    python benchmarks layers.recurrent --only rounds --rows 32 --nodes 32 --all
    python benchmarks layers.recurrent --only prompt --all
    python benchmarks layers.recurrent --rule kimi    # mamba: likewise

The published widths, bf16, states in float32: of gated, Qwen3.5-27B's, of kimi, Kimi-Linear-48B-A3B's, of mamba,
Nemotron-3-Nano's (recurrent_rules.py).  Times are medians of replays of CUDA graphs of CALLS layers, each with states of its
own, so that none lies in the L2 cache.  The limit is the time to move at 4.48 TB/s one read and one write of each row's state,
the nodes' inputs and outputs, what PENDING of the nodes before have left, and what the nodes leave; of a prompt, the state and
the tokens' inputs and outputs.  Where the convolution and the rule are one launch, the rule's time is that of both.  --all
tries other tiles: choose from them those of trees (of gated, `tree_tiles` in specdec/ops/recurrent/trees/rule_triton.py and
`hopper_tiles` beside it; `kimi_tiles` and `kimi_hopper_tiles` in kimi/launch.py; `ssd_tiles` in mamba/ssd_tree_triton.py, and
`step_tiles` and `ssd_hopper_tiles` beside it), those of parts (chunks/launch.py, kimi/parts/launch.py, mamba/launch.py), and
ONE, CHAIN, TREE, CHUNK (conv_triton.py).

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
from gpus import need_gpu
from graph_timing import replay_us
from torch import Tensor
from triton.runtime.errors import OutOfResources

from layers.recurrent_rules import RULES, MeasuredRule, first_of, halves
from specdec.ops.recurrent.conv import Convolution, chunk_convolution, tree_convolution
from specdec.ops.recurrent.conv_triton import ConvTiles, launch_chunk_convolution, launch_tree_convolution
from specdec.ops.recurrent.states import ChunkSteps, ConvStates, LayerStates, TreeSteps

BANDWIDTH = 4.48e12  # of an H200, as rounds/round_8b.py has it
CALLS, PENDING, PROMPT = 8, 3, 8192
GPU = torch.device("cuda", 0)
SHAPES = {1: (1, 0, 1), 6: (6, 5, 6), 32: (32, 5, 6), 60: (60, 7, 8)}  # nodes, depth, places of a path
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

    def __init__(self, rule: MeasuredRule, numbers: int, nodes: int, tokens: int, device: torch.device) -> None:
        taps, channels = rule.sizes.taps, rule.sizes.channels
        self.layers = [
            LayerStates(
                ConvStates(halves(device, numbers, taps - 1, channels), halves(device, numbers, nodes, channels)),
                rule.memory(numbers, nodes, device),
            )
            for _ in range(CALLS)
        ]
        self.conv = Convolution(halves(device, taps, channels), halves(device, channels) if rule.biased else None)
        self.norm, self.device = halves(device, *rule.norm_weight), device
        self.x, self.z, self.gates = rule.inputs(tokens, device)


def time_calls(call: Callable[[int], object]) -> float:
    """Microseconds of a call, which is given its number."""
    call(0)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            call(number)
    return replay_us(graph, 9) / CALLS


def tree_of(B: int, N: int, device: torch.device) -> TreeSteps:
    _, depth, places = SHAPES[N]
    numbers_B = torch.arange(2, 2 + 2 * B, 2, device=device)
    below = [n - 1 if n <= depth else (n - depth - 1) % depth for n in range(1, N)]  # so no node is deeper than `depth`
    parents_N = torch.tensor([0, *below], device=device)
    path_BE = torch.arange(places, device=device).expand(B, places).contiguous()
    count_B = torch.full((B,), min(PENDING, places), dtype=torch.int32, device=device)
    return TreeSteps(numbers_B, numbers_B + 1, parents_N.expand(B, N).contiguous(), depth, N == depth + 1, path_BE, count_B)


def moved_bytes(rule: MeasuredRule) -> int:
    """Of a token's inputs, of its gates, and of its outputs."""
    return 2 * (rule.sizes.channels + rule.gate_numbers + 2 * rule.sizes.outputs)


def limit_us(rule: MeasuredRule, B: int, N: int) -> float:
    """See the top of this file."""
    state, left = 2 * rule.sizes.state_bytes(torch.bfloat16), rule.sizes.node_bytes(torch.bfloat16)
    node = moved_bytes(rule) + left
    return 1e6 * B * (state + N * node + min(PENDING, SHAPES[N][2]) * left) / BANDWIDTH


def prompt_limit_us(rule: MeasuredRule, tokens: int) -> float:
    return 1e6 * (2 * rule.sizes.state_bytes(torch.bfloat16) + tokens * moved_bytes(rule)) / BANDWIDTH


def measure_tree(rule: MeasuredRule, B: int, N: int, every: bool, device: torch.device = GPU) -> dict[str, Any]:
    world, steps = World(rule, 2 + 2 * B, N if N > 8 else 8, B * N, device), tree_of(B, N, device)

    def of(y: Tensor, call: int, tiles: Any = None) -> Tensor:
        memory = world.layers[call].rule
        assert memory is not None
        if rule.is_joined(N):
            return rule.convolved_trees(world.x, world.conv, world.gates, world.layers[call], steps, tiles)
        return rule.trees(y, world.gates, memory, steps, tiles)

    def whole(call: int) -> None:
        out = rule.convolved_trees(world.x, world.conv, world.gates, world.layers[call], steps)
        rule.norm(out, world.z, world.norm)

    layers, conv, memory = world.layers, world.conv, world.layers[0].rule
    assert memory is not None
    y = tree_convolution(world.x, conv, layers[0].conv, steps)
    out = of(y, 0)
    row = {
        "rows": B, "nodes": N, "limit": limit_us(rule, B, N), "tiles": rule.own_tiles(y, memory, B, N),
        "layer": time_calls(whole),
        "convolution": 0.0 if rule.is_joined(N) else time_calls(
            lambda call: tree_convolution(world.x, conv, layers[call].conv, steps)
        ),
        "rule": time_calls(lambda call: of(y, call)),
        "norm": time_calls(lambda _: rule.norm(out, world.z, world.norm)),
    }  # fmt: skip
    tried: dict[str, Any] = {}
    for tiles in rule.tried_tiles(y, memory, N) if every else ():
        with suppress(OutOfResources):
            tried[str(tuple(tiles))] = time_calls(lambda call: of(y, call, tiles))  # noqa: B023
    for own in CONV_TILES[min(N, 6)] if every else ():
        tried[f"convolution {tuple(own)}"] = time_calls(
            lambda call: launch_tree_convolution(world.x, conv, layers[call].conv, steps, own)  # noqa: B023
        )
    return row | ({"tried": tried} if every else {})


def part_of(tokens: int, device: torch.device) -> ChunkSteps:
    """One, of whose states none is kept."""
    numbers = torch.tensor([2, 3, 1], device=device).split(1)
    cu_B1, none = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([0, tokens], [0]))
    return ChunkSteps(numbers[0], numbers[1], cu_B1, numbers[2], none, tokens)


def measure_rule(rule: MeasuredRule, world: World, y: Tensor, tiles: Any) -> dict[str, float]:
    """Microseconds of what is prepared, of the scan, and of both."""
    steps, gates = part_of(len(y), world.device), first_of(world.gates, len(y))
    memories = [layer.rule for layer in world.layers if layer.rule is not None]
    out = y.new_empty(len(y), rule.rule.value_heads, rule.rule.value_width)
    prepared = rule.prepare(y, gates, memories[0], steps, tiles)
    return {
        "prepare": time_calls(lambda call: rule.prepare(y, gates, memories[call], steps, tiles)),
        "scan": time_calls(lambda call: rule.scan(y, prepared, memories[call], steps, tiles, out)),
        "rule": time_calls(lambda call: rule.parts(y, gates, memories[call], steps, tiles)),
    }


def measure_prompt(rule: MeasuredRule, every: bool, tokens: int = PROMPT, device: torch.device = GPU) -> dict[str, Any]:
    world, steps = World(rule, 4, 1, tokens, device), part_of(tokens, device)
    y = chunk_convolution(world.x, world.conv, world.layers[0].conv, steps)
    own = rule.own_chunk_tiles(y)

    def of(y: Tensor, call: int) -> Tensor:
        memory = world.layers[call].rule
        assert memory is not None
        return rule.parts(y, world.gates, memory, steps, own)

    def whole(call: int) -> None:
        convolved = chunk_convolution(world.x, world.conv, world.layers[call].conv, steps)
        rule.norm(of(convolved, call), world.z, world.norm)

    out = of(y, 0)
    row = {
        "tokens": tokens, "limit": prompt_limit_us(rule, tokens), "tiles": own, "layer": time_calls(whole),
        "convolution": time_calls(lambda call: chunk_convolution(world.x, world.conv, world.layers[call].conv, steps)),
        "norm": time_calls(lambda _: rule.norm(out, world.z, world.norm)),
    } | measure_rule(rule, world, y, own)  # fmt: skip
    row |= {f"rule of {few}": measure_rule(rule, world, y[:few], own)["rule"] for few in (1, 64, 512)}
    tried: dict[str, Any] = {}
    for tiles in rule.chunk_tiles if every else ():
        with suppress(OutOfResources):
            tried[str(tuple(tiles))] = measure_rule(rule, world, y, tiles)
    for conv in CONV_TILES[PROMPT] if every else ():
        tried[f"convolution {tuple(conv)}"] = time_calls(
            lambda call: launch_chunk_convolution(world.x, world.conv, world.layers[call].conv, steps, conv)  # noqa: B023
        )
    return row | ({"tried": tried} if every else {})


def print_tree(row: dict[str, Any]) -> None:
    times = f"{row['convolution']:11.1f} {row['rule']:7.1f} {row['norm']:7.1f}"
    ratio = row["layer"] / row["limit"]
    print(f"{row['rows']:16} {row['nodes']:5} | {row['limit']:6.1f} | {row['layer']:6.1f} {ratio:6.2f} | {times}", flush=True)
    for tiles, us in row.get("tried", {}).items():
        print(f"    {tiles:34} {us:8.1f}", flush=True)


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
    parser.add_argument("--rule", choices=RULES, default="gated")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--nodes", type=int, nargs="+", choices=SHAPES, default=[1, 6, 32])
    parser.add_argument("--only", choices=("rounds", "prompt"))
    parser.add_argument("--all", action="store_true", help="other tiles, too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    need_gpu()
    rule = RULES[args.rule]
    began, rows, prompt = time.perf_counter(), [], None
    print("us a layer: rows nodes |  limit |  layer  ratio | convolution    rule    norm")
    with torch.inference_mode():
        for B in args.rows if args.only != "prompt" else ():
            for N in args.nodes:
                rows.append(measure_tree(rule, B, N, args.all))
                print_tree(rows[-1])
        if args.only != "rounds":
            print_prompt(prompt := measure_prompt(rule, args.all))
    print(f"{time.perf_counter() - began:.0f} s in all")
    if args.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                 "date": time.strftime("%Y-%m-%d"), "rule": args.rule, "rows": rows, "prompt": prompt}  # fmt: skip
        args.out.write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    main()
