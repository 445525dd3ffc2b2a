#!/usr/bin/env bash
# wt.sh NAME: a worktree of main at /work/wt/NAME on branch NAME
set -e
n=$1; cd /work/main; git worktree add -q -B "$n" /work/wt/$n main
mkdir -p /work/sites/$n; ln -sfn /work/wt/$n /work/sites/$n/specdec
echo "cd /work/wt/$n; source /work/tools/env.sh $n"
