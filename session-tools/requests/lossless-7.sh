# two GPUs, ~50 s: two ranks with grammars, two ranks deterministic
date -u +%T
timeout 48 python3 -P -m pytest -q -m gpu -p no:cacheprovider --durations=4 -rfE tests/gpu/test_gpu_grammar.py tests/gpu/test_gpu_deterministic.py -k "two_ranks" 2>&1 | tail -30
date -u +%T
