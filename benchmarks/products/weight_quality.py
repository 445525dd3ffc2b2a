"""What fewer bits of the target's weights cost in quality: accept length and next tokens of the shipped pair, on any device.

    python benchmarks products.weight_quality --out benchmarks/products/results/weight_quality_cpu.json

The shipped target's weights are rounded to nearest; the head stays as it is.  Its text is another one then, so the accept
length is compared over each target's own text, and the next tokens over the text of the ordinary weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from specdec import SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.attention.eager.dense import DenseAttention
from specdec.bench.prompt_file import read_prompts
from specdec.models.linear import Linear
from specdec.models.schemes.formats import rounded
from specdec.ops.quantised.codes import Kind

SCHEMES: dict[str, tuple[Kind, int] | None] = {
    "ordinary": None, "fp8 row": ("e4m3", 0), "fp8 128": ("e4m3", 128), "int8 128": ("int8", 128), "int4 128": ("int4", 128),
    "int4 32": ("int4", 32),
}  # fmt: skip
SHAPES = ((5, 1, 6), (5, 4, 16))


def round_target(decoder: SpecDecoder, kind: Kind, group: int) -> None:
    """Stores all matrices of the target but the output layer in that form, where their columns are whole groups."""
    head = decoder.model.get_submodule("lm_head")
    for matrix in decoder.model.modules():
        if isinstance(matrix, Linear) and matrix is not head:
            parts = {part: matrix.tensors(part)["weight"].tensor for part in matrix.parts.sizes}
            for part, weight in parts.items():
                matrix.fill(part, rounded(weight, kind, group))


@torch.inference_mode()
def next_tokens(decoder: SpecDecoder, sequences: list[list[int]]) -> list[torch.Tensor]:
    """The likeliest next token at every place of each text."""
    model, found = decoder.model, []
    for ids in sequences:
        attn = DenseAttention(model.config.layer_kinds)
        hidden = model(torch.tensor(ids), torch.arange(len(ids)), attn).hidden_TH
        found.append(model.logits(hidden).argmax(-1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    prompts = read_prompts(shipped.prompts_file(), args.prompts)
    rows: list[dict[str, Any]] = []
    sequences: list[list[int]] = []
    want: list[torch.Tensor] = []
    for shape in SHAPES:
        for name, scheme in SCHEMES.items():
            folders = shipped.target_folder(), shipped.draft_folder()
            with SpecDecoder.from_pretrained(*folders, SpecConfig(*shape), dtype="float32", device="cpu") as decoder:
                if scheme is not None:
                    round_target(decoder, *scheme)
                made = decoder.generate(prompts, SamplingParams(max_tokens=args.max_tokens, ignore_eos=True))
                if not sequences:
                    sequences = [[*out.prompt_token_ids, *out.token_ids] for out in made]
                    want = next_tokens(decoder, sequences)
                same = torch.cat([a == b for a, b in zip(next_tokens(decoder, sequences), want)])
                matrices = sum(module.num_bytes for module in decoder.model.modules() if isinstance(module, Linear))
            emitted, rounds = (sum(getattr(out.stats, key) for out in made) for key in ("emitted", "rounds"))
            row = {"weights": name, "spec": ",".join(map(str, shape)), "accept_length": round(emitted / rounds, 4),
                   "same_next_token": round(float(same.float().mean()), 4), "matrix_bytes": matrices}  # fmt: skip
            rows.append(row)
            print(json.dumps(row), flush=True)
    about = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
             "prompts": len(prompts), "max_tokens": args.max_tokens}  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
