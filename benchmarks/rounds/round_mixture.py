"""Milliseconds a round of mixtures of experts with an EAGLE-3 head, random bf16 weights: few layers, and what that is for all.

    python benchmarks rounds.round_mixture --layers 8 --rounds 40 --out round_mixture.json
    python benchmarks rounds.round_mixture --model gpt-oss-20b --only plain:1
    python benchmarks rounds.round_mixture --layers 8 --deterministic --no-trace
    python benchmarks rounds.round_mixture --ranks 2 --no-trace --out benchmarks/rounds/results/round_mixture_2.json

Tokens choose nearly at random with random weights.  The printed limit counts the experts that they chose.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from rounds.round_8b import Case, measure, random_pair, show
from specdec.config import SpecConfig
from specdec.loading.pair import Loaded
from specdec.loading.ranks import Ranks
from specdec.loading.resolve import resolve_device, resolve_settings
from specdec.models.causal_lm import MakeLayer
from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.gpt_oss.modules import SinkAttention, gpt_oss_layer
from specdec.models.mixtures.dividing import ExpertSharing, ExpertSizes, chosen_by, chosen_of_fullest, summed_bytes
from specdec.models.mixtures.loader import mixture_layer
from specdec.models.mixtures.router import Router
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.models.sharding import share_of, with_sharing
from specdec.ops.products.experts import SwiGLU
from specdec.ops.products.routing import RouterRule
from specdec.options import EngineOptions
from specdec.parallel.group import Group
from specdec.parallel.shard import Shard

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


class RandomMixture(NamedTuple):
    """What every rank makes its share of: so many layers of a model.  sharing: how ranks share its experts."""

    model: str
    layers: int
    sharing: str
    options: EngineOptions

    @property
    def config(self) -> ModelConfig:
        whole = replace(MODELS[self.model][0], num_layers=self.layers, layer_kinds=(), kv_source=())
        return with_sharing(whole, ExpertSharing(self.sharing == "experts", ""))

    def check(self, size: int) -> None:
        share_of(self.config, Shard(0, size))

    def load(self, group: Group, options: EngineOptions) -> Loaded:
        torch.manual_seed(0)  # so that what all ranks hold alike is alike
        device, layer = resolve_device(options.device), MODELS[self.model][1]
        model, head = random_pair(4096, device, self.config, (0, 1, self.layers - 1), group, layer)
        torch.manual_seed(1)  # routers again: a rank may have drawn more biases
        fill_buffers(model)
        return model, head, resolve_settings(options, SpecConfig(5, 1, 6), model.config), Path("/nonexistent")


def expected(config: ModelConfig, tokens: int, ranks: int) -> str:
    """What dividing.py counts of a layer of the fullest rank, if tokens choose at random."""
    assert config.experts is not None
    E, K, width = config.experts.count, config.experts.router.top_k, config.experts.intermediate_size
    sizes = ExpertSizes(config.hidden_size, 16, steps=False)
    cut = chosen_by(tokens, E, K) * sizes.expert_bytes(width // ranks)
    whole = chosen_of_fullest(tokens, E, K, ranks) * sizes.expert_bytes(width)
    sent = summed_bytes(tokens, config.hidden_size, ranks)
    return f"tensor reads {cut / 1e6:.1f} MB a layer, experts {whole / 1e6:.1f}; a rank sends {sent / 1e3:.1f} kB"


def measure_ways(args: argparse.Namespace, ranks: Ranks, options: EngineOptions) -> Iterator[dict[str, Any]]:
    """Every case that was asked for, with the experts shared in each way."""
    for sharing in args.experts if args.ranks > 1 else ["tensor"]:
        wanted = RandomMixture(args.model, args.layers, sharing, options)
        model, head, _, _ = ranks.load(wanted)
        for case in CASES:
            if args.only and not case.name.startswith(tuple(args.only)):
                continue
            row = measure(
                model, head, case, args.rounds, "round", traced=not args.no_trace, deterministic=args.deterministic, ranks=ranks
            )
            row |= {"model": args.model, "layers": args.layers, "ranks": args.ranks, "sharing": sharing}
            show(row)
            print(f"         {row['experts']:.1f} experts a layer on the first rank", flush=True)
            if args.ranks > 1:
                tokens = case.batch * (1 if case.spec == "plain" else int(case.spec.rpartition(",")[2]))
                print(f"         {sharing}; expected: {expected(wanted.config, tokens, args.ranks)}", flush=True)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="Qwen3-30B-A3B")
    parser.add_argument("--layers", type=int, default=8, help="how many of the model's layers are made")
    parser.add_argument("--only", nargs="+", help="cases whose spec:batch:context starts with one of these")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that hold the models together")
    parser.add_argument(
        "--experts", nargs="+", choices=("tensor", "experts"), default=("tensor", "experts"), help="ways of ranks"
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options = EngineOptions(device="cuda", dtype="bfloat16", tensor_parallel_size=args.ranks)
    ranks, rows = Ranks(options), []
    try:
        for row in measure_ways(args, ranks, options):
            rows.append(row)
            if args.out:
                args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))
    finally:
        ranks.close()


if __name__ == "__main__":
    main()
