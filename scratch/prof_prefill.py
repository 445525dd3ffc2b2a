import sys, time, torch
sys.path.insert(0, "benchmarks"); sys.path.insert(0, "scratch")
from collections import defaultdict
from statistics import median
from rounds import round_8b as R
from specdec.bench.kernels import short_name, kind_of
from specdec.config import SamplingParams, SpecConfig
import specdec.models.linear as L
from specdec.ops.products import linear as PL
from specdec.ops.products.tiles import ProductTiles
from specdec.ops.products.gated_hopper import launch_gated_hopper
import gc
T0 = time.perf_counter()
def say(*a): print(f"[{time.perf_counter()-T0:6.1f}]", *a, flush=True)
torch.manual_seed(0)
model, head = R.random_pair(4096, torch.device("cuda", 0))
import torch.nn.functional as F
tree = L.gated_linear
def today(x, w, b=None, n=None):
    return PL.silu_mul(F.linear(x, w, b)) if x.dim() == 2 and x.shape[0] >= 512 else tree(x, w, b, n)
OLD = ProductTiles(256, 128, 64, 1, 8, 4, lag=1)
def tiled(x, w, b=None, n=None):
    return PL._launch(x, w, b, True, OLD) if x.dim() == 2 and x.shape[0] >= 512 else today(x, w, b, n)
def manyed(x, w, b=None, n=None):
    return launch_gated_hopper(x, w, b, 132) if x.dim() == 2 and x.shape[0] >= 512 else today(x, w, b, n)
from many import many
def many2(x, w, b=None, n=None):
    return many(x, w, True, loaders=4, together=8) if x.dim() == 2 and x.shape[0] >= 512 else today(x, w, b, n)
WAYS = {"today": today, "hopper": tiled, "gated": manyed, "many": many2}
def runs(batch, tokens, repeats, ways):
    prompts = R.random_prompts(batch, tokens)
    decoders, times = {}, defaultdict(list)
    for way in ways:
        L.gated_linear = WAYS[way]
        decoders[way] = R.make_decoder(model, head, SpecConfig(5, 1, 6), batch, tokens, "round")
        for _ in range(3): decoders[way].generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
        if way == ways[0]: profile(decoders[way], batch, tokens, 5); host(decoders[way], prompts)
    for _ in range(repeats):
        for way in ways:
            L.gated_linear = WAYS[way]
            for _ in range(4 if batch == 1 else 1):
                torch.cuda.synchronize(); s = time.perf_counter()
                decoders[way].generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
                times[way].append(1e3 * (time.perf_counter() - s))
    for way in ways: say(f"prefill {batch} x {tokens} {way}: median {median(times[way]):.2f} min {min(times[way]):.2f} ms")
    return decoders
def host(decoder, prompts):
    import cProfile, pstats
    p = cProfile.Profile()
    from specdec.bench.session import Session
    session = Session(decoder)
    for _ in range(10):
        torch.cuda.synchronize(); p.enable()
        session.submit(prompts, [SamplingParams(max_tokens=1, ignore_eos=True)] * len(prompts), speculate=True)
        while not decoder.engine.is_idle: session.step()
        p.disable()
    pstats.Stats(p).sort_stats("tottime").print_stats(14)
    p = cProfile.Profile()
    for _ in range(10): torch.cuda.synchronize(); p.enable(); decoder.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True)); p.disable()
    pstats.Stats(p).sort_stats("cumulative").print_stats(16)
    waits = []
    readback = decoder.engine.runner.readback
    for _ in range(8):
        torch.cuda.synchronize(); w, s = readback.wait_seconds, time.perf_counter()
        session.submit(prompts, [SamplingParams(max_tokens=1, ignore_eos=True)] * len(prompts), speculate=True)
        b = time.perf_counter()
        while not decoder.engine.is_idle: session.step()
        e = time.perf_counter(); waits.append((round(1e3 * (b - s), 2), round(1e3 * (e - s), 2), round(1e3 * (readback.wait_seconds - w), 2)))
    say("submit, whole, waited ms", waits)
def profile(decoder, batch, tokens, n):
    prompts = R.random_prompts(batch, tokens)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        for _ in range(n):
            decoder.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
        torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    # the gap between generates is dropped: gaps > 300 us
    by, idle, now = defaultdict(lambda: [0.0, 0]), 0.0, spans[0][0]
    kinds = defaultdict(float)
    for s, e, name in spans:
        if 0 < s - now < 300: idle += s - now
        own = max(0.0, e - max(s, now)); now = max(now, e)
        k = short_name(name) if "nvjet" not in name else name[:70]
        by[k][0] += own; by[k][1] += 1; kinds[kind_of(short_name(name))] += own
    say(f"profile {batch} x {tokens}: busy {sum(v[0] for v in by.values())/1e3/n:.2f} ms, idle {idle/1e3/n:.2f}; " + ", ".join(f"{k} {v/1e3/n:.2f}" for k, v in kinds.items()))
    for k, (t, c) in sorted(by.items(), key=lambda i: -i[1][0])[:22]: print(f"    {t/1e3/n:8.3f} ms {c/n:7.1f} x {t/c:8.1f} us  {k}")
EngOpt = R.EngineOptions
def small(**k): return EngOpt(**k, kv_pool_bytes=None) if False else EngOpt(**k)
which = sys.argv[1]
import os
if which == "1":
    runs(1, 1024, 5, sys.argv[2].split(","))
else:
    for way in sys.argv[2].split(","):
        L.gated_linear = WAYS[way]
        d = R.make_decoder(model, head, SpecConfig(5, 1, 6), 32, 1024, "round")
        prompts, ts = R.random_prompts(32, 1024), []
        for _ in range(4):
            torch.cuda.synchronize(); s = time.perf_counter()
            d.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True)); ts.append(1e3 * (time.perf_counter() - s))
        say(f"prefill 32 x 1024 {way}: {[round(t, 1) for t in ts]}")
        if way == "today": profile(d, 32, 1024, 1)
        d.close(); del d; gc.collect(); torch.cuda.empty_cache()
