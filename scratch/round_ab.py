"""Rounds of the 8B shape, in turns with and without what is new here.  usage: round_ab.py OUT case..."""
import json, sys, time
sys.path.insert(0, "benchmarks")
START = time.time()
import torch
from rounds import round_8b as r8
from specdec.attention.kernels import tiles_triton, triton_backend
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.ops.products import normed, tiles

NEW_DEFER, NEW_JOIN = normed._tiles, TritonBackend._joins

def use(defer, join, extra=lambda: None):
    normed._tiles = NEW_DEFER if defer else (lambda *a: None)
    TritonBackend._joins = NEW_JOIN if join else (lambda self, *a: False)

def main():
    torch.manual_seed(0)
    cases = [next(c for c in r8.CASES if c.name.startswith(name)) for name in sys.argv[2:]]
    model, head = r8.random_pair(32768 + 2048, torch.device("cuda", 0))
    print(f"[{time.time() - START:.1f}] model", flush=True)
    rows = []
    for case in cases:
        for label, defer, join in (("neither", False, False), ("norms", True, False), ("both", True, True)):
            if label == "both" and case.spec.count(",8,") + case.spec.count(",10,") == 0:
                continue
            use(defer, join)
            try:
                row = r8.measure(model, head, case, 40, "round")
            except Exception as error:
                print("failed", case.name, label, error, flush=True); continue
            print(f"[{time.time() - START:.1f}] {label}:", end=" "); r8.show(row)
            rows.append(row | {"label": label})
            torch.cuda.empty_cache()
            json.dump(rows, open(sys.argv[1], "w"))
main()
