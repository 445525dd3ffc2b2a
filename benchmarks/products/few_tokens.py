"""How long a layer's mixture takes at few tokens: router, experts, and both with norms, until now and by the new kernels.

    python benchmarks products.few_tokens --out benchmarks/products/results/few_tokens_h200.json    # about 3 minutes
    python benchmarks products.few_tokens --formats dense int4 --rows 1 --all

Layers of Qwen3-30B-A3B's size in bf16, fp8 blocks and int4, and of gpt-oss-20b's in mxfp4.  "Until now": cuBLAS and torch's
operations for the router; for experts torch's grouped product, or mixture_triton.py.  New: router_triton.py and
few_tokens_triton.py, with the best of a few tiles, first of gate and up, then of down.  "Layer" is a norm that adds the last
output, the router and the experts, in a chain of CALLS, each with a router of its own; `+ partials`: the norm adds splits up.

Times are medians of replays of CUDA graphs.  The limit is the time to read the distinct experts that were chosen, which are
counted, once at 4.48 TB/s.  specdec takes the new kernels up to MOST_TOKENS tokens (specdec/ops/products/tiles/experts.py):
choose it, and `few_tokens_tiles`, from this table.

Shapes: T tokens, H hidden size, E experts, K experts of a token.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from products.quantised_experts import BANDWIDTH, CALLS, FORMATS, LAYERS, choices, random_experts, time_calls
from specdec.models.mixtures.products import run_experts
from specdec.ops.norm import add_rms_norm
from specdec.ops.products.experts import DenseExperts, Experts, few_tokens_experts, quantised_experts
from specdec.ops.products.partials import Partials
from specdec.ops.products.routing import RouterRule, RouterWeights, choose, routed
from specdec.ops.products.tiles.experts import ROUTER, ExpertTiles, MixtureTiles, RouterTiles, few_tokens_tiles

NAMES = {"dense": "Qwen3-30B-A3B", **{name: of for name, (of, _, _) in FORMATS.items()}}
# Of gate and up: block_n, warps, stages, unroll.  Of down: splits, too.
GATE_UP = {
    True: ((32, 2, 4, 1), (32, 2, 6, 1), (32, 1, 5, 1), (16, 1, 6, 1), (64, 4, 4, 1), (64, 4, 6, 1)),
    False: ((32, 2, 4, 2), (32, 2, 6, 2), (32, 1, 4, 2), (32, 2, 4, 4), (16, 1, 6, 2), (64, 4, 4, 2), (64, 2, 4, 2)),
}
DOWN = {
    True: ((16, 1, 4, 1), (16, 1, 6, 1), (16, 1, 9, 1), (32, 2, 4, 1), (32, 1, 6, 1), (64, 4, 5, 1)),
    False: ((16, 1, 4, 2), (16, 1, 6, 2), (16, 1, 4, 3), (32, 1, 4, 2), (32, 2, 6, 3), (64, 2, 4, 2)),
}
SPLITS = {1: (1, 2, 4, 8), 8: (2, 4, 8), 32: (2, 4)}
ROUTERS = (
    ROUTER,
    RouterTiles(8, 16, 512, 4),
    RouterTiles(8, 16, 128, 2),
    RouterTiles(8, 32, 256, 4),
    RouterTiles(16, 16, 256, 4),
)


class Trial(NamedTuple):
    """A format and a number of tokens.  tiles: of the new kernels; None: the way taken until now."""

    name: str
    T: int
    tiles: MixtureTiles | None


class World:
    """One format's layer with random weights, and what CALLS calls of T tokens read."""

    def __init__(self, name: str) -> None:
        self.name, self.layer = name, LAYERS[NAMES[name]]
        E, H, F = self.layer.experts, self.layer.hidden, self.layer.width
        if name == "dense":
            shapes = (E, 2 * F, H), (E, H, F)
            first, second = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).div_(50) for shape in shapes)
            self.experts: Experts = DenseExperts(first, second)
        else:
            self.experts = random_experts(self.layer, *FORMATS[name][1:])
        is_oss = self.layer.experts == 32  # whose router is float32
        oss = RouterRule(self.layer.top_k, "softmax of chosen", biased=True)
        self.rule = oss if is_oss else RouterRule(self.layer.top_k, "softmax", normed=True)
        bias = torch.zeros(E, device="cuda") if is_oss else None
        weights = [torch.randn(E, H, device="cuda").div_(H**0.5) for _ in range(CALLS)]
        self.routers = [RouterWeights(each if is_oss else each.bfloat16(), bias, None) for each in weights]
        self.norm = torch.ones(H, device="cuda", dtype=torch.bfloat16)

    def inputs(self, T: int) -> list[Tensor]:
        return [torch.randn(T, self.layer.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(CALLS)]

    def bytes_of(self, experts: float) -> float:
        """That so many experts' weights take."""
        stacks = self.experts[:2]
        held = [[each] if isinstance(each, Tensor) else [each.qweight_RJ, each.scales_RG] for each in stacks]
        return experts / self.layer.experts * sum(tensor.nbytes for tensors in held for tensor in tensors)

    def route(self, x_TH: Tensor, call: int, tiles: RouterTiles | None) -> tuple[Tensor, Tensor]:
        router = self.routers[call]
        if tiles is not None:
            return routed(x_TH, router, self.rule, self.layer.experts, tiles)[:2]
        logits = torch.nn.functional.linear(x_TH.float(), router.weight_LH.float(), router.bias_E)
        return choose(logits, self.rule)

    def run(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, tiles: MixtureTiles | None, partials: bool = False) -> Any:
        experts = self.experts
        if tiles is not None:
            return few_tokens_experts(x_TH, weights_TK, ids_TK, experts, tiles, partials=partials)
        if isinstance(experts, DenseExperts):
            return run_experts(x_TH, weights_TK, ids_TK, experts.gate_up, experts.down)
        return quantised_experts(x_TH, weights_TK, ids_TK, experts)


def experts_call(world: World, T: int, tiles: MixtureTiles | None) -> Callable[[int], object]:
    xs, chosen, shares = world.inputs(T), choices(world.layer, T), torch.rand(T, world.layer.top_k, device="cuda")
    return lambda call: world.run(xs[call], shares, chosen[call], tiles)


def layer_call(
    world: World, T: int, tiles: MixtureTiles | None, router: RouterTiles | None, partials: bool, seen: list[Tensor]
) -> Callable[[int], object]:
    """seen: takes the ids that each call chose."""
    x = world.inputs(T)[0]
    outputs: list[Tensor | Partials] = [torch.zeros_like(x)]  # all of them: a graph reads the one that was made before it

    def call(number: int) -> None:
        _, normed = add_rms_norm(x, outputs[-1], world.norm, 1e-6)
        weights_TK, ids_TK = world.route(normed, number, router)
        seen.append(ids_TK)
        outputs.append(world.run(normed, weights_TK, ids_TK, tiles, partials))

    return call


def combined(T: int, gate_up: tuple[int, ...], down: tuple[int, ...], splits: int) -> MixtureTiles:
    block_m = max(8, triton.next_power_of_2(T))
    return MixtureTiles("few_tokens_triton", ExpertTiles(block_m, *gate_up), ExpertTiles(block_m, *down, splits))


def candidates(name: str, T: int) -> Iterator[MixtureTiles]:
    """Each form of gate and up, and each of down, at least once."""
    dense, top_k = name == "dense", LAYERS[NAMES[name]].top_k
    splits = [each for each in SPLITS.get(T, (1, 2)) if T > 1 or each <= top_k]
    downs = [(down, each) for down in DOWN[dense] for each in splits]
    for place in range(max(len(downs), len(GATE_UP[dense]))):
        yield combined(T, GATE_UP[dense][place % len(GATE_UP[dense])], *downs[place % len(downs)])


def compile_all(todo: list[Trial]) -> None:
    """By one process, of several: what it compiles is kept for the process that measures."""
    with torch.inference_mode():
        for name in dict.fromkeys(trial.name for trial in todo):
            world = World(name)
            for trial in todo:
                if trial.name == name:
                    with suppress(OutOfResources):
                        experts_call(world, trial.T, trial.tiles)(0)
                    for router in ROUTERS if trial.tiles is None else ():
                        world.route(world.inputs(trial.T)[0], 0, router)
    torch.cuda.synchronize()


def best_tiles(world: World, T: int, kept: list[dict[str, Any]]) -> tuple[MixtureTiles, float]:
    """Gate and up with the policy's down, and then down with the best gate and up."""

    def fastest(trials: list[MixtureTiles]) -> tuple[MixtureTiles, float]:
        times = []
        for each in dict.fromkeys(trials):
            with suppress(OutOfResources):
                times.append((time_calls(experts_call(world, T, each)), each))
        kept.extend({"format": world.name, "T": T, "tiles": tiles, "us": round(us, 2)} for us, tiles in times)
        us, tiles = min(times, key=lambda each: each[0])
        return tiles, us

    own = few_tokens_tiles(T, "dense" if world.name == "dense" else FORMATS[world.name][1])
    every = list(candidates(world.name, T))
    first, _ = fastest([own, *(own._replace(gate_up=each.gate_up) for each in every)])
    return fastest([first, *(first._replace(down=each.down) for each in every)])


def measure(world: World, T: int, kept: list[dict[str, Any]]) -> dict[str, Any]:
    layer, xs = world.layer, world.inputs(T)
    tiles, new = best_tiles(world, T, kept)
    routers = {each: time_calls(lambda call: world.route(xs[call], call, each)) for each in ROUTERS}  # noqa: B023
    router = min(routers, key=lambda each: routers[each])
    chosen, shares = choices(layer, T), torch.rand(T, layer.top_k, device="cuda")
    got, want = (world.run(xs[0], shares, chosen[0], each).float() for each in (tiles, None))
    row = {
        "format": world.name, "T": T, "distinct": sum(len(ids.unique()) for ids in chosen) / CALLS,
        "differs": float((got - want).norm() / want.norm()),
        "router": [round(time_calls(lambda call: world.route(xs[call], call, None)), 2), round(routers[router], 2)],
        "experts": [round(time_calls(experts_call(world, T, None)), 2), round(new, 2)],
        "tiles": tiles, "router_tiles": router,
    }  # fmt: skip
    row["experts_limit"] = round(1e6 * world.bytes_of(row["distinct"]) / BANDWIDTH, 2)
    ways = (None, None, False), (tiles, router, False), (tiles, router, True)
    row["layer"], seen = [], []
    for mixture, routing, partials in ways:
        seen.clear()
        row["layer"].append(round(time_calls(layer_call(world, T, mixture, routing, partials, seen)), 2))
    distinct = sum(len(ids.unique()) for ids in seen[-CALLS:]) / CALLS  # of the last replay, in the graph's memory
    router_bytes = world.routers[0].weight_LH.nbytes
    row["layer_limit"] = round(1e6 * (world.bytes_of(distinct) + router_bytes) / BANDWIDTH, 2)
    return row


def shown(tiles: ExpertTiles) -> str:
    return f"{tiles.block_n}x{tiles.warps}w {tiles.stages}s u{tiles.unroll}" + f" /{tiles.splits}" * (tiles.splits > 1)


def print_table(rows: list[dict[str, Any]]) -> None:
    print("us a layer          | router        | experts                 | layer, with its norm             |")
    print("format      T  read |   old     new |  limit     old     new  |  limit     old     new +partials | best tiles")
    for row in rows:
        router, experts, layer, tiles = row["router"], row["experts"], row["layer"], row["tiles"]
        print(
            f"{row['format']:10} {row['T']:2} {row['distinct']:5.1f} | {router[0]:5.1f} {router[1]:7.1f} | "
            f"{row['experts_limit']:6.1f} {experts[0]:7.1f} {experts[1]:7.1f}  | {row['layer_limit']:6.1f} {layer[0]:7.1f} "
            f"{layer[1]:7.1f} {layer[2]:7.1f}   | {shown(tiles.gate_up)}; {shown(tiles.down)}; "
            f"router {row['router_tiles'][:4]}; differs by {row['differs']:.1e}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--processes", type=int, default=14, help="that compile side by side")
    parser.add_argument("--all", action="store_true", help="print each trial of tiles, too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    todo = [Trial(name, T, tiles) for name in args.formats for T in args.rows for tiles in (None, *candidates(name, T))]
    began = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(compile_all, [todo[first :: args.processes] for first in range(args.processes)])
    print(f"compiled for {time.perf_counter() - began:.0f} s", flush=True)
    rows, kept = [], []  # type: list[dict[str, Any]], list[dict[str, Any]]
    with torch.inference_mode():
        for name in args.formats:
            world = World(name)
            rows += [measure(world, T, kept) for T in args.rows]
            print_table(rows[-len(args.rows) :])
    if args.all:
        for trial in sorted(kept, key=lambda each: (each["format"], each["T"], each["us"])):
            print(trial["format"], trial["T"], f"{trial['us']:8.2f}", shown(trial["tiles"].gate_up), shown(trial["tiles"].down))
    print_table(rows)
    print(f"{time.perf_counter() - began:.0f} s in all")
    if args.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                 "date": time.strftime("%Y-%m-%d"), "rows": rows, "tiles": kept}  # fmt: skip
        args.out.write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    main()
