"""Attention of one layer where ranks shard each sequence (decode_context_parallel_size), against ranks that keep whole ones.

    python benchmarks layers.context_parallel --ranks 2 --out benchmarks/layers/results/context_parallel_2xh200.json

`whole`: a rank's own heads over all tokens.  `sharded`: the same heads' result from half the tokens (of two ranks): queries
gathered, attention of all ranks' heads over the rank's own tokens, states put together, exchanged and merged, and the round's
nodes added.  Recorded results call it `divided`.  `gather` and `swap`: the two exchanges of that alone, with the copies that
they need.  `differ`: the largest difference between the results.  Times are medians of CUDA-graph replays, in microseconds a
layer; a graph holds several layers.  bf16, scattered pages of 64 slots, random data.

Shapes: DeepSeek V3's latents (512 + 64) with the heads of a rank where 2 or 8 ranks hold the model, and the one key/value head
of a rank, with its 8 query heads of 128, where 8 ranks hold a model of 4 key/value heads and 64 query heads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.mla_cache import LatentLayout
from specdec.attention.context_parallel.all_to_all import all_to_all_states
from specdec.attention.context_parallel.sharding import KVSharding
from specdec.attention.context_parallel.tables import ContextParallel
from specdec.attention.inputs import LayerCall, PreparedPlan
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import FULL, Scoring
from specdec.attention.state import AttentionState
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.batch.trees.tables import context_parallel_tables, tree_tables
from specdec.parallel.group import Group
from specdec.parallel.processes import RankPipe, Rendezvous, start

PAGE = 64
LAYERS = 4  # calls in a graph
TIMED = ("whole", "sharded", "gather", "swap")
REPLAYS = 11


class Shape(NamedTuple):
    """heads: query heads of a rank.  key, value: their widths; a key that is wider than its value is a latent."""

    name: str
    heads: int
    key: int
    value: int

    def cache(self, slots: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        latent = LatentLayout(self.value, self.key - self.value, dtype)
        layout = latent if self.key > self.value else HeadsLayout(1, self.key, dtype)
        return KVCache(layout, [FULL], slots, device=device)


SHAPES = (
    Shape("1 kv head, 8 heads a rank", 8, 128, 128),
    Shape("latents, 16 heads a rank", 16, 576, 512),
    Shape("latents, 64 heads a rank", 64, 576, 512),
)


class Case(NamedTuple):
    """A batch of `rows` sequences of `context` tokens, of which a pass verifies `nodes` nodes each."""

    shape: Shape
    rows: int
    context: int
    nodes: int


class Ways(NamedTuple):
    """One layer's attention both ways, and its exchanges alone.  bytes: of the caches, for these sequences."""

    whole: Callable[[], Tensor]
    sharded: Callable[[], Tensor]
    gather: Callable[[], Any]
    swap: Callable[[], Any]
    bytes: tuple[int, int]


def ways(group: Group, case: Case, backend: Backend, device: torch.device, dtype: torch.dtype) -> Ways:
    """Both caches hold the same numbers, which are the same on all ranks; queries are each rank's own."""
    shape, rows, context, nodes = case
    whole_page, dice = PAGE * group.size, torch.Generator(device).manual_seed(7)
    pages = -(-(context + nodes) // whole_page)
    state = BatchState.empty(rows, pages, page_size=whole_page, device=device)
    state.pages.table.copy_(torch.randperm(rows * pages, device=device, generator=dice).add_(1).view(rows, pages))
    state.lens_B.fill_(context)
    count, T = rows * pages + 1, rows * nodes
    sharding = KVSharding(group.rank, group.size, PAGE, PAGE)
    context_parallel = ContextParallel(group, sharding, count * PAGE, T)
    tree = DraftTree.chain(torch.zeros(rows, nodes, dtype=torch.int64, device=device))
    of_whole, of_sharded = tree_tables(state, tree), context_parallel_tables(state, tree, context_parallel)
    whole, sharded = (shape.cache(slots, dtype, device) for slots in (count * whole_page, count * PAGE + T))
    for name, buffer in whole.buffers.items():
        buffer.normal_(generator=dice)
        local_slots = sharding.local_slots(torch.arange(count * whole_page, device=device))
        sharded.buffers[name][0].index_copy_(0, local_slots, buffer[0])
        sharded.buffers[name][0][of_sharded.slots_BN.flatten()] = buffer[0][of_whole.slots_BN.flatten()]
    q_THL = torch.randn(T, shape.heads, shape.key, device=device, dtype=dtype)
    scoring = Scoring(scale=shape.key**-0.5)

    def of(cache: KVCache, tables: Any) -> Callable[[], Tensor]:
        prepared = PreparedPlan(tables.plan)
        return lambda: LayerCall(
            backend, cache.view(0), FULL, tables.slots_BN.flatten(), prepared, None, scoring, {}
        ).attend(q_THL)  # fmt: skip

    heads = shape.heads * group.size
    out_THE = torch.randn(T, heads, shape.value, device=device, dtype=dtype)
    state_of_all = AttentionState(out_THE, torch.zeros(T, heads, device=device))

    sizes = tuple(sum(p[0, 0].nbytes for p in cache.buffers.values()) * slots for cache, slots in (
        (whole, count * whole_page), (sharded, count * PAGE),
    ))  # fmt: skip
    both = of(whole, of_whole), of(sharded, of_sharded)
    return Ways(
        *both, lambda: group.all_gather_heads(q_THL), lambda: all_to_all_states(state_of_all, group), (sizes[0], sizes[1])
    )


def microseconds(call: Callable[[], Any]) -> float:
    """Of one call, from the median replay of a graph that holds LAYERS of them."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(LAYERS):
            call()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / LAYERS)
    return statistics.median(times[2:])


def measured(group: Group, case: Case, backend: Backend, device: torch.device) -> dict[str, Any]:
    """One row of the table.  All ranks must call it alike."""
    made = ways(group, case, backend, device, torch.bfloat16)
    differ = (made.whole() - made.sharded()).abs().max()
    row = case.shape._asdict() | case._asdict() | {"shape": case.shape.name, "differ": float(differ)}
    row |= {"whole_bytes": made.bytes[0], "sharded_bytes": made.bytes[1]}
    return row | {name: microseconds(getattr(made, name)) for name in TIMED}


def break_even(rows: list[dict[str, Any]]) -> float | None:
    """The tokens of a batch from which sharding is faster, between two measured contexts; None if it never was.

    rows: of one shape and one number of nodes.
    """
    rows = sorted(rows, key=lambda row: row["context"])
    points = [(0.0, -rows[0]["gather"] - rows[0]["swap"])] + [
        (row["rows"] * row["context"], row["whole"] - row["sharded"]) for row in rows
    ]
    for (below, loss), (above, gain) in zip(points, points[1:]):
        if loss < 0 < gain:
            return float(below + (above - below) * -loss / (gain - loss))
    return None


def table(
    group: Group, device: torch.device, contexts: tuple[int, ...], nodes: tuple[int, ...], shapes: str, out: Path | None = None
) -> list[dict[str, Any]]:
    """Every case.  The same on all ranks, but for the times.  out: a file that is written anew after each case."""
    cases = [
        Case(shape, 8, context, count) for shape in SHAPES if shapes in shape.name for count in nodes for context in contexts
    ]
    rows = []
    with torch.inference_mode():
        for case in cases:
            row = measured(group, case, TritonBackend(), device)
            rows.append(row)
            if group.rank == 0:
                show(row)
                write(out, rows, [])
            torch.cuda.empty_cache()
    return rows


def show(row: dict[str, Any]) -> None:
    times = ", ".join(f"{name} {row[name]:7.1f}" for name in TIMED)
    share = row["sharded_bytes"] / row["whole_bytes"]
    case = f"{row['shape']:26} {row['rows']} x {row['context']:>7,} x {row['nodes']:>2} nodes"
    print(f"{case}: {times} us, {share:.3f} of the bytes, differ {row['differ']:.1e}", flush=True)


def write(out: Path | None, rows: list[dict[str, Any]], break_even: list[dict[str, Any]]) -> None:
    if out is None:
        return
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    what = {"device": torch.cuda.get_device_name(), **versions, "date": time.strftime("%Y-%m-%d")}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(what | {"rows": rows, "break_even": break_even}, indent=1) + "\n")


def follow(rendezvous: Rendezvous, pipe: RankPipe) -> None:
    """What the process of another rank does."""
    asked, device = next(iter(pipe.messages())), torch.device("cuda", rendezvous.rank)
    torch.cuda.set_device(device)
    table(rendezvous.join(device), device, *asked)
    pipe.tell("measured")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--contexts", default="8192,32768,131072")
    parser.add_argument("--nodes", default="1,6")
    parser.add_argument("--shapes", default="", help="shapes whose name holds this")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    contexts, nodes = (tuple(map(int, text.split(","))) for text in (args.contexts, args.nodes))
    other_ranks, device = start(args.ranks, follow), torch.device("cuda", 0)
    try:
        other_ranks.send((contexts, nodes, args.shapes))
        rows = table(other_ranks.rendezvous.join(device), device, contexts, nodes, args.shapes, args.out)
        other_ranks.wait("measured")
    finally:
        other_ranks.close()
    evens = []
    for shape in SHAPES:
        for count in nodes if args.shapes in shape.name else ():
            even = break_even([row for row in rows if (row["shape"], row["nodes"]) == (shape.name, count)])
            evens.append({"shape": shape.name, "nodes": count, "tokens": even})
            print(f"{shape.name}, {count} nodes: faster from {'no context' if even is None else f'{even:,.0f} tokens'} on")
    write(args.out, rows, evens)
