"""Products of many rows: cuBLAS against candidates, hot and alternating."""
import sys, time, torch, triton
sys.path.insert(0, "scratch")
import torch.nn.functional as F
from specdec.ops.products import linear as PL
from specdec.ops.products.tiles import ProductTiles
from many import many
torch.manual_seed(0); torch.set_grad_enabled(False)
dev = "cuda"
def check(gated, **kw):
    T, I, O = 1000, 512, 1536
    x = torch.randn(T, I, device=dev, dtype=torch.bfloat16); w = torch.randn(O, I, device=dev, dtype=torch.bfloat16) / 16
    ref = x.double() @ w.double().T
    if gated: ref = F.silu(ref[:, :O // 2]) * ref[:, O // 2:]
    for _ in range(2): junk = torch.full((T, ref.shape[1]), float("nan"), device=dev, dtype=torch.bfloat16); del junk
    y = many(x, w, gated, **kw).double()
    print("check", gated, kw, float((y - ref).norm() / ref.norm()), flush=True)
for g, kw in ((True, dict(stages=4)), (False, dict(stages=3)), (False, dict(stages=4, BN=128))):
    check(g, **kw)
W = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
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
OLD = ProductTiles(256, 128, 64, 1, 8, 4, lag=1)
from specdec.ops.products.gated_hopper import launch_gated_hopper
for T, O, I, n in ((130, 136, 1000, 3), (1100, 264, 72, 5)):
    x = torch.randn(T, I, device=dev, dtype=torch.bfloat16); w = torch.randn(2 * O, I, device=dev, dtype=torch.bfloat16) / 16; b = torch.randn(2 * O, device=dev, dtype=torch.bfloat16)
    ref = F.linear(x.double(), w.double(), b.double()); ref = F.silu(ref[:, :O]) * ref[:, O:]
    y = launch_gated_hopper(x, w, b, n).double(); print("check gated_hopper", T, O, I, float((y - ref).norm() / ref.norm()), flush=True)
for T in (256, 320, 384, 512, 768, 1024, 8192):
    xs = {i: torch.randn(T, i, device=dev, dtype=torch.bfloat16) for i in (4096, 14336)}
    for name, (O, I) in W.items():
        if name != 'gate_up' and T not in (1024, 8192): continue
        x, w, gated = xs[I], ws[name], name == "gate_up"
        ways = {"cublas": lambda i: F.linear(x, w[i % 3])}
        if gated:
            ways["cublas+silu"] = lambda i: PL.silu_mul(F.linear(x, w[i % 3]))
            ways["hopper gated"] = lambda i: PL._launch(x, w[i % 3], None, True, OLD)
            ways["gated_hopper"] = lambda i: launch_gated_hopper(x, w[i % 3], None, 132)
            for t in (4, 8, 16) if T >= 1024 else (): ways[f"many gated t{t}"] = lambda i, t=t: many(x, w[i % 3], True, stages=4, together=t)
        else:
            for t in (8,): ways[f"many t{t}"] = lambda i, t=t: many(x, w[i % 3], False, stages=3, together=t)
            if T == 1024: ways["many 128x128"] = lambda i: many(x, w[i % 3], False, BN=128, stages=4, together=8)
        found = {k: [] for k in ways}
        for _ in range(2):
            for k, f in ways.items(): found[k].append(hot(f, 0.04 if T < 8192 else 0.06))
        flops = 2 * T * O * I
        print(f"T {T} {name}: " + "; ".join(f"{k} {min(v):.1f} {max(v):.1f} us ({flops/min(v)/1e6:.0f})" for k, v in found.items()), flush=True)
