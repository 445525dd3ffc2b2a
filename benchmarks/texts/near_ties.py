"""How far below the best the tokens of right texts lie, in units of the noise by which `specdec verify` bounds near-ties.

    python benchmarks texts.near_ties --out benchmarks/texts/results/near_ties_cpu.json

The shipped pair and tiny random targets of the tests write texts with and without speculation.  A line of the result holds,
over all tokens of both: how many the reference would not have taken; the largest of their margins in units of noise (what
`specdec verify` allows is reference.FACTOR); and at what share of places the two best tokens are closer than the bound, so that
a wrong one would go unseen.  The random targets are there because they are chaotic: rounding moves their logits by a third of
what lies between the two best tokens.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from toolkit.deepseek import DeepseekZoo
from toolkit.models import Zoo, ragged_prompts

from specdec import SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.bench.prompt_file import read_prompts
from specdec.lossless.choice import GeneratedText
from specdec.lossless.reference import FACTOR, passes_of, read_text
from specdec.session import Session

KEPT = ("auto", "int8", "fp8")
RANDOM = ("llama", "qwen3", "mistral", "v3", "v2")  # the last two choose experts


def decoders(prompts: int, device: str) -> Iterator[tuple[str, str, SpecDecoder, list[Any]]]:
    """(the target's name, how KV is kept, its decoder, its prompts)."""
    shared: dict[str, Any] = {"dtype": "bfloat16", "device": device, "max_batch_size": 16}
    for kept in KEPT:
        pair = shipped.target_folder(), shipped.draft_folder(), SpecConfig(5, 4, 16)
        own = read_prompts(shipped.prompts_file())[:prompts]
        yield "shipped", kept, SpecDecoder.from_pretrained(*pair, kv_cache_dtype=kept, max_seq_len=256, **shared), own
    with tempfile.TemporaryDirectory() as folder:
        for name in RANDOM:
            zoo = (DeepseekZoo if name in ("v2", "v3") else Zoo)(Path(folder))
            own = ragged_prompts(40, prompts, seed=3)
            yield name, "auto", zoo.decoder(name, "eagle3", SpecConfig(4, 4, 16), **shared), own


def measure(decoder: SpecDecoder, prompts: list[Any], sampling: list[SamplingParams]) -> dict[str, Any]:
    """One line, of both sides' texts."""
    passes, ratios, bounds, tokens, unsure = passes_of(Session(decoder)), [0.0], [], 0, 0
    for speculate in (False, True):
        for out, params in zip(decoder.generate(prompts, sampling, speculate=speculate), sampling, strict=True):
            check = read_text(passes, GeneratedText(out.prompt_token_ids, out.token_ids, params))
            ratios += [float("inf") if each.margin is None else FACTOR * each.margin / each.bound for each in check.off]
            tokens, unsure = tokens + len(out.token_ids), unsure + check.unsure
            bounds.append(check.bound)
    return {
        "tokens": tokens, "off": len(ratios) - 1, "largest_margin_in_noise": round(max(ratios), 3),
        "median_bound": round(median(bounds), 4), "unsure_share": round(unsure / tokens, 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    rows = []
    for name, kept, decoder, prompts in decoders(args.prompts, args.device):
        for temperature in (0.0, 0.8):
            options: dict[str, Any] = {"temperature": temperature, **({"top_p": 0.9} if temperature else {})}
            sampling = [SamplingParams(args.max_tokens, seed=i, ignore_eos=True, **options) for i in range(len(prompts))]
            rows.append({"target": name, "kv": kept, "temperature": temperature, **measure(decoder, prompts, sampling)})
            print(json.dumps(rows[-1]), flush=True)
        decoder.close()
    where = torch.cuda.get_device_name() if args.device != "cpu" else "cpu"
    about = {"device": where, "torch": torch.__version__, "date": datetime.date.today().isoformat(), "dtype": "bfloat16"}
    if args.out:
        args.out.write_text(json.dumps({**about, "factor": FACTOR, "rows": rows}, indent=1) + "\n")
