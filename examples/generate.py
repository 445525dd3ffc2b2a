"""Generates one text with the pair that ships inside specdec, or with your own: generate.py [TARGET DRAFT]."""

import sys

from specdec import SamplingParams, SpecDecoder, shipped

target, draft = sys.argv[1:3] if len(sys.argv) > 2 else (shipped.target_folder(), shipped.draft_folder())
decoder = SpecDecoder.from_pretrained(target, draft)

(answer,) = decoder.generate("Once upon a time", SamplingParams(max_tokens=64))

print("Once upon a time" + answer.text)
print(f"\nended by {answer.finish_reason} after {len(answer.token_ids)} tokens")
print(f"{answer.stats.rounds} rounds, {answer.stats.accept_length:.2f} tokens a round")
