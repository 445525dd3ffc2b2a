"""Prefill where the last half of the layers shares keys and values: all tokens through these layers, or only those read.

    python benchmarks rounds.last_token_prefill --out benchmarks/rounds/results/last_token_prefill.json

Llama-3.1-8B shape, whose layers 16 to 31 read the keys and values of layer 15, with an EAGLE-3 head of the real shape over the
outputs of layers 1, 7 and 14; random bf16 weights, through the engine, host included.  For comparison, the same shape with keys
and values of each layer's own.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import triton
from shapes import TARGET

from rounds.round_8b import prefill_ms, random_pair
from specdec.models.config import ModelConfig
from specdec.models.kv import cache_layout

HALF = TARGET.num_layers // 2
SHARING = replace(TARGET, kv_source=(*range(HALF), *[HALF - 1] * HALF))
PROMPTS = ((1, 1024), (1, 8192), (8, 1024))


def last_layer(config: ModelConfig, aux_layers: Sequence[int]) -> int:
    """In place of ModelConfig.first_of_rows: all tokens run through all layers but the last, as where none shares."""
    return config.num_layers - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for config in (TARGET, SHARING):
        most = max(tokens for _, tokens in PROMPTS) + 2048
        model, head = random_pair(most, torch.device("cuda", 0), config, aux_layers=(1, 7, 14))
        for limits in (False,) if config is TARGET else (False, True):
            for batch, tokens in PROMPTS:
                with nullcontext() if limits or config is TARGET else patch.object(ModelConfig, "first_of_rows", last_layer):
                    ms = prefill_ms(model, head, batch, tokens)
                what = "all sharing layers" if limits else "last layer"
                kv_bytes = sum(map(cache_layout(config, "auto", torch.bfloat16).layer_bytes, set(config.kv_source)))
                rows.append({
                    "shares": config is SHARING, "limited": what, "batch": batch, "tokens": tokens, "ms": ms,
                    "kv_bytes_a_token": kv_bytes,
                })  # fmt: skip
                print(
                    f"{'shares' if config is SHARING else 'own keys':>8}, limited to the tokens that are read: {what:<18} "
                    f"{batch} x {tokens}: {ms:6.1f} ms, {kv_bytes:,} bytes a token", flush=True,
                )  # fmt: skip
                torch.cuda.empty_cache()
        del model, head
    result = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "weights": "random", "dtype": "bfloat16",
        "rows": rows,
    }  # fmt: skip
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
