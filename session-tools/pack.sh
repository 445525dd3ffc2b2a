#!/usr/bin/env bash
# pack.sh "LANE0" "LANE1" "BOTH": each a list of TREE:REQUEST (request = /work/tools/requests/REQUEST.sh, run in TREE).
# main's working tree travels whole; other trees as what differs from it.
set -e
P=/work/main/.probe; rm -rf $P/trees $P/req; mkdir -p $P/trees $P/req
head=$(git -C /work/main rev-parse HEAD)
[ -z "$(git -C /work/main status --porcelain)" ] || echo "NOTE: main has uncommitted changes; they travel for tree main, others are compared with HEAD"
i=0
for list in "$1" "$2" "$3"; do
  : > $P/lane$i
  for e in $list; do
    t=${e%%:*}; r=${e##*:}
    [ -f /work/tools/requests/$r.sh ] || { echo "no request $r"; exit 1; }
    cp /work/tools/requests/$r.sh $P/req/; echo "$t $r" >> $P/lane$i
    if [ $t != main ] && [ ! -f $P/trees/$t.tar ]; then
      ( cd /work/wt/$t; git add -AN; git diff --name-only --diff-filter=d $head > /tmp/pk; git diff --no-renames --name-only --diff-filter=D $head > $P/trees/$t.del
        git diff --no-renames --name-only --diff-filter=d $head > /tmp/pk; tar cf $P/trees/$t.tar -T /tmp/pk
        wc -l < /tmp/pk; if [ -d .carry ]; then tar rf $P/trees/$t.tar .carry; fi )
    fi
  done; i=$((i+1))
done
du -sh $P
