"""How long a layer's mixture takes at few tokens: router, experts, and both with norms, until now and by the new kernels.

    python benchmarks products.few_tokens --all --out benchmarks/products/results/few_tokens_h200.json    # about 90 seconds
    python benchmarks products.few_tokens --formats "dense 256" "int4 g128" --rows 1
    python benchmarks products.few_tokens --sorted 64 96 192 512

Layers of Qwen3-30B-A3B's size in bf16 (dense), fp8 blocks and int4, of Qwen3.5-35B-A3B's and GLM-4.7-Flash's in bf16 with a
shared expert (dense 256, dense 64), of Nemotron-3-Nano's with two (dense relu2), and of gpt-oss-20b's in mxfp4.  "Until now":
cuBLAS and torch's operations for the router; for experts torch's grouped product, or mixture_triton.py.  New: router_triton.py
and few_tokens_triton.py, with the best of a few tiles, first of gate and up, then of down; --all prints the best three of each.
"Layer" is a norm that adds the last output, the router and the experts, in a chain of CALLS, each with a router and shared
experts of its own; `+ partials`: the norm adds splits up, and shared experts are computed beside the chosen ones instead of in
front of them.  --sorted: of more tokens, torch's grouped product beside stacked_triton.py's and grouped_hopper.py's, and
routers of many tokens.

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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from products.quantised_experts import BANDWIDTH, CALLS, FORMATS, Layer, choices, random_experts, time_calls
from products.quantised_experts import LAYERS as OF_SIZES
from specdec.models.mixtures.products import ordered_experts, placed_experts, run_experts
from specdec.ops.norm import add_rms_norm
from specdec.ops.products.dense import gated_linear, linear, relu2
from specdec.ops.products.experts import (
    DenseExperts,
    Experts,
    Form,
    Relu2,
    SharedExperts,
    SharedOutput,
    SwiGLU,
    few_tokens_experts,
    inputs_of,
    quantised_experts,
)
from specdec.ops.products.partials import Partials
from specdec.ops.products.routing import RouterRule, RouterWeights, choose, routed
from specdec.ops.products.tiles.experts import (
    ExpertTiles,
    GroupedTiles,
    ManyRouterTiles,
    MixtureTiles,
    RouterTiles,
    StackedTiles,
    few_tokens_tiles,
)

LAYERS = OF_SIZES | {
    "Qwen3.5-35B-A3B": Layer(256, 8, 2048, 512, SwiGLU()), "GLM-4.7-Flash": Layer(64, 4, 2048, 1536, SwiGLU()),
    "Nemotron-3-Nano-30B-A3B": Layer(128, 6, 2688, 1856, Relu2()),
}  # fmt: skip
# Of layers with shared experts as wide as the others: whether they are weighed, and how many they are.
SHARED = {"dense 256": (True, 1), "dense 64": (False, 1), "dense relu2": (False, 2)}
NAMES = {"dense": "Qwen3-30B-A3B", "dense 256": "Qwen3.5-35B-A3B", "dense 64": "GLM-4.7-Flash"} | {
    "dense relu2": "Nemotron-3-Nano-30B-A3B", **{name: of for name, (of, _, _) in FORMATS.items()}
}  # fmt: skip
ROWS = {True: (1, 6, 8, 32, 48), False: (1, 8)}  # of tokens, of dense experts and of others
# By dense or not, and the most tokens, of gate and up: block_n, warps, stages, unroll, and perhaps 1 and
# slices.  Of down: splits instead of 1, and perhaps slices and what is prefetched.
GATE_UP = {
    (True, 1): ((32, 2, 4, 1), (32, 2, 6, 1), (32, 1, 5, 1), (16, 4, 3, 1, 1, 4), (32, 4, 3, 1, 1, 4)),
    (True, 8): ((32, 1, 5, 1), (16, 1, 5, 1), (16, 1, 8, 1), (32, 2, 5, 1)),
    (True, 32): ((64, 4, 3, 1), (64, 4, 4, 1), (128, 4, 3, 1), (32, 2, 4, 1)),
    (True, 64): ((64, 4, 2, 1), (64, 4, 3, 1), (64, 4, 4, 1), (128, 8, 3, 1)),
    (False, 1): ((32, 2, 4, 2), (64, 4, 4, 2), (32, 4, 4, 1, 1, 4), (16, 4, 4, 1, 1, 4), (32, 2, 4, 1, 1, 2)),
    (False, 8): ((32, 2, 4, 2), (64, 4, 4, 2), (32, 4, 3, 1, 1, 4), (32, 2, 4, 1, 1, 2)),
}  # fmt: skip
DOWN = {
    (True, 1): ((32, 2, 4, 1, 8), (32, 2, 4, 1, 8, 1, 1024), (16, 4, 3, 1, 8, 4), (32, 2, 3, 1, 8, 2)),
    (True, 8): ((16, 1, 4, 1, 8), (16, 1, 5, 1, 16), (32, 1, 4, 1, 8), (32, 1, 4, 1, 16)),
    (True, 32): ((64, 4, 5, 1, 4), (64, 4, 3, 1, 8), (32, 2, 4, 1, 8), (128, 4, 3, 1, 8)),
    (True, 64): ((64, 4, 3, 1, 8), (64, 4, 4, 1, 8), (64, 4, 3, 1, 16), (128, 4, 3, 1, 8), (128, 8, 3, 1, 8)),
    (False, 1): ((32, 1, 4, 2, 8), (32, 4, 3, 1, 4, 4), (16, 2, 4, 1, 8, 2), (32, 4, 3, 1, 8, 4), (16, 1, 4, 2, 4)),
    (False, 8): ((16, 1, 4, 2, 8), (64, 4, 3, 1, 8, 4), (64, 2, 4, 2, 8), (32, 4, 3, 1, 16, 4)),
}  # fmt: skip
ROUTERS = (
    RouterTiles(4, 16, 512, 4), RouterTiles(4, 16, 256, 4), RouterTiles(4, 16, 1024, 4), RouterTiles(8, 16, 512, 4),
    RouterTiles(8, 16, 1024, 8), RouterTiles(8, 16, 2048, 8),
)  # fmt: skip
STACKED = (
    None, StackedTiles(16, 64, 128, 4, 4), StackedTiles(16, 128, 128, 4, 3), StackedTiles(32, 64, 128, 4, 4),
    StackedTiles(64, 128, 64, 4, 4), StackedTiles(64, 128, 64, 8, 4), StackedTiles(128, 128, 64, 8, 4),
    (GroupedTiles(256, 64, 4, 8), GroupedTiles(256, 64, 3, 8)),
)  # fmt: skip  # None: torch's; two: grouped_hopper.py's
MANY_ROUTED = (
    RouterTiles(8, 16, 512, 8), ManyRouterTiles(16, 64, 8, 4), ManyRouterTiles(32, 64, 8, 4), ManyRouterTiles(64, 64, 8, 4),
)  # fmt: skip


class Trial(NamedTuple):
    """A format, a number of tokens, and the part of the new kernels that has these tiles; None: the way taken until now."""

    name: str
    T: int
    part: str
    tiles: ExpertTiles | RouterTiles | None


class World:
    """One format's layer with random weights, and what CALLS calls of T tokens read."""

    def __init__(self, name: str) -> None:
        self.name, self.layer = name, LAYERS[NAMES[name]]
        E, H, F = self.layer.experts, self.layer.hidden, self.layer.width
        parts, (weighed, R) = inputs_of(self.layer.activation), SHARED.get(name, (False, 0))
        if is_dense(name):
            shapes = (E, parts * F, H), (E, H, F)
            first, second = (torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(std=0.02) for shape in shapes)
            self.experts: Experts = DenseExperts(first, second, Form(self.layer.activation))
        else:
            self.experts = random_experts(self.layer, *FORMATS[name][1:])
        is_oss = self.layer.experts == 32  # whose router is float32
        oss = RouterRule(self.layer.top_k, "softmax of chosen", biased=True)
        glm = RouterRule(self.layer.top_k, "sigmoid", True, normed=True, scaling=1.8)
        self.rule = oss if is_oss else glm if E == 64 or parts == 1 else RouterRule(self.layer.top_k, "softmax", normed=True)
        bias, correction = (torch.zeros(E, device="cuda") if has else None for has in (is_oss, self.rule.corrected))
        rows = E + weighed
        weights = [torch.randn(rows, H, device="cuda").div_(H**0.5) for _ in range(CALLS)]
        self.routers = [RouterWeights(each if is_oss else each.bfloat16(), bias, correction) for each in weights]
        sizes = ((parts * R * F, H), (H, R * F)) if R else ()
        self.shared = [
            [torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_(std=0.02) for size in sizes] for _ in range(CALLS)
        ]  # fmt: skip
        self.norm = torch.ones(H, device="cuda", dtype=torch.bfloat16)

    def inputs(self, T: int) -> list[Tensor]:
        return [torch.randn(T, self.layer.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(CALLS)]

    def bytes_of(self, experts: float) -> float:
        """That so many experts' weights take."""
        stacks = self.experts[:2]
        held = [[each] if isinstance(each, Tensor) else [each.qweight_RJ, each.scales_RG] for each in stacks]
        return experts / self.layer.experts * sum(tensor.nbytes for tensors in held for tensor in tensors)

    def route(
        self, x_TH: Tensor, call: int, tiles: RouterTiles | ManyRouterTiles | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        router, E = self.routers[call], self.layer.experts
        if tiles is not None:
            return routed(x_TH, router, self.rule, E, tiles)
        logits = torch.nn.functional.linear(x_TH.float(), router.weight_LH.float(), router.bias_E)
        gate = logits[:, E:].sigmoid() if logits.shape[1] > E else None
        return *choose(logits[:, :E], self.rule, router.correction_E), gate

    def shared_of(self, x_TH: Tensor, gate_T1: Tensor | None, call: int, beside: bool) -> SharedExperts | SharedOutput | None:
        """The layer's shared expert, as few_tokens_experts takes it; otherwise its output, of two launches more."""
        if not self.shared[call]:
            return None
        first, second = self.shared[call]
        if beside:
            return SharedExperts(first, second, gate_T1, SHARED[self.name][1])
        mid_TF = relu2(linear(x_TH, first)) if self.layer.activation == Relu2() else gated_linear(x_TH, first)
        return SharedOutput(linear(mid_TF, second), gate_T1)

    def run(
        self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, tiles: MixtureTiles | None, partials: bool = False,
        shared: SharedExperts | SharedOutput | None = None,
    ) -> Any:  # fmt: skip
        experts = self.experts
        if tiles is not None:
            return few_tokens_experts(x_TH, weights_TK, ids_TK, experts, tiles, shared, partials)
        if isinstance(shared, SharedOutput):
            return shared.added_to(self.run(x_TH, weights_TK, ids_TK, None))
        if isinstance(experts, DenseExperts):
            return run_experts(x_TH, weights_TK, ids_TK, *experts)
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
        weights_TK, ids_TK, gate_T1 = world.route(normed, number, router)
        seen.append(ids_TK)
        shared = world.shared_of(normed, gate_T1, number, beside=partials)
        outputs.append(world.run(normed, weights_TK, ids_TK, tiles, partials, shared))

    return call


def is_dense(name: str) -> bool:
    return name.startswith("dense")


def forms(table: dict[tuple[bool, int], tuple[tuple[int, ...], ...]], name: str, T: int) -> list[ExpertTiles]:
    """The table's tiles for so many tokens."""
    dense, block_m = is_dense(name), max(8, triton.next_power_of_2(T))
    size = min(each for kind, each in table if kind == dense and (each >= T or each == (64 if dense else 8)))
    return [ExpertTiles(block_m, *each) for each in table[dense, size]]


def own_tiles(name: str, T: int) -> MixtureTiles:
    return few_tokens_tiles(T, "dense" if is_dense(name) else FORMATS[name][1], LAYERS[NAMES[name]].experts)


def trials(name: str, T: int) -> Iterator[Trial]:
    """Each launch that must be compiled."""
    own = own_tiles(name, T)
    yield Trial(name, T, "now", None)
    yield from (Trial(name, T, "gate_up", each) for each in dict.fromkeys([own.gate_up, *forms(GATE_UP, name, T)]))
    yield from (Trial(name, T, "down", each) for each in dict.fromkeys([own.down, *forms(DOWN, name, T)]))
    yield from (Trial(name, T, "router", each) for each in ROUTERS)


_world: World | None = None  # of a process that compiles


def compile_one(trial: Trial) -> None:
    """By one process, of several: what it compiles is kept for the process that measures."""
    global _world
    with torch.inference_mode(), suppress(OutOfResources):
        if _world is None or _world.name != trial.name:
            _world = None
            _world = World(trial.name)
        T, x = trial.T, _world.inputs(trial.T)[0]
        if isinstance(trial.tiles, RouterTiles):
            _world.route(x, 0, trial.tiles)
        elif trial.tiles is None:
            experts_call(_world, T, None)(0)
        else:
            own = own_tiles(trial.name, T)
            experts_call(_world, T, own._replace(**{trial.part: trial.tiles}))(0)
        torch.cuda.synchronize()


def best_tiles(world: World, T: int, kept: list[dict[str, Any]]) -> tuple[MixtureTiles, float]:
    """Gate and up with the policy's down, and then down with the best gate and up."""

    def fastest(part: str, trials: list[MixtureTiles]) -> tuple[MixtureTiles, float]:
        times = []
        for each in dict.fromkeys(trials):
            with suppress(OutOfResources):
                times.append((time_calls(experts_call(world, T, each)), each))
        kept.extend(
            {"format": world.name, "T": T, "part": part, "tiles": tiles, "us": round(us, 2)} for us, tiles in times
        )  # fmt: skip
        us, tiles = min(times, key=lambda each: each[0])
        return tiles, us

    own = own_tiles(world.name, T)
    first, _ = fastest("gate_up", [own, *(own._replace(gate_up=each) for each in forms(GATE_UP, world.name, T))])
    return fastest("down", [first, *(first._replace(down=each) for each in forms(DOWN, world.name, T))])


def compare_sorted(names: list[str], rows: list[int]) -> list[dict[str, Any]]:
    """Of dense experts and more tokens: torch's grouped product beside ours, by tiles, and its router beside ours."""
    found = []
    for name in filter(is_dense, names):
        world = World(name)
        for T in rows:
            xs, chosen, shares = world.inputs(T), choices(world.layer, T), torch.rand(T, world.layer.top_k, device="cuda")
            distinct = sum(len(ids.unique()) for ids in chosen) / CALLS
            limit = 1e6 * world.bytes_of(distinct) / BANDWIDTH
            print(f"{name} {T} tokens, {distinct:.0f} experts, limit {limit:.0f} us:", end="")
            for tiles in STACKED:
                way = ordered_experts if isinstance(tiles, StackedTiles) else placed_experts
                way = run_experts if tiles is None else partial(way, tiles=tiles)
                us = time_calls(lambda call: way(xs[call], shares, chosen[call], *world.experts))  # noqa: B023
                found.append({"format": name, "T": T, "tiles": tiles, "us": round(us, 2)})
                print(f" {'torch' if tiles is None else 'x'.join(map(str, tiles))} {us:.0f}", end="", flush=True)
            print(f"\n{name} {T} tokens, router:", end="")
            for router in (None, *MANY_ROUTED):
                us = time_calls(lambda call: world.route(xs[call], call, router))  # noqa: B023
                found.append({"format": name, "T": T, "router": router, "us": round(us, 2)})
                print(f" {'torch' if router is None else 'x'.join(map(str, router))} {us:.1f}", end="", flush=True)
            print()
    return found


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
        "tiles": tiles, "router_tiles": router, "routers": [(each, round(us, 2)) for each, us in routers.items()],
    }  # fmt: skip
    row["experts_limit"] = round(1e6 * world.bytes_of(row["distinct"]) / BANDWIDTH, 2)
    ways = (None, None, False), (tiles, router, False), (tiles, router, True)
    row["layer"], seen = [], []
    for mixture, routing, partials in ways:
        seen.clear()
        row["layer"].append(round(time_calls(layer_call(world, T, mixture, routing, partials, seen)), 2))
    distinct = sum(len(ids.unique()) for ids in seen[-CALLS:]) / CALLS  # of the last replay, in the graph's memory
    router_bytes = world.routers[0].weight_LH.nbytes
    beside_bytes = router_bytes + sum(each.nbytes for each in world.shared[0])
    row["layer_limit"] = round(1e6 * (world.bytes_of(distinct) + beside_bytes) / BANDWIDTH, 2)
    return row


def shown(tiles: ExpertTiles) -> str:
    more = f" /{tiles.splits}" * (tiles.splits > 1) + f" {tiles.slices} slices" * (tiles.slices > 1)
    more += f" ahead {tiles.prefetch}" * (tiles.prefetch != 512)
    return f"{tiles.block_n}x{tiles.warps}w {tiles.stages}s u{tiles.unroll}{more}"


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


def print_best(rows: list[dict[str, Any]], kept: list[dict[str, Any]]) -> None:
    """The best three tiles of gate and up, of down, and of the router, of each format and number of tokens."""
    for row in rows:
        line = f"{row['format']} {row['T']}"
        for part in ("gate_up", "down"):
            own = [each for each in kept if (each["format"], each["T"], each["part"]) == (row["format"], row["T"], part)]
            best = sorted(own, key=lambda each: each["us"])[:3]
            line += f" | {part}: " + ", ".join(f"{each['us']:.1f} {shown(getattr(each['tiles'], part))}" for each in best)
        best = sorted(row["routers"], key=lambda each: each[1])[:3]
        print(line + " | router: " + ", ".join(f"{us:.1f} {'x'.join(map(str, tiles))}" for tiles, us in best))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--rows", type=int, nargs="+", help="tokens; left out: those of ROWS")
    parser.add_argument("--sorted", type=int, nargs="+", help="tokens: products of pairs sorted by expert, and routers")
    parser.add_argument("--processes", type=int, default=14, help="that compile side by side")
    parser.add_argument("--all", action="store_true", help="print the best three tiles of each part, too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.sorted:
        with torch.inference_mode():
            compare_sorted(args.formats, args.sorted)
        return
    tokens = {name: args.rows or ROWS[is_dense(name)] for name in args.formats}
    # One compiled kernel serves all numbers of tokens that are padded alike, but for down's list of experts.
    todo = {
        (trial.name, trial.part, trial.tiles, trial.T if trial.part in ("down", "now") else trial.T == 1): trial
        for name in args.formats for T in tokens[name] for trial in trials(name, T)
    }  # fmt: skip
    began = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(compile_one, todo.values(), chunksize=max(1, len(todo) // (3 * args.processes)))
    print(f"compiled for {time.perf_counter() - began:.0f} s", flush=True)
    rows, kept = [], []  # type: list[dict[str, Any]], list[dict[str, Any]]
    with torch.inference_mode():
        for name in args.formats:
            world = World(name)
            rows += [measure(world, T, kept) for T in tokens[name]]
            print(f"measured {name}, {time.perf_counter() - began:.0f} s", flush=True)
    print_table(rows)
    if args.all:
        print_best(rows, kept)
    print(f"{time.perf_counter() - began:.0f} s in all")
    if args.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                 "date": time.strftime("%Y-%m-%d"), "rows": rows, "tiles": kept}  # fmt: skip
        args.out.write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    main()
