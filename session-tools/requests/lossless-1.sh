# one GPU, ~100 s: kernels under compute-sanitizer beside device tests (nothing is timed)
date -u +%T; which compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer; (compute-sanitizer --version || /usr/local/cuda/bin/compute-sanitizer --version) | tail -2; uname -r
S=75
timeout $((S+8)) python3 scripts/sanitize --jobs 1 --seconds $S --kernels latent_path_kernel memcheck racecheck > $R/san_path.txt 2>&1 &
timeout $((S+8)) python3 scripts/sanitize --jobs 1 --seconds $S --kernels latent_hopper_kernel racecheck > $R/san_hopper.txt 2>&1 &
timeout $((S+8)) python3 scripts/sanitize --jobs 1 --seconds $S --kernels quantised_sliced_kernel memcheck racecheck > $R/san_sliced.txt 2>&1 &
timeout $((S+8)) python3 scripts/sanitize --jobs 1 --seconds $S --kernels quantised_hopper_kernel memcheck racecheck > $R/san_wide.txt 2>&1 &
timeout $S python3 -P -m pytest -q -m gpu -n 6 -p no:cacheprovider --durations=6 -rfE tests/gpu/test_gpu_grammar.py tests/gpu/test_gpu_options.py tests/verify/test_round_draws.py > $R/pytest.txt 2>&1
date -u +%T; tail -30 $R/pytest.txt
wait
date -u +%T; tail -n +1 $R/san_*.txt
