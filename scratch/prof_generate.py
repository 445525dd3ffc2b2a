import sys, time, torch
sys.path.insert(0, "benchmarks")
from collections import defaultdict
from statistics import median
from rounds import round_8b as R
from specdec.bench.session import Session
from specdec.config import SamplingParams, SpecConfig
torch.manual_seed(0)
T0 = time.perf_counter()
def say(*a): print(f"[{time.perf_counter()-T0:6.1f}]", *a, flush=True)
model, head = R.random_pair(4096, torch.device("cuda", 0))
B = 32
d = R.make_decoder(model, head, SpecConfig(5, 1, 6), B, 1024, "round")
s, prompts = Session(d), R.random_prompts(B, 1024)
s.force_acceptance([0.75] * 5)
G = lambda n: [SamplingParams(max_tokens=n, ignore_eos=True)] * B
for n in (40, 600):
    torch.cuda.synchronize(); g0 = s.num_graphs; t = time.perf_counter()
    s.generate(prompts, G(n), speculate=True)
    t = time.perf_counter() - t
    say(f"generate {n}: {t:.3f} s, {B*n/t:.0f} tok/s, graphs {g0} -> {s.num_graphs}")
def steps(trace=False):
    s.submit(prompts, G(600), speculate=True)
    rows = []
    while not d.engine.is_idle:
        n, e, g = s.num_running, s.num_entering, s.num_graphs
        st = s.timed_step()
        rows.append((n, e, st.wall, st.waited, s.num_graphs - g))
    return rows
for _ in range(1):
    t = time.perf_counter(); rows = steps(); t = time.perf_counter() - t
    by = defaultdict(list)
    for n, e, w, wait, g in rows: by[(n, "entering" if e else "")].append((w, w - wait))
    say(f"steps: total {t:.3f} s, {len(rows)} steps, captures {[(r[0], round(r[2],3)) for r in rows if r[4]]}")
    for k in sorted(by, reverse=True): print(f"   running {k}: {len(by[k])} steps, sum {sum(w for w,_ in by[k]):.4f} s, median {1e3*median(w for w,_ in by[k]):.2f} ms, host {1e3*median(h for _,h in by[k]):.2f} ms, max host {1e3*max(h for _,h in by[k]):.2f}")
import cProfile, pstats
p = cProfile.Profile(); p.enable(); steps(); p.disable()
pstats.Stats(p).sort_stats("tottime").print_stats(22)
say("plain chain by round_8b")
r = R.measure(model, head, R.Case("5,1,6", 32, 1024), 40, "round"); R.show(r)
