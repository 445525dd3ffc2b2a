"""Milliseconds a round where several GPUs hold the models together, random weights: dense models and mixtures, sums, starts.

    python benchmarks rounds.round_tp --ranks 4 --shape 70B --out benchmarks/rounds/results/round_tp_h200_x4_70B.json
    python benchmarks rounds.round_tp --ranks 8 --shape DeepSeek-V3-fp8 --out FILE
    python benchmarks rounds.round_tp --ranks 2 --shape 8B --only plain --no-trace
    python benchmarks rounds.round_tp --ranks 8 --device cpu --shape all --tiny        # whether all of it runs

Each --shape is one command, which ends within --seconds.  Lines are measured as in round_8b.py, on the first rank.  The limit
is the time to read the bytes that one rank must read.  What can't run is written down by name, with the reason: no room, parts
that ranks can't share, no time left.  "sums" are of a layer's partial sums with its norm, by rows, at the shape's width.
The same for one rank is rounds.round_8b and rounds.round_mixture; other commands of several GPUs: products.all_reduce,
layers.context_round, serving.replicas, scripts/many_ranks --device cuda.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from gpus import device_name, this_gpu
from graph_timing import replay_us

from rounds.round_8b import Case, make_decoder, measure, show, verdict
from rounds.round_mixture import RandomShape
from specdec.loading.ranks import Ranks
from specdec.options import EngineOptions
from specdec.session import Session

PLAIN, CHAIN, TREE = (tuple(Case(spec, batch, 1024) for batch in (1, 8, 32)) for spec in ("plain", "5,1,6", "5,8,32"))
ROOM = 0.75  # of a GPU's memory that weights may take: pool, graphs, inboxes and activations need the rest
SUM_ROWS, CALLS = (1, 6, 8, 32, 64, 192, 1024), 20


class Lines(NamedTuple):
    """What one command measures.  sharings: ways in which ranks share experts, one after the other.

    fits: whether as many layers are made as there is room for, where not all have.
    """

    shape: str
    cases: tuple[Case, ...]
    quantize: str = "none"
    sharings: tuple[str, ...] = ("tensor",)
    fits: bool = False


BOTH = ("tensor", "experts")
COMMANDS = {
    "8B": Lines("8B", (*PLAIN, *CHAIN, *TREE)),
    "70B": Lines("70B", (*PLAIN, *CHAIN, *TREE)),
    "Qwen3-30B-A3B": Lines("Qwen3-30B-A3B", (*PLAIN, CHAIN[0], TREE[0]), sharings=BOTH),
    "gpt-oss-120b": Lines("gpt-oss-120b", (*PLAIN, CHAIN[0]), sharings=BOTH),
    "gpt-oss-120b-mxfp4": Lines("gpt-oss-120b", (*PLAIN, CHAIN[0], TREE[0]), "mxfp4", BOTH),
    "Qwen3-235B-A22B-fp8": Lines("Qwen3-235B-A22B", (*PLAIN, CHAIN[0], TREE[0]), "fp8", BOTH),
    "DeepSeek-V3-fp8": Lines("DeepSeek-V3", (*PLAIN, CHAIN[0]), "fp8", BOTH, fits=True),
}
BARS = {  # milliseconds that a line must stay below, by GPU and number of ranks
    ("H200", 2): {
        "8B:plain:1:1024": 2.9, "8B:plain:8:1024": 3.1, "8B:5,1,6:1:1024": 3.9, "8B:5,1,6:8:1024": 4.4, "8B:5,8,32:1:1024": 4.0,
        "70B:plain:1:1024": 19.0, "70B:5,1,6:1:1024": 21.0, "70B:5,8,32:1:1024": 21.5,
    },
    ("H200", 4): {
        "8B:plain:1:1024": 1.9, "8B:5,1,6:1:1024": 2.4, "70B:plain:1:1024": 9.9, "70B:5,8,32:1:1024": 12.5,
    },
    ("H100", 4): {
        "8B:plain:1:1024": 2.4, "8B:5,1,6:1:1024": 3.1, "70B:plain:1:1024": 13.5, "70B:5,8,32:1:1024": 16.5,
    },
}  # fmt: skip


class Run:
    """The ranks of one command, what they have measured, and what was left out."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.monotonic()
        self.options = EngineOptions(
            device=args.device, dtype="bfloat16", tensor_parallel_size=args.ranks, threads=1 if args.device == "cpu" else "auto"
        )
        self.ranks = Ranks(self.options)
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[dict[str, str]] = []
        self.sums: list[dict[str, Any]] = []
        gpu = next((short for short in ("H200", "H100") if short in device_name()), "")
        self.bars = {} if args.tiny else BARS.get((gpu, args.ranks), {})

    def leave_out(self, what: str, why: object) -> None:
        self.left_out.append({"what": what, "why": str(why)})
        print(f"{what}: left out: {why}", flush=True)

    def command(self, name: str) -> None:
        """Measures everything that a command stands for."""
        asked = COMMANDS[name]
        for sharing in asked.sharings:
            label = name if len(asked.sharings) == 1 else f"{name}, {sharing}"
            wanted = RandomShape(asked.shape, self.args.layers, sharing, asked.quantize, self.options, self.args.tiny)
            try:
                wanted.check(self.args.ranks)
            except ValueError as error:
                self.leave_out(label, error)
                continue
            if (layers := self.layers_that_fit(wanted, label, asked.fits)) is not None:
                self.measure(name, label, wanted._replace(layers=layers), asked.cases)

    def layers_that_fit(self, wanted: RandomShape, label: str, fits: bool) -> int | None:
        """How many layers are made; 0: all.  None: there is no room, which is written down."""
        layers, rest = wanted.bytes_of_rank(self.args.ranks)
        count, room = wanted.shape.config.num_layers, ROOM * memory(self.args)
        if layers + rest <= room:
            return wanted.layers
        most = int((room - rest) / (layers / count))
        if fits and most > 0:
            self.leave_out(f"{label}: {count - most} of {count} layers", f"there is room for {most}")
            return most
        needed = f"a rank's weights take {(layers + rest) / 2**30:.1f} GiB, and {room / 2**30:.1f} may"
        self.leave_out(label, needed)
        return None

    def measure(self, name: str, label: str, wanted: RandomShape, cases: tuple[Case, ...]) -> None:
        """Every line of a shape that was asked for, then its sums."""
        args, began = self.args, time.monotonic()
        if args.tiny:
            cases = tuple(dict.fromkeys(case._replace(batch=1, context=24) for case in cases))
        model, head, _, _ = self.ranks.load(wanted)
        loaded = time.monotonic() - began
        for case in cases:
            if args.only and not case.name.startswith(tuple(args.only)):
                continue
            if time.monotonic() - self.began > args.seconds:
                self.leave_out(f"{label} {case.name}", f"{args.seconds:.0f} seconds have passed")
                continue
            traced, settle = not (args.no_trace or args.tiny), 1 if args.tiny else 8
            row = measure(model, head, case, args.rounds, "round", traced=traced, ranks=self.ranks, settle=settle)
            row |= {
                "shape": name, "sharing": wanted.sharing, "layers": model.config.num_layers, "ranks": args.ranks,
                "load_s": loaded, "since_start_s": time.monotonic() - self.began, "bar": self.bars.get(f"{name}:{case.name}"),
            }  # fmt: skip
            print(f"{label:>12} {row['bytes'] / 1e9:6.2f} GB a rank", end="  ")
            show(row)
            self.rows.append(row)
            self.save()
            torch.cuda.empty_cache()
        if not args.only:
            self.measure_sums(label, make_decoder(model, head, None, 1, 24, "round", ranks=self.ranks))

    def measure_sums(self, label: str, decoder: Any) -> None:
        session, hidden = Session(decoder), decoder.model.config.hidden_size
        for rows in SUM_ROWS[:2] if self.args.tiny else SUM_ROWS:
            self.sums.append({"hidden": hidden, "rows": rows, "us": session.on_all_ranks(sum_us, rows)})
        told = ", ".join(f"{each['rows']}: {each['us']:.1f}" for each in self.sums if each["hidden"] == hidden)
        print(f"{label}: a sum and norm of rows of {hidden}, us: {told}", flush=True)
        self.save()

    def save(self) -> None:
        if self.args.out is None:
            return
        result = {
            "device": device_name(), "ranks": self.args.ranks, "torch": torch.__version__, "triton": triton.__version__,
            "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "weights": "random", "dtype": "bfloat16",
            "tiny": self.args.tiny, "read_bandwidth": this_gpu().read_bandwidth, "rows": self.rows, "sums": self.sums,
            "left_out": self.left_out,
        }  # fmt: skip
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        self.args.out.write_text(json.dumps(result, indent=1) + "\n")


def memory(args: argparse.Namespace) -> int:
    """Free bytes of a rank, once the model before has gone."""
    if args.device == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // args.ranks
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def sum_us(workers: Any, rows: int) -> float:
    """Microseconds of one sum over ranks with its norm, of a chain of CALLS; on a GPU in a graph."""
    model = workers.verifier.model
    group, device = model.group, workers.state.lens_B.device
    x_TH = torch.ones(rows, model.config.hidden_size, dtype=torch.bfloat16, device=device)
    weight_H = torch.ones_like(x_TH[0])

    def chain() -> None:
        total_TH, normed_TH = x_TH, x_TH
        for _ in range(CALLS):
            total_TH, normed_TH = group.all_reduce_add_rms_norm(total_TH, normed_TH, weight_H, 1e-5)

    with torch.inference_mode():
        chain()
        if device.type == "cpu":
            began = time.perf_counter()
            chain()
            return 1e6 * (time.perf_counter() - began) / CALLS
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            chain()
        return replay_us(graph, 9) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=("all", *COMMANDS), default="8B", help="what is measured")
    parser.add_argument("--only", nargs="+", help="lines whose spec:batch:context starts with one of these; no sums then")
    parser.add_argument("--layers", type=int, default=0, help="how many of the model's layers are made; 0: all")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=480.0, help="after which no line begins")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes of the same kinds and few rounds: to try the script")
    parser.add_argument("--no-trace", action="store_true", help="wall times only")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    run = Run(args)
    try:
        for name in COMMANDS if args.shape == "all" else [args.shape]:
            run.command(name)
        run.save()
    finally:
        run.ranks.close()
    missed = sum(verdict(row["ms"], row["bar"]).endswith("MISS") for row in run.rows)
    print(f"{len(run.rows)} lines, {missed} above their bar, {len(run.left_out)} left out")
