"""What a grammar adds to a round at the Llama-3.1-8B shape, random bf16 weights, and what the host does meanwhile.

    python benchmarks texts.grammar_rounds --tokenizer tokenizer.json --out benchmarks/texts/results/grammar_rounds.json

tokenizer.json: of at most 128,256 ids; texts end with --eos.  The texts are arrays of objects that never end: rows write
strings, numbers and keys.  "phases" is a batch without a grammar whose rounds run phase by phase, as those with a grammar do.
Every line is a round's wall time through the engine, as in rounds/round_8b.py.  Of the host: "looking" is what it does for the
rows' trees while the device drafts, "completing" what it does once the drafts are there, "masks" the time for making a round's
masks and enqueuing their copy.  Of the device: "trees" is the time from the end of the draft until the target can read,
"choice" that from the end of the target's pass until tokens can be chosen.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from engine_internals import grammar_rows, hold_looking
from rounds.round_8b import Case, make_decoder, random_pair, random_prompts, spec_of
from shapes import TARGET

from specdec.bench.profile import Workload, full_rounds
from specdec.config import GraphMode, SamplingParams
from specdec.grammar.library import Grammars
from specdec.grammar.tree_completion import TreeCompletion
from specdec.session import Session

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
SETTLE = 16  # rounds before those that count: kernels compile, graphs are captured, the library learns its states


class Clock:
    """What the host does in rounds with grammars, and how long the device waits for it."""

    def __init__(self, rows: Any) -> None:
        self._host = dict.fromkeys(("looking", "completing", "masks"), 0.0)
        self._device: dict[str, list[tuple[Any, Any]]] = {"trees": [], "choice": []}
        self._hold(rows, "complete", self._waited("trees"))
        self._hold(rows, "of_round", self._waited("choice"))
        self._hold(rows, "_send", self._worked("masks"))
        hold_looking(lambda holder, name: self._hold(holder, name, self._worked("looking")))
        self._hold(TreeCompletion, "run", self._worked("completing"))

    def _hold(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Has calls of a function timed by this clock, in place of an earlier one."""
        now = getattr(owner, name)
        setattr(owner, name, wrap(getattr(now, "unheld", now)))

    def _worked(self, name: str) -> Callable[[Any], Any]:
        def wrap(function: Any) -> Any:
            def timed(*given: Any) -> Any:
                start = time.perf_counter()
                try:
                    return function(*given)
                finally:
                    self._host[name] += time.perf_counter() - start

            timed.unheld = function  # type: ignore[attr-defined]
            return timed

        return wrap

    def _waited(self, name: str) -> Callable[[Any], Any]:
        def wrap(function: Any) -> Any:
            def marked(*given: Any) -> Any:
                begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begun.record()
                try:
                    return function(*given)
                finally:
                    done.record()
                    self._device[name].append((begun, done))

            marked.unheld = function  # type: ignore[attr-defined]
            return marked

        return wrap

    def read(self) -> dict[str, float]:
        """Milliseconds a round since the last call: means of the host, medians of the device."""
        torch.cuda.synchronize()
        rounds = max(1, len(self._device["trees"]))
        found = {name: 1e3 * seconds / rounds for name, seconds in self._host.items()}
        for name, marks in self._device.items():
            found[name] = median([begun.elapsed_time(done) for begun, done in marks] or [0.0])
            marks.clear()
        self._host = dict.fromkeys(self._host, 0.0)
        return {f"{name}_ms": value for name, value in found.items()}


def session_of(case: Case, pair: Any, tokenizer: str, graphs: GraphMode) -> Session:
    """A decoder over a tokenizer that only grammars use."""
    decoder = make_decoder(*pair, spec_of(case.spec), case.batch, case.context, graphs)
    decoder.grammars = Grammars(lambda: tokenizer, TARGET.vocab_size, pair[0].config.eos_ids)
    return Session(decoder)


def measure(session: Session, case: Case, rounds: int, masked: int, **options: Any) -> dict[str, Any]:
    """One line.  masked: so many rows have a grammar.  options: of the others."""
    clock = Clock(grammar_rows(session.decoder))
    work = Workload(session, random_prompts(case.batch, case.context), [SamplingParams()] * case.batch, case.spec != "plain")
    free, held = SamplingParams(max_tokens=900, ignore_eos=True, **options), SamplingParams(max_tokens=900, json_schema=ENDLESS)
    work.sampling = [held] * masked + [free] * (case.batch - masked)
    full_rounds(work, session.step, SETTLE)
    clock.read()
    walls = [timed.wall for timed, _ in full_rounds(work, session.timed_step, rounds)]
    found = {**case._asdict(), "rows_with_grammar": masked, "rounds": len(walls), "ms": 1e3 * median(walls)}
    return found | (clock.read() if masked else {})


def lines_of(case: Case, pair: Any, tokenizer: str, rounds: int, brief: bool) -> Iterator[dict[str, Any]]:
    """The lines of one case.  brief: only those of the mode "round" without grammars and with as many as there are rows."""
    session = session_of(case, pair, tokenizer, "round")
    yield {"grammar": "none", **measure(session, case, rounds, 0)}
    if case.batch > 1 and not brief:
        yield {"grammar": "one row", **measure(session, case, rounds, 1)}
    yield {"grammar": "all rows", **measure(session, case, rounds, case.batch)}
    yield {"grammar": "none again", **measure(session, case, rounds, 0)}
    session.decoder.close()
    if not brief:
        session = session_of(case, pair, tokenizer, "step")
        yield {"grammar": "phases", **measure(session, case, rounds, 0)}
        session.decoder.close()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--eos", type=int, default=1, help="the id with which texts end; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--brief", action="store_true", help="measure batches without grammars and full ones alone")
    parser.add_argument("--only", help="cases whose spec:batch:context starts with this")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    pair = random_pair(4096, torch.device("cuda", 0), replace(TARGET, eos_ids=(args.eos,)))
    tokenizer, lines = args.tokenizer.read_text(), []
    for case in CASES:
        if args.only and not case.name.startswith(args.only):
            continue
        for line in lines_of(case, pair, tokenizer, args.rounds, args.brief):
            lines.append(line)
            parts = [f"{name[:-3]} {value:.3f}" for name, value in line.items() if name.endswith("_ms")]
            print(f"{case.name:>16} {line['grammar']:<10} {line['ms']:7.3f} ms  {', '.join(parts)}", flush=True)
    result = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"), "weights": "random", "dtype": "bfloat16", "schema": ENDLESS, "rows": lines,
    }  # fmt: skip
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
