# int4, window 2 (takes the place of int4-1): the final kernel's candidates beside today's, then its tests
LIMIT=62 timeout 75 python3 -P .x/bench2.py
timeout 43 python3 -P -m pytest -q -m gpu -n 15 -p no:cacheprovider -rfEs tests/ops/quantised/test_quantised_hopper.py -k "registers or True" 2>&1 | tail -30
