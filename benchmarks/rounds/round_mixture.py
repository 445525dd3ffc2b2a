"""Milliseconds a round of mixtures of experts with an EAGLE-3 head, random weights: the targets of the issue, or few layers.

    python benchmarks rounds.round_mixture --layers 0 --prompts 1:1024 32:1024 --out round_mixture.json
    python benchmarks rounds.round_mixture --layers 0 --quantize fp8 --only plain:1
    python benchmarks rounds.round_mixture --layers 0 --model gpt-oss-20b --quantize mxfp4 --only plain:1 5,1,6
    python benchmarks rounds.round_mixture --layers 0 --model SmolLM2-135M
    python benchmarks rounds.round_mixture --layers 8 --deterministic --no-trace
    python benchmarks rounds.round_mixture --ranks 2 --no-trace --out benchmarks/rounds/results/round_mixture_2.json

Tokens choose nearly at random with random weights.  The printed limit counts the experts that they chose.  mxfp4: experts
alone, as gpt-oss's checkpoints have them.  fp8: experts in blocks, and int4: in groups of 128; with them all other matrices but
the output layer, as quantize= rounds them.  SmolLM2 is no mixture: its layers are as thin as a mixture's, and its bytes free.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from products.quantised_experts import random_stack
from torch import nn

from rounds.round_8b import Case, measure, prefill_ms, random_pair, round_weights, show, verdict
from specdec.config import SpecConfig
from specdec.loading.pair import Loaded
from specdec.loading.ranks import Ranks
from specdec.loading.resolve import resolve_device, resolve_settings
from specdec.models.causal_lm import MakeLayer, decoder_layer
from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.gpt_oss.modules import SinkAttention, gpt_oss_layer
from specdec.models.latent.attention import LatentLayer
from specdec.models.latent.config import LatentConfig
from specdec.models.linear import LinearStack
from specdec.models.mixtures.dividing import ExpertSharing, ExpertSizes, chosen_by, chosen_of_fullest, summed_bytes
from specdec.models.mixtures.loader import mixture_layer
from specdec.models.mixtures.router import Router
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.models.schemes.rows import QuantisedRows
from specdec.models.sharding import share_of, with_sharing
from specdec.ops.products.experts import SwiGLU
from specdec.ops.products.formats.quantised import Kind
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
                32, 2880, RouterRule(4, "softmax of chosen", biased=True), activation=SwiGLU(1.702, 7.0), biased=True,
                kept_float32=True,
            ),
        ),
        gpt_oss_layer,
    ),
    "GLM-4.7-Flash": (
        LatentConfig(
            family="glm4_moe_lite", hidden_size=2048, intermediate_size=10240, num_layers=47, num_heads=20, num_kv_heads=20,
            head_dim=64, vocab_size=154880, rms_norm_eps=1e-5, rope=RopeConfig(1e6), max_position=202752, latent_rank=512,
            q_rank=768, nope_dim=192, value_dim=256, has_experts=True,
            experts=ExpertsConfig(
                64, 1536, RouterRule(4, "sigmoid", True, groups=1, top_groups=1, group_best=2, normed=True, scaling=1.8),
                shared_size=1536, dense_layers=frozenset({0}),
            ),
        ),
        LatentLayer,
    ),
    "SmolLM2-135M": (
        ModelConfig(
            family="llama", hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
            vocab_size=49152, rms_norm_eps=1e-5, rope=RopeConfig(1e5), max_position=8192, tie_embeddings=True,
        ),
        decoder_layer,
    ),
}  # fmt: skip
_OSS, _LAYER = MODELS["gpt-oss-20b"]
assert _OSS.experts is not None
MODELS["gpt-oss-120b"] = replace(_OSS, num_layers=36, experts=replace(_OSS.experts, count=128)), _LAYER
CASES = (
    Case("plain", 1, 1024),
    Case("plain", 8, 1024),
    Case("plain", 32, 1024),
    Case("5,1,6", 1, 1024),
    Case("5,8,32", 1, 1024),
)
CASES_OF = {"GLM-4.7-Flash": CASES[:3], "SmolLM2-135M": (CASES[0], Case("5,4,16", 1, 1024))}  # an EAGLE-3 head has no latents
FORMATS: dict[str, tuple[Kind, int]] = {"mxfp4": ("e2m1", 32), "fp8": ("e4m3", 128), "int4": ("int4", 128)}
BARS = {  # milliseconds that all of a model's layers must stay below on an H200
    ("Qwen3-30B-A3B", "none"): {
        "plain:1:1024": 2.4, "plain:8:1024": 7.4, "plain:32:1024": 15.0, "5,1,6:1:1024": 6.4, "1:1024": 35.0, "32:1024": 400.0,
    },
    ("Qwen3-30B-A3B", "fp8"): {"plain:1:1024": 1.6},
    ("Qwen3-30B-A3B", "int4"): {"plain:1:1024": 1.35},
    ("gpt-oss-20b", "mxfp4"): {"plain:1:1024": 1.35},
    ("gpt-oss-120b", "mxfp4"): {"plain:1:1024": 1.8},
    ("GLM-4.7-Flash", "none"): {"plain:1:1024": 2.9},
    ("SmolLM2-135M", "none"): {"plain:1:1024": 0.42, "5,4,16:1:1024": 0.75},
}  # fmt: skip


def fill_buffers(model: nn.Module) -> None:
    """Random numbers for what a checkpoint would bring in float32."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if isinstance(module, Router | SinkAttention):
                setattr(module, name, nn.Buffer(0.02 * torch.randn(buffer.shape, device=buffer.device)))


def store_experts(model: nn.Module, quantize: str) -> None:
    """Random experts in that format."""
    for stack in model.modules():
        if isinstance(stack, LinearStack) and stack.count:
            (kind, group), rows, columns = FORMATS[quantize], stack.parts.total, stack.in_features
            made = random_stack(kind, group, stack.count, rows, columns)
            scales = torch.ones(rows, -(-columns // group), device=made.scales_RG.device)
            for part, of in stack.parts.rows.items():  # one matrix says how all are stored
                qvalues = torch.zeros(of.stop - of.start, columns, dtype=torch.uint8, device=scales.device)
                stack.fill(0, part, QuantisedRows(kind, qvalues, scales[of], None, group))
            assert stack.quantised is not None
            stack.quantised.qweight_RJ.copy_(made.qweight_RJ)
            stack.quantised.scales_RG.copy_(made.scales_RG)


class RandomMixture(NamedTuple):
    """What every rank makes its share of: so many layers of a model; 0: all.  sharing: how ranks share its experts."""

    model: str
    layers: int
    sharing: str
    quantize: str
    options: EngineOptions

    @property
    def config(self) -> ModelConfig:
        published = MODELS[self.model][0]
        whole = replace(published, num_layers=self.layers or published.num_layers, layer_kinds=(), kv_source=())
        return with_sharing(whole, ExpertSharing(self.sharing == "experts", "")) if whole.experts else whole

    def check(self, size: int) -> None:
        share_of(self.config, Shard(0, size))

    def load(self, group: Group, options: EngineOptions) -> Loaded:
        torch.manual_seed(0)  # so that what all ranks hold alike is alike
        device, layer = resolve_device(options.device), MODELS[self.model][1]
        config, few_bits = self.config, self.quantize != "none"
        model, head = random_pair(4096, device, config, (0, 1, config.num_layers - 1), group, layer, few_bits)
        torch.manual_seed(1)  # routers again: a rank may have drawn more biases
        fill_buffers(model)
        if few_bits:
            store_experts(model, self.quantize)
            if self.quantize != "mxfp4":
                round_weights(model, self.quantize, model.lm_head)
            torch.cuda.empty_cache()
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
    about = {"model": args.model, "layers": args.layers, "ranks": args.ranks, "quantize": args.quantize}
    bars = BARS.get((args.model, args.quantize), {}) if args.layers == 0 and args.ranks == 1 else {}
    for sharing in args.experts if args.ranks > 1 else ["tensor"]:
        wanted = RandomMixture(args.model, args.layers, sharing, args.quantize, options)
        model, head, _, _ = ranks.load(wanted)
        for case in CASES_OF.get(args.model, CASES):
            if args.only and not case.name.startswith(tuple(args.only)):
                continue
            row = measure(
                model, head, case, args.rounds, "round", traced=not args.no_trace, deterministic=args.deterministic, ranks=ranks
            )
            row |= about | {"sharing": sharing, "bar": bars.get(case.name)}
            show(row)
            if row["experts"] is not None:
                print(f"         {row['experts']:.1f} experts a layer on the first rank", flush=True)
            if args.ranks > 1:
                tokens = case.batch * (1 if case.spec == "plain" else int(case.spec.rpartition(",")[2]))
                print(f"         {sharing}; expected: {expected(wanted.config, tokens, args.ranks)}", flush=True)
            yield row
            torch.cuda.empty_cache()
        for batch, tokens in (map(int, text.split(":")) for text in args.prompts):
            ms, bar = prefill_ms(model, head, batch, tokens), bars.get(f"{batch}:{tokens}")
            print(f"prompts {batch} x {tokens}: {ms:.1f} ms  {verdict(ms, bar)}", flush=True)
            yield about | {"prompts": batch, "tokens": tokens, "ms": ms, "bar": bar}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="Qwen3-30B-A3B")
    parser.add_argument("--layers", type=int, default=8, help="how many of the model's layers are made; 0: all")
    parser.add_argument("--quantize", choices=("none", *FORMATS), default="none", help="how weights are stored")
    parser.add_argument("--prompts", nargs="+", default=(), help="batch:tokens of prompts that are timed too, on one GPU")
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
