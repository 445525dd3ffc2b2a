"""Pieces of import torch.  argv[1]: variant."""
import time, sys
T0 = time.perf_counter()
import os, resource
variant = sys.argv[1]
last = [T0, resource.getrusage(resource.RUSAGE_SELF)]
def lap(name):
    now, r = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    p = last[1]
    print(f"  {variant}: {name}: wall {now-last[0]:.3f} user {r.ru_utime-p.ru_utime:.3f} sys {r.ru_stime-p.ru_stime:.3f} minflt {r.ru_minflt-p.ru_minflt} majflt {r.ru_majflt-p.ru_majflt} mods {len(sys.modules)}", flush=True)
    last[:] = [time.perf_counter(), r]
import ctypes, importlib.util
where = "/opt/torch/.venv/lib/python3.12/site-packages/torch"
if not os.path.isdir(where): where = os.path.dirname(importlib.util.find_spec("torch").origin)
lib = where + "/lib/"
if "nogc" in variant: import gc; gc.disable()
if "nobackends" in variant: os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
if "lazy" in variant: sys.setdlopenflags(os.RTLD_LAZY)
if "pieces" in variant:
    lap("start")
    ctypes.CDLL(lib + "libtorch_global_deps.so", mode=ctypes.RTLD_GLOBAL); lap("global deps")
    for name in ("libc10.so", "libc10_cuda.so", "libtorch_cpu.so", "libtorch_cuda.so", "libtorch_python.so"):
        ctypes.CDLL(lib + name, mode=os.RTLD_LAZY if "rtlazy" in variant else os.RTLD_NOW); lap(name)
    import numpy; lap("numpy")
threads = []
if "beside" in variant:
    import threading
    def libs():
        s = time.perf_counter()
        ctypes.CDLL(lib + "libtorch_global_deps.so", mode=ctypes.RTLD_GLOBAL)
        m = time.perf_counter()
        ctypes.CDLL(lib + "libtorch_python.so", mode=os.RTLD_NOW)
        print(f"  {variant}: in thread: deps {m-s:.3f} torch_python {time.perf_counter()-m:.3f}", flush=True)
    def cuda():
        s = time.perf_counter()
        c = ctypes.CDLL("libcuda.so.1"); r = c.cuInit(0); m = time.perf_counter()
        ctx = ctypes.c_void_p(); q = c.cuDevicePrimaryCtxRetain(ctypes.byref(ctx), 0)
        print(f"  {variant}: in thread: cuInit {m-s:.3f} ({r}) context {time.perf_counter()-m:.3f} ({q})", flush=True)
    for f in ((libs, cuda) if "libs" in variant else (cuda,)):
        t = threading.Thread(target=f); t.start(); threads.append(t)
    lap("threads begun")
    if "libs" in variant:
        import triton; lap("triton")
        import numpy; lap("numpy")
import torch; lap("torch")
for t in threads: t.join()
lap("joined")
if "cuda" in variant or threads:
    torch.zeros(1, device="cuda").sum().item(); lap("CUDA")
if "then" in variant:
    import triton; lap("triton")
    import specdec.decoder; lap("decoder")
print(f"  {variant}: total {time.perf_counter()-T0:.3f}", flush=True)
