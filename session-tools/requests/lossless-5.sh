# one GPU, ~115 s: deterministic texts of eight targets, eight processes side by side (nothing is timed)
date -u +%T
for m in pair dense windowed experts latent differential; do
  timeout 112 python3 benchmarks texts.deterministic --models $m --ways 5,7,6,3,4 --pool-share 0.08 --out $R/$m.json > $R/$m.txt 2>&1 &
done
for m in sparse normed; do
  timeout 112 python3 benchmarks texts.deterministic --models $m --ways 1,2,5,7,3,4,6 --pool-share 0.08 --out $R/$m.json > $R/$m.txt 2>&1 &
done
wait
date -u +%T; tail -n 8 $R/*.txt
