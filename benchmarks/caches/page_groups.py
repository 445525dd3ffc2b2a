"""What two page tables cost in a round and a prompt: the Llama-3.1-8B shape with a window of 1,024 in every second layer.

    python benchmarks caches.page_groups --out benchmarks/caches/results/page_groups_h200.json

"one" gives every layer pages for all tokens, as before; "two" lets the windowed layers go around a ring of pages of their own.
Random bf16 weights, an EAGLE-3 head of the real shape, graphs of whole rounds; milliseconds are medians through the engine,
host included.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine_internals import caches, set_rings
from rounds import round_8b
from rounds.round_8b import Case
from shapes import TARGET

from specdec.attention.kinds import FULL, LayerKind

WINDOW, CONTEXT = 1024, 8192
CASES = (Case("plain", 1, CONTEXT), Case("5,8,32", 1, CONTEXT), Case("plain", 8, CONTEXT), Case("5,1,6", 8, CONTEXT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the numbers are written as JSON")
    parser.add_argument("--only-prompts", action="store_true", help="measure no rounds")
    parser.add_argument("--rounds", type=int, default=120)
    args = parser.parse_args()
    torch.manual_seed(0)
    target = replace(TARGET, layer_kinds=(LayerKind(window=WINDOW), FULL) * 16)
    model, head = round_8b.random_pair(CONTEXT + 2048, torch.device("cuda", 0), target)
    make, rows = round_8b.make_decoder, list[dict[str, Any]]()
    bytes_of: dict[str, int] = {}

    def noted(*given: Any) -> Any:
        decoder = make(*given)
        bytes_of["kv"] = sum(cache.bytes for cache in caches(decoder))
        return decoder

    round_8b.make_decoder = noted
    for case in () if args.only_prompts else CASES:
        for two in (False, True):
            set_rings(two)
            row = round_8b.measure(model, head, case, args.rounds, "round", traced=False)
            rows.append({**case._asdict(), "groups": "two" if two else "one", "ms": row["ms"], "kv_bytes": bytes_of["kv"]})
            kv = f"{bytes_of['kv'] / 2**30:.2f} GiB"
            print(f"{case.name:>16} {rows[-1]['groups']}: {row['ms']:.3f} ms, KV pool {kv}", flush=True)
            torch.cuda.empty_cache()
    for name in ("one", "two"):
        set_rings(name == "two")
        ms = round_8b.prefill_ms(model, head, 1, CONTEXT, 5)
        rows.append({"prefill": CONTEXT, "groups": name, "ms": ms})
        print(f"prompt of {CONTEXT} {name}: {ms:.1f} ms", flush=True)
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(
            json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1)
        )
