# two GPUs, ~60 s: the kernels that exchange memory between GPUs under compute-sanitizer
date -u +%T; uname -r
timeout 58 python3 scripts/sanitize --ranks --jobs 1 --seconds 52 memcheck racecheck
date -u +%T
