#!/usr/bin/env bash
# fetch.sh FOLDER: unpacks the run's results to /work/tools/results
tar xJf $(find $1 -name all.tar.xz | head -1) -C /work/tools/results && ls -t /work/tools/results | head -20
