"""Seconds from the start of the process to the first speculated tokens, with an empty Triton cache and with a full one.

    python benchmarks rounds.start --out benchmarks/rounds/results/start.json
    python benchmarks rounds.start --only shipped --one-by-one

Each start is a fresh process, and finds Python's bytecode of all modules, as in an installed package.  The bytecode is written
before, to a folder of its own: a clone may have none, and an environment with PYTHONDONTWRITEBYTECODE never gets any.

`8b` is the shape of round_8b.py, with weights made on the GPU; the time that this takes, and that of the benchmark's own
imports, are named apart and belong to no sum.  `shipped` is the pair inside the package, loaded from its files.  `--one-by-one`
compiles kernels where they are launched, as without the rehearsal of first passes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WRITE_BYTECODE = """
import compileall, pathlib
import specdec.decoder, specdec.attention, specdec.draft, specdec.verify
import torch, triton, triton.experimental.gluon
for package in (specdec, specdec.attention, specdec.draft, specdec.verify):
    compileall.compile_dir(pathlib.Path(package.__file__).parent, quiet=2)
"""
APART = ("the benchmark's own imports", "random weights")
PAIRS = ("8b", "shipped")


def start(pair: str, one_by_one: bool) -> dict[str, Any]:
    """Starts in this process: both models, a prompt, one round of (5,4,16)."""
    from specdec.startup import STARTUP

    STARTUP.lap("Python")
    from specdec import SamplingParams, SpecConfig, SpecDecoder  # through the door, as users do; it imports torch

    STARTUP.lap("torch, specdec")
    import torch
    import triton

    from specdec.loading import build

    STARTUP.lap("triton")
    if one_by_one:
        build.can_rehearse = lambda *_: False  # type: ignore[assignment]
    spec = SpecConfig(5, 4, 16)
    prompt: Any = "Once upon a time there was a little girl"
    if pair == "8b":
        from rounds.round_8b import make_decoder, random_pair, random_prompts

        STARTUP.lap(APART[0])
        torch.zeros(1, device="cuda").sum().item()
        STARTUP.lap("CUDA")
        model, head = random_pair(4096, torch.device("cuda", 0))
        torch.cuda.synchronize()
        STARTUP.lap(APART[1])
        decoder, prompt = make_decoder(model, head, spec, 8, 1024, "round"), random_prompts(1, 1024)[0]
    else:
        from specdec import shipped

        decoder = SpecDecoder.from_pretrained(shipped.target_folder(), shipped.draft_folder(), spec)
    stream = decoder.stream(prompt, SamplingParams(max_tokens=16, ignore_eos=True))
    tokens = [next(stream).token_ids, next(stream).token_ids]  # prefill's, then the first round's
    assert all(tokens)
    seconds = sum(time for stage, time in STARTUP.stages.items() if stage not in APART)
    versions = {"torch": torch.__version__, "triton": triton.__version__, "device": torch.cuda.get_device_name()}
    return {"seconds": seconds, "stages": STARTUP.stages, **versions}


def child(pair: str, one_by_one: bool, cache: str, bytecode: str) -> dict[str, Any]:
    """What a fresh process measures, with these folders as Triton's cache and for Python's bytecode."""
    command = [sys.executable, str(Path(__file__).parents[1]), "rounds.start", "--child", pair]
    done = subprocess.run(
        [*command, *(["--one-by-one"] if one_by_one else [])],
        env=environment(bytecode) | {"TRITON_CACHE_DIR": cache},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def environment(bytecode: str) -> dict[str, str]:
    """This process's, for children that write bytecode to that folder and read it there."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": bytecode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=PAIRS, help="one pair instead of both")
    parser.add_argument("--one-by-one", action="store_true", help="compile each kernel where it is first launched")
    parser.add_argument("--warm", type=int, default=1, help="how many starts with a full cache; the fastest is kept")
    parser.add_argument("--child", choices=PAIRS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(start(args.child, args.one_by_one)))
        return
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "one_by_one": args.one_by_one, "starts": []}
    bytecode = tempfile.mkdtemp()
    subprocess.run([sys.executable, "-P", "-c", WRITE_BYTECODE], env=environment(bytecode), check=True)
    for pair in (args.only,) if args.only else PAIRS:
        with tempfile.TemporaryDirectory() as cache:
            for name, times in (("cold", 1), ("warm", args.warm)):
                found = min(
                    (child(pair, args.one_by_one, cache, bytecode) for _ in range(times)),
                    key=lambda each: float(each["seconds"]),
                )
                result["starts"].append({"pair": pair, "cache": name, **found})
                stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in found["stages"].items())
                print(f"{pair}, {name} cache: {found['seconds']:.2f} s ({stages})", flush=True)
    shutil.rmtree(bytecode)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
