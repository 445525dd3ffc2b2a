"""Milliseconds a round of mixtures of experts with an EAGLE-3 head, random bf16 weights: few layers, and what that is for all.

    python benchmarks rounds.round_mixture --layers 8 --rounds 40 --out round_mixture.json
    python benchmarks rounds.round_mixture --model gpt-oss-20b --only plain:1
    python benchmarks rounds.round_mixture --layers 8 --deterministic --no-trace

Tokens choose nearly at random with random weights.  The printed limit counts the experts that they chose.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from rounds.round_8b import Case, measure, random_pair, show
from specdec.models.causal_lm import MakeLayer
from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.gpt_oss.modules import SinkAttention, gpt_oss_layer
from specdec.models.mixtures.loader import mixture_layer
from specdec.models.mixtures.router import Router
from specdec.models.mixtures.rules import ExpertsConfig, RouterRule
from specdec.ops.products.experts import SwiGLU

MODELS: dict[str, tuple[ModelConfig, MakeLayer]] = {
    "Qwen3-30B-A3B": (
        ModelConfig(
            family="qwen3_moe", hidden_size=2048, intermediate_size=6144, num_layers=48, num_heads=32, num_kv_heads=4,
            head_dim=128, vocab_size=151936, rms_norm_eps=1e-6, rope=RopeConfig(1e6), max_position=40960, qk_norm=True,
            has_experts=True, experts=ExpertsConfig(128, 768, RouterRule(8, "softmax", normed=True)),
        ),
        mixture_layer,
    ),
    "gpt-oss-20b": (
        ModelConfig(
            family="gpt_oss", hidden_size=2880, intermediate_size=2880, num_layers=24, num_heads=64, num_kv_heads=8,
            head_dim=64, vocab_size=201088, rms_norm_eps=1e-5, rope=RopeConfig(150000.0), max_position=131072, qkv_bias=True,
            o_bias=True, has_sinks=True, has_experts=True,
            experts=ExpertsConfig(
                32, 2880, RouterRule(4, "softmax of chosen", biased=True), gate=SwiGLU(1.702, 7.0), biased=True,
                kept_float32=True,
            ),
        ),
        gpt_oss_layer,
    ),
}  # fmt: skip
CASES = (
    Case("plain", 1, 1024),
    Case("plain", 8, 1024),
    Case("plain", 32, 1024),
    Case("5,1,6", 1, 1024),
    Case("5,8,32", 1, 1024),
)


def fill_buffers(model: nn.Module) -> None:
    """Random numbers for what a checkpoint would bring in float32."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if isinstance(module, Router | SinkAttention):
                setattr(module, name, nn.Buffer(0.02 * torch.randn(buffer.shape, device=buffer.device)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="Qwen3-30B-A3B")
    parser.add_argument("--layers", type=int, default=8, help="how many of the model's layers are made")
    parser.add_argument("--only", nargs="+", help="cases whose spec:batch:context starts with one of these")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    whole, layer = MODELS[args.model]
    config = replace(whole, num_layers=args.layers, layer_kinds=(), kv_source=())
    model, head = random_pair(4096, torch.device("cuda", 0), config, (0, 1, args.layers - 1), make_layer=layer)
    fill_buffers(model)
    rows = []
    for case in CASES:
        if args.only and not case.name.startswith(tuple(args.only)):
            continue
        row = measure(model, head, case, args.rounds, "round", traced=not args.no_trace, deterministic=args.deterministic)
        row |= {"model": args.model, "layers": args.layers}
        show(row)
        print(f"         {row['experts']:.1f} experts a layer", flush=True)
        rows.append(row)
    if args.out:
        args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
