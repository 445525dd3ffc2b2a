"""How often a head is right, depth by depth, over several prompts: measure_acceptance.py [TARGET DRAFT PROMPTS.jsonl].

Averages are taken over counters, not over requests: a long text weighs more than a short one.
"""

import json
import sys
from pathlib import Path

from specdec import SamplingParams, SpecConfig, SpecDecoder, Stats, shipped

own = len(sys.argv) > 3
target, draft = sys.argv[1:3] if own else (shipped.target_folder(), shipped.draft_folder())
lines = Path(sys.argv[3] if own else shipped.prompts_file()).read_text(encoding="utf-8").split("\n")
prompts = [json.loads(line)["prompt"] for line in lines if line][:4]

decoder = SpecDecoder.from_pretrained(target, draft, SpecConfig(num_steps=5, topk=4, num_draft_tokens=16), dtype="float32")
greedy = SamplingParams(max_tokens=48)
answers = decoder.generate(prompts, greedy)
plain = decoder.generate(prompts, greedy, speculate=False)
assert [a.token_ids for a in answers] == [a.token_ids for a in plain], "speculation never changes a text in float32"

total = Stats.total([answer.stats for answer in answers])
print(f"accept length {total.accept_length:.2f} over {total.rounds} rounds of {len(prompts)} prompts")
print("of each prompt:", ", ".join(f"{answer.stats.accept_length:.2f}" for answer in answers))
for depth, share in enumerate(total.acceptance_by_depth, 1):
    print(f"depth {depth}: accepted {share:.0%} of the {total.reached_by_depth[depth - 1]} rounds that reached it")
