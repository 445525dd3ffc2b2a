"""What one request's keys and values take in models where only some layers have a window or chunks.  Needs no GPU.

    python benchmarks caches.kv_memory --out benchmarks/caches/results/kv_memory.json

Before: every layer has pages for all tokens, from one page table.  After: windowed and chunked layers reuse a ring of pages
from a page table of their own.  The numbers come from the functions that size the KV pool of a decoder, for one request of the
longest length, bf16 keys and values, pages of 16 tokens and the look-ahead of a draft tree (5, 4, 16); dummy pages, of which
there is one for each group of layers, are left out.  `fit` is how many such requests 64 GiB hold.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from specdec import SpecConfig
from specdec.loading.memory import pool_plan
from specdec.loading.resolve import resolve_settings
from specdec.models.registry import family_of
from specdec.models.transformers_backend.config import read_transformers_config
from specdec.options import EngineOptions

# What the published config.json files say of attention; name: (model_type, keys).
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss-20b": (
        "gpt_oss",
        dict(num_hidden_layers=24, hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8,
             head_dim=64, sliding_window=128, num_local_experts=32, num_experts_per_tok=4, vocab_size=201088,
             max_position_embeddings=131072),
    ),
    "Gemma-3-27B": (
        "gemma3_text",
        dict(num_hidden_layers=62, hidden_size=5376, intermediate_size=21504, num_attention_heads=32, num_key_value_heads=16,
             head_dim=128, sliding_window=1024, query_pre_attn_scalar=168, vocab_size=262208, max_position_embeddings=131072),
    ),
    "Llama-4-Scout": (
        "llama4_text",
        dict(num_hidden_layers=48, hidden_size=5120, intermediate_size=8192, intermediate_size_mlp=16384,
             num_attention_heads=40, num_key_value_heads=8, head_dim=128, attention_chunk_size=8192, num_local_experts=16,
             vocab_size=202048, max_position_embeddings=262144),
    ),
    "Gemma-4-31B": (
        "gemma4_text",
        dict(num_hidden_layers=60, hidden_size=5376, intermediate_size=21504, num_attention_heads=32, num_key_value_heads=16,
             num_global_key_value_heads=4, head_dim=256, global_head_dim=512, attention_k_eq_v=True, sliding_window=1024,
             hidden_size_per_layer_input=0, vocab_size=262144, max_position_embeddings=262144),
    ),
    "Gemma-4-E4B": (
        "gemma4_text",
        dict(num_hidden_layers=42, hidden_size=2560, intermediate_size=10240, num_attention_heads=8, num_key_value_heads=2,
             head_dim=256, global_head_dim=512, num_kv_shared_layers=18, sliding_window=512, hidden_size_per_layer_input=256,
             vocab_size=262144, max_position_embeddings=131072),
    ),
    "MiMo-V2-Flash": (
        "mimo_v2_flash",
        dict(num_hidden_layers=48, hidden_size=4096, intermediate_size=16384, num_attention_heads=64, num_key_value_heads=4,
             swa_num_key_value_heads=8, head_dim=192, v_head_dim=128, sliding_window_size=128, moe_intermediate_size=2048,
             n_routed_experts=256, num_experts_per_tok=8, vocab_size=152576, max_position_embeddings=262144),
    ),
}  # fmt: skip
UNLIKE = ("gemma4_text", "mimo_v2_flash")  # whose kinds of layers have heads of their own: read by specdec's own parsers
LENGTHS = (32_768, 131_072)
POOL = 64 * 2**30


def row(name: str, length: int) -> dict[str, Any]:
    """One line of the table."""
    model_type, keys = SHAPES[name]
    if model_type in UNLIKE:
        family = family_of(model_type)
        assert family is not None
        config = family.parse({"model_type": model_type, **keys}, name)
    else:
        with tempfile.TemporaryDirectory() as folder:
            CONFIG_MAPPING[model_type](**keys).save_pretrained(folder)
            config = read_transformers_config(Path(folder))
    options = EngineOptions(device="cpu", dtype="bfloat16", max_batch_size=1, max_seq_len=length)
    backend = "native" if model_type in UNLIKE else "transformers"
    settings = resolve_settings(options, SpecConfig(5, 4, 16), config, backend)
    plan = pool_plan([config], settings, math.inf)
    before = settings.pages_per_sequence * sum(plan.page_bytes)
    by_group = [(pages - 1) * size for pages, size in zip(plan.num_pages, plan.page_bytes, strict=True)]
    kinds = [str(kind) for kind in config.layer_kinds]
    return {
        "model": name, "tokens": length, "layers": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "ring_tokens": (plan.groups[-1].ring or 0) * options.page_size, "before_bytes": before, "after_bytes": sum(by_group),
        "full_bytes": by_group[0], "local_bytes": by_group[-1] if len(by_group) > 1 else 0,
        "fit_before": POOL // before, "fit_after": POOL // sum(by_group),
    }  # fmt: skip


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the numbers are written as JSON")
    args = parser.parse_args()
    rows = [row(name, length) for name in SHAPES for length in LENGTHS]
    print("| model | layers | tokens | one table | two | of it in full layers | fit |")
    print("| --- " * 7 + "|")
    for one in rows:
        layers = ", ".join(f"{count} {kind}" for kind, count in one["layers"].items())
        print(
            f"| {one['model']} | {layers} | {one['tokens']:,} | {gib(one['before_bytes'])} | {gib(one['after_bytes'])} "
            f"| {gib(one['full_bytes'])} | {one['fit_before']} to {one['fit_after']} |"
        )
    if args.out:
        args.out.write_text(json.dumps({"script": "benchmarks/caches/kv_memory.py", "rows": rows}, indent=1) + "\n")
