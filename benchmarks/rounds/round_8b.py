"""Milliseconds a round at the Llama-3.1-8B shape with an EAGLE-3 head of the real shape, random bf16 weights: the speed table.

    python benchmarks rounds.round_8b --out benchmarks/rounds/results/round_8b.json
    python benchmarks rounds.round_8b --prefills 1:8192,1:32768 --attention triton,auto
    python benchmarks rounds.round_8b --only 5,1,6:1 --deterministic
    python benchmarks rounds.round_8b --quantize fp8 --out benchmarks/rounds/results/round_8b_fp8_h200.json
    python benchmarks rounds.round_8b --only none --no-auto --no-prefill --generate 1,8,32

Random weights accept next to nothing, which does not change what a round costs.  Every line is measured through the engine,
host included, as in `generate()`: first the wall time from one read of tokens to the next, then a profiler's trace of the
kernels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import triton
from gpus import device_name, this_gpu
from shapes import TARGET
from torch import Tensor, nn

from specdec.bench.byte_limit import byte_limit
from specdec.bench.kernels import trace
from specdec.bench.profile import Workload, chosen_experts, full_rounds, rounds_in
from specdec.config import GraphMode, SamplingParams, SpecConfig
from specdec.decoder import SpecDecoder
from specdec.draft.drafter import DraftModel
from specdec.draft.eagle.head import Eagle3Head, EagleHead
from specdec.draft.formats.spec import HeadSpec
from specdec.loading.load import pack_pair
from specdec.loading.ranks import Ranks
from specdec.loading.resolve import choose_attention, resolve_settings
from specdec.models.causal_lm import CausalLM, MakeLayer, decoder_layer
from specdec.models.checkpoints.loader import build
from specdec.models.config import ModelConfig
from specdec.models.linear import Linear, Stored
from specdec.models.schemes.config import ROUNDED
from specdec.models.schemes.formats import rounded
from specdec.models.sharding import join, share_of
from specdec.options import EngineOptions
from specdec.parallel.group import ALONE, Group
from specdec.parallel.shard import Shard
from specdec.prompts.tokenizer import Tokenizer
from specdec.session import Session

DRAFT_VOCAB = 32000
KEPT = "kv_b_proj"  # a matrix of latent attention that is multiplied head by head, and so not kept in few bits
TRACED = 10


class Case(NamedTuple):
    """One line of the table.  spec: S,k,nd; "plain"; or "auto", which with random weights settles at no levels."""

    spec: str
    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.spec}:{self.batch}:{self.context}"


CASES = (
    Case("plain", 1, 1024), Case("plain", 8, 1024), Case("plain", 32, 1024), Case("5,1,6", 1, 1024), Case("5,1,6", 8, 1024),
    Case("5,1,6", 32, 1024), Case("5,8,32", 1, 1024), Case("5,8,32", 8, 1024), Case("7,10,60", 1, 1024),
    Case("plain", 1, 32768), Case("5,1,6", 1, 32768),
)  # fmt: skip
PREFILLS = ((1, 1024), (32, 1024))
PAUSES = (1, 32)  # batch sizes at which "auto" is compared with plain decoding


def random_pair(
    max_positions: int,
    device: torch.device,
    target: ModelConfig = TARGET,
    aux_layers: tuple[int, int, int] = (1, 15, 28),
    group: Group = ALONE,
    make_layer: MakeLayer = decoder_layer,
    no_experts: bool = False,
    head_layer: ModelConfig | None = None,
    model_class: type[CausalLM] = CausalLM,
) -> tuple[CausalLM, EagleHead]:
    """Both models with normal weights, made on the GPU.  The head has the real one's shape, over those layers' outputs.

    group: the ranks of which each makes a share of both.  make_layer: of a target that is no Llama.
    no_experts: whether the experts' matrices take no memory yet, because the caller stores them in fewer bits.
    head_layer: the head's layer; left out: one like the target's, without experts.  model_class: the model around the layers.
    """
    shard = Shard(group.rank, group.size)
    model, head = empty_pair(max_positions, device, target, aux_layers, shard, make_layer, no_experts, head_layer, model_class)
    for matrix in model.modules() if no_experts else ():
        if isinstance(matrix, Linear):
            for part in matrix.parts.sizes:
                matrix.tensors(part)  # takes its memory
    for parameter in dict.fromkeys([*model.parameters(), *head.parameters()]):  # in one order on all ranks
        parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    vocab = head.config.draft_vocab_size
    head.d2t_V = torch.arange(vocab, device=device) * min(3, target.vocab_size // vocab - 1)
    for each in (model, head):
        join(each, group)
    return model, head


def empty_pair(
    max_positions: int, device: torch.device, target: ModelConfig, aux_layers: tuple[int, int, int], shard: Shard,
    make_layer: MakeLayer, no_experts: bool = False, head_layer: ModelConfig | None = None,
    model_class: type[CausalLM] = CausalLM,
) -> tuple[CausalLM, EagleHead]:  # fmt: skip
    """A rank's share of both models, whose weights hold nothing yet.  The arguments are those of `random_pair`."""
    vocab = min(DRAFT_VOCAB, target.vocab_size)
    model = build(lambda: model_class(share_of(target, shard), max_positions, make_layer), device, torch.bfloat16, no_experts)
    layer = share_of(head_layer or replace(target, num_layers=1, layer_kinds=(), kv_source=(), experts=None), shard)
    shape = HeadSpec(layer, "eagle3", aux_layers, target.hidden_size, vocab)
    head = build(lambda: Eagle3Head(shape, max_positions), device, torch.bfloat16)
    head.embed_tokens = model.embed_tokens
    return model, head


def whole_matrix(stored: Stored) -> Tensor:
    """A checkpoint's matrix: this rank's, or, where it holds a part, random numbers, of which `Linear.fill` takes that part."""
    if stored.tensor.shape == stored.shape:
        return stored.tensor
    return 0.02 * torch.randn(stored.shape, dtype=stored.tensor.dtype, device=stored.tensor.device)


def round_weights(model: nn.Module, quantize: str, but: Linear | None = None, act_order: bool = False) -> None:
    """Stores matrices, all `but` one, in 8 or 4 bits, as quantize does at load a target's, and draft_quantize a head's.

    act_order: with the columns of each matrix in a random order of its own.
    """
    form = ROUNDED[quantize]
    for name, matrix in model.named_modules():
        if isinstance(matrix, Linear) and matrix is not but and not name.endswith(KEPT):
            parts = [part for part, rows in matrix.parts.sizes.items() if rows]
            numbers = {part: whole_matrix(matrix.tensors(part)["weight"]) for part in parts}
            columns, device = next((each.shape[1], each.device) for each in numbers.values())
            order_K = torch.randperm(columns, device=device).int() if act_order else None
            for part, weight in numbers.items():
                matrix.fill(part, rounded(weight, form.kind, form.group_size_of(columns))._replace(order_K=order_K))


def store_weights(
    model: CausalLM, head: EagleHead, quantize: str, draft_quantize: str, packs: bool, act_order: bool = False
) -> None:
    """Stores both models' weights as the options of these names do."""
    if quantize != "none":
        round_weights(model, quantize, model.lm_head, act_order)
    if draft_quantize != "none":
        round_weights(head, draft_quantize)
    if packs:
        pack_pair(model, head)
    torch.cuda.empty_cache()


def spec_of(text: str) -> SpecConfig | None:
    if text == "plain":
        return None
    return SpecConfig("auto", 1, 6) if text == "auto" else SpecConfig(*map(int, text.split(",")))


def make_decoder(
    model: CausalLM,
    head: DraftModel,
    spec: SpecConfig | None,
    batch: int,
    context: int,
    graphs: GraphMode,
    attention: str = "auto",
    deterministic: bool = False,
    ranks: Ranks | None = None,
    tokenizer: Tokenizer | None = None,
) -> SpecDecoder:
    """A decoder on the first GPU, or where the model lies if that is the CPU."""
    device = model.embed_tokens.weight.device.type
    where: dict[str, Any] = {"device": "cuda:0"} if device == "cuda" else {"device": device, "threads": 1}
    options = EngineOptions(
        dtype="bfloat16", max_batch_size=batch, max_seq_len=context + 1024, cuda_graphs=graphs, attention=attention,
        deterministic=deterministic, **where,
    )  # fmt: skip
    settings = resolve_settings(options, spec, model.config)
    settings = replace(settings, attention_backend=choose_attention(settings, model.config, *head.needs.models))
    settings = settings.with_drafter(head)
    return SpecDecoder(model, head if spec else None, settings, tokenizer or Tokenizer(Path("/nonexistent")), ranks)


def random_prompts(batch: int, context: int, vocab_size: int = 100000) -> list[list[int]]:
    most = min(100000, vocab_size)
    return torch.randint(1000, most, (batch, context), generator=torch.Generator().manual_seed(1)).tolist()


def measure(
    model: CausalLM,
    head: DraftModel,
    case: Case,
    rounds: int,
    graphs: GraphMode,
    *,
    traced: bool = True,
    deterministic: bool = False,
    ranks: Ranks | None = None,
    settle: int | None = None,
) -> dict[str, Any]:
    """One line: wall, host and GPU milliseconds a round; if traced, by kind of kernel and by phase too.

    ranks: those that hold both models, if there are several; the bytes are then those that one of them reads.
    settle: rounds that are not measured; None: as many as compiling, capturing and "auto" take.
    """
    spec = spec_of(case.spec)
    decoder = make_decoder(model, head, spec, case.batch, case.context, graphs, deterministic=deterministic, ranks=ranks)
    sampling = [SamplingParams(max_tokens=900, ignore_eos=True)] * case.batch
    session = Session(decoder)
    prompts = random_prompts(case.batch, case.context, model.config.vocab_size)
    work = Workload(session, prompts, sampling, speculate=spec is not None)
    full_rounds(work, session.step, settle or (8 if traced else 100))
    found = [walls for walls, _ in full_rounds(work, session.timed_step, rounds)]
    chosen = chosen_experts(work, rounds)
    limit = byte_limit(model, head if spec else None, spec, case.batch, case.context, chosen=chosen)
    row: dict[str, Any] = {
        **case._asdict(), "deterministic": deterministic,
        "bar": this_gpu().bars.get(case.name), "rounds": len(found), "graphs": graphs,
        "ms": 1e3 * median(wall for wall, _ in found), "host_ms": 1e3 * median(wall - waited for wall, waited in found),
        "limit_ms": 1e3 * limit.total / this_gpu().read_bandwidth, "bytes": limit.total,
        "experts": limit.target_experts and limit.target_experts.chosen,
    }  # fmt: skip
    if not traced:
        row["mean_ms"] = 1e3 * sum(wall for wall, _ in found) / len(found)
        return row
    with work.running():
        split = trace(session.step, min(TRACED, rounds_in(900, spec)), decoder.settings.device)
    row |= {"gpu_ms": split.span, "idle_share": split.idle_share, "kernels": split.kernels, "kinds_ms": split.by_kind,
            "phases_ms": split.by_phase, "longest": split.longest}  # fmt: skip
    return row


def prefill_ms(
    model: CausalLM,
    head: DraftModel,
    batch: int,
    tokens: int,
    repeats: int = 8,
    attention: str = "auto",
    deterministic: bool = False,
) -> float:
    """Wall milliseconds from the request to the first token of every prompt, for both models."""
    decoder = make_decoder(model, head, SpecConfig(5, 1, 6), batch, tokens, "round", attention, deterministic)
    prompts, times = random_prompts(batch, tokens, model.config.vocab_size), []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        decoder.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
        times.append(time.perf_counter() - start)
    return 1e3 * median(times[2:])


def generate_rate(
    model: CausalLM, head: DraftModel, batch: int, tokens: int = 600, probability: float = 0.75
) -> dict[str, Any]:
    """Tokens a second of `generate` with prompts of 1,024 tokens and the chain (5,1,6), where acceptance is forced.

    tokens: of each request.  probability: of each level, given the level before.
    """
    decoder = make_decoder(model, head, SpecConfig(5, 1, 6), batch, 1024, "round")
    session, prompts, seconds = Session(decoder), random_prompts(batch, 1024), {}
    session.force_acceptance([probability] * 5)
    # Rows leave the first run one after the other, so that it captures rounds of every size.  The second ends with the prompts.
    for asked, more in ((40, 8), (1, 0), (tokens, 0)):
        sampling = [SamplingParams(max_tokens=asked + more * row, ignore_eos=True) for row in range(batch)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        session.generate(prompts, sampling, speculate=True)
        seconds[asked] = time.perf_counter() - start
    return {
        "batch": batch, "tokens": tokens, "acceptance": probability, "seconds": seconds[tokens], "prompts_seconds": seconds[1],
        "tokens_per_s": batch * tokens / seconds[tokens],
        "tokens_per_s_after_prompts": batch * (tokens - 1) / (seconds[tokens] - seconds[1]),
    }  # fmt: skip


def verdict(ms: float, bar: float | None) -> str:
    return "no bar" if bar is None else f"bar {bar:5.2f} {'ok  ' if ms <= bar else 'MISS'}"


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['spec']:>8} batch {row['batch']:>2} context {row['context']:>5}: {row['ms']:6.2f} ms"
        f"  limit {row['limit_ms']:5.2f}  {verdict(row['ms'], row['bar'])}  host {row['host_ms']:.2f}",
        end="",
    )
    if "kinds_ms" in row:
        phases = ", ".join(f"{name} {ms:.2f}" for name, ms in row["phases_ms"].items())
        kinds = ", ".join(f"{name} {ms:.2f}" for name, ms in row["kinds_ms"].items())
        print(f"  idle {row['idle_share']:.1%}  {row['kernels']:.0f} kernels\n         {phases}\n         {kinds}", end="")
        for name, spent, launches in row["longest"]:
            print(f"\n         {spent:7.3f} ms {launches:6.1f} x {name}", end="")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="cases whose spec:batch:context starts with one of these, as 5,1,6:8")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--graphs", choices=("round", "step"), default="round")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--prefills", help="batch:tokens of prefills, separated by commas; nothing else is measured then")
    parser.add_argument("--attention", default="auto", help="attention backends of the prefills, separated by commas")
    parser.add_argument("--generate", help="numbers of rows, separated by commas, whose tok/s are measured too")
    parser.add_argument("--no-auto", action="store_true")
    parser.add_argument("--deterministic", action="store_true", help="with the target's sums in one order")
    parser.add_argument("--quantize", choices=("none", *ROUNDED), default="none", help="the target's weights in 8 or 4 bits")
    parser.add_argument("--act-order", action="store_true", help="and their columns in a random order, as GPTQ's may be")
    parser.add_argument("--pack-weights", action="store_true", help="keep weights in 16 bit once more in 12 bits, without loss")
    parser.add_argument("--draft-quantize", choices=("none", *ROUNDED), default="none", help="the head's weights likewise")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.act_order and args.quantize == "none":
        parser.error("--act-order is of weights in 8 or 4 bits: name --quantize as well")
    torch.manual_seed(0)
    model, head = random_pair(max(case.context for case in CASES) + 2048, torch.device("cuda", 0))
    store_weights(model, head, args.quantize, args.draft_quantize, args.pack_weights, args.act_order)
    rows = []
    for case in () if args.prefills else CASES:
        if args.only and not case.name.startswith(tuple(args.only)):
            continue
        rows.append(measure(model, head, case, args.rounds, args.graphs, deterministic=args.deterministic))
        show(rows[-1])
        torch.cuda.empty_cache()
    for batch in () if args.no_auto or args.prefills else PAUSES:
        for spec in ("plain", "auto"):  # both over the same 600 rounds, so of the same lengths
            case = Case(spec, batch, 1024)
            rows.append(measure(model, head, case, 600, args.graphs, traced=False, deterministic=args.deterministic))
            print(
                f"600 rounds of {spec}, batch {batch}: median {rows[-1]['ms']:.2f} ms, mean {rows[-1]['mean_ms']:.2f} ms",
                flush=True,
            )
            torch.cuda.empty_cache()
    prefills = []
    asked = [tuple(map(int, text.split(":"))) for text in args.prefills.split(",")] if args.prefills else PREFILLS
    for (batch, tokens), attention in () if args.no_prefill else itertools.product(asked, args.attention.split(",")):
        ms = prefill_ms(model, head, batch, tokens, attention=attention, deterministic=args.deterministic)
        bar = this_gpu().bars.get(f"prefill:{batch}:{tokens}")
        prefills.append({"batch": batch, "tokens": tokens, "attention": attention, "ms": ms, "bar": bar})
        print(f"prefill {batch} x {tokens}, attention={attention}: {ms:.1f} ms  {verdict(ms, bar)}", flush=True)
        torch.cuda.empty_cache()
    rates = [generate_rate(model, head, batch) for batch in map(int, args.generate.split(","))] if args.generate else []
    for rate in rates:
        print(f"generate, {rate['batch']} rows: {rate['tokens_per_s']:.0f} tok/s, after the prompts "
              f"{rate['tokens_per_s_after_prompts']:.0f}", flush=True)  # fmt: skip
    result = {
        "device": device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "weights": "random", "dtype": "bfloat16",
        "quantize": args.quantize, "draft_quantize": args.draft_quantize, "pack_weights": args.pack_weights,
        "act_order": args.act_order,
        "read_bandwidth": this_gpu().read_bandwidth, "rows": rows, "prefill": prefills, "generate": rates,
    }  # fmt: skip
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
