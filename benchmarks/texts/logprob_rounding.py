"""How far log-probabilities of a 16-bit target differ between two passes over one text, and which part its logits have in it.

    python benchmarks texts.logprob_rounding --out benchmarks/texts/results/logprob_rounding.json

Two passes of transformers over the same texts in bfloat16, a whole text at once and a token at a time with a cache, give hidden
states that differ by rounding.  From each, log-probabilities are made twice: with logits rounded to bfloat16, as the product
hands them out, and with logits kept in float32.  A pass of the same weights in float32 is compared with both too.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import shipped

PROMPTS, TOKENS = 8, 64


@torch.inference_mode()
def differences() -> dict[str, Tensor]:
    """Absolute differences of the log-probabilities of all tokens, by what is compared."""
    folder = shipped.target_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weight_VH = model.lm_head.weight.float()
    found: dict[str, list[Tensor]] = {}
    for line in shipped.prompts_file().read_text().splitlines()[:PROMPTS]:
        ids_1T = torch.tensor([tokenizer.encode(json.loads(line)["prompt"])])
        ids_1T = exact.generate(ids_1T, max_new_tokens=TOKENS, do_sample=False)
        next_T1 = ids_1T[0, 1:, None]
        at_once_TH = model.model(ids_1T).last_hidden_state[0, :-1]
        cache, rows = None, []
        for place in range(ids_1T.shape[1] - 1):
            out = model.model(ids_1T[:, place : place + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.last_hidden_state[0, 0])

        def logprobs(hidden_TH: Tensor, dtype: torch.dtype, next_T1: Tensor = next_T1) -> Tensor:
            logits_TV = (hidden_TH.float() @ weight_VH.T).to(dtype).float()
            return logits_TV.log_softmax(-1).gather(1, next_T1)

        own = exact(ids_1T).logits[0, :-1].log_softmax(-1).gather(1, next_T1)
        for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
            first, second = logprobs(at_once_TH, dtype), logprobs(torch.stack(rows), dtype)
            found.setdefault(f"two passes, logits in {name}", []).append((first - second).abs())
            found.setdefault(f"the float32 model, logits in {name}", []).append((first - own).abs())
    return {name: torch.cat(each) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = {}
    for name, off in differences().items():
        rows[name] = {"tokens": len(off), "mean": off.mean().item(), "max": off.max().item()}
        print(f"{name:<38} {len(off)} tokens: {rows[name]['mean']:.4f} on average, at most {rows[name]['max']:.4f}")
    if args.out:
        result = {"target": "shipped", "device": "cpu", "torch": torch.__version__}
        result |= {"date": time.strftime("%Y-%m-%d"), "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
