"""What fewer bits of the target's weights cost in quality: accept length and next tokens of a pair, on a CPU.

    python benchmarks products.weight_quality --out benchmarks/products/results/weight_quality_cpu.json
    python benchmarks products.weight_quality --target DIR --draft DIR --prompts FILE.jsonl --out FILE

Without a pair it takes the shipped one.  The target's weights are rounded to nearest, or to bfloat16; the head stays as it is.
Its text is another one then, so the accept length is compared over each target's own text, and the next tokens over the text
of the ordinary weights.  All computes in float32.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec import SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.attention.eager.dense import DenseAttention
from specdec.bench.prompt_file import read_prompts
from specdec.models.linear import Linear
from specdec.models.schemes.formats import RoundToNearest, rounded
from specdec.models.schemes.rows import QuantisedRows
from specdec.ops.products.formats.quantised import Kind, unscaled

SHAPES = ((5, 1, 6), (5, 4, 16))
MX_LARGEST, NV_LARGEST = 6.0, 6.0 * 448.0  # of e2m1; of e2m1 with a scale in e4m3


class Scheme(NamedTuple):
    """kind: None leaves dense values, in bfloat16 if `group_size` is 16, else as the checkpoint has them.

    group_size: columns of a scale; 0, and where the columns are no whole groups: all of a row.
    smaller: whether groups are smaller where the columns are no whole groups, as `quantize` makes them.
    """

    kind: Kind | None
    group_size: int = 0
    smaller: bool = False


SCHEMES = {
    "ordinary": Scheme(None), "bf16": Scheme(None, 16), "fp8 row": Scheme("e4m3"), "fp8 128": Scheme("e4m3", 128),
    "int8 128": Scheme("int8", 128), "int4 128": Scheme("int4", 128), "int4 quantize": Scheme("int4", 128, True),
    "int4 32": Scheme("int4", 32),
    "mxfp4": Scheme("e2m1", 32), "nvfp4": Scheme("e2m1", 16),
}  # fmt: skip


def rounded_floats(weight_OI: Tensor, group: int) -> QuantisedRows:
    """e2m1: mxfp4's scales are powers of two, nvfp4's (groups of 16) e4m3 numbers times one scale of the matrix."""
    group = group if weight_OI.shape[1] % group == 0 else 0
    runs_OGg = weight_OI.float().unflatten(1, (-1, group or weight_OI.shape[1]))
    largest_OG = runs_OGg.abs().amax(dim=2)
    if group == 16:
        whole = largest_OG.max() / NV_LARGEST
        scales_NG = (largest_OG / MX_LARGEST / whole).to(torch.float8_e4m3fn).float() * whole
    else:
        scales_NG = 2.0 ** (largest_OG.log2().floor() - 2)  # OCP's rule: what is above 6 becomes 6
    scales_NG = torch.where(scales_NG == 0, 1.0, scales_NG)
    scaled_OI = (runs_OGg / scales_NG[..., None]).flatten(1)
    table = unscaled("e2m1", torch.arange(8, dtype=torch.uint8))
    middles = (table[1:] + table[:-1]) / 2
    magnitudes = torch.bucketize(scaled_OI.abs().clamp(max=MX_LARGEST), middles)
    qvalues_NK = (magnitudes + 8 * (scaled_OI < 0)).to(torch.uint8)
    return QuantisedRows("e2m1", qvalues_NK, scales_NG, None, group)


def round_target(decoder: SpecDecoder, scheme: Scheme) -> None:
    """Stores all matrices of the target but the output layer in that form."""
    head, kind = decoder.model.get_submodule("lm_head"), scheme.kind
    for matrix in decoder.model.modules():
        if not isinstance(matrix, Linear) or matrix is head:
            continue
        parts = {part: matrix.tensors(part)["weight"].tensor for part in matrix.parts.sizes}
        for part, weight in parts.items():
            if kind is None:
                weight.copy_(weight.bfloat16())
            elif kind == "e2m1":
                matrix.fill(part, rounded_floats(weight, scheme.group_size))
            else:
                group, columns = scheme.group_size, weight.shape[1]
                if scheme.smaller:
                    group = RoundToNearest(kind, group).group_size_of(columns)
                elif group and columns % group:
                    group = 0
                matrix.fill(part, rounded(weight, kind, group))


@torch.inference_mode()
def next_tokens(decoder: SpecDecoder, sequences: list[list[int]]) -> list[Tensor]:
    """The likeliest next token at every place of each text."""
    model, found = decoder.model, []
    for ids in sequences:
        attn = DenseAttention(model.config.layer_kinds)
        hidden = model(torch.tensor(ids), torch.arange(len(ids)), attn).hidden_TH
        found.append(model.logits(hidden).argmax(-1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(shipped.target_folder()), metavar="DIR")
    parser.add_argument("--draft", default=str(shipped.draft_folder()), metavar="DIR")
    parser.add_argument("--prompts", default=str(shipped.prompts_file()), metavar="FILE")
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES), metavar="NAME")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    prompts = read_prompts(args.prompts, args.num_prompts)
    rows: list[dict[str, Any]] = []
    sequences: list[list[int]] = []
    want: list[Tensor] = []
    for shape in SHAPES:
        for name in dict.fromkeys(("ordinary", *args.schemes)):
            folders = args.target, args.draft
            with SpecDecoder.from_pretrained(*folders, SpecConfig(*shape), dtype="float32", device="cpu") as decoder:
                if name != "ordinary":
                    round_target(decoder, SCHEMES[name])
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
