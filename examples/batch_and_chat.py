"""Several prompts at once, each with settings of its own; and a chat, where the model has a chat template.

batch_and_chat.py [TARGET DRAFT]
"""

import sys

from specdec import SamplingParams, SpecDecoder, shipped

target, draft = sys.argv[1:3] if len(sys.argv) > 2 else (shipped.target_folder(), shipped.draft_folder())
decoder = SpecDecoder.from_pretrained(target, draft, max_batch_size=4)  # four run together; more prompts wait for a place

prompts = ["Once upon a time", "One day, a girl named Lily", "The sun was", "There was a big dog", "In the park"]
greedy = SamplingParams(max_tokens=24)
warm = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=7)
for prompt, answer in zip(prompts, decoder.generate(prompts, [greedy, greedy, warm, warm, greedy])):
    print(f"{prompt!r} -> {answer.text!r}")

messages = [{"role": "user", "content": "Tell me a story about a bear."}]
try:
    (answer,) = decoder.generate(messages, greedy)
    print("chat:", answer.text)
except ValueError as error:  # the shipped target was trained on stories and has no chat template
    print("no chat:", error)
