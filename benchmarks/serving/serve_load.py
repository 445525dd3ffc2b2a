"""The HTTP server under load: what it costs against `generate`, and how long its clients wait.

    python benchmarks serving.serve_load --out benchmarks/serving/results/serve_load.json 2>log   (the server logs each request)
    python benchmarks serving.serve_load --tiny   (the shipped pair on a CPU: whether this script works, no numbers)

The Llama-3.1-8B shape with an EAGLE-3 head of the real shape, random bf16 weights, the chain (5,1,6), at most 32 rows.  Every
level of a draft is accepted with probability 0.75, given that the level before was: a choice by seed and position alone, so
that the same requests take the same rounds, however they are run.  A request is a prompt of 1,024 random token ids and asks
for 256 tokens, greedy, with its number as its seed.  The tokenizer has as many ids as the model, and each has a text.

The server (uvicorn in one thread, the engine in another) and the calls of `generate` run in one process with one decoder.  The
clients run in up to 8 processes of their own, with the real `openai` package, over loopback, and stream every answer.
For N = 1, 8 and 32 clients this measures:

waves    N clients send one request each at the same moment, and the wave ends when the last stream has ended.  A wave of the
         same N requests goes through `generate` in one call, before or after it in turn.  The ratio of tok/s, over all waves,
         is what has a bar: prompts enter at once on both sides and rows leave without successors on both sides, so the
         difference is what the server costs: HTTP, JSON, queues, text made piece by piece, the clients' own time.
closed   N clients, each of which sends its next request when its last one has ended.  It gives the rates that N patient
         clients get.  `generate` has no such thing, so it is compared with nothing.
poisson  Requests are due at the times of a Poisson process, at 80 percent of the rate of the closed loop, whatever the server
         does.  At most N are under way at once (each process of clients has its share of the N): a request that is due while
         all places are taken waits at the client, and that wait is shown apart.  Times to the first token count from sending.

tok/s counts tokens of answered requests as the server's `usage` does.  Time between tokens: a piece of m tokens that comes t
after the piece before it counts as m times t / m; clients count tokens in the text, which this tokenizer allows.  A failure is
a request that ended without a finish reason and `usage`, or in an error.  Before each N, waves run until one captures no
CUDA graph, six at most; graphs captured later are counted.  Exit code 1: a bar was missed or a request failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rounds.round_8b import make_decoder, random_pair

from serving.numbers import latencies, rates
from serving.processes import ClientProcesses
from serving.server import http_server
from serving.work import Work, save_tokenizer
from specdec import shipped
from specdec.config import SamplingParams, SpecConfig
from specdec.decoder import SpecDecoder
from specdec.prompts.tokenizer import Tokenizer
from specdec.serve.options import ServeOptions
from specdec.session import Session

CHAIN, ACCEPTANCE, SHARE = SpecConfig(5, 1, 6), 0.75, 0.8
KEY = "load"
MAX_WARM_UPS = 6
PACKAGES = ("openai", "fastapi", "starlette", "uvicorn", "pydantic", "tokenizers", "transformers")


class Size(NamedTuple):
    """What is run with so many clients.  bar: the least share of the tok/s of `generate`."""

    clients: int
    waves: int
    requests_each: int
    arrivals: int
    bar: float | None


FULL = (Size(1, 12, 16, 40, 0.95), Size(8, 8, 10, 128, None), Size(32, 8, 8, 320, 0.92))
TINY = (Size(1, 2, 2, 3, None), Size(4, 2, 2, 8, None))


def large_decoder() -> SpecDecoder:
    torch.manual_seed(0)
    model, head = random_pair(1024 + 1024, torch.device("cuda", 0))
    return make_decoder(model, head, CHAIN, max(size.clients for size in FULL), 1024, "round")


def tiny_decoder() -> SpecDecoder:
    target, draft = shipped.target_folder(), shipped.draft_folder()
    return SpecDecoder.from_pretrained(target, draft, CHAIN, device="cpu", dtype="float32", max_batch_size=4, max_seq_len=128)


class Bench:
    """One decoder behind its server, and its clients."""

    def __init__(self, decoder: SpecDecoder, clients: ClientProcesses, work: Work) -> None:
        self.session, self.clients, self.work = Session(decoder), clients, work
        self._next = 0

    def numbers(self, count: int) -> list[int]:
        """Numbers of requests that have not run yet."""
        self._next += count
        return list(range(self._next - count, self._next))

    def generate(self, numbers: Sequence[int]) -> dict[str, Any]:
        """One call of `generate` with these requests."""
        prompts = [self.work.prompt(number) for number in numbers]
        sampling = [SamplingParams(max_tokens=self.work.max_tokens, seed=number) for number in numbers]
        start = time.monotonic()
        outputs = self.session.generate(prompts, sampling, speculate=True)
        seconds = time.monotonic() - start
        assert all(output.text for output in outputs)
        return {"seconds": seconds, "tokens": sum(len(output.token_ids) for output in outputs),
                "accepted": sum(output.stats.accepted for output in outputs)}  # fmt: skip

    def wave(self, numbers: Sequence[int]) -> dict[str, Any]:
        """These requests through the server, all sent at once by a client each."""
        start, records = self.clients.closed(self.work, [[number] for number in numbers])
        return {**rates(start, records), "accepted": sum(record.accepted for record in records)}

    def warm_up(self, size: Size) -> None:
        graphs = -1
        for _ in range(MAX_WARM_UPS):
            if graphs == self.session.num_graphs:
                break
            graphs = self.session.num_graphs
            numbers = self.numbers(size.clients)
            self.generate(numbers)
            self.wave(numbers)

    def waves(self, size: Size) -> dict[str, Any]:
        by_generate, by_server = [], []
        for index in range(size.waves):
            numbers = self.numbers(size.clients)
            runs: list[Callable[[], None]] = [
                lambda numbers=numbers: by_generate.append(self.generate(numbers)),
                lambda numbers=numbers: by_server.append(self.wave(numbers)),
            ]
            for run in runs if index % 2 else runs[::-1]:
                run()
        generate, server = total(by_generate), total(by_server)
        return {
            "generate": {**generate, "waves": by_generate}, "door": {**server, "waves": by_server},
            "ratio": server["tok_s"] / generate["tok_s"], "bar": size.bar,
        }  # fmt: skip

    def closed(self, size: Size) -> dict[str, Any]:
        lanes = [self.numbers(size.requests_each) for _ in range(size.clients)]
        start, records = self.clients.closed(self.work, lanes)
        return {**rates(start, records), **latencies(records)}

    def poisson(self, size: Size, rate: float) -> dict[str, Any]:
        """rate: requests due a second."""
        chance = random.Random(size.clients)
        offsets = accumulate(chance.expovariate(rate) for _ in range(size.arrivals))
        arrivals = list(zip(offsets, self.numbers(size.arrivals), strict=True))
        start, records = self.clients.opened(self.work, arrivals, size.clients)
        return {"due_s": rate, "share": SHARE, **rates(start, records), **latencies(records)}

    def measure(self, size: Size) -> dict[str, Any]:
        self.warm_up(size)
        graphs = self.session.num_graphs
        waves, closed = self.waves(size), self.closed(size)
        poisson = self.poisson(size, SHARE * closed["requests_s"])
        captured = self.session.num_graphs - graphs
        return {"clients": size.clients, "waves": waves, "closed": closed, "poisson": poisson, "graphs_captured": captured}


def total(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over waves, and their tokens a second."""
    sums = {key: sum(run[key] for run in runs) for key in ("seconds", "tokens", "accepted", "failures") if key in runs[0]}
    return {**sums, "tok_s": sums["tokens"] / sums["seconds"]}


def faults(row: dict[str, Any]) -> list[str]:
    """What makes the run fail."""
    waves, found = row["waves"], []
    if waves["bar"] is not None and waves["ratio"] < waves["bar"]:
        found.append(f"{row['clients']} clients: {waves['ratio']:.1%} of generate's tok/s, bar {waves['bar']:.0%}")
    errors = {error for wave in waves["door"]["waves"] for error in wave["errors"]}
    for part in (row["closed"], row["poisson"]):
        errors |= set(part["errors"])
    return found + [f"{row['clients']} clients: a request failed: {error}" for error in sorted(errors)]


def show(row: dict[str, Any]) -> None:
    waves = row["waves"]
    server, generate, bar = waves["door"], waves["generate"], waves["bar"]
    verdict = "no bar" if bar is None else f"bar {bar:.0%} {'ok' if waves['ratio'] >= bar else 'MISS'}"
    print(
        f"{row['clients']:>2} clients: generate {generate['tok_s']:8.1f} tok/s, server {server['tok_s']:8.1f}"
        f" = {waves['ratio']:.1%} ({verdict}); accepted {generate['accepted']} and {server['accepted']}"
        f", {row['graphs_captured']} graphs captured"
    )
    for name in ("closed", "poisson"):
        part = row[name]
        first, wait, between = part["first_token_ms"], part["wait_ms"], part["between_tokens_ms"]
        print(f"   {name:>8}: {part['tok_s']:8.1f} tok/s {part['requests_s']:6.2f} requests/s {part['failures']} of "
              f"{part['requests']} failed; ms p50/p99: first token {pair(first)}, wait before {pair(wait)}, "
              f"between tokens {pair(between['all'])}, longest pause {part['longest_pause_ms']:.1f}", flush=True)  # fmt: skip


def pair(found: dict[str, float] | None) -> str:
    return "-" if found is None else f"{found['p50']:.2f}/{found['p99']:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the shipped pair on a CPU, few short requests, no bars")
    parser.add_argument("--clients", type=int, nargs="+", choices=[size.clients for size in FULL], help="these numbers alone")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    decoder, sizes = (tiny_decoder(), TINY) if args.tiny else (large_decoder(), FULL)
    sizes = tuple(size for size in sizes if args.tiny or not args.clients or size.clients in args.clients)
    vocab_size = decoder.model.config.vocab_size
    work = Work("model", vocab_size, *((32, 16) if args.tiny else (1024, 256)))
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder), vocab_size)
        decoder.tokenizer = Tokenizer(Path(folder))
    Session(decoder).force_acceptance([ACCEPTANCE] * CHAIN.max_steps)
    options = ServeOptions(port=0, model_name=work.model, api_key=KEY)
    rows = []
    with http_server(decoder, options) as url, ClientProcesses(url, KEY, 2 if args.tiny else 8) as clients:
        bench = Bench(decoder, clients, work)
        for size in sizes:
            rows.append(bench.measure(size))
            show(rows[-1])
    result = {
        "device": "cpu" if args.tiny else torch.cuda.get_device_name(), "cpus": os.cpu_count(), "torch": torch.__version__,
        "python": platform.python_version(), **{name: version(name) for name in PACKAGES}, "date": time.strftime("%Y-%m-%d"),
        "weights": "shipped" if args.tiny else "random", "spec": CHAIN.label, "acceptance": ACCEPTANCE,
        "prompt_tokens": work.prompt_tokens, "max_tokens": work.max_tokens, "rows": rows,
    }  # fmt: skip
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    found = [fault for row in rows for fault in faults(row)]
    for fault in found:
        print(f"FAILED: {fault}")
    return 1 if found else 0
