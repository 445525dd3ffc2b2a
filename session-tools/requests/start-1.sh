# where the start's seconds go, then prefill and generate by kernel, with candidates
date -u; env | grep -i -E "^(PYTHON|TORCH|TRITON|CUDA|OMP|LD_)" | cut -c1-200; nproc; grep -m1 "model name" /proc/cpuinfo; cat /proc/loadavg; free -m | head -2
grep -m1 -o sha_ni /proc/cpuinfo
D=$(python3 -c "import importlib.util,os; print(os.path.dirname(importlib.util.find_spec('torch').origin))"); echo $D; ls $D/__pycache__ | wc -l; ls $D/fx/__pycache__ | wc -l; ls -laL $D/lib | awk '$5>30000000{print $5,$9}'; ls -la $D/../triton/_C/; mount | grep -E " / |/opt" | head -3
export TRITON_CACHE_DIR=/tmp/tc
say() { echo "##### $(date -u +%T) $*"; }
go() { timeout 40 python3 -P scratch/start_new.py 2>&1 | grep -v -i warning | tail -12; }
say cold; FLAGS= go
say warm; FLAGS= go
export PYTHONPYCACHEPREFIX=/tmp/pyc PYTHONDONTWRITEBYTECODE=
say bytecode-written; FLAGS= go
say bytecode; FLAGS= go
say known-writes; FLAGS=known go
say known; FLAGS=known go
say known-all; FLAGS=known,cuda,nogc,nobackends go
say prepare; FLAGS=prepare go
say cold-prepare; TRITON_CACHE_DIR=/tmp/tc2 FLAGS=cuda,prepare,nogc go
say cprofile; CPROFILE=1 timeout 25 python3 -P scratch/prof_start.py
say gpu
( python3 -X importtime -c "import torch" 2> $R/importtime_torch.txt
  python3 -P scratch/pieces.py pieces; python3 -P scratch/pieces.py pieces-rtlazy; python3 -P scratch/pieces.py plain; python3 -P scratch/pieces.py nogc; python3 -P scratch/pieces.py nobackends; python3 -P scratch/pieces.py lazy; python3 -P scratch/pieces.py plain
  python3 -P scratch/pieces.py beside-libs-cuda-then
  LD_DEBUG=statistics python3 -c "import torch" 2>&1 | grep -E "final|relocation|startup|load" | tail -14
  python3 -X importtime -c "import torch, triton, specdec.decoder" 2> $R/importtime_all.txt ) > $R/imports.txt 2>&1 &
timeout 100 python3 -P scratch/w1_gpu.py 2>&1 | tee $R/gpu.txt
wait; cat $R/imports.txt; say end
