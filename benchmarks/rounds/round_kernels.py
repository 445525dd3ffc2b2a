"""Microseconds of each kernel around the two models, of one round, under CUDA graphs, chained as in a round.

    python benchmarks rounds.round_kernels --out benchmarks/rounds/results/round_kernels.json

Shapes of Llama-3.1-8B with an EAGLE-3 head (32,000 and 128,256 tokens, hidden 4,096, 32 layers of 8 heads of 128), bf16, random
data.  Each stage is repeated on the same inputs, which stay in L2 as they do after the kernel that wrote them.  `torch` is the
same stage by its pure definition, also under a graph.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.kinds import FULL
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.batch.trees.tables import tree_tables
from specdec.config import SpecConfig
from specdec.draft.eagle.rows import EagleRows
from specdec.draft.tree.branches import fork
from specdec.draft.tree.build_tree import best_nodes
from specdec.draft.tree.expand import Candidates, expand, first_level
from specdec.ops import index, launch
from specdec.ops.rows import take_rows
from specdec.ops.topk import greedy_tokens, top_tokens
from specdec.parallel.group import ALONE
from specdec.parallel.vocabulary import Vocabulary
from specdec.verify.accept import accept

DRAFT_VOCAB, VOCAB, HIDDEN, PAGE, CONTEXT, LAYERS = 32000, 128256, 4096, 16, 1024, 32
DEVICE = torch.device("cuda")
Stage = tuple[int, Callable[[], Any]]  # how often a round runs it; the stage


def random_state(B: int, lookahead: int) -> BatchState:
    pages = (CONTEXT + lookahead) // PAGE + 1
    state = BatchState.empty(B, pages, page_size=PAGE, device=DEVICE)
    state.lens_B.fill_(CONTEXT - 3)
    state.speculates_B.fill_(1)
    state.pages.table.copy_(torch.randperm(B * pages, device=DEVICE).add_(1).view(B, pages))
    return state


def random_rows(B: int, K: int) -> EagleRows:
    rows = EagleRows.empty(B, K, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    rows.level1_logp_BK.copy_(-torch.rand(B, K, device=DEVICE).sort(dim=1).values)
    rows.level1_tokens_BK.random_(DRAFT_VOCAB)
    return rows


def random_bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def draft_stages(
    state: BatchState, rows: EagleRows, spec: SpecConfig, d2t_V: torch.Tensor
) -> tuple[dict[str, Stage], DraftTree]:
    """The stages of one draft, and a tree that it could have drawn."""
    B, K, S, N = state.rows, spec.topk, spec.num_steps, spec.num_draft_tokens
    logits_RV, hidden_RH = random_bf16(B * K, DRAFT_VOCAB), random_bf16(B * K, HIDDEN)
    if K == 1:
        tokens_B = greedy_tokens(logits_RV, d2t_V)
        tree = DraftTree.chain(torch.randint(DRAFT_VOCAB, (B, N), device=DEVICE))
        return {
            "draft: tables": (1, lambda: state.pages.next_tokens(state.lens_B, S - 1, by_step=True)),
            "draft: best token": (S - 1, lambda: greedy_tokens(logits_RV, d2t_V)),
            "draft: stack": (1, lambda: torch.stack([state.bonus_B, *[tokens_B] * S], dim=1)),
        }, tree
    candidates, vocabulary = Candidates.empty(B, K, S, DEVICE), Vocabulary.of(DRAFT_VOCAB, ALONE)
    beam = first_level(candidates, rows.level1_tokens_BK, rows.level1_logp_BK)
    for level in range(2, S + 1):
        beam = expand(candidates, level, beam, random_bf16(B * K, DRAFT_VOCAB), d2t_V, vocabulary)
    ancestors = torch.zeros(B * K, S - 2, dtype=torch.int32, device=DEVICE)
    pages, lens = state.pages, state.lens_B
    return {
        "draft: first level": (1, lambda: first_level(candidates, rows.level1_tokens_BK, rows.level1_logp_BK)),
        "draft: fork": (S - 1, lambda: fork(pages, lens, beam.parents_BK, hidden_RH, ancestors)),
        "draft: scan + expand": (S - 1, lambda: expand(candidates, S, beam, logits_RV, d2t_V, vocabulary)),
        "build: best nodes": (1, lambda: best_nodes(candidates, state.bonus_B, N, S)),
    }, best_nodes(candidates, state.bonus_B, N, S)


def round_stages(B: int, spec: SpecConfig) -> dict[str, Stage]:
    K, N, E = spec.topk, spec.num_draft_tokens, spec.num_steps + 1
    state, rows, d2t_V = random_state(B, spec.lookahead), random_rows(B, K), torch.arange(DRAFT_VOCAB, device=DEVICE) * 3
    stages, tree = draft_stages(state, rows, spec, d2t_V)
    logits_TV, level1_BV = random_bf16(B * N, VOCAB), random_bf16(B, DRAFT_VOCAB)
    targets_BN = torch.gather(tree.tokens_BN, 1, torch.randint(N, (B, N), device=DEVICE))
    features_BNF, hidden_BEH = random_bf16(B, N, 3 * HIDDEN), random_bf16(B, E, HIDDEN)
    pages = int(state.page_table_BGW.max()) + 1
    cache = KVCache(HeadsLayout(8, 128, torch.bfloat16), [FULL] * LAYERS, pages * PAGE, device=DEVICE)
    slots_BN = tree_tables(state, tree).slots_BN
    path_BE = torch.arange(E, device=DEVICE).repeat(B, 1)
    path_BE[:, 1:] += N - E  # everything accepted, and everything has to move
    last_B1 = torch.full((B, 1), E - 1, device=DEVICE)
    stages["verify: tables"] = (1, lambda: tree_tables(state, tree))
    stages["verify: argmax"] = (1, lambda: greedy_tokens(logits_TV))
    stages["verify: accept"] = (1, lambda: accept(tree, targets_BN, state))
    if K > 1:
        stages["verify: move KV"] = (1, lambda: cache.move(slots_BN, path_BE))
        stages["verify: features"] = (1, lambda: take_rows(features_BNF, path_BE))
    stages["extend: tables"] = (1, lambda: state.pages.next_tokens(state.lens_B, E))
    stages["extend: last row"] = (1, lambda: take_rows(hidden_BEH, last_B1, rows.level1_hidden_BH[:, None]))
    out = rows.level1_logp_BK, rows.level1_tokens_BK
    stages["extend: first level"] = (1, lambda: top_tokens(level1_BV, K, d2t_V, out))
    return stages


def graph_us(stage: Callable[[], Any], repeats: int = 20, replays: int = 20) -> float:
    """Microseconds of a call, from the median replay of a graph that holds `repeats` calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stage()
        stage()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            stage()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats)
    return statistics.median(times[3:])


@contextlib.contextmanager
def pure_definitions() -> Iterator[None]:
    """Inside, torch computes every stage."""
    real = launch.has_triton
    launch.has_triton = index.has_triton = lambda: False  # type: ignore[assignment]
    try:
        yield
    finally:
        launch.has_triton = index.has_triton = real


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--specs", default="5,1,6;5,8,32;7,10,60")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for text in args.specs.split(";"):
        spec = SpecConfig(*map(int, text.split(",")))
        for B in map(int, args.batches.split(",")):
            with torch.inference_mode():
                stages = round_stages(B, spec)
                ours = {name: (count, graph_us(stage)) for name, (count, stage) in stages.items()}
                with pure_definitions():
                    torch_us = {name: graph_us(stage) for name, (_, stage) in stages.items()}
            total = sum(count * us for count, us in ours.values())
            torch_total = sum(ours[name][0] * us for name, us in torch_us.items())
            print(f"({text}) batch {B}: {total:.1f} us a round, torch {torch_total:.1f}")
            for name, (count, us) in ours.items():
                print(f"  {name:22s} {count} x {us:6.2f} us   torch {torch_us[name]:7.2f}")
                rows.append({"spec": text, "batch": B, "stage": name, "count": count, "us": us, "torch_us": torch_us[name]})
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
