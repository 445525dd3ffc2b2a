# the tests that need two GPUs
python3 -P -m pytest -q -m gpu -n 3 --dist loadfile -p no:cacheprovider --durations=8 -rfE tests/gpu/test_gpu_ranks.py tests/gpu/test_gpu_context.py tests/gpu/test_gpu_symmetric.py 2>&1 | tail -40
