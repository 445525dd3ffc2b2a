"""Milliseconds a round where several GPUs hold the models together, at the shapes of Llama 3.1 8B and 70B, random weights.

    python benchmarks rounds.round_tp --ranks 2 --out benchmarks/rounds/results/round_tp.json
    python benchmarks rounds.round_tp --ranks 2 --only 8B:plain --no-trace

Lines are measured as in round_8b.py, on the first rank.  The limit is the time to read the bytes that one rank must read.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from rounds.round_8b import TARGET, Case, measure, random_pair, show, this_gpu, verdict
from specdec.config import SpecConfig
from specdec.loading.pair import Loaded
from specdec.loading.ranks import Ranks
from specdec.loading.resolve import resolve_device, resolve_settings
from specdec.models.config import ModelConfig
from specdec.models.sharding import share_of
from specdec.options import EngineOptions
from specdec.parallel.group import Group
from specdec.parallel.shard import Shard

MAX_POSITIONS = 4096


class Shape(NamedTuple):
    """A target's shape.  aux_layers: what its EAGLE-3 head, which is as wide, reads.

    lines: the cases to measure, and for each the milliseconds on two H200 that it must stay below.
    """

    target: ModelConfig
    aux_layers: tuple[int, int, int]
    lines: dict[Case, float]


SHAPES = {
    "8B": Shape(TARGET, (1, 15, 28), {
        Case("plain", 1, 1024): 2.9, Case("plain", 8, 1024): 3.1, Case("5,1,6", 1, 1024): 3.9, Case("5,1,6", 8, 1024): 4.4,
        Case("5,8,32", 1, 1024): 4.0,
    }),
    "70B": Shape(
        replace(TARGET, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, layer_kinds=(), kv_source=()),
        (1, 39, 76),
        {Case("plain", 1, 1024): 19.0, Case("5,1,6", 1, 1024): 21.0, Case("5,8,32", 1, 1024): 21.5},
    ),
}  # fmt: skip


class RandomPair(NamedTuple):
    """What every rank makes its share of: a pair of the shape of that name."""

    shape: str
    options: EngineOptions

    def check(self, size: int) -> None:
        share_of(SHAPES[self.shape].target, Shard(0, size))

    def load(self, group: Group, options: EngineOptions) -> Loaded:
        torch.manual_seed(0)  # so that what all ranks hold alike is alike
        shape, device = SHAPES[self.shape], resolve_device(options.device)
        model, head = random_pair(MAX_POSITIONS, device, shape.target, shape.aux_layers, group)
        return model, head, resolve_settings(options, SpecConfig(5, 1, 6), model.config), Path("/nonexistent")


def measure_shape(name: str, ranks: Ranks, options: EngineOptions, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every line of a shape that was asked for."""
    wanted = {
        case: bar
        for case, bar in SHAPES[name].lines.items()
        if not args.only or any(f"{name}:{case.name}".startswith(prefix) for prefix in args.only.split())
    }
    if not wanted:
        return
    model, head, _, _ = ranks.load(RandomPair(name, options))
    for case, bar in wanted.items():
        row = measure(model, head, case, args.rounds, "round", traced=not args.no_trace, ranks=ranks)
        row |= {"shape": name, "ranks": args.ranks, "bar": bar if args.ranks == 2 else None}
        print(f"{name:>4} {row['bytes'] / 1e9:6.2f} GB a rank", end="  ")
        show(row)
        yield row
        torch.cuda.empty_cache()


def save(path: Path, rows: list[dict[str, Any]], ranks: int) -> None:
    result = {
        "device": torch.cuda.get_device_name(), "ranks": ranks, "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "weights": "random", "dtype": "bfloat16",
        "read_bandwidth": this_gpu().read_bandwidth, "rows": rows,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", help="lines whose shape:spec:batch:context starts with one of these, separated by blanks")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--no-trace", action="store_true", help="wall times only")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options = EngineOptions(device="cuda", dtype="bfloat16", tensor_parallel_size=args.ranks)
    ranks, rows = Ranks(options), []
    try:
        for name in SHAPES:
            for row in measure_shape(name, ranks, options, args):
                rows.append(row)
                if args.out:  # after each line: the last ones take long
                    save(args.out, rows, args.ranks)
    finally:
        ranks.close()
    missed = sum(verdict(row["ms"], row["bar"]).endswith("MISS") for row in rows)
    print(f"{len(rows)} lines, {missed} above their bar")
