du -sh ~/.triton/cache; cd ~/.triton/cache; ls | wc -l
find . -name '*.cubin' -o -name '*.json' -o -name '*.so' > /tmp/l; wc -l < /tmp/l; tar cf - -T /tmp/l | xz -T0 -1 > /tmp/c.xz; ls -l /tmp/c.xz; split -b 15000000 /tmp/c.xz $OUT/cubins.; ls -l $OUT
