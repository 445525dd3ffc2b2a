set -x
nvidia-smi --query-gpu=name,clocks.sm,clocks.mem,temperature.gpu --format=csv
timeout 147 python3 scratch/sweep1.py
nvidia-smi --query-gpu=name,clocks.sm,clocks.mem,temperature.gpu --format=csv
