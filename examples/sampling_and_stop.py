"""Sampling with a seed, and the three ways in which a text ends: sampling_and_stop.py [TARGET DRAFT]."""

import sys

from specdec import SamplingParams, SpecDecoder, shipped

target, draft = sys.argv[1:3] if len(sys.argv) > 2 else (shipped.target_folder(), shipped.draft_folder())
decoder = SpecDecoder.from_pretrained(target, draft, dtype="float32")
prompt = "Tom had a red ball."

# A seed fixes the text: it depends neither on the batch, nor on the draft.
sampled = SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=3)
(fast,) = decoder.generate(prompt, sampled)
(plain,) = decoder.generate(prompt, sampled, speculate=False)
assert fast.token_ids == plain.token_ids
print("sampled:", repr(fast.text))

# A stop string ends the text and is not part of it.
(answer,) = decoder.generate(prompt, SamplingParams(max_tokens=40, stop=[".", "!"]))
print(f"{answer.finish_reason}: {answer.text!r}")

# A stop token stays in token_ids, and its text is not shown.
third = decoder.generate(prompt, SamplingParams(max_tokens=3))[0].token_ids[-1]
(answer,) = decoder.generate(prompt, SamplingParams(max_tokens=40, stop_token_ids=[third]))
print(f"{answer.finish_reason}: token_ids {answer.token_ids}, text {answer.text!r}")

# The model's own end of text, and max_tokens.
(answer,) = decoder.generate(prompt, SamplingParams(max_tokens=300))
print(f"{answer.finish_reason}: after {len(answer.token_ids)} of at most 300 tokens")
