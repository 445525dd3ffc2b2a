"""Products of many rows: cuBLAS against candidates.  `check N` compiles and checks variant N, `time` times all."""
import sys, time, torch
sys.path.insert(0, "scratch")
import torch.nn.functional as F
from specdec.ops.products import linear as PL
from specdec.ops.products.tiles import ProductTiles
from many import many
from specdec.ops.products.gated_hopper import launch_gated_hopper
torch.manual_seed(0); torch.set_grad_enabled(False)
dev = "cuda"
OLD = ProductTiles(256, 128, 64, 1, 8, 4, lag=1)
V = {
    "today tiled": (True, lambda x, w: PL._launch(x, w, None, True, OLD)),
    "gated_hopper": (True, lambda x, w: launch_gated_hopper(x, w, None, 132)),
    "many gated t8": (True, lambda x, w: many(x, w, True, together=8, loaders=4)),
    "many gated t16": (True, lambda x, w: many(x, w, True, together=16, loaders=4)),
    "many t8": (False, lambda x, w: many(x, w, False, together=8, loaders=4)),
    "many t16": (False, lambda x, w: many(x, w, False, together=16, loaders=4)),
}
def check(name):
    gated, f = V[name]
    for T, I, O in ((1000, 512, 1536), (1100, 64 * 9, 16 * 33), (2048, 4096, 28672)):
        x = torch.randn(T, I, device=dev, dtype=torch.bfloat16); w = torch.randn(O, I, device=dev, dtype=torch.bfloat16) / 16
        ref = x.double() @ w.double().T if T < 2048 else (x.float() @ w.float().T)
        if gated: ref = F.silu(ref[:, :ref.shape[1] // 2]) * ref[:, ref.shape[1] // 2:]
        for _ in range(2): junk = torch.full(ref.shape, float("nan"), device=dev, dtype=torch.bfloat16); del junk
        y = f(x, w).double(); print("check", name, T, I, O, float((y - ref).norm() / ref.norm()), flush=True)
if sys.argv[1] == "check":
    check(list(V)[int(sys.argv[2])]); sys.exit()
bad = set(sys.argv[2:])
W = {"gate_up": (28672, 4096), "down": (4096, 14336), "qkv": (6144, 4096), "o": (4096, 4096)}
ws = {k: [torch.randn(*s, device=dev, dtype=torch.bfloat16) * 0.02 for _ in range(3)] for k, s in W.items()}
def hot(fn, seconds=0.08):
    fn(0); fn(1); torch.cuda.synchronize()
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    a.record(); fn(2); b.record(); b.synchronize(); n = max(4, int(seconds * 1e3 / a.elapsed_time(b)))
    for i in range(n // 2): fn(i)
    a.record()
    for i in range(n): fn(i)
    b.record(); b.synchronize()
    return a.elapsed_time(b) / n * 1e3
for T in (1024, 7168, 512, 2048, 256):
    xs = {i: torch.randn(T, i, device=dev, dtype=torch.bfloat16) for i in (4096, 14336)}
    for name, (O, I) in W.items():
        if name != "gate_up" and T not in (1024, 7168): continue
        x, w = xs[I], ws[name]
        ways = {"cublas": lambda i: F.linear(x, w[i % 3])}
        if name == "gate_up": ways["cublas+silu"] = lambda i: PL.silu_mul(F.linear(x, w[i % 3]))
        for k, (gated, f) in V.items():
            if gated == (name == "gate_up") and k not in bad and (T >= 1024 or "t16" not in k): ways[k] = lambda i, f=f: f(x, w[i % 3])
        found = {k: [] for k in ways}
        for _ in range(3):
            for k, f in ways.items(): found[k].append(hot(f, 0.03 if T < 2048 else 0.05))
        flops = 2 * T * O * I
        print(f"T {T} {name}: " + "; ".join(f"{k} {min(v):.1f} {max(v):.1f} us ({flops/min(v)/1e6:.0f})" for k, v in found.items()), flush=True)
