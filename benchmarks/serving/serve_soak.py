"""The soak of the HTTP server on a GPU: the shipped pair in bf16, 32 rows, 20,000 calls of every kind, faults in the meantime.

Some texts must obey a grammar, some chats and responses have tools and thoughts, the pool is too small for 32 texts, so that
rows step back, and an audit compares a share of the answers with the target.  Every end has a reason: done, left by its client,
refused as it had to be, or the name of a planted fault.  At the end different calls are decoded plainly and compared.

    python benchmarks serving.serve_soak --out benchmarks/serving/results/serve_soak.json 2>log   (the server logs each request)

What is sent, what may happen to it and what must be as before afterwards is written in tests/toolkit/soak/; the test suite runs
the same on a CPU with fewer calls.  Exit code 1: something was not as it must be.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from toolkit.soak.run import Plan, pair_with_chat, soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=6, help="of clients, which share 60 calls at a time")
    parser.add_argument("--seconds", type=float, default=60.0, help="for comparing answers with those of plain decoding")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    plan = Plan(
        args.calls, max(200, args.calls // 4), 60, args.processes, pause=300, max_tokens=32, exact=args.device == "cpu",
        crowded=True, questions=max(60, args.calls // 50), compare_seconds=args.seconds,
    )  # fmt: skip
    dtype = "float32" if args.device == "cpu" else "bfloat16"  # in bfloat16 torch keeps something of every shape on a CPU
    with tempfile.TemporaryDirectory() as folder:
        more = {"kv_cache_memory": "4MiB", "audit": 0.01, "audit_folder": str(Path(folder) / "audit")}
        decoder = pair_with_chat(Path(folder), device=args.device, dtype=dtype, max_batch_size=32, **more)
        report = soak(decoder, plan)
    print(f"{args.calls} calls in {report.seconds:.1f} s: {report.ends}; faults: {report.faults}")
    print(f"{report.stepped_back} rows stepped back; grammars: {report.structured}; {report.audited} tokens audited")
    print(f"ends by reason: {report.reasons}")
    print(f"{report.differing} of {report.repeated} repeated calls got more than one answer")
    print(f"{report.plain} of {report.different} different calls were decoded plainly too: {report.unequal} answers are unlike")
    print(f"memory in MiB, in tenths of the time: {[report.memory[i * len(report.memory) // 10] >> 20 for i in range(10)]}")
    for problem in report.problems[:40]:
        print(f"FAILED: {problem}")
    if args.out:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else args.device
        result = {
            "device": device, "torch": torch.__version__, "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"), "dtype": dtype, "max_batch_size": 32, "plan": asdict(plan),
            "report": vars(report),
        }  # fmt: skip
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if report.problems else 0
