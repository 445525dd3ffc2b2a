timeout 100 python3 scratch/round_ab.py $R/ab.json 5,1,6:1:1024 plain:32 5,8,32:1 5,1,6:1:32768 7,10,60:1 5,1,6:8 plain:1:1024
timeout 55 python3 -P -m pytest -q -x -p no:cacheprovider tests/ops/products/test_normed.py tests/attention/kernels/test_joined_suffix.py -k "chained or 4096-4096 or 1024-2088 or joined or definition" 2>&1 | tail -15
