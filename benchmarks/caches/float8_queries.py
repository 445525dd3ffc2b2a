"""What flash-attn 3 costs in quality over an fp8 cache, where it rounds queries and softmax weights to float8 too.

    python benchmarks caches.float8_queries texts --out FILE    # with flash-attn-3's kernels
    python benchmarks caches.float8_queries errors --out FILE   # any device

texts: the shipped pair, bf16, greedy, over KV in bf16 and in fp8, read by our kernels and by flash-attn 3.  A line holds the
accept length, how many texts equal those of plain decoding with the same settings, and how many of the others part at a
near-tie, by the check of `specdec bench`.
errors: how far attention and logits move in one dense float32 forward over the pair's texts, by rounding queries, keys and
values, or all of them.  Softmax weights stay as they are.

Shapes: T tokens, K kv heads, G query heads of each, D head dim.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from engine_internals import target_cache
from torch import Tensor

from specdec import SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.attention.caches.quant_cache import as_stored
from specdec.attention.eager.dense import DenseAttention, StoreFn
from specdec.attention.flash.queries import float8_queries
from specdec.attention.inputs import DenseHeads, HeadInputs, LayerInputs
from specdec.bench.prompt_file import read_prompts
from specdec.lossless.near_tie import explain_divergence
from specdec.session import Session

SETTINGS = (("auto", "triton"), ("fp8", "triton"), ("fp8", "fa3"))  # kv_cache_dtype, attention
SHAPES = ("5,1,6", "5,4,16")
PROMPTS = 48


def measure(kv: str, attention: str, shape: str, max_tokens: int) -> dict[str, Any]:
    spec, folders = SpecConfig(*map(int, shape.split(","))), (shipped.target_folder(), shipped.draft_folder())
    decoder = SpecDecoder.from_pretrained(
        *folders, spec, dtype="bfloat16", device="cuda", kv_cache_dtype=kv, attention=attention, max_batch_size=PROMPTS
    )
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompts = read_prompts(shipped.prompts_file(), PROMPTS)
    fast, plain = (decoder.generate(prompts, sampling, speculate=speculate) for speculate in (True, False))
    session = Session(decoder)
    found = [
        explain_divergence(session, number, a.prompt_token_ids, a.token_ids, b.token_ids, sampling)
        for number, (a, b) in enumerate(zip(plain, fast, strict=True))
    ]
    accepted = sum(out.stats.emitted for out in fast) / sum(out.stats.rounds for out in fast)
    row = {
        "kv": kv, "attention": attention, "spec": shape, "accept_length": round(accepted, 4),
        "prompts": len(prompts), "equal": found.count(None),
        "near_ties": sum(each is not None and each.verdict == "near-tie" for each in found),
        "diverged": sum(each is not None and each.verdict != "near-tie" for each in found),
        "widest_margin": max((each.margin or 0 for each in found if each), default=0.0),
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    decoder.close()
    return row


class RoundedQueries(HeadInputs):
    """Heads whose queries are rounded to float8, each token by itself."""

    def dense(self) -> DenseHeads:
        q_TQD, k_TKD, v_TKD = super().dense()
        (T, H, _), K = q_TQD.shape, k_TKD.shape[1]
        rounded, scale_TK = float8_queries(q_TQD, torch.arange(T + 1, dtype=torch.int32), 1, K)
        return DenseHeads(rounded.float() * scale_TK.repeat_interleave(H // K, dim=1)[:, :, None], k_TKD, v_TKD)


class Compared(DenseAttention):
    """Dense attention with rounded queries, keys or values, which notes how far each layer's output is from the exact one."""

    def __init__(self, kinds: Any, stores: StoreFn | None, queries: bool) -> None:
        super().__init__(kinds, as_stored=stores)
        self.exact, self.queries, self.errors = DenseAttention(kinds), queries, list[float]()

    def __call__(self, layer: int, inputs: LayerInputs, *args: Any, **kwargs: Any) -> Tensor:
        assert isinstance(inputs, HeadInputs)
        want = self.exact(layer, HeadInputs(inputs.qkv_TXD.clone(), inputs.prep), *args, **kwargs)
        rounded = RoundedQueries(inputs.qkv_TXD, inputs.prep) if self.queries else inputs
        got = super().__call__(layer, rounded, *args, **kwargs)
        self.errors.append(float((got - want).norm() / want.norm()))
        return got


@torch.inference_mode()
def errors(max_tokens: int) -> list[dict[str, Any]]:
    folders = shipped.target_folder(), shipped.draft_folder()
    decoder = SpecDecoder.from_pretrained(*folders, SpecConfig(5, 1, 6), dtype="float32", device="cpu", kv_cache_dtype="fp8")
    prompts = read_prompts(shipped.prompts_file(), PROMPTS)
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    model, stores = decoder.model, as_stored(target_cache(decoder))
    relative: dict[str, list[float]] = {"queries": [], "keys and values": [], "all": []}
    moved: dict[str, list[float]] = {name: [] for name in relative}
    for out in outputs:
        ids_T = torch.tensor([*out.prompt_token_ids, *out.token_ids])
        at_T, kinds = torch.arange(len(ids_T)), model.config.layer_kinds
        exact_TV = model.logits(model(ids_T, at_T, DenseAttention(kinds)).hidden_TH)
        for name in relative:
            attn = Compared(kinds, None if name == "queries" else stores, name != "keys and values")
            moved[name].append(float((model.logits(model(ids_T, at_T, attn).hidden_TH) - exact_TV).abs().mean()))
            relative[name] += attn.errors
    rows = [
        {"rounded": name, "attention_relative_mean": mean(relative[name]), "logits_mean": mean(moved[name])}
        for name in relative
    ]
    print(json.dumps(rows, indent=1))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("texts", "errors"), nargs="?", default="texts")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--max-tokens", type=int, default=300)
    args = parser.parse_args()
    is_texts = args.what == "texts"
    if is_texts:
        rows = [measure(*setting, shape, args.max_tokens) for shape in SHAPES for setting in SETTINGS]
    else:
        rows = errors(args.max_tokens)
    about = {
        "device": torch.cuda.get_device_name() if is_texts else "cpu", "torch": torch.__version__,
        "date": datetime.date.today().isoformat(), "pair": "shipped", "dtype": "bfloat16" if is_texts else "float32",
        "max_tokens": args.max_tokens, "prompts": PROMPTS,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
