# the controller against fixed shapes, batch 1 (cells in the order of what matters)
timeout 108 python3 -P benchmarks rounds.controller --batches 1 --taus 1.5,2,4.5,1,3,6 --seconds 0.4 --repeats 2 --out $R/controller_b1.json
