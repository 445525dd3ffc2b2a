# tests of what changed, then the lines to publish
timeout 100 python3 -P -m pytest -q -m gpu -p no:cacheprovider --durations=5 tests/gpu/test_gpu_start.py tests/ops/test_linear.py -k "gpu_start or gated_hopper" 2>&1 | tail -25
timeout 60 python3 -P benchmarks rounds.start --only 8b --warm 3 --out $R/start_8b_h200.json
timeout 90 python3 -P benchmarks rounds.round_8b --only none --no-auto --generate 1,8,32 --out $R/generate_8b_h200.json
