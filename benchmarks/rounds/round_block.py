"""Milliseconds a round of heads of one pass at the Llama-3.1-8B shape, beside EAGLE-3 and the verify of the same trees.

    python benchmarks rounds.round_block --out benchmarks/rounds/results/round_block.json
    python benchmarks rounds.round_block --heads p-eagle-2,eagle3,eagle3:fp8 --shapes 5,1,6:1

A head's name with ":fp8", ":int4" or ":nvfp4" has its own matrices in few bits, as published heads have them, but for the
language-model head; the target stays in bfloat16.

Weights are random, and acceptance is forced (--accept a level), so that rounds commit as many tokens as with trained heads.
What a round costs without any drafter is measured with one that proposes constants, before and after each head: a GPU that gets
warm becomes slower by a percent, which is as much as the bar leaves.  Rounds are timed through the engine, host included, as in
`generate()`.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import triton
from gpus import this_gpu
from shapes import TARGET

from rounds.round_8b import DRAFT_VOCAB, random_prompts
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.bench.byte_limit import byte_limit
from specdec.bench.kernels import trace
from specdec.bench.profile import Workload, full_rounds
from specdec.config import SamplingParams, SpecConfig
from specdec.decoder import SpecDecoder
from specdec.draft.drafter import Drafter, DrafterContext, DraftModel, DraftNeeds
from specdec.draft.formats.empty import class_of
from specdec.draft.formats.spec import BlockSpec, HeadSpec, Selection, SlotConvolution
from specdec.draft.head import DraftHead
from specdec.loading.resolve import choose_attention, resolve_settings
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.loader import build
from specdec.models.linear import Linear
from specdec.models.schemes.rows import QuantisedRows
from specdec.ops.products.formats.quantised import Kind
from specdec.options import EngineOptions
from specdec.prompts.tokenizer import Tokenizer
from specdec.session import Session
from specdec.steps import Needs

BAR = 1.08  # times the verify of the same tree, of a head of two layers at batch 1
SHAPES = ("5,1,6", "7,1,8", "5,8,32", "7,10,60")
BATCHES = (1, 8)
CONTEXT, ROOM = 1024, 2048


class Shape(NamedTuple):
    """A head.  block: rows of its block.  vocab: of the head.  aux: how many layers of the target it reads.

    bar: whether its rounds at batch 1 must stay below BAR.  candidates: of DFlash2.
    """

    kind: str
    layers: int
    block: int
    vocab: int
    aux: int = 3
    rank: int = 0
    bar: bool = False
    candidates: int = 0


# The published heads: P-EAGLE of 4 layers (SpecForge, speculators), DFlash of 5 layers and blocks of 16 (z-lab), DSpark of 5
# layers and blocks of 7 (DeepSpec), DSpark of 3 layers and blocks of 8 (speculators), DFlash2 of 5 layers and blocks of 16
# (z-lab).  The bar is for those of 2 layers: five layers, their
# `fc` and the whole vocabulary are 1.23 times the bytes of a verify.
HEADS = {
    "eagle3": Shape("eagle3", 1, 0, DRAFT_VOCAB),
    "p-eagle-2": Shape("p-eagle", 2, 8, DRAFT_VOCAB, bar=True),
    "p-eagle-4": Shape("p-eagle", 4, 8, DRAFT_VOCAB),
    "dflash-2": Shape("dflash", 2, 8, DRAFT_VOCAB, bar=True),
    "dflash-5": Shape("dflash", 5, 16, TARGET.vocab_size, aux=5),
    "dflash2-2": Shape("dflash2", 2, 8, TARGET.vocab_size, rank=256, candidates=16),
    "dflash2-5": Shape("dflash2", 5, 16, TARGET.vocab_size, aux=5, rank=256, candidates=16),
    "dspark-2": Shape("dspark", 2, 8, DRAFT_VOCAB, rank=256, bar=True),
    "dspark-3": Shape("dspark", 3, 8, DRAFT_VOCAB, rank=256),
    "dspark-5": Shape("dspark", 5, 7, TARGET.vocab_size, aux=5, rank=256),
}


FORMS: dict[str, tuple[Kind, int]] = {"fp8": ("e4m3", 0), "int4": ("int4", 128), "nvfp4": ("e2m1", 16)}  # columns of a scale


class ConstantModel(DraftModel):
    """Proposes the same tokens always, and costs nothing: what remains of a round is its verify."""

    @property
    def needs(self) -> DraftNeeds:
        return DraftNeeds(features=None)

    def check(self, spec: SpecConfig) -> None: ...

    def worker(self, context: DrafterContext) -> Drafter:
        return Constant(context)

    @property
    def description(self) -> str:
        return "constants"


class Constant(Drafter):
    """A tree whose node n hangs below node (n - 1) // topk, as far as the levels go."""

    def __init__(self, context: DrafterContext) -> None:
        spec, parents, depths = context.spec, [0], [0]
        for node in range(1, spec.num_draft_tokens):
            above = node - 1 if spec.topk == 1 else (node - 1) // spec.topk
            above = above if depths[above] < spec.max_steps else 0
            parents.append(above)
            depths.append(depths[above] + 1)
        self.parents_N = torch.tensor(parents, device=context.device)
        self.tokens_N = torch.arange(1, spec.num_draft_tokens, device=context.device)

    def draft(self, state: BatchState, spec: SpecConfig, needs: Needs) -> DraftTree:
        tokens_BN = torch.cat((state.bonus_B[:, None], self.tokens_N.expand(state.rows, -1)), dim=1)
        if spec.topk == 1:
            return DraftTree.chain(tokens_BN)
        return DraftTree(tokens_BN, self.parents_N.repeat(state.rows, 1), spec.max_steps)

    def extend(self, *args: Any) -> None: ...

    def prefill(self, *args: Any) -> None: ...

    def keep(self, *args: Any) -> None: ...

    def catch_up(self, state: BatchState, needs: Needs) -> None: ...


def random_head(name: str, model: CausalLM, max_positions: int) -> DraftHead:
    """A head with normal weights, made on the GPU, which shares what such heads share with their target."""
    shape, device = shape_of(name), model.embed_tokens.weight.device
    over_context = shape.kind not in ("eagle3", "p-eagle")
    layers = replace(TARGET, num_layers=shape.layers, layer_kinds=(), kv_source=(), qk_norm=over_context)
    aux, block = tuple(1 + 27 * i // (shape.aux - 1) for i in range(shape.aux)), None
    if shape.block:
        skips = shape.kind in ("dflash", "dflash2")
        causal = (shape.kind == "p-eagle",) * shape.layers
        block = BlockSpec(shape.block + skips * (shape.block == 8), 0, causal, skips)
        if shape.candidates:
            selection = Selection(shape.candidates, shape.rank)
            block = replace(block, convolution=SlotConvolution(2, 16), selection=selection)
        elif shape.rank:
            block = replace(block, markov="vanilla", markov_rank=shape.rank)
    spec = HeadSpec(layers, shape.kind, aux, TARGET.hidden_size, shape.vocab, block=block)
    head = build(lambda: class_of(shape.kind)(spec, max_positions), device, torch.bfloat16)
    head.embed_tokens = model.embed_tokens
    for parameter in head.parameters():
        if parameter is not model.embed_tokens.weight:
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    if shape.vocab == TARGET.vocab_size:
        head.lm_head = model.lm_head
    else:
        head.d2t_V = torch.arange(shape.vocab, device=device) * 3
    if ":" in name:
        in_few_bits(head, FORMS[name.partition(":")[2]])
    return head


def shape_of(name: str) -> Shape:
    """Of a head's name, whatever its weights are in."""
    return HEADS[name.partition(":")[0]]


def in_few_bits(head: DraftHead, form: tuple[Kind, int]) -> None:
    """Puts random quantised values into the matrices of a head's layers, and into the one that fuses features."""
    kind, group = form
    for name, module in head.named_modules():
        if not isinstance(module, Linear) or not re.search(r"(_proj|fc)$", name) or "markov" in name:
            continue
        assert module.weight is not None
        device = module.weight.device
        for part, rows in module.parts.sizes.items():
            qvalues = torch.randint(0, 16, (rows, module.in_features), dtype=torch.uint8, device=device)
            if kind == "e4m3":
                qvalues = (20 * torch.randn(qvalues.shape, device=device)).to(torch.float8_e4m3fn).view(torch.uint8)
            scales = torch.full((rows, module.in_features // (group or module.in_features)), 0.002, device=device)
            module.fill(part, QuantisedRows(kind, qvalues, scales, None, group))


@contextmanager
def running(
    model: CausalLM, head: Any, spec: SpecConfig, batch: int, args: argparse.Namespace
) -> Iterator[tuple[Session, Workload]]:
    options = EngineOptions(
        device="cuda:0",
        dtype="bfloat16",
        max_batch_size=batch,
        max_seq_len=CONTEXT + 1024,
        cuda_graphs=False if args.eager else "round",
    )
    settings = resolve_settings(options, spec, model.config)
    settings = replace(settings, attention_backend=choose_attention(settings, model.config, *head.needs.models))
    decoder = SpecDecoder(model, head, settings, Tokenizer(Path("/nonexistent")))
    session = Session(decoder)
    session.force_acceptance([args.accept] * spec.max_steps)
    sampling = [SamplingParams(max_tokens=900, ignore_eos=True)] * batch
    yield session, Workload(session, random_prompts(batch, CONTEXT), sampling, speculate=True)
    decoder.close()
    torch.cuda.empty_cache()


def measure(model: CausalLM, head: Any, spec: SpecConfig, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    with running(model, head, spec, batch, args) as (session, work):
        full_rounds(work, session.step, 8)  # compiles and captures
        found = [walls.wall for walls, _ in full_rounds(work, session.timed_step, args.rounds)]
        row: dict[str, Any] = {"ms": 1e3 * median(found), "rounds": len(found)}
        limit = byte_limit(model, head, spec, batch, CONTEXT)
        row["limit_ms"] = 1e3 * limit.total / this_gpu().read_bandwidth
        if args.traced:
            with work.running():
                split = trace(session.step, 10, session.decoder.settings.device)
            row |= {"gpu_ms": split.span, "kernels": split.kernels, "longest": split.longest}
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default=",".join(HEADS), help="names of HEADS, separated by commas")
    parser.add_argument("--shapes", default="", help="S,k,nd:batch, separated by spaces; all if left out")
    parser.add_argument("--accept", type=float, default=0.75, help="the conditional probability of a level")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--traced", action="store_true")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs, to find what is wrong")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    known = {*HEADS, *(f"{name}:{form}" for name in HEADS for form in FORMS)}
    if unknown := ", ".join(name for name in args.heads.split(",") if name not in known):
        parser.error(f"argument --heads: expected some of {', '.join(HEADS)}, or one with :fp8, :int4 or :nvfp4, got {unknown}")
    cases = [case.split(":") for case in args.shapes.split()] or [(s, str(b)) for b in BATCHES for s in SHAPES]
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    model = build(lambda: CausalLM(TARGET, CONTEXT + ROOM), device, torch.bfloat16)
    for parameter in model.parameters():
        parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    rows: list[dict[str, Any]] = []
    heads: dict[str, Any] = {name: random_head(name, model, CONTEXT + ROOM) for name in args.heads.split(",")}
    for shape, batch in cases:
        spec = SpecConfig(*map(int, shape.split(",")))
        fitting = [name for name in heads if not shape_of(name).block or spec.max_steps <= shape_of(name).block]
        before = report(rows, "verify", shape, batch, measure(model, ConstantModel(), spec, int(batch), args), None)
        for name in fitting:
            found = measure(model, heads[name], spec, int(batch), args)
            after = measure(model, ConstantModel(), spec, int(batch), args)["ms"]
            report(rows, name, shape, batch, found, (before + after) / 2)
            before = after
        if args.out:  # after each shape, so that what was measured stays
            write(args.out, rows, args.accept)


def report(rows: list[dict[str, Any]], name: str, shape: str, batch: str, found: dict[str, Any], verify: float | None) -> float:
    """Adds what was found of a head, or of the verify alone, to the rows, prints it, and returns the milliseconds of a round.

    verify: of a round without a drafter, in milliseconds; None: that is what was measured.
    """
    times = 1.0 if verify is None else found["ms"] / verify
    has_bar = verify is not None and shape_of(name).bar and batch == "1"
    rows.append(
        {"head": name, "spec": shape, "batch": int(batch), **found, "verify_ms": verify, "times_verify": times}
        | {"bar": BAR if has_bar else None}
    )
    verdict = "" if not has_bar else "  ok" if times <= BAR else f"  MISSES {BAR}"
    print(f"{name:>12} {shape:>7} batch {batch}: {found['ms']:6.2f} ms  {times:.3f} of verify{verdict}", flush=True)
    for kernel, spent, launches in found.get("longest", ()):
        print(f"             {spent:7.3f} ms {launches:6.1f} x {kernel}", flush=True)
    return float(found["ms"])


def write(out: Path, rows: list[dict[str, Any]], accept: float) -> None:
    result = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "weights": "random", "dtype": "bfloat16",
        "context": CONTEXT, "accept": accept, "rows": rows,
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
