# the whole GPU suite over the visible GPUs; LIMIT seconds, then it stops by itself; keeps compiled kernels in $OUT/cubins.tar.xz
cat > /tmp/gpupick.py <<'P'
import os, time
w = os.environ.get("PYTEST_XDIST_WORKER")
if w:
    gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(w[2:]) % len(gpus)]
began = time.monotonic(); LIMIT = float(os.environ.get("LIMIT", "1000"))
config = None
def pytest_configure(config):
    globals()["config"] = config
def pytest_runtest_logreport(report):
    if w: return
    if report.when == "call" or report.outcome != "passed":
        with open(os.environ["R"] + "/tests", "a") as f:
            f.write(f"{report.outcome[:4]} {report.duration:6.1f} {time.monotonic()-began:6.1f} {report.nodeid}\n")
            if report.outcome == "failed": f.write("    " + str(report.longrepr)[-1500:].replace("\n", "\n    ") + "\n")
    if time.monotonic() - began > LIMIT:
        d = config.pluginmanager.get_plugin("dsession")
        if d is not None and not d.shouldstop: d.shouldstop = "the limit is over"
P
if [ -f "$ROOT/.probe/cubins.tar" ] && [ ! -d ~/.triton/cache ]; then mkdir -p ~/.triton/cache; tar xf $ROOT/.probe/cubins.tar -C ~/.triton/cache; echo "cubins unpacked: $SECONDS s"; fi
PYTHONPATH=$PYTHONPATH:/tmp timeout -k 3 $((LIMIT+8)) python3 -P -m pytest -q -p gpupick -m gpu -n ${N:-30} --dist loadfile -p no:cacheprovider --durations=25 -rfE tests > $R/pytest 2>&1
echo "rc $?, $SECONDS s"; grep -c ^pass $R/tests; grep ^fail $R/tests; tail -5 $R/pytest
