"""Attention of prompts by tiles, and with one compare a logit.  `compile N`: run variant N once; `time`: all."""
import sys, torch
sys.path.insert(0, "benchmarks"); sys.path.insert(0, "scratch")
torch.manual_seed(0); torch.set_grad_enabled(False)
from layers.attention import Case, World, ours
from graph_timing import timed
import specdec.attention.kernels.triton_backend as TB
from specdec.attention.kernels.tiles_triton import PagedTiles, paged_tiles
from specdec.attention.kernels.paged_triton import paged_attention_kernel as new
from paged_old_triton import paged_attention_kernel as old
pool = torch.randn(400_000_000, device="cuda", dtype=torch.bfloat16)
P1, P7, C32, C1 = Case("chain", 1, 1024, 1024), Case("chain", 7, 1024, 1024), Case("chain", 32, 1100, 6), Case("chain", 1, 1100, 6)
V = [
    (old, None), (new, None), (new, (64, 64, 4, 2)), (new, (64, 32, 4, 3, 128, 168)), (new, (128, 64, 8, 2)),
    (new, (128, 64, 8, 2, 128, 128)), (new, (128, 64, 8, 3)), (new, (128, 128, 8, 2)), (new, (64, 32, 4, 4, 128, 168)),
    (new, (128, 32, 8, 3, 128, 128)),
]
def use(v):
    kernel, tiles = v
    TB.paged_attention_kernel = kernel
    TB.paged_tiles = paged_tiles if tiles is None else lambda *a: PagedTiles(*tiles)
if sys.argv[1] == "compile":
    use(V[int(sys.argv[2])])
    for case in (P1, P7, C32, C1):
        if V[int(sys.argv[2])][1] is None or case in (P1, P7): ours(World(case, pool))
    torch.cuda.synchronize(); sys.exit()
for case in (P1, P7, C32, C1):
    world, base, line = World(case, pool), None, []
    for _ in range(2):
        for v in V:
            if v[1] is not None and case not in (P1, P7): continue
            use(v)
            us, out = timed(ours, world, 15)
            if base is None: base = out.float().clone()
            err = float((out.float() - base).norm() / base.norm())
            line.append(f"{'old' if v[0] is old else 'new'} {v[1]} {us:.1f}" + (f" ({err:.0e})" if len(line) < len(V) else ""))
    print(case[:4], "layers", world.layers, "; ".join(line), flush=True)
