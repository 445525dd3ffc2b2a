import sys, time, traceback
for name, argv in (("gemm", []), ("prof_prefill", ["1", "today,hopper,many"]), ("prof_prefill", ["32", "today,hopper,many"]), ("prof_generate", [])):
    print("=====", name, argv, flush=True); s = time.perf_counter()
    sys.argv = [name, *argv]
    try: exec(compile(open(f"scratch/{name}.py").read(), name, "exec"), {"__name__": "x"})
    except BaseException: traceback.print_exc()
    print(f"===== took {time.perf_counter()-s:.1f}", flush=True)
