"""Times inside a start with a full cache."""
import time, sys, threading, os
sys.path.insert(0, "benchmarks")
T0 = time.perf_counter()
def say(*a): print(f"[{time.perf_counter()-T0:7.3f}]", *a, flush=True)
import torch; say("torch")
import triton; say("triton")
import triton.runtime.cache as C
from specdec.ops.compiling import rehearsal as R
import specdec.decoder; say("decoder")
class Stub:
    def __init__(self, *a): pass
    def loads(self): return []
    def add(self, f): pass
import specdec.runner.first_passes as FP
if not os.environ.get("KNOWN"): FP.KnownKernels = Stub
from triton.runtime.jit import JITFunction
key = C.triton_key
def tkey():
    s = time.perf_counter(); r = key(); d = time.perf_counter() - s
    if d > 0.01: say(f"triton_key took {d:.3f} in {threading.current_thread().name}")
    return r
C.triton_key = tkey
import triton.compiler.compiler as CC
if hasattr(CC, "triton_key"): CC.triton_key = tkey
fills = []
def loaded(kernel, orig=R._loaded):
    s, c = time.perf_counter(), time.thread_time()
    r = orig(kernel)
    fills.append(("load", time.perf_counter() - s, time.thread_time() - c, s - T0)); return r
R._loaded = loaded
def fill(future, function, device, orig=R._fill):
    s, c = time.perf_counter(), time.thread_time(); orig(future, function, device)
    fills.append(("fill", time.perf_counter() - s, time.thread_time() - c, s - T0))
R._fill = fill
reh = R.Rehearsals.rehearse
prof = None
if os.environ.get("CPROFILE"):
    import cProfile; prof = cProfile.Profile()
def rehearse(self, run):
    s = time.perf_counter()
    if prof: prof.enable()
    wait = reh(self, run)
    if prof: prof.disable()
    say(f"rehearse took {time.perf_counter()-s:.3f}, {len(self._waiting)} wait")
    def w():
        s = time.perf_counter(); wait(); say(f"wait took {time.perf_counter()-s:.3f}")
    return w
R.Rehearsals.rehearse = rehearse
launches = []
no = R._no_launches
from rounds import start
say("benchmark")
print(start.start("8b", False)["stages"])
for kind in ("load", "fill"):
    f = [x for x in fills if x[0] == kind]
    if f: say(kind, len(f), "wall sum %.3f cpu sum %.3f first %.3f last end %.3f" % (sum(x[1] for x in f), sum(x[2] for x in f), min(x[3] for x in f), max(x[3] + x[1] for x in f)))
say("longest loads", sorted((round(x[1], 3), round(x[2], 3)) for x in fills if x[0] == "load")[-5:])
if prof:
    import pstats; p = pstats.Stats(prof); p.sort_stats("cumulative").print_stats(45); p.sort_stats("tottime").print_stats(25)
os._exit(0)
