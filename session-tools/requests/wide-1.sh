# products of 65 to 512 rows: sweep at 192 and 256 rows, rounds with today's and with the best tiles, tests of odd shapes
BEST_OUT=/tmp/best.json NO_LAYERS=1 ROWS=192,256 timeout 70 python3 -P sweep/wide_sweep.py 2>&1; cp /tmp/best.json $R/; cat /tmp/best.json
timeout 50 python3 -P -m pytest -q -n 14 -m gpu -p no:cacheprovider -rfE tests/ops/products/test_many_linear.py 2>&1 | tail -15
for p in none gate_up,down,qkv,o,lm_head gate_up; do echo "ROUNDS WITH $p"; BEST=/tmp/best.json PRODUCTS=$p timeout 40 python3 -P sweep/rounds.py --only 5,1,6:32 5,8,32:8 --no-auto --no-prefill --rounds 40 2>&1 | grep -v "^ *$" | cut -c1-700; done
