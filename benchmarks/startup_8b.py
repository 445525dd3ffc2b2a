#!/usr/bin/env python3
"""Seconds from the start of the process to the first speculated tokens, at the 8B shape, weights made on the GPU.

    python benchmarks/startup_8b.py --out benchmarks/results/startup_8b.json

The script runs itself twice in fresh processes: with an empty Triton cache, as on a new machine, and with the cache that the
first run has filled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def start() -> dict[str, Any]:
    """Starts in this process: both models, a prompt of 1,024 tokens, one round of (5,4,16)."""
    import torch
    from round_8b import make_decoder, random_pair, random_prompts

    from specdec.config import SamplingParams, SpecConfig
    from specdec.startup import STARTUP

    STARTUP.lap("imports")
    model, head = random_pair(4096, torch.device("cuda", 0))
    torch.cuda.synchronize()
    STARTUP.lap("random weights of both models")
    decoder = make_decoder(model, head, SpecConfig(5, 4, 16), 8, 1024, "round")
    stream = decoder.stream(random_prompts(1, 1024)[0], SamplingParams(max_tokens=16, ignore_eos=True))
    tokens = [next(stream).token_ids, next(stream).token_ids]  # prefill's, then the first round's
    assert all(tokens)
    return {"stages": STARTUP.stages, "seconds": sum(STARTUP.stages.values()), "device": torch.cuda.get_device_name(),
            "torch": torch.__version__}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(start()))
        return
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d")}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("empty Triton cache", "Triton cache of the run before"):
            command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), __file__, "--child"]
            environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": _path()}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            result[name] = json.loads(done.stdout.splitlines()[-1])
            stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in result[name]["stages"].items())
            print(f"{name}: {result[name]['seconds']:.1f} s ({stages})", flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def _path() -> str:
    return os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


if __name__ == "__main__":
    main()
