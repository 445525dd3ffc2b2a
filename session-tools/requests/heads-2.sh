# the controller against fixed shapes, batch 8
timeout 98 python3 -P benchmarks rounds.controller --batches 8 --taus 1.5,1,3,2,6,4.5 --seconds 0.4 --repeats 2 --out $R/controller_b8.json
