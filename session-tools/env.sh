# source env.sh NAME: python of main's venv, specdec of worktree NAME ("main" for /work/main)
export PATH=/work/main/.venv/bin:$PATH OMP_NUM_THREADS=1
if [ "$1" = main ]; then unset PYTHONPATH; else export PYTHONPATH=/work/sites/$1; fi
