"""Milliseconds a round at the Llama-3.1-8B shape of trees from several sources, against the head's own of as many nodes.

    python benchmarks sources.joined_8b --out benchmarks/sources/results/joined_8b_h200.json

Weights are random in bf16, as in rounds.round_8b.  The drafter is joined by matches in the text, then by a corpus of random
tokens and by earlier answers too.  All lines are measured in one process, in turns, and each is compared with the head alone.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rounds.round_8b import Case, measure, random_pair

from specdec.draft.drafter import DraftModel
from specdec.draft.join.drafter import JoinedModel
from specdec.draft.join.sources import open_source
from specdec.draft.suffix.host_table import TableText, host_table
from specdec.draft.suffix.source import TableSource
from specdec.draft.suffix.texts import ALL_ROWS
from specdec.options import EngineOptions

SOURCES = {"head": (), "suffix": ("suffix",), "all": ("suffix", "corpus", "answers")}
SPECS = ("5,8,32", "5,8,32,8", "5,8,32,31")  # the head's own, then paths of at most so many levels


def joined(head: DraftModel, names: tuple[str, ...], tokens: int) -> DraftModel:
    """The head with these sources, whose tables hold so many random tokens in the scope that all rows read."""
    if not names:
        return head
    sources = [open_source(name, EngineOptions()) for name in names]
    for source in sources:
        source.load(torch.device("cuda", 0))
        if isinstance(source, TableSource):
            assert source.table is not None
            count = min(tokens, source.table.capacity - 2)
            text = TableText(np.random.default_rng(0).integers(0, 100000, count).astype(np.int32))
            made = host_table({ALL_ROWS: [text]})
            source.table.fill(0, made.text_N, made.order_X)
            source.table.use(made.keys_S, made.bounds_S2)
    return JoinedModel(head, sources)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8", help="numbers of rows, separated by commas")
    parser.add_argument("--tokens", type=int, default=4_000_000, help="of each table")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--traced", action="store_true", help="show kernels too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, head = random_pair(4096, torch.device("cuda", 0))
    heads = {name: joined(head, sources, args.tokens) for name, sources in SOURCES.items()}
    rows = list[dict[str, Any]]()
    for batch in map(int, args.batches.split(",")):
        cases = [(name, spec) for name in heads for spec in SPECS if (name == "head") == (spec == SPECS[0])]
        times: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
        for _ in range(args.repeats):
            for name, spec in cases:
                found = measure(model, heads[name], Case(spec, batch, 1024), args.rounds, "round", traced=args.traced)
                times[name, spec].append(found["ms"])
                if args.traced:
                    print(name, spec, found["phases_ms"], found["longest"], flush=True)
                torch.cuda.empty_cache()
        own = median(times[cases[0]])
        for name, spec in cases:
            ms = median(times[name, spec])
            rows.append(
                {"sources": name, "spec": spec, "batch": batch, "ms": ms, "repeats": times[name, spec], "ratio": ms / own}
            )
            print(f"batch {batch:>2} {name:>7} {spec:>9}: {ms:6.3f} ms, {ms / own:.3f} of the head's own", flush=True)
    if args.out:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        args.out.write_text(json.dumps(facts | {"tokens": args.tokens, "rows": rows}, indent=1) + "\n")
