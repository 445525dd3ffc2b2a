"""Which tree shape suits this machine: accept length and speed of a few shapes.  own_tree_shape.py [TARGET DRAFT].

More nodes accept more tokens a round and make a round longer; which one wins depends on the machine and on the batch.
`specdec bench` measures the same with repeats, its own baseline and a check of the outputs.
"""

import sys
import time

from specdec import SamplingParams, SpecConfig, SpecDecoder, Stats, shipped

target, draft = sys.argv[1:3] if len(sys.argv) > 2 else (shipped.target_folder(), shipped.draft_folder())
prompts = ["Once upon a time", "One day, a girl named Lily", "The sun was", "There was a big dog"]
sampling = SamplingParams(max_tokens=32, ignore_eos=True)
shapes = [
    SpecConfig(num_steps=3, topk=1, num_draft_tokens=4),  # a chain: one candidate a level
    SpecConfig(num_steps=5, topk=1, num_draft_tokens=6),
    SpecConfig(num_steps=5, topk=4, num_draft_tokens=16),  # a tree: the best 15 candidates of five levels, and the root
    SpecConfig(num_steps="auto", topk=4, num_draft_tokens=16),  # levels chosen while it runs
]

print(f"{'S,k,nd':>10} {'tokens a round':>15} {'tok/s':>8}")
for shape in shapes:
    decoder = SpecDecoder.from_pretrained(target, draft, shape, max_batch_size=len(prompts))
    decoder.generate(prompts, sampling)  # warm-up: kernels are compiled and graphs captured
    began = time.perf_counter()
    answers = decoder.generate(prompts, sampling)
    seconds = time.perf_counter() - began
    tokens = sum(len(answer.token_ids) for answer in answers)
    accept_length = Stats.total([answer.stats for answer in answers]).accept_length
    print(f"{shape.label:>10} {accept_length:>15.2f} {tokens / seconds:>8.0f}")
