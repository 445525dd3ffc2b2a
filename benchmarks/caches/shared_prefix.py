"""Rows that begin with the same tokens: what is gained by reading these tokens once, and by finding them cached.

    python benchmarks caches.shared_prefix --out benchmarks/caches/results/shared_prefix_h100.json

Llama-3.1-8B shape and an EAGLE-3 head of the real shape, random bf16 weights, rounds through the engine as in `generate()`.
Four ways to run a batch whose prompts begin alike:

    copies     every row has pages of its own: no prefix caching
    cached     the rows' tables name the same pages, and each row reads them for itself
    shared     the pages are read once for all rows, in passes that have few queries a row
    all        the pages are read once in every pass, so in the verification of a large tree too

After that the script measures how long a prompt's first token takes, with and without its beginning in the cache.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
from engine_internals import give_copies, is_shared, set_sharing, sharing_difference, take_copies
from rounds.round_8b import random_pair, spec_of
from shapes import TARGET

from specdec.bench.kernels import trace
from specdec.bench.profile import Workload
from specdec.config import SamplingParams
from specdec.decoder import SpecDecoder
from specdec.draft.eagle.head import EagleHead
from specdec.loading.resolve import resolve_settings
from specdec.models.causal_lm import CausalLM
from specdec.options import EngineOptions
from specdec.prompts.tokenizer import Tokenizer
from specdec.session import Session

SPECS = ("plain", "5,1,6", "5,4,16", "5,8,32")
ROWS, SHARED, OWN = 32, 8192, 256
RULE_ROWS, RULE_SHARED = (2, 4, 8, 16, 32), (512, 1024, 2048, 4096, 8192)
MAX_TOKENS = 400
WARM, TRACED = 3, 8


def make_decoder(model: CausalLM, head: EagleHead, spec: str, prefix_caching: bool) -> SpecDecoder:
    shape = spec_of(spec)
    options = EngineOptions(
        device="cuda:0", dtype="bfloat16", max_batch_size=ROWS, max_seq_len=SHARED + OWN + MAX_TOKENS + 64,
        attention="triton", prefix_caching=prefix_caching,
    )  # fmt: skip
    settings = resolve_settings(options, shape, model.config)
    return SpecDecoder(model, head if shape else None, settings, Tokenizer(Path("/nonexistent")))


def prompts_of(rows: int, shared: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(shared)
    system = torch.randint(1000, 100000, (shared,), generator=generator).tolist()
    return [system + torch.randint(1000, 100000, (OWN,), generator=generator).tolist() for _ in range(rows)]


def measure(decoder: SpecDecoder, spec: str, rows: int, shared: int, way: str, rounds: int, traced: bool) -> dict[str, Any]:
    """Median wall milliseconds of a round, and the trace's attention for one layer, of the target and of the draft alike."""
    session, shape = Session(decoder), spec_of(spec)
    set_sharing(decoder, shared=way in ("shared", "all"), in_every_pass=way == "all")
    work = Workload(session, prompts_of(rows, shared), [SamplingParams(max_tokens=MAX_TOKENS)] * rows, shape is not None)
    with work.running(), torch.inference_mode():
        if way == "copies":
            give_copies(decoder)
        for _ in range(WARM):
            session.step()
        walls = [session.timed_step() for _ in range(rounds)]
        assert session.num_running == rows and is_shared(decoder) == (way in ("shared", "all"))
        row: dict[str, Any] = {"spec": spec, "rows": rows, "shared": shared, "own": OWN, "way": way}
        row["ms"] = 1e3 * median(wall for wall, _ in walls)
        row["host_ms"] = 1e3 * median(wall - waited for wall, waited in walls)
        if traced:
            split = trace(session.step, TRACED, decoder.settings.device)
            passes = TARGET.num_layers + (shape.max_steps if shape else 0)  # S - 1 draft steps and an extend, a layer each
            row |= {"kinds_ms": split.by_kind, "phases_ms": split.by_phase, "longest": split.longest}
            row["attention_ms_a_layer"] = split.by_kind.get("attention", 0.0) / passes
        if way == "shared":
            row["difference"] = sharing_difference(decoder, rows, TARGET.num_heads, TARGET.head_dim)
        if way == "copies":
            take_copies(decoder, rows)
    print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items() if "longest" != key})
    return row


def first_token_ms(decoder: SpecDecoder, prompts: list[list[int]], again: int) -> list[float]:
    """Wall milliseconds until every prompt has its first token, of each of so many calls."""
    times = []
    for _ in range(again):
        torch.cuda.synchronize()
        start = time.perf_counter()
        decoder.generate(prompts, SamplingParams(max_tokens=1))
        times.append(1e3 * (time.perf_counter() - start))
    return times


def first_tokens(decoder: SpecDecoder, model: CausalLM, head: EagleHead) -> list[dict[str, Any]]:
    """First tokens of one prompt, cold and with its beginning cached, and of a batch, the first time and with it cached."""
    found = []
    prompts = prompts_of(ROWS + 4, SHARED - 16)  # another text than the rounds'
    cold = first_token_ms(decoder, prompts[:1], 1)[0]
    tails = [first_token_ms(decoder, prompts[i : i + 1], 1)[0] for i in (1, 2, 3)]
    found.append({"prompts": 1, "tokens": SHARED - 16 + OWN, "cold_ms": cold, "hit_ms": median(tails)})
    fresh = prompts_of(ROWS, SHARED - 32)
    batch = first_token_ms(decoder, fresh, 1)[0]
    decoder.generate(prompts[:1], SamplingParams(max_tokens=1))
    hit = first_token_ms(decoder, prompts[4:], 1)[0]
    del decoder
    torch.cuda.empty_cache()
    found.append({"prompts": ROWS, "tokens": SHARED - 16 + OWN, "first_time_ms": batch, "hit_ms": hit})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--no-rule", action="store_true")
    parser.add_argument("--no-first", action="store_true")
    parser.add_argument("--specs", default=" ".join(SPECS), help="separated by blanks")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, head = random_pair(SHARED + OWN + MAX_TOKENS + 512, torch.device("cuda", 0))
    rows, rule, first = [], [], []
    for spec in args.specs.split():
        decoder = make_decoder(model, head, spec, prefix_caching=True)
        for way in ("copies", "cached", "shared"):
            rows.append(measure(decoder, spec, ROWS, SHARED, way, args.rounds, traced=True))
        for batch in () if args.no_rule or spec == "5,8,32" else RULE_ROWS:
            for shared in RULE_SHARED:
                for way in ("cached", "shared"):
                    if (batch, shared) != (ROWS, SHARED):
                        rule.append(measure(decoder, spec, batch, shared, way, args.rounds, traced=False))
        if spec == "5,1,6" and not args.no_first:
            first = first_tokens(decoder, model, head)
            print(first, flush=True)
        del decoder
        torch.cuda.empty_cache()
        if spec in ("5,4,16", "5,8,32"):
            decoder = make_decoder(model, head, spec, prefix_caching=True)
            rows.append(measure(decoder, spec, ROWS, SHARED, "all", args.rounds, traced=True))
            rows += [measure(decoder, spec, *size, "all", args.rounds, traced=False) for size in ((8, SHARED), (ROWS, 1024))]
            del decoder
            torch.cuda.empty_cache()
    if first:
        decoder = make_decoder(model, head, "5,1,6", prefix_caching=False)
        first[1]["without_cache_ms"] = first_token_ms(decoder, prompts_of(ROWS, SHARED - 16), 1)[0]
        print(first[1], flush=True)
    result = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "weights": "random", "dtype": "bfloat16",
        "rounds": args.rounds, "rows": rows, "rule": rule, "first_token": first,
    }  # fmt: skip
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
