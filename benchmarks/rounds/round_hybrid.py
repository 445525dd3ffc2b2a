"""Milliseconds a round of Qwen's hybrids in bf16, random weights, against the bytes of that work: the targets of the issue.

    python benchmarks rounds.round_hybrid --out benchmarks/rounds/results/round_hybrid.json
    python benchmarks rounds.round_hybrid --model Qwen3.5-35B-A3B --only plain:1
    python benchmarks rounds.round_hybrid --layers 8 --no-trace
    python benchmarks rounds.round_hybrid --only none --profile-prompt    # where a prompt's time goes: about 40 seconds

The byte limit counts weights, keys and values, one read and one write of each row's states, and what nodes leave.  Chains are
drafted by the target's MTP layer, trees by an EAGLE-3 head; with random weights they accept nothing.  Configs: the published
ones, without their vision parts.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from rounds.mtp_8b import facts
from rounds.round_8b import Case, make_decoder, measure, prefill_ms, random_pair, random_prompts, show
from rounds.round_mixture import fill_buffers
from specdec.bench.kernels import trace
from specdec.config import SamplingParams
from specdec.draft.drafter import DraftModel
from specdec.draft.mtp.head import MtpHead
from specdec.draft.mtp.layouts import FAMILIES
from specdec.draft.mtp.spec import MtpSpec
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.loader import build
from specdec.models.config import ModelConfig
from specdec.models.layers import HeadsRMSNorm, RMSNorm
from specdec.models.linear import Linear
from specdec.models.qwen_hybrid.config import parse_qwen_hybrid
from specdec.models.qwen_hybrid.modules import GatedDeltaNet, hybrid_layer
from specdec.models.sharding import join
from specdec.parallel.group import ALONE

COMMON: dict[str, Any] = dict(
    vocab_size=248320, head_dim=256, linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_conv_kernel_dim=4, full_attention_interval=4, max_position_embeddings=262144, rms_norm_eps=1e-6,
    mtp_num_hidden_layers=1, tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3.5-27B": dict(
        model_type="qwen3_5_text", hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24,
        num_key_value_heads=4, linear_num_value_heads=48,
    ),
    "Qwen3.5-35B-A3B": dict(
        model_type="qwen3_5_moe_text", hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2,
        linear_num_value_heads=32, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
}  # fmt: skip
CASES = (
    Case("plain", 1, 1024),
    Case("plain", 32, 1024),
    Case("5,1,6", 1, 1024),
    Case("5,1,6", 8, 1024),
    Case("5,8,32", 1, 1024),
)
PROMPT = 8192


class Drafters(NamedTuple):
    """mtp: for chains.  eagle: for trees."""

    mtp: DraftModel
    eagle: DraftModel

    def of(self, case: Case) -> DraftModel:
        return self.mtp if case.spec == "5,1,6" else self.eagle


def config_of(model: str, layers: int | None) -> ModelConfig:
    """The published model's, or its first `layers` layers."""
    raw = COMMON | MODELS[model]
    return parse_qwen_hybrid(raw | ({"num_hidden_layers": layers} if layers else {}), model)


def fill_hybrid(model: nn.Module) -> None:
    """What a checkpoint would bring in float32: decays of a token between none and a half, and norms by one."""
    fill_buffers(model)
    for module in model.modules():
        if isinstance(module, RMSNorm | HeadsRMSNorm) and module.zero_centred:
            module.weight = nn.Buffer(torch.ones_like(module.weight, dtype=torch.float32))
        if isinstance(module, GatedDeltaNet):
            module.A_log_V.uniform_(-3, 0)
            module.dt_bias_V.uniform_(-1, 1)


def random_mtp(target: CausalLM, max_positions: int) -> MtpHead:
    """One layer of full attention, as the published models have."""
    family = FAMILIES[target.config.family]
    layer = replace(target.config, num_layers=1, layer_kinds=(), kv_source=(), mtp_layers=0)
    spec = MtpSpec(target.config.family, layer, ("mtp",), family.names, family.rules, family.block)
    head = build(lambda: MtpHead(spec, max_positions), target.embed_tokens.weight.device, torch.bfloat16)
    for parameter in head.parameters():
        parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    fill_hybrid(head)
    head.borrow(target)
    join(head, ALONE)
    return head


def profile_prompt(model: CausalLM, drafter: DraftModel) -> dict[str, Any]:
    """Milliseconds of one prompt by kind of kernel, and of the longest kernels.  Without a drafter's passes."""
    decoder, sampling = make_decoder(model, drafter, None, 1, PROMPT, "round"), SamplingParams(max_tokens=1, ignore_eos=True)

    def once() -> None:
        decoder.generate(random_prompts(1, PROMPT), sampling)

    once()
    found = trace(once, 2, decoder.settings.device, named=14)
    print(f"a prompt of {PROMPT}, target alone: {found.span:.1f} ms, idle {found.idle:.1f}, {found.kernels:.0f} kernels;",
          ", ".join(f"{kind} {ms:.1f}" for kind, ms in found.by_kind.items()))  # fmt: skip
    for name, ms, launches in found.longest:
        print(f"    {ms:8.2f} ms {launches:6.1f} x {name}", flush=True)
    products = cublas_ms(model, PROMPT)
    print(f"    its products with dense weights by cuBLAS alone: {products:.1f} ms; {found.span / products:.2f} times that")
    return {"profiled": PROMPT, "kinds_ms": found.by_kind, "longest": found.longest, "gpu_ms": found.span, "cublas": products}


def cublas_ms(model: CausalLM, tokens: int) -> float:
    """Milliseconds of the layers' products with dense weights, one after the other, in one pass over so many tokens."""
    matrices = [part.weight for part in model.layers.modules() if isinstance(part, Linear) and part.weight is not None]
    inputs = {K: torch.randn(tokens, K, device="cuda", dtype=torch.bfloat16) for K in {weight.shape[1] for weight in matrices}}
    times = []
    with torch.inference_mode():
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for weight in matrices:
                F.linear(inputs[weight.shape[1]], weight)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return sorted(times)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="Qwen3.5-27B")
    parser.add_argument("--layers", type=int, help="how many of the model's layers are made; left out: all")
    parser.add_argument("--only", nargs="+", help="cases whose spec:batch:context starts with one of these")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--no-prompt", action="store_true", help=f"leave out the prompt of {PROMPT} tokens")
    parser.add_argument("--profile-prompt", action="store_true", help="the kernels of one, by time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    config, longest, rows = config_of(args.model, args.layers), PROMPT + 2048, list[dict[str, Any]]()
    aux = (1, config.num_layers // 2 - 1, config.num_layers - 4)
    model, eagle = random_pair(longest, torch.device("cuda", 0), config, aux, make_layer=hybrid_layer)
    for each in (model, eagle):
        fill_hybrid(each)
    drafters = Drafters(random_mtp(model, longest), eagle)
    for case in CASES:
        if args.only and not case.name.startswith(tuple(args.only)):
            continue
        row = measure(model, drafters.of(case), case, args.rounds, "round", traced=not args.no_trace)
        rows.append(row | {"model": args.model, "layers": config.num_layers, "times_limit": row["ms"] / row["limit_ms"]})
        show(rows[-1])
        print(f"         {rows[-1]['times_limit']:.3f} times its bytes", flush=True)
        torch.cuda.empty_cache()
    if not args.no_prompt:
        rows.append({"model": args.model, "prompt": PROMPT, "ms": prefill_ms(model, drafters.mtp, 1, PROMPT)})
        print(f"a prompt of {PROMPT}: {rows[-1]['ms']:.1f} ms", flush=True)
    if args.profile_prompt:
        rows.append({"model": args.model} | profile_prompt(model, drafters.mtp))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(facts() | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
