"""Which tiles of few_hopper.py are fastest: a layer of one token in fp8, int4 and mxfp4, and mxfp4's experts of six tokens.

    python benchmarks products.expert_tiles --out FILE    # about 60 seconds, of which 35 compile
    python benchmarks products.expert_tiles --formats mxfp4 --tokens 6

It needs a GPU of compute capability 9.0.  A layer is a norm that adds the layer before, the router, and the experts, which
choose where the policy lets them; CALLS of them make a CUDA graph, each with a router of its own.  First tiles of gate and up
are tried with the policy's down, then tiles of down with the best of these.  Six tokens have no router: they choose from a few
experts, because the tokens of a chain choose alike, and from more.  There the policy is few_tokens_triton.py.

Kernels are compiled by several processes, which hold each against float64.  A result that is not finite after the timed
replays ends the script.  What wins is for `few_hopper_tiles` and MOST_HOPPER (specdec/ops/products/tiles/experts.py).

Shapes: T tokens, E experts, K experts of a token, H hidden size.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from gpus import need_gpu
from graph_timing import timed
from torch import Tensor

from products.few_tokens import World
from products.quantised_experts import CALLS, FORMATS
from specdec.ops.norm import add_rms_norm
from specdec.ops.products.experts import QuantisedExperts, few_tokens_experts
from specdec.ops.products.formats.experts import dequantise_stack, stack_of
from specdec.ops.products.partials import Partials, added_up
from specdec.ops.products.routing import unchosen
from specdec.ops.products.tiles.experts import (
    ExpertTiles,
    MixtureTiles,
    RouterTiles,
    few_hopper_tiles,
    few_tokens_tiles,
    router_tiles,
)

# By tokens and format.  Of gate and up: rows, warps, units at one time, registers, and 1 where words come early.
GATE_UP: dict[tuple[int, str], str] = {
    (1, "fp8 blocks"): "16,4,4,128,1 32,4,2,168,1 16,4,4,96 16,4,8,168 16,8,4,128 16,8,4,96 16,2,8,168 32,4,2,128 32,4,2,168 "
    "32,4,4,168 32,8,2,96 32,8,4,128 32,2,4,168 64,4,1,128 64,4,2,168 16,4,2,80",
    (1, "int4 g128"): "32,4,4,128,1 16,4,4,128,1 32,4,2,96 32,4,4,168 32,4,2,128 16,4,4,80 16,4,4,96 16,4,4,128 16,2,4,128 "
    "16,2,8,128 32,2,4,168 32,8,2,96 64,4,2,168 16,8,2,64",
    (1, "mxfp4"): "16,4,6,96 16,4,3,80 16,4,3,96 16,8,3,80 32,4,6,168 32,4,3,128 32,4,3,168 32,4,3,96 32,4,2,96 32,8,3,96 "
    "32,8,3,128 64,4,2,168 64,4,3,168 16,4,2,80",
    (6, "mxfp4"): "16,4,6,128 16,4,3,96 16,8,3,96 16,8,3,128 32,4,3,128 32,4,3,168 32,8,3,128 64,4,2,168",
}
# Of down: rows, warps, units at one time, splits, registers.
DOWN: dict[tuple[int, str], str] = {
    (1, "fp8 blocks"): "16,8,3,4,96 16,8,3,4,64 16,4,6,4,128 32,8,6,2,128 32,8,3,4,128 32,8,3,2,128 16,8,6,2,96 16,8,3,2,80",
    (1, "int4 g128"): "16,8,3,2,96 16,8,3,2,64 16,4,6,2,128 16,8,6,1,96 32,8,3,2,128 32,8,6,1,128 32,4,6,2,128 16,8,3,1,80",
    (1, "mxfp4"): "16,8,3,4,80 16,8,3,4,128 16,4,6,4,128 32,8,6,2,128 32,8,3,4,128 32,8,4,3,128 16,8,4,3,96 16,8,3,2,96 "
    "16,8,6,2,96",
    (6, "mxfp4"): "16,8,3,2,128 16,8,4,4,128 16,8,3,4,96 32,8,2,2,128 32,8,3,2,128 32,8,3,4,128 32,8,2,4,128",
}
FROM = (5, 4, 8, 12, 32)  # experts that six tokens choose from; tiles are tried with the first number
TOPS = 3  # tiles that are tried with the other numbers
MOST_ERROR = 8e-3  # of the norm, in bfloat16


class TriedTiles(NamedTuple):
    """A format, a number of tokens, and tiles of which one part is not the policy's."""

    name: str
    T: int
    tiles: MixtureTiles


class Layers:
    """CALLS mixtures of T tokens in a graph, as graph_timing.py takes what it times.

    chosen: ids of each call; empty: a router chooses, in a chain.
    """

    layers = CALLS

    def __init__(self, world: World, T: int, tiles: MixtureTiles, chosen: list[Tensor]) -> None:
        self.world, self.tiles, self.chosen = world, tiles, chosen
        self.xs, self.shares = world.inputs(T), torch.rand(T, world.layer.top_k, device="cuda")
        self.routing = router_tiles(T, world.layer.experts)

    def run(self) -> list[Tensor]:
        outs = [self.one(call) for call in range(CALLS)] if self.chosen else self.chained()
        last = outs[-1]
        return [last.tensor() if isinstance(last, Partials) else last]

    def one(self, call: int) -> Tensor | Partials:
        return mixture(self.world, self.xs[call], self.shares, self.chosen[call], self.tiles)

    def chained(self) -> list[Tensor | Partials]:
        world = self.world
        outs: list[Tensor | Partials] = [torch.zeros_like(self.xs[0])]
        for call in range(CALLS):
            _, normed = add_rms_norm(self.xs[0], outs[-1], world.norm, 1e-6)
            if self.tiles.chooses:
                outs.append(chosen_by_experts(world, normed, call, self.tiles)[0])
            else:
                assert isinstance(self.routing, RouterTiles)
                weights_TK, ids_TK, _ = world.route(normed, call, self.routing)
                outs.append(mixture(world, normed, weights_TK, ids_TK, self.tiles))
        return outs


def mixture(world: World, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, tiles: MixtureTiles) -> Tensor | Partials:
    return few_tokens_experts(x_TH, weights_TK, ids_TK, world.experts, tiles, None, True)


def chosen_by_experts(
    world: World, x_1H: Tensor, call: int, tiles: MixtureTiles
) -> tuple[Tensor | Partials, Tensor, Tensor]:  # fmt: skip
    """(output, weights, ids), of experts that choose for themselves."""
    found = unchosen(x_1H, world.routers[call], world.rule, world.layer.experts)
    weights_1K, ids_1K, _ = found.out
    return few_tokens_experts(x_1H, weights_1K, ids_1K, world.experts, tiles, None, True, found), weights_1K, ids_1K


def numbers(text: str) -> list[list[int]]:
    return [[int(number) for number in each.split(",")] for each in text.split()]


def gate_up_tiles(T: int, name: str) -> list[ExpertTiles]:
    return [
        ExpertTiles(8, rows, warps, 1, units, slices=warps, registers=registers, early=bool(early))
        for rows, warps, units, registers, *early in numbers(GATE_UP[T, name])
    ]


def down_tiles(T: int, name: str) -> list[ExpertTiles]:
    return [
        ExpertTiles(8, rows, warps, 1, units, splits, warps, registers=registers)
        for rows, warps, units, splits, registers in numbers(DOWN[T, name])
    ]


def policy(T: int, name: str) -> MixtureTiles:
    kind = FORMATS[name][1]
    return few_hopper_tiles(1, kind) if T == 1 else few_tokens_tiles(T, kind)


def tried(T: int, name: str) -> Iterator[TriedTiles]:
    """Each kernel that must be compiled, with another part that is compiled anyway."""
    own = few_hopper_tiles(T, FORMATS[name][1])
    yield TriedTiles(name, T, policy(T, name))
    yield TriedTiles(name, T, own)
    yield from (TriedTiles(name, T, own._replace(gate_up=each)) for each in gate_up_tiles(T, name))
    yield from (TriedTiles(name, T, own._replace(down=each)) for each in down_tiles(T, name))


_world: World | None = None  # of a process that compiles


def compile_one(trial: TriedTiles) -> tuple[TriedTiles, str]:
    """(these tiles, why they are not measured): the kernels are compiled, and held against float64."""
    global _world
    try:
        with torch.inference_mode():
            if _world is None or _world.name != trial.name:
                _world = None
                _world = World(trial.name)
            error = error_of(_world, trial)
    except Exception as found:  # of any kind, as Triton has many: tiles that can't run are named, and the search goes on
        return trial, f"{type(found).__name__}: {found}"[:200]
    return trial, "" if error < MOST_ERROR else f"differs from float64 by {error:.1e}"


def error_of(world: World, trial: TriedTiles) -> float:
    x, K = world.inputs(trial.T)[0] / 8, world.layer.top_k
    if trial.tiles.chooses:
        got, weights_TK, ids_TK = chosen_by_experts(world, x, 0, trial.tiles)
    else:
        weights_TK = torch.rand(trial.T, K, device="cuda")
        ids_TK = torch.rand(trial.T, world.layer.experts, device="cuda").topk(K).indices
        got = mixture(world, x, weights_TK, ids_TK, trial.tiles)
    want = exact(x, weights_TK, ids_TK, world.experts)
    return float((added_up(got).double() - want).norm() / want.norm())


def exact(x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Any) -> Tensor:
    """The weighted sum in float64."""
    assert isinstance(experts, QuantisedExperts)
    ids, places_TK = ids_TK.unique(return_inverse=True)
    gate_up, down = (dequantise_stack(stack_of(each, ids), torch.float64) for each in experts[:2])
    rows = []
    for x_H, weights_K, places_K in zip(x_TH.double(), weights_TK.double(), places_TK, strict=True):
        mid = experts.form.activation(gate_up[places_K] @ x_H)
        rows.append((weights_K[:, None] * (down[places_K] @ mid[:, :, None])[:, :, 0]).sum(0))
    return torch.stack(rows)


def choices_from(world: World, T: int, some: int) -> list[Tensor]:
    """CALLS choices of T tokens, each token's from the same `some` experts, other ones in each call."""
    generator, (E, K) = torch.Generator().manual_seed(some), (world.layer.experts, world.layer.top_k)
    chosen = []
    for _ in range(CALLS):
        own = torch.randperm(E, generator=generator)[:some]
        chosen.append(torch.stack([own[torch.randperm(some, generator=generator)[:K]] for _ in range(T)]).cuda())
    return chosen


def measure(world: World, T: int, bad: set[TriedTiles], rows: list[dict[str, Any]]) -> None:
    """Tiles of gate and up, then of down; of six tokens the best ones also with other numbers of experts."""
    name, own, start = world.name, policy(T, world.name), few_hopper_tiles(T, FORMATS[world.name][1])
    chosen = choices_from(world, T, FROM[0]) if T > 1 else []

    def us(tiles: MixtureTiles, chosen: list[Tensor]) -> float:
        found, last = timed(Layers.run, Layers(world, T, tiles, chosen), 11)
        if not bool(last.isfinite().all()):
            raise SystemExit(f"{name}, {T} tokens: {tiles} left numbers that are none")
        return found

    def fastest(part: str, trials: list[MixtureTiles], chosen: list[Tensor]) -> list[MixtureTiles]:
        found = sorted(((us(each, chosen), each) for each in dict.fromkeys([own, *trials])), key=lambda each: each[0])
        read = sum(len(ids.unique()) for ids in chosen) / CALLS if chosen else world.layer.top_k
        rows.extend({"format": name, "T": T, "read": read, "part": part, "tiles": t, "us": round(us, 2)} for us, t in found)
        now = next(us for us, tiles in found if tiles == own)
        print(f"{name}, {T} tokens, {read:.1f} experts, {part}: policy {now:.2f} {shown(own)} |", end="")
        print("; ".join(f" {us:.2f} {shown(tiles)}" for us, tiles in found[:6]), flush=True)
        return [tiles for _, tiles in found if tiles.kernel == "few_hopper"]

    def fine(part: str, tiles: ExpertTiles) -> bool:
        return TriedTiles(name, T, start._replace(**{part: tiles})) not in bad

    gates = [start._replace(gate_up=each) for each in gate_up_tiles(T, name) if fine("gate_up", each)]
    best = fastest("gate_up", [start, *gates], chosen)[0]
    downs = [best._replace(down=each) for each in down_tiles(T, name) if fine("down", each)]
    tops = fastest("down", [best, *downs], chosen)[:TOPS]
    for some in FROM[1:] if T > 1 else ():
        fastest("both", tops, choices_from(world, T, some))


def shown(tiles: MixtureTiles) -> str:
    if tiles.kernel != "few_hopper":
        return tiles.kernel
    first, second = tiles.gate_up, tiles.down
    early = " early" if first.early else ""
    return (
        f"{first.block_n}x{first.warps}w u{first.unroll} r{first.registers}{early}"
        f" + {second.block_n}x{second.warps}w u{second.unroll} /{second.splits} r{second.registers}"
    )


def compiled(todo: list[TriedTiles], processes: int) -> set[TriedTiles]:
    """Compiles all, and gives what can't be measured."""
    bad: set[TriedTiles] = set()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for trial, why in pool.imap_unordered(compile_one, todo, chunksize=2):
            if why:
                print(f"not measured: {trial}: {why}", flush=True)
                bad.add(trial)
    return bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--tokens", nargs="+", type=int, choices=(1, 6), default=[1, 6], help="six: mxfp4 alone")
    parser.add_argument("--processes", type=int, default=14, help="that compile side by side")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    need_gpu()
    cases = [(T, name) for T, name in GATE_UP if T in args.tokens and name in args.formats]
    began = time.perf_counter()
    todo = sorted({each for case in cases for each in tried(*case)}, key=lambda each: each.name)
    bad = compiled(todo, args.processes)
    print(f"{len(todo)} tiles compiled for {time.perf_counter() - began:.0f} s, {len(bad)} not measured", flush=True)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for T, name in cases:
            measure(World(name), T, bad, rows)
            torch.cuda.empty_cache()
    print(f"{time.perf_counter() - began:.0f} s in all")
    if args.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                 "date": time.strftime("%Y-%m-%d"), "rows": rows}  # fmt: skip
        args.out.write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    main()
