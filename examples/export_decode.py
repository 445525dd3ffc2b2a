"""Exports a target's decode pass with torch.export, saves it, loads it again and writes greedily: export_decode.py [TARGET].

The loaded program is a graph of torch's own operations and of specdec's operators; it has no page pool, scheduler or sampler.
Here the script hands out pages itself: one row, whose pages lie in the cache one after the other.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer

from specdec import SamplingParams, SpecDecoder, shipped
from specdec.operators import DecodePass, export_decode

PAGE, PAGES, TOKENS, PROMPT = 16, 8, 48, "Once upon a time"
target = sys.argv[1] if len(sys.argv) > 1 else shipped.target_folder()
decode = DecodePass.from_pretrained(target, page_size=PAGE)

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "decode.pt2"
    torch.export.save(export_decode(decode), file)
    program = torch.export.load(file).module()

tokenizer = AutoTokenizer.from_pretrained(target)
pages = torch.arange(PAGES, dtype=torch.int32)[None]
cache = decode.new_cache(PAGES * PAGE)
prompt = tokenizer(PROMPT).input_ids
tokens, written = torch.tensor([prompt]), list[int]()
with torch.no_grad():
    for _ in range(TOKENS):  # the whole prompt in the first call, one token in each of the others
        stored = torch.tensor([len(prompt) + len(written) - tokens.shape[1]], dtype=torch.int32)
        tokens = program(tokens, pages, stored, cache)[:, -1:].argmax(-1)
        written.append(int(tokens))
print(PROMPT + tokenizer.decode(written))

names = {str(node.target).split(".")[1] for node in program.graph.nodes if str(node.target).startswith("specdec.")}
print(f"\noperators in the graph: {', '.join(sorted(names))}")
with SpecDecoder.from_pretrained(target, None) as decoder:
    (answer,) = decoder.generate(PROMPT, SamplingParams(max_tokens=TOKENS))
same = answer.token_ids == written[: len(answer.token_ids)]
print(f"SpecDecoder writes {'the same' if same else 'ANOTHER TEXT'}")
