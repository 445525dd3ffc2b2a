# one GPU, ~75 s: rounds with grammars, 8B shape
python3 -c "import lzma; open('/tmp/tok.json','wb').write(lzma.open('.carry/tokenizer.json.xz').read())"
date -u +%T
timeout 58 python3 benchmarks texts.grammar_rounds --tokenizer /tmp/tok.json --eos 128001 --rounds 30 --only 5, --out $R/rounds.json
date -u +%T
