"""Sweep of the many-rows kernel. Stages: compile (processes), check, time alone, time layers."""
import sys, time, os, json, math, statistics, threading, subprocess
from concurrent.futures import ProcessPoolExecutor
sys.path.insert(0, "benchmarks")
START = time.time()
def say(*a): print(f"[{time.time()-START:6.1f}]", *a, flush=True)

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "lm_head": (128256, 4096)}
def candidates(T, name):
    """tuples (groups, block_o, block_i, stages, programs, even)"""
    out = []
    O, I = SHAPES[name]
    if T in (192, 384):
        A, B = (3, 256, 64, 4), (3, 128, 64, 5)
    elif T == 256:
        A, B = (2, 256, 64, 4), (4, 128, 64, 4)
    else:
        A, B = (2, 256, 64, 4), (2, 128, 64, 7)
    kinds = [A + (False,), B + (False,)]
    if T in (256, 512): kinds.append((3, 256, 64, 4, True))
    if T in (96, 128) and name in ("gate_up", "down"): kinds.append((4, 128, 64, 4, True))
    for g, block, bi, st, swap in kinds:
        bt, bo = (block, 64 * g) if swap else (64 * g, block)
        N = -(-O // bo) * -(-T // bt)
        if name == "lm_head" and (g, block) == B[:2]: continue
        if N <= 132: ps = sorted({N * s for s in (1, 2, 3, 4, 5, 6, 7, 8) if N * s <= 132}, reverse=True)[:3]
        else: ps = []
        for p in ps:
            out.append((g, block, bi, st, p, True, swap))
        if N % 132 and (N > 66): out.append((g, block, bi, st, 132, True, swap))
        if N > 132: out.append((g, block, bi, st, 132, False, swap))
    if name == "gate_up" and T in (96, 128): out.append((2, 256, 128, 2, 112, True, False))
    return out
def new_tiles(t):
    from specdec.ops.products.tiles import ProductTiles
    g, block, bi, st, p, even, swap = t
    bt, bo = (block, 64 * g) if swap else (64 * g, block)
    return ProductTiles(bt, bo, bi, 2 if even else 1, 4 * g, st, programs=p)
def compile_one(job):
    name, T, t = job
    try:
        import torch
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction
        class NoGpu:
            def get_current_target(self): return GPUTarget("cuda", 90, 32)
            def get_current_device(self): return 0
            def get_current_stream(self, d): return 0
        driver.set_active(NoGpu())
        JITFunction.__getitem__ = lambda kernel, grid: (lambda *a, **o: kernel.run(*a, grid=grid, warmup=True, **o))
        import specdec.ops.products.linear_many_hopper as m
        m.chained = lambda d: {"PDL": True, "launch_pdl": True}
        O, I = SHAPES[name]
        m.sms = lambda d: 132
        m.launch_many_linear(torch.empty(T, I, dtype=torch.bfloat16), torch.empty(O, I, dtype=torch.bfloat16), None, name == "gate_up", new_tiles(t))
    except Exception as e:
        return f"{job}: {type(e).__name__} {str(e)[-300:]}"
    return None

def main():
    rows = [int(r) for r in os.environ.get("ROWS", "192,256,128,96,384,512").split(",")]
    jobs = [(n, T, t) for T in rows for n in SHAPES for t in candidates(T, n) if n != "lm_head" or T in (128, 192, 256)]
    seen, todo = set(), []
    def key(job):
        n, T, t = job
        bt, bo = (t[1], 64 * t[0]) if t[6] else (64 * t[0], t[1])
        N = -(-SHAPES[n][0] // bo) * -(-T // bt)
        return (n == "gate_up", SHAPES[n], t[:4], t[6], t[5] and N % min(t[4], N if not t[5] else 10**9) > 0)
    for j in jobs:
        if key(j) not in seen: seen.add(key(j)); todo.append(j)
    say(len(jobs), "jobs,", len(todo), "kernels")
    if os.environ.get("COUNT"): return
    import multiprocessing as mp
    pool = ProcessPoolExecutor(15, mp_context=mp.get_context("spawn"))
    futures = [pool.submit(compile_one, j) for j in todo]
    import torch, triton
    import torch.nn.functional as F
    import specdec.ops.products.linear_many_hopper as m
    from specdec.ops.products.linear import linear, gated_linear, silu_mul
    from specdec.ops.norm import add_rms_norm, rms_norm
    torch.manual_seed(1)
    D = "cuda"
    torch.set_grad_enabled(False)
    for f in futures:
        e = f.result()
        if e: say("COMPILE", e)
    pool.shutdown()
    say("compiled", torch.cuda.get_device_name(), triton.__version__)
    new = lambda O, I: torch.randn(O, I, device=D, dtype=torch.bfloat16).mul_(I ** -0.5)
    weights = {n: [new(*s) for _ in range(max(2, math.ceil(250e6 / (s[0] * s[1] * 2))))] for n, s in SHAPES.items()}

    def cublas(n, x, w): return silu_mul(F.linear(x, w)) if n == "gate_up" else F.linear(x, w)
    def today(n, x, w): return gated_linear(x, w) if n == "gate_up" else linear(x, w)
    def mine(n, x, w, t): return m.launch_many_linear(x, w, None, n == "gate_up", t)
    def graph_us(step, replays=9):
        step(); torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g): step()
        times = []
        for i in range(replays + 2):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(); g.replay(); b.record(); b.synchronize()
            if i >= 2: times.append(a.elapsed_time(b) * 1e3)
        return statistics.median(times)
    best, floor = {}, {}
    failed = 0
    for T in rows:
        for n, (O, I) in SHAPES.items():
            if n == "lm_head" and T not in (128, 192, 256): continue
            x = torch.randn(T, I, device=D, dtype=torch.bfloat16)
            ws = weights[n]
            ref = x.double() @ ws[0].double().T if n != "lm_head" else (x.float() @ ws[0].float().T).double()
            if n == "gate_up": ref = F.silu(ref[:, :O // 2]) * ref[:, O // 2:]
            todo = ws * math.ceil(8 / len(ws)) if n != "lm_head" else ws
            line = [("cublas", graph_us(lambda: [cublas(n, x, w) for w in todo]) / len(todo)), ("today", graph_us(lambda: [today(n, x, w) for w in todo]) / len(todo))]
            floor[T, n] = min(us for _, us in line)
            for t in candidates(T, n):
                tl = new_tiles(t)
                try:
                    outs = []
                    for _ in range(3):
                        p = torch.full((T, ref.shape[1]), float("nan"), device=D, dtype=torch.bfloat16); del p
                        outs.append(mine(n, x, ws[0], tl))
                    err = ((outs[0].double() - ref).norm() / ref.norm()).item()
                    same = all(torch.equal(outs[0], o) for o in outs)
                    if not (err < 4e-3 and same):
                        failed += 1; say("WRONG", T, n, tl, err, same); 
                        if failed > 40: return
                        continue
                    us = graph_us(lambda: [mine(n, x, w, tl) for w in todo]) / len(todo)
                    line.append((",".join(map(str, (tl.block_t, tl.block_o, tl.block_i, tl.splits, tl.warps, tl.stages, tl.programs))), us))
                    if (T, n) not in best or us < best[T, n][0]: best[T, n] = (us, t)
                except Exception as e:
                    say("FAILED", T, n, tl, str(e)[:200])
            say(T, n, f"err {err:.1e}", " | ".join(f"{k} {v:.1f}" for k, v in line))
            del ref
        if os.environ.get("BEST_OUT"):
            json.dump({f"{T}:{n}": list(new_tiles(t)) for (T, n), (us, t) in best.items() if us < 0.98 * floor[T, n]}, open(os.environ["BEST_OUT"], "w"))
        torch.cuda.empty_cache()
    if os.environ.get("NO_LAYERS"): return
    # layers
    del weights
    torch.cuda.empty_cache()
    L = 8
    layers = [{n: new(*SHAPES[n]) for n in ("qkv", "o", "gate_up", "down")} for _ in range(L)]
    norm = torch.ones(4096, device=D, dtype=torch.bfloat16)
    def run(x, choose):
        d = x
        for l in layers:
            x, h = add_rms_norm(x, d, norm, 1e-5)
            q = choose("qkv", h, l["qkv"])
            a = rms_norm(q[:, :4096], norm, 1e-5)
            d = choose("o", a, l["o"])
            x, h = add_rms_norm(x, d, norm, 1e-5)
            d = choose("down", choose("gate_up", h, l["gate_up"]), l["down"])
        return d
    samples = []
    stop = threading.Event()
    def watch():
        p = subprocess.Popen(["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw.instant,clocks_event_reasons.active", "--format=csv,noheader,nounits", "-lms", "50"], stdout=subprocess.PIPE, text=True)
        while not stop.is_set():
            samples.append((time.time(), p.stdout.readline().strip()))
        p.terminate()
    th = threading.Thread(target=watch, daemon=True); th.start()
    for T in rows:
        if T not in (96, 128, 192, 256, 384, 512): continue
        x = torch.randn(T, 4096, device=D, dtype=torch.bfloat16)
        tl = {n: new_tiles(best[T, n][1]) for n in ("qkv", "o", "gate_up", "down") if (T, n) in best}
        ways = {"cublas": cublas, "today": today}
        for names in (("gate_up",), ("down",), ("qkv",), ("o",), ("gate_up", "down"), ("gate_up", "down", "qkv"), ("gate_up", "down", "qkv", "o")):
            if all(n in tl for n in names):
                ways["+".join(names)] = lambda n, x, w, names=names: mine(n, x, w, tl[n]) if n in names else today(n, x, w)
        graphs = {}
        for k, c in ways.items():
            run(x, c); torch.cuda.synchronize()
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g): out = run(x, c)
            graphs[k] = g
        res = {}
        for k in list(graphs) + ["today"]:
            g = graphs[k]
            t0 = time.time(); ts = []
            n = 0
            while time.time() - t0 < 0.35:
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record()
                for _ in range(8): g.replay()
                b.record(); b.synchronize(); ts.append(a.elapsed_time(b) * 1e3 / 8 / L)
            mid = [s for t, s in samples if t > t0 + 0.15]
            res.setdefault(k, []).append(f"{min(ts):.1f}/{statistics.median(ts[len(ts)//2:]):.1f}" + (f" ({mid[-1]})" if mid and k in ("today", "cublas", "gate_up+down") else ""))
        say("layer", T, {n: repr(t) for n, t in tl.items()})
        for k, v in res.items(): print("      ", k, " ; ".join(v), flush=True)
        if time.time() - START > float(os.environ.get("LIMIT", "110")): break
    stop.set()

if __name__ == "__main__":
    main()
