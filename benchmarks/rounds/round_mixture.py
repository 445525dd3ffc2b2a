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
from pathlib import Path
from typing import Any, NamedTuple

import torch
from products.quantised_experts import random_stack
from shapes import SHAPES, Shape, tiny
from torch import nn

from rounds.round_8b import Case, empty_pair, measure, prefill_ms, random_pair, round_weights, show, verdict
from specdec.config import SpecConfig
from specdec.loading.pair import Loaded
from specdec.loading.ranks import Ranks
from specdec.loading.resolve import resolve_device, resolve_settings
from specdec.models.config import ModelConfig
from specdec.models.gpt_oss.modules import SinkAttention
from specdec.models.linear import LinearStack
from specdec.models.mixtures.dividing import ExpertSharing, ExpertSizes, chosen_by, chosen_of_fullest, summed_bytes
from specdec.models.mixtures.router import Router
from specdec.models.schemes.rows import QuantisedRows
from specdec.models.sharding import share_of, with_sharing
from specdec.ops.products.formats.quantised import Kind
from specdec.options import EngineOptions
from specdec.parallel.group import Group
from specdec.parallel.shard import Shard

MODELS = tuple(name for name in SHAPES if name not in ("8B", "70B"))
CASES = (
    Case("plain", 1, 1024),
    Case("plain", 8, 1024),
    Case("plain", 32, 1024),
    Case("5,1,6", 1, 1024),
    Case("5,8,32", 1, 1024),
)
SMALL = tuple(Case(spec, batch, 1024) for spec in ("plain", "5,1,6", "5,4,16") for batch in (1, 8, 32))
CASES_OF = {"GLM-4.7-Flash": CASES[:3], "SmolLM2-135M": SMALL}  # an EAGLE-3 head has no latents
FORMATS: dict[str, tuple[Kind, int]] = {"mxfp4": ("e2m1", 32), "fp8": ("e4m3", 128), "int4": ("int4", 128)}
BITS = {"none": 16.0, "mxfp4": 4.25, "fp8": 8.01, "int4": 4.25}  # of a weight with its share of scales
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
    """Random experts in that format: this rank's, or its part of each."""
    kind, group = FORMATS[quantize]
    for stack in model.modules():
        if isinstance(stack, LinearStack) and stack.count:
            made = random_stack(kind, group, stack.count, stack.parts.total, stack.in_features, stack.device.type)
            for part in stack.parts.sizes:  # one matrix says how all are stored
                rows, columns = stack.shape(part)
                qvalues = torch.zeros(rows, columns, dtype=torch.uint8, device=stack.device)
                scales = torch.ones(rows, -(-columns // group), device=stack.device)
                stack.fill(0, part, QuantisedRows(kind, qvalues, scales, None, group))
            assert stack.quantised is not None
            stack.quantised.qweight_RJ.copy_(made.qweight_RJ)
            stack.quantised.scales_RG.copy_(made.scales_RG)


class RandomShape(NamedTuple):
    """What every rank makes its share of: so many layers of a shape; 0: all.  tried: of a small one of that kind.

    sharing: how ranks share its experts.
    """

    name: str
    layers: int
    sharing: str
    quantize: str
    options: EngineOptions
    tried: bool = False

    @property
    def shape(self) -> Shape:
        shape = tiny(SHAPES[self.name]) if self.tried else SHAPES[self.name].of_layers(self.layers)
        return shape._replace(config=with_sharing(shape.config, ExpertSharing(self.sharing == "experts", "")))

    def check(self, size: int) -> None:
        """ValueError if so many ranks can't share it, scales of groups of columns included."""
        share, experts = share_of(self.shape.config, Shard(0, size)), self.shape.config.experts
        group = FORMATS[self.quantize][1] if self.quantize != "none" else 1
        if experts is not None and share.experts is not None and share.experts.intermediate_size % group:
            raise ValueError(
                f"{size} ranks can't share experts of {experts.intermediate_size} columns in {self.quantize}, in groups of "
                f"{group}, by parts; nearest setting that works: expert_parallel='experts'"
            )

    def bytes_of_rank(self, size: int) -> tuple[int, int]:
        """Of a rank's weights as they are stored: (target's layers, all else of target and head).  Nothing is made."""
        shape, nowhere = self.shape, torch.device("meta")
        own = shape.config, shape.aux_layers, Shard(0, size), shape.layer
        model, head = empty_pair(1, nowhere, *own, head_layer=shape.head_layer)
        experts = {each for part in model.modules() if isinstance(part, LinearStack) for each in part.parameters()}
        layers = set(model.layers.parameters())

        def bits(parameter: nn.Parameter) -> float:
            in_few = parameter in experts or (self.quantize != "mxfp4" and parameter in layers and parameter.dim() > 1)
            return BITS[self.quantize] if in_few else 16

        every = {*model.parameters(), *head.parameters()}
        of_layers, of_all = (int(sum(each.numel() * bits(each) for each in some) / 8) for some in (layers, every))
        return of_layers, of_all - of_layers

    def load(self, group: Group, options: EngineOptions) -> Loaded:
        torch.manual_seed(0)  # so that what all ranks hold alike is alike
        device, shape = resolve_device(options.device), self.shape
        few_bits = self.quantize != "none"
        own = shape.config, shape.aux_layers, group, shape.layer, few_bits, shape.head_layer
        model, head = random_pair(4096, device, *own)
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
        wanted = RandomShape(args.model, args.layers, sharing, args.quantize, options)
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
                print(f"         {sharing}; expected: {expected(wanted.shape.config, tokens, args.ranks)}", flush=True)
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
