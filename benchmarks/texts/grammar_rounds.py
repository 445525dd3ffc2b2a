"""What a grammar adds to a round at the Llama-3.1-8B shape, random bf16 weights, and what the host does meanwhile.

    python benchmarks texts.grammar_rounds --tokenizer tokenizer.json --out benchmarks/texts/results/grammar_rounds.json

tokenizer.json: of at most 128,256 ids.  The texts are arrays of objects that never end: rows write strings, numbers and keys.
"phases" is a batch without a grammar whose rounds run phase by phase, as those with a grammar do.  Every line is a round's wall
time through the engine, as in rounds/round_8b.py; "masks" is the host's time for making a round's masks and enqueueing their
copy, "waits" its time for waiting for the trees, both of which pass while the device runs the target.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from engine_internals import grammar_rows
from rounds.round_8b import TARGET, Case, make_decoder, random_pair, random_prompts, spec_of

from specdec.bench.profile import Work, full_rounds
from specdec.bench.session import Session
from specdec.config import GraphMode, SamplingParams
from specdec.grammar.library import Grammars

CASES = (Case("plain", 1, 1024), Case("5,4,16", 1, 1024), Case("5,4,16", 8, 1024), Case("5,1,6", 32, 1024))
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}  # fmt: skip
ENDLESS = {"type": "array", "minItems": 1000, "items": ITEM}
EOS = 1
SETTLE = 16  # rounds before those that count: kernels compile, graphs are captured, the library learns its states


class Clock:
    """Adds up what the host does for masks, and how long it waits for trees."""

    def __init__(self, rows: Any) -> None:
        self.rounds, self.masks, self.waits = 0, 0.0, 0.0
        send, of_round = rows._send, rows.of_round

        def timed_send(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return send(*args)
            finally:
                self.masks += time.perf_counter() - start

        def timed_round(*args: Any) -> Any:
            start, before = time.perf_counter(), self.masks
            try:
                return of_round(*args)
            finally:
                self.rounds += 1
                self.waits += time.perf_counter() - start - (self.masks - before)

        rows._send, rows.of_round = timed_send, timed_round  # type: ignore[method-assign]

    def read(self) -> dict[str, float]:
        """Milliseconds a round since the last call."""
        rounds = max(1, self.rounds)
        found = {"masks_ms": 1e3 * self.masks / rounds, "waits_ms": 1e3 * self.waits / rounds}
        self.rounds, self.masks, self.waits = 0, 0.0, 0.0
        return found


def session_of(case: Case, pair: Any, tokenizer: str, graphs: GraphMode) -> Session:
    """A decoder whose texts end with EOS, over a tokenizer that only grammars use."""
    decoder = make_decoder(*pair, spec_of(case.spec), case.batch, case.context, graphs)
    decoder.grammars = Grammars(lambda: tokenizer, TARGET.vocab_size, [EOS])
    return Session(decoder)


def measure(session: Session, case: Case, rounds: int, masked: int, **options: Any) -> dict[str, Any]:
    """One line.  masked: so many rows have a grammar.  options: of the others."""
    clock = Clock(grammar_rows(session.decoder))
    work = Work(session, random_prompts(case.batch, case.context), [SamplingParams()] * case.batch, case.spec != "plain")
    free, held = SamplingParams(max_tokens=900, ignore_eos=True, **options), SamplingParams(max_tokens=900, json_schema=ENDLESS)
    work.sampling = [held] * masked + [free] * (case.batch - masked)
    full_rounds(work, session.step, SETTLE)
    clock.read()
    walls = [timed.wall for timed, _ in full_rounds(work, session.timed_step, rounds)]
    found = {**case._asdict(), "rows_with_grammar": masked, "rounds": len(walls), "ms": 1e3 * median(walls)}
    return found | (clock.read() if masked else {})


def lines_of(case: Case, pair: Any, tokenizer: str, rounds: int) -> Iterator[dict[str, Any]]:
    """The lines of one case."""
    session = session_of(case, pair, tokenizer, "round")
    yield {"grammar": "none", **measure(session, case, rounds, 0)}
    if case.batch > 1:
        yield {"grammar": "one row", **measure(session, case, rounds, 1)}
    yield {"grammar": "all rows", **measure(session, case, rounds, case.batch)}
    yield {"grammar": "none again", **measure(session, case, rounds, 0)}
    session.decoder.close()
    session = session_of(case, pair, tokenizer, "step")
    yield {"grammar": "phases", **measure(session, case, rounds, 0)}
    session.decoder.close()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", help="cases whose spec:batch:context starts with this")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    pair = random_pair(4096, torch.device("cuda", 0), replace(TARGET, eos_ids=(EOS,)))
    tokenizer, lines = args.tokenizer.read_text(), []
    for case in CASES:
        if args.only and not case.name.startswith(args.only):
            continue
        for line in lines_of(case, pair, tokenizer, args.rounds):
            lines.append(line)
            host = f"masks {line['masks_ms']:.3f} ms, waits {line['waits_ms']:.3f} ms" if "masks_ms" in line else ""
            print(f"{case.name:>16} {line['grammar']:<10} {line['ms']:7.3f} ms  {host}", flush=True)
    result = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"), "weights": "random", "dtype": "bfloat16", "schema": ENDLESS, "rows": lines,
    }  # fmt: skip
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
