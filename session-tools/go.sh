#!/usr/bin/env bash
# go.sh SECONDS_LANES SECONDS_BOTH  (each request gets at most that; lanes side by side, then BOTH)
export ROOT=$PWD; root=$PWD; S=${1:-120}; B=${2:-200}; export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 MAX_JOBS=8
mkdir -p /tmp/trees /tmp/sites /tmp/out
[ -d /tmp/site ] || python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/site .probe/whl/*.whl
rm -rf /tmp/out/*; ln -sfn $root/.probe/shared /tmp/trees/shared
for t in main $(ls .probe/trees 2>/dev/null | sed -n 's/\.tar$//p'); do
  rm -rf /tmp/trees/$t; mkdir -p /tmp/trees/$t; tar cf - --exclude=./.probe --exclude=./.git . | tar xf - -C /tmp/trees/$t
  if [ $t != main ]; then (cd /tmp/trees/$t; xargs -r -d '\n' rm -f < $root/.probe/trees/$t.del; tar xf $root/.probe/trees/$t.tar); fi
  mkdir -p /tmp/sites/$t; ln -sfn /tmp/trees/$t /tmp/sites/$t/specdec
done
echo "ready after $SECONDS s"; nvidia-smi --query-gpu=name,clocks.sm --format=csv,noheader
one() { # TREE REQ GPUS SECONDS
  local began=$SECONDS R=/tmp/out/$2; mkdir -p $R
  ( cd /tmp/trees/$1; R=$R REQ=$2 CUDA_VISIBLE_DEVICES=$3 PYTHONPATH=/tmp/sites/$1:/tmp/site timeout -k 5 $4 bash $root/.probe/req/$2.sh > $R/log 2>&1 </dev/null; echo "rc $?" >> $R/log )
  ( flock 9; tar cJf /tmp/all.tar.xz -C /tmp/out . && mv /tmp/all.tar.xz $OUT/all.tar.xz ) 9>/tmp/lock; echo "== $2: $(tail -1 $R/log), $((SECONDS-began)) s"; tail -n ${TAIL:-12} $R/log
}
export LIMIT=${3:-265}; if [ -s .probe/first ]; then while read -r t r; do one $t $r 0,1 $B; done < .probe/first; fi
lane() { while read -r t r; do one $t $r $2 $S; done < .probe/lane$1; }
lane 0 0 & a=$!; if [ -s .probe/lane1 ]; then lane 1 1 & b=$!; wait $b; fi; wait $a
while read -r t r; do one $t $r 0,1 $B; done < .probe/lane2
tar cJf $OUT/all.tar.xz -C /tmp/out . ; ls -l $OUT; echo "all done after $SECONDS s"
