"""What becomes of drafts under grammars: how many break them, what takes their places, and what the accept length gains.

    python benchmarks texts.grammar_drafts --out benchmarks/texts/results/grammar_drafts.json
    python benchmarks texts.grammar_drafts --target stories260K --draft stories260K-eagle3 --prompts prompts.jsonl

Each case runs twice: with trees as drafted, whose broken drafts the target reads and cannot accept, and with completed trees
(specdec/grammar/tree_completion.py).  Both write the same text.  Four of five texts obey a random schema, the others an
expression.  "us a row" is the processor time, of one thread, for completing one tree.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from specdec import SamplingParams, SpecConfig, SpecDecoder, Stats, shipped
from specdec.grammar import tree_completion
from specdec.grammar.tree_completion import TreeCompletion
from texts.grammar_texts import random_schema

SHAPES = (SpecConfig(5, 1, 6), SpecConfig(5, 4, 16), SpecConfig(7, 8, 32))
EXPRESSIONS = (
    r"[A-Z][a-z]{2,9}( [a-z]{1,9}){4}\.", r"(The|A) [a-z]{2,6}( [a-z]{2,7}){2,9}\.",
    r"[0-9]{3}-[0-9]{2}-[0-9]{4}( [A-Z][a-z]+){3}", r"(yes|no|maybe)(, (yes|no|maybe)){5}",
)  # fmt: skip


class Watch:
    """Counts places of trees and the time that completing them takes.  completes: whether trees are completed at all."""

    def __init__(self, completes: bool) -> None:
        self.completes, self.trees, self.seconds = completes, 0, 0.0
        self.kept = self.added = self.padding = 0
        self._kept_here = 0  # of the tree that is being completed
        self._run, self._keep = TreeCompletion.run, TreeCompletion._keep_drafts

    @contextmanager
    def on(self) -> Iterator[Watch]:
        with patch.object(TreeCompletion, "run", self._timed), patch.object(TreeCompletion, "_keep_drafts", self._counted):
            yield self

    @property
    def _timed(self) -> Any:
        def run(tree: TreeCompletion) -> Any:
            start = time.thread_time()
            done = self._run(tree)
            self.seconds += time.thread_time() - start
            self.trees += 1
            held = max(len(tree._states), self._kept_here + 1)  # a tree of which all is kept has no states
            self.added += held - 1 - self._kept_here
            self.padding += len(tree._drafts) - held
            return done if self.completes else (tree._drafts, tree._above)

        return run

    @property
    def _counted(self) -> Any:
        def keep(tree: TreeCompletion) -> None:
            self._keep(tree)
            self._kept_here = len(tree.tokens) - 1
            self.kept += self._kept_here

        return keep

    def read(self) -> dict[str, float]:
        places = max(1, self.kept + self.added + self.padding)
        shares = {name: round(getattr(self, name) / places, 4) for name in ("kept", "added", "padding")}
        return {**shares, "us_a_row": round(1e6 * self.seconds / max(1, self.trees), 1)}


def params_of(count: int, temperature: float, most: int) -> list[SamplingParams]:
    draw, found = random.Random(0), []
    for number in range(count):
        base = SamplingParams(temperature=temperature, seed=number if temperature else None, max_tokens=most)
        if number % 5 == 4:
            found.append(replace(base, regex=EXPRESSIONS[number // 5 % len(EXPRESSIONS)]))
            continue
        schema = random_schema(draw)
        if number % 2 == 0:
            schema["x-guidance"] = {"whitespace_pattern": ""}
        found.append(replace(base, json_schema=schema))
    return found


def measure(decoder: SpecDecoder, prompts: list[Any], params: list[SamplingParams], completes: bool) -> dict[str, Any]:
    """One line, and the ids."""
    with Watch(completes).on() as watch:
        outputs = decoder.generate(prompts, params)
    stats = Stats.total([out.stats for out in outputs])
    return {"accept_length": round(stats.accept_length, 3), **watch.read(), "ids": [out.token_ids for out in outputs]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=shipped.target_folder())
    parser.add_argument("--draft", type=Path, default=shipped.draft_folder())
    parser.add_argument(
        "--prompts", type=Path, default=shipped.prompts_file(), help="an object with prompt or token_ids a line"
    )
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--few", type=int, default=tree_completion.FEW, help="another threshold for tokens that are few")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tree_completion.FEW = args.few
    lines = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    prompts = [lines[i % len(lines)].get("prompt") or lines[i % len(lines)]["token_ids"] for i in range(args.num_prompts)]
    rows = []
    for spec in SHAPES:
        settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_batch_size": 8, "max_seq_len": 512}
        with SpecDecoder.from_pretrained(args.target, args.draft, spec, **settings) as decoder:
            for temperature in (0.0, 1.0):
                params = params_of(args.num_prompts, temperature, args.max_tokens)
                drafted, completed = (measure(decoder, prompts, params, completes) for completes in (False, True))
                same = sum(a == b for a, b in zip(drafted.pop("ids"), completed.pop("ids"), strict=True))
                row = {"spec": spec.label, "temperature": temperature, "equal_texts": same, "texts": args.num_prompts}
                rows.append({**row, "drafted": drafted, "completed": completed})
                print(json.dumps(rows[-1]), flush=True)
    result = {
        "target": args.target.name, "draft": args.draft.name, "dtype": "float32", "few": args.few,
        "max_tokens": args.max_tokens,
        "torch": torch.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "rows": rows,
    }  # fmt: skip
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
