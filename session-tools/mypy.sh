#!/usr/bin/env bash
# mypy.sh [TREE]: types, as CI checks them
t=${1:-/work/main}; w=$(mktemp -d); mkdir $w/specdec; cp -r $t/specdec/. $w/specdec/; for d in attention draft verify; do cp -r $t/$d $w/specdec/$d; done
cd $w && /work/main/.venv/bin/mypy --config-file $t/pyproject.toml --cache-dir /tmp/mypycache-$(basename $t) specdec; rm -rf $w
