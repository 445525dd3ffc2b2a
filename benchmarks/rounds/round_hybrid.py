"""Milliseconds a round of hybrids and of Gemma 4 in bf16, random weights, against the bytes of that work.

    python benchmarks rounds.round_hybrid --out benchmarks/rounds/results/round_hybrid.json
    python benchmarks rounds.round_hybrid --model Qwen3.5-35B-A3B --only plain:1
    python benchmarks rounds.round_hybrid --model Nemotron-3-Nano-30B-A3B --rounds 20
    python benchmarks rounds.round_hybrid --model Gemma-4-31B --rounds 20 --only plain:1 --no-prompt
    python benchmarks rounds.round_hybrid --layers 8 --no-trace
    python benchmarks rounds.round_hybrid --only none --profile-prompt    # where a prompt's time goes: about 40 seconds

The byte limit counts weights (of experts those that were chosen), keys and values or latents, one read and one write of each
row's states, and what nodes leave.  Chains are drafted by the target's MTP layer where there is one, trees by an EAGLE-3 head,
and both by an assistant for Gemma 4; with random weights they accept nothing.  A verify is compared with the plain step of as
many rows, by the GPU's time of both.
Configs: the published ones, without their vision parts.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from shapes import ordinary_layer
from torch import Tensor, nn

from rounds.mtp_8b import facts
from rounds.round_8b import Case, make_decoder, measure, prefill_ms, random_pair, random_prompts, show
from rounds.round_mixture import fill_buffers
from specdec.attention.kinds import FULL
from specdec.bench.kernels import trace
from specdec.config import SamplingParams
from specdec.draft.assistant.config import AssistantConfig, layers_read
from specdec.draft.assistant.head import Assistant
from specdec.draft.drafter import DraftModel
from specdec.draft.mtp.head import MtpHead
from specdec.draft.mtp.layouts import FAMILIES
from specdec.draft.mtp.spec import MtpSpec
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.frame import Family
from specdec.models.checkpoints.loader import build
from specdec.models.config import ModelConfig
from specdec.models.gemma4.config import GemmaConfig
from specdec.models.gemma4.modules import LayerScale
from specdec.models.kimi_linear.modules import KimiDeltaAttention
from specdec.models.layers import HeadsRMSNorm, RMSNorm
from specdec.models.linear import Linear
from specdec.models.mamba.mixer import Mamba2
from specdec.models.recurrent.delta_net import GatedDeltaNet
from specdec.models.registry import family_of
from specdec.models.sharding import join
from specdec.parallel.group import ALONE

QWEN: dict[str, Any] = dict(
    vocab_size=248320, head_dim=256, linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_conv_kernel_dim=4, full_attention_interval=4, max_position_embeddings=262144, rms_norm_eps=1e-6,
    mtp_num_hidden_layers=1, tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3.5-27B": QWEN | dict(
        model_type="qwen3_5_text", hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24,
        num_key_value_heads=4, linear_num_value_heads=48,
    ),
    "Qwen3.5-35B-A3B": QWEN | dict(
        model_type="qwen3_5_moe_text", hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2,
        linear_num_value_heads=32, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "Nemotron-3-Nano-30B-A3B": dict(
        model_type="nemotron_h", vocab_size=131072, hidden_size=2688, intermediate_size=1856, num_hidden_layers=52,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", num_attention_heads=32,
        num_key_value_heads=2, head_dim=128, mamba_num_heads=64, mamba_head_dim=64, ssm_state_size=128, n_groups=8,
        conv_kernel=4, chunk_size=128, use_conv_bias=True, use_bias=False, n_routed_experts=128, num_experts_per_tok=6,
        moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712, n_group=1, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=2.5, layer_norm_epsilon=1e-5, max_position_embeddings=262144, tie_word_embeddings=False,
    ),
    "Kimi-Linear-48B-A3B-Instruct": dict(
        model_type="kimi_linear", vocab_size=163840, hidden_size=2304, intermediate_size=9216, num_hidden_layers=27,
        num_attention_heads=32, num_key_value_heads=32, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, mla_use_nope=True, num_experts=256, num_experts_per_token=8, num_shared_experts=1,
        moe_intermediate_size=1024, moe_renormalize=True, moe_router_activation_func="sigmoid", num_expert_group=1,
        topk_group=1, routed_scaling_factor=2.446, first_k_dense_replace=1, rms_norm_eps=1e-5, model_max_length=1048576,
        tie_word_embeddings=False,
        linear_attn_config=dict(
            head_dim=128, num_heads=32, short_conv_kernel_size=4, full_attn_layers=[4, 8, 12, 16, 20, 24, 27],
            kda_layers=[layer for layer in range(1, 28) if layer % 4 and layer < 27],
        ),
    ),
    "Gemma-4-31B": dict(
        model_type="gemma4_text", vocab_size=262144, hidden_size=5376, intermediate_size=21504, num_hidden_layers=60,
        num_attention_heads=32, num_key_value_heads=16, num_global_key_value_heads=4, head_dim=256, global_head_dim=512,
        attention_k_eq_v=True, sliding_window=1024, hidden_size_per_layer_input=0, final_logit_softcapping=30.0,
        max_position_embeddings=262144, rms_norm_eps=1e-6,
    ),
}  # fmt: skip
CASES = (
    Case("plain", 1, 1024),
    Case("plain", 8, 1024),
    Case("plain", 32, 1024),
    Case("5,1,6", 1, 1024),
    Case("5,1,6", 8, 1024),
    Case("5,8,32", 1, 1024),
)
PROMPT = 8192


class Drafters(NamedTuple):
    """chain: the target's MTP layer if it has one.  tree: an EAGLE-3 head.  Of Gemma 4 an assistant drafts both."""

    chain: DraftModel
    tree: DraftModel

    def of(self, case: Case) -> DraftModel:
        return self.chain if case.spec == "5,1,6" else self.tree


def config_of(model: str, layers: int | None) -> ModelConfig:
    """The published model's, or its first `layers` layers."""
    raw = MODELS[model] if layers is None else first_layers(MODELS[model], layers)
    return family_by(raw["model_type"]).parse(raw, model)


def family_by(name: str) -> Family:
    family = family_of(name)
    assert family is not None, name
    return family


def first_layers(raw: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config of a model of so many layers, those with which the given one begins."""
    cut = raw | {"num_hidden_layers": layers}
    if (pattern := raw.get("hybrid_override_pattern")) is not None:
        cut["hybrid_override_pattern"] = pattern[:layers]
    if (inner := raw.get("linear_attn_config")) is not None:
        lists = {key: [layer for layer in inner[key] if layer <= layers] for key in ("full_attn_layers", "kda_layers")}
        cut["linear_attn_config"] = inner | lists
    return cut


def head_layer(target: ModelConfig) -> ModelConfig | None:
    """The layer of an EAGLE-3 head for a target that has no ordinary layer of its width; None: one like the target's."""
    if target.family not in ("nemotron_h", "kimi_linear", "gemma4_text"):
        return None
    return ordinary_layer(target)


def fill_hybrid(model: nn.Module) -> None:
    """What a checkpoint would bring in float32: decays of a token between none and a half, and norms by one.

    Of Mamba-2 and of Kimi's rule what training begins with: rates from 1 to 16, of steps from 0.001 to 0.1.
    """
    fill_buffers(model)
    for module in model.modules():
        if isinstance(module, RMSNorm | HeadsRMSNorm) and module.zero_centred:
            module.weight = nn.Buffer(torch.ones_like(module.weight, dtype=torch.float32))
        if isinstance(module, LayerScale):
            module.weight.fill_(1.0)
        if isinstance(module, GatedDeltaNet | Mamba2 | KimiDeltaAttention):
            for name, buffer in module.named_buffers(recurse=False):  # which were cast when the model was made
                setattr(module, name, nn.Buffer(torch.empty_like(buffer, dtype=torch.float32)))
        if isinstance(module, GatedDeltaNet):
            module.A_log_V.uniform_(-3, 0)
            module.dt_bias_V.uniform_(-1, 1)
        elif isinstance(module, Mamba2):
            fill_rates(module.A_log_V, module.dt_bias_V)
            module.D_V.fill_(1.0)
            if module.conv_bias_C is not None:
                module.conv_bias_C.normal_(std=0.02)
        elif isinstance(module, KimiDeltaAttention):
            fill_rates(module.A_log_H, module.dt_bias_C)


def fill_rates(A_log: Tensor, dt_bias: Tensor) -> None:
    """dt_bias: softplus of it is the step."""
    A_log.uniform_(1, 16).log_()
    dt_bias.uniform_(math.log(0.001), math.log(0.1)).exp_().expm1_().log_()


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


def random_assistant(target: CausalLM, max_positions: int) -> Assistant:
    """One of the published shape beside Gemma-4-31B: three windowed layers and a full one, of hidden_size 1,024."""
    own, count = target.config, 4
    assert isinstance(own, GemmaConfig)
    kinds = (own.layer_kinds[0],) * (count - 1) + (FULL,)
    layers = replace(
        own, hidden_size=1024, intermediate_size=4096, num_layers=count, layer_kinds=kinds, kv_source=tuple(range(count)),
    )  # fmt: skip
    config = AssistantConfig(layers, own.hidden_size)
    read = layers_read(config, own, "random assistant")
    head = build(lambda: Assistant(config, read, max_positions), target.embed_tokens.weight.device, torch.bfloat16)
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


def random_models(name: str, config: ModelConfig, max_positions: int, device: torch.device) -> tuple[CausalLM, Drafters]:
    aux, family = (1, config.num_layers // 2 - 1, config.num_layers - 4), family_by(MODELS[name]["model_type"])
    own = {"make_layer": family.layer, "head_layer": head_layer(config), "model_class": family.model}
    model, eagle = random_pair(max_positions, device, config, aux, **own)
    for each in (model, eagle):
        fill_hybrid(each)
    if config.mtp_layers:
        return model, Drafters(random_mtp(model, max_positions), eagle)
    if isinstance(config, GemmaConfig):
        return model, Drafters(*[random_assistant(model, max_positions)] * 2)
    return model, Drafters(eagle, eagle)


def save(out: Path | None, rows: list[dict[str, Any]]) -> None:
    """After each line, so that a run that is cut short leaves what it measured."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(facts() | {"rows": rows}, indent=1) + "\n")


def verify_ratio(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """How many times a round's verify takes a plain step of as many rows; None: one of them was not traced."""
    same = (plain for plain in rows if plain["spec"] == "plain" and plain["batch"] == row["batch"])
    step = next((plain["gpu_ms"] for plain in same if "gpu_ms" in plain), None)
    verify = row.get("phases_ms", {}).get("verify")
    return None if step is None or verify is None else verify / step


def measure_cases(model: CausalLM, drafters: Drafters, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rows = list[dict[str, Any]]()
    for case in CASES:
        if args.only and not case.name.startswith(tuple(args.only)):
            continue
        row = measure(model, drafters.of(case), case, args.rounds, "round", traced=not args.no_trace)
        row |= {"model": args.model, "layers": model.config.num_layers, "times_limit": row["ms"] / row["limit_ms"]}
        rows.append(row | {"verify_times_plain": verify_ratio(row, rows)})
        show(rows[-1])
        times, chosen = rows[-1]["verify_times_plain"], rows[-1]["experts"]
        print(f"         {row['times_limit']:.3f} times its bytes"
              + ("" if times is None else f"; its verify {times:.2f} times a plain step")
              + ("" if chosen is None else f"; {chosen:.1f} experts a layer"), flush=True)  # fmt: skip
        yield rows[-1]
        torch.cuda.empty_cache()


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
    model, drafters = random_models(args.model, config, longest, torch.device("cuda", 0))
    for row in measure_cases(model, drafters, args):
        rows.append(row)
        save(args.out, rows)
    if not args.no_prompt:
        rows.append({"model": args.model, "prompt": PROMPT, "ms": prefill_ms(model, drafters.chain, 1, PROMPT)})
        print(f"a prompt of {PROMPT}: {rows[-1]['ms']:.1f} ms", flush=True)
    if args.profile_prompt:
        rows.append({"model": args.model} | profile_prompt(model, drafters.chain))
    save(args.out, rows)


if __name__ == "__main__":
    main()
