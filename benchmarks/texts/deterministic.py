"""Counts the tokens by which texts differ with `deterministic=True`: between batch sizes, trees, chunks, graphs and page sizes.

    python benchmarks texts.deterministic --out benchmarks/texts/results/deterministic.json
    python benchmarks texts.deterministic --models dense --tokens 64 --fast
    python benchmarks texts.deterministic --cost

Every text is compared with that of plain decoding, token by token.  The shipped pair drafts with its own head.  The other
models have the layer shapes of real ones, fewer layers, and random bf16 weights, whose logits lie close together; their drafts
are the plain texts with some tokens changed, so that branches are accepted at every depth.  --fast runs the same with
deterministic=False, which shows how many differences the comparison finds where there are some.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from engine_internals import replace_drafter
from rounds.round_8b import Case, measure, prefill_ms, random_pair
from shapes import TARGET
from torch import Tensor

from specdec.attention.kinds import FULL, LayerKind
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.config import SamplingParams, SpecConfig
from specdec.decoder import SpecDecoder
from specdec.draft.drafter import Drafter
from specdec.draft.eagle.head import EagleHead
from specdec.loading import memory
from specdec.loading.resolve import choose_attention, resolve_settings
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.loader import build
from specdec.models.config import IndexerConfig, ModelConfig, RopeConfig
from specdec.models.diffllama.modules import DifferentialAttention, diffllama_layer
from specdec.models.latent.attention import LatentLayer
from specdec.models.latent.config import LatentConfig
from specdec.models.mixtures.loader import mixture_layer
from specdec.models.mixtures.router import Router
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.models.target import Target
from specdec.ops.products.experts import SwiGLU
from specdec.ops.products.routing import RouterRule
from specdec.options import EngineOptions
from specdec.prompts.tokenizer import Tokenizer
from specdec.shipped import draft_folder, prompts_file, target_folder
from specdec.steps import Needs

FEW = replace(TARGET, num_layers=4)
WINDOWS = (LayerKind(window=300), FULL, LayerKind(window=64), LayerKind(chunk=128))
COMMON: dict[str, Any] = {
    "num_layers": 4, "vocab_size": 102400, "rms_norm_eps": 1e-6, "rope": RopeConfig(1e4), "max_position": 16384,
}  # fmt: skip
MODELS: dict[str, ModelConfig | None] = {
    "pair": None,
    "dense": FEW,
    "windowed": replace(FEW, family="qwen2", layer_kinds=WINDOWS, qkv_bias=True),
    "normed": replace(
        FEW, family="qwen3", qk_norm=True, num_heads=16, num_kv_heads=4, intermediate_size=9216, tie_embeddings=True,
    ),
    "experts": LatentConfig(  # the layers of DeepSeek-V2-Lite
        family="deepseek_v2", hidden_size=2048, intermediate_size=10944, num_heads=16, num_kv_heads=16, head_dim=64,
        latent_rank=512, nope_dim=128, value_dim=128, has_experts=True, **COMMON,
        experts=ExpertsConfig(64, 1408, RouterRule(6, "softmax"), shared_size=2 * 1408, dense_layers=frozenset({0})),
    ),
    "latent": LatentConfig(  # the layers of DeepSeek-V3, with a quarter of the experts
        family="deepseek_v3", hidden_size=7168, intermediate_size=18432, num_heads=128, num_kv_heads=128, head_dim=64,
        latent_rank=512, q_rank=1536, nope_dim=128, value_dim=128, has_experts=True, **COMMON,
        experts=ExpertsConfig(
            64, 2048, RouterRule(8, "sigmoid", True, groups=8, top_groups=4, group_best=2, normed=True, scaling=2.5),
            shared_size=2048, dense_layers=frozenset(range(3)),
        ),
    ),
    "mixture": replace(  # layers of Qwen3-30B-A3B, with a gated shared expert as Qwen2-MoE's
        FEW, family="qwen3_moe", hidden_size=2048, intermediate_size=6144, vocab_size=102400, num_heads=32, num_kv_heads=4,
        qk_norm=True, has_experts=True,
        experts=ExpertsConfig(128, 768, RouterRule(8, "softmax", normed=True), shared_size=768, shared_gated=True),
    ),
    "clamped": replace(  # experts of gpt-oss-20b, under heads without sinks
        FEW, family="gpt_oss", hidden_size=2880, intermediate_size=2880, vocab_size=102400, num_heads=64, num_kv_heads=8,
        head_dim=64, has_experts=True,
        experts=ExpertsConfig(
            32, 2880, RouterRule(4, "softmax of chosen", biased=True), SwiGLU(1.702, 7.0), biased=True, kept_float32=True,
        ),
    ),
    "sparse": LatentConfig(  # the layers of DeepSeek-V3.2, all dense, with few chosen keys: the texts are short
        family="deepseek_v32", hidden_size=7168, intermediate_size=18432, num_heads=128, num_kv_heads=128, head_dim=64,
        latent_rank=512, q_rank=1536, nope_dim=128, value_dim=128, **COMMON,
        indexer=IndexerConfig(64, 128, 256, False, (0, 1, 2, 3)),
    ),
    "differential": replace(FEW, family="diffllama", differential=True),
}  # fmt: skip
AUX_LAYERS = (0, 1, 2)
COSTS = (
    Case("plain", 1, 1024), Case("5,1,6", 1, 1024), Case("5,8,32", 1, 1024), Case("7,10,60", 1, 1024), Case("plain", 8, 1024),
    Case("5,1,6", 8, 1024), Case("5,8,32", 8, 1024),
)  # fmt: skip
COST_PREFILLS = ((1, 1024), (8, 1024))


class Way(NamedTuple):
    """One way to write the same texts.  spec: S,k,nd, or "" for plain decoding.  batch: the most rows.  requests: None: all."""

    name: str
    spec: str = ""
    batch: int = 32
    requests: int | None = None
    options: tuple[tuple[str, Any], ...] = ()


WAYS = (
    Way("tree of 32, batch 8, prefixes kept", "5,8,32", 8, options=(("prefix_caching", True),)),
    Way("chain, batch 8", "5,1,6", 8),
    Way("plain, chunks of 64, pages of 1", batch=7, options=(("prefill_chunk", 64), ("page_size", 1))),
    Way("tree of 24, batch 32, no graphs", "6,3,24", 32, options=(("cuda_graphs", False), ("page_size", 64))),
    Way(
        "tree of 60, batch 3, graphs of steps, chunks of 100",
        "7,10,60",
        3,
        9,
        (("cuda_graphs", "step"), ("prefill_chunk", 100)),
    ),
    Way("plain, batch 1", batch=1, requests=3),
    Way("tree of 16, batch 1", "5,4,16", 1, 4),
)


class Recorded(Drafter):
    """A drafter that knows the plain texts.  It puts them on one path of each tree and changes about every sixth token.

    It learns nothing of what rounds emit, since it knows that already: `extend`, `prefill`, `keep` and `catch_up` do nothing.
    texts_QX: ids of prompt and output of each request, whose number is its seed.
    """

    def __init__(self, texts_QX: Tensor, vocab_size: int) -> None:
        self.texts_QX, self.vocab_size = texts_QX, vocab_size
        self._shapes: dict[SpecConfig, tuple[Tensor, Tensor, Tensor]] = {}

    def draft(self, state: BatchState, spec: SpecConfig, needs: Needs) -> DraftTree:
        parents_N, depths_N, is_main_N = self._shape(spec)
        at_BN = state.lens_B.long()[:, None] + depths_N
        seeds_B1 = state.sampling.seed_R.clamp(0, len(self.texts_QX) - 1)[:, None]
        known_BN = self.texts_QX[seeds_B1, at_BN.clamp(max=self.texts_QX.shape[1] - 1)]
        is_kept_BN = is_main_N & ((at_BN * 2654435761 + seeds_B1 * 40503) % 97 > 15)
        others_BN = (known_BN + 1 + torch.arange(len(depths_N), device=at_BN.device)) % self.vocab_size
        tokens_BN = torch.where(is_kept_BN, known_BN, others_BN)
        tokens_BN[:, 0] = state.bonus_B
        if spec.topk == 1:
            return DraftTree.chain(tokens_BN)
        return DraftTree(tokens_BN, parents_N.expand_as(tokens_BN).contiguous(), spec.max_steps)

    def extend(self, *args: Any) -> None:
        """Nothing: it knows the texts, and has nothing to learn of them here and in the three below."""

    def prefill(self, *args: Any) -> None: ...

    def keep(self, *args: Any) -> None: ...

    def catch_up(self, *args: Any) -> None: ...

    def _shape(self, spec: SpecConfig) -> tuple[Tensor, Tensor, Tensor]:
        """(parents, depths, whether a node is on the path of the text): one random tree for each spec."""
        if spec not in self._shapes:
            chooser, N = random.Random(str(spec)), spec.num_draft_tokens
            parents, depths, main = [0], [0], [True]
            tip = 0  # the last node of the path
            for node in range(1, N):
                if spec.topk == 1 or (depths[tip] < spec.max_steps and (N - node) * chooser.random() < spec.max_steps):
                    parent, on_path, tip = tip, True, node
                else:
                    parent = chooser.choice([n for n in range(node) if depths[n] < spec.max_steps])
                    on_path = False
                parents.append(parent), depths.append(depths[parent] + 1), main.append(on_path)
            numbers = (torch.tensor(each, device=self.texts_QX.device) for each in (parents, depths, main))
            self._shapes[spec] = tuple(numbers)  # type: ignore[assignment]
        return self._shapes[spec]


def models_of(name: str, max_positions: int) -> tuple[Target, EagleHead, Tokenizer]:
    config = MODELS[name]
    if config is None:
        decoder = SpecDecoder.from_pretrained(target_folder(), draft_folder(), device="cuda", dtype="bfloat16")
        assert isinstance(decoder.head, EagleHead)
        return decoder.model, decoder.head, decoder.tokenizer
    device = torch.device("cuda", 0)
    is_head_like = type(config) is ModelConfig and not config.differential and config.experts is None
    like_target = config if is_head_like else replace(FEW, hidden_size=config.hidden_size, vocab_size=102400)
    model: Target
    if config is like_target:
        model, head = random_pair(max_positions, device, config, AUX_LAYERS)
    else:
        ordinary = mixture_layer if config.experts is not None else diffllama_layer
        layer = LatentLayer if isinstance(config, LatentConfig) else ordinary
        model = build(lambda: CausalLM(config, max_positions, layer), device, torch.bfloat16)
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        for module in model.modules():
            if isinstance(module, Router):
                for part, buffer in module.named_buffers(recurse=False):
                    setattr(module, part, torch.nn.Buffer(0.02 * torch.randn(buffer.shape, device=device)))
            elif isinstance(module, DifferentialAttention):
                module.factor = torch.nn.Buffer(torch.tensor(0.3, device=device))
        head = random_pair(max_positions, device, replace(like_target, num_layers=3), AUX_LAYERS)[1]
    return model, head, Tokenizer(Path("/nonexistent"))


def prompts_of(name: str, count: int, tokenizer: Tokenizer) -> list[Any]:
    if MODELS[name] is None:
        lines = [json.loads(line)["prompt"] for line in prompts_file().read_text().splitlines()]
        return [tokenizer.encode(lines[i % len(lines)]) for i in range(count)]
    chooser = random.Random(name)
    return [[chooser.randrange(1000, 100_000) for _ in range(chooser.choice((5, 61, 127, 300, 700)) + i)] for i in range(count)]


def write(
    name: str, way: Way, parts: tuple[Target, EagleHead, Tokenizer], prompts: list[Any], sampling: list[SamplingParams],
    texts_QX: Tensor | None, deterministic: bool,
) -> tuple[list[list[int]], float]:  # fmt: skip
    """(the output ids of each request, the accept length)."""
    model, head, tokenizer = parts
    spec = SpecConfig(*map(int, way.spec.split(","))) if way.spec else None
    longest = 512 if name == "pair" else 2048
    options = EngineOptions(
        device="cuda",
        dtype="bfloat16",
        max_batch_size=way.batch,
        max_seq_len=longest,
        deterministic=deterministic,
        **dict(way.options),
    )
    settings = resolve_settings(options, spec, model.config)
    settings = replace(settings, attention_backend=choose_attention(settings, model.config, head.config.model))
    decoder = SpecDecoder(model, head if spec else None, settings, tokenizer)
    if spec and name != "pair":
        assert texts_QX is not None
        replace_drafter(decoder, Recorded(texts_QX, model.config.vocab_size))
    outputs = decoder.generate(prompts, sampling)
    accepted = sum(o.stats.emitted for o in outputs) / max(1, sum(o.stats.rounds for o in outputs))
    decoder.close()
    return [o.token_ids for o in outputs], accepted


def compare(name: str, ways: list[Way], tokens: int, count: int, deterministic: bool) -> Iterator[dict[str, Any]]:
    """Texts of these ways against those of plain decoding.  A third of them are greedy, a third sampled, a third with top-p."""
    parts = models_of(name, 4096)
    prompts = prompts_of(name, count, parts[2])
    plain = SamplingParams(max_tokens=tokens, ignore_eos=True)
    sampling = [
        replace(plain, temperature=0.8 if i % 3 else 0.0, top_p=0.9 if i % 3 == 2 else 1.0, seed=i) for i in range(count)
    ]
    texts, _ = write(name, Way("plain"), parts, prompts, sampling, None, deterministic)
    longest = max(len(p) + len(t) for p, t in zip(prompts, texts, strict=True))
    texts_QX = torch.zeros(count, longest, dtype=torch.int64)
    for row, prompt, text in zip(texts_QX, prompts, texts, strict=True):
        row[: len(prompt) + len(text)] = torch.tensor([*prompt, *text])
    texts_QX = texts_QX.cuda()
    for way in ways:
        begun, asked = time.perf_counter(), way.requests or count
        got, accepted = write(name, way, parts, prompts[:asked], sampling[:asked], texts_QX, deterministic)
        differing = sum(g != t for g, t in zip(got, texts))
        row = {
            "model": name, "way": way.name, "tokens": sum(map(len, got)), "texts": len(got), "texts_that_differ": differing,
            "tokens_that_differ": sum(a != b for g, t in zip(got, texts) for a, b in zip(g, t)),
            "accept_length": round(accepted, 3), "seconds": round(time.perf_counter() - begun, 1),
        }  # fmt: skip
        print(
            f"{name:>8} {way.name:<52} {row['tokens']:>6} tokens, {differing:>2} of {len(got):>2} texts differ, "
            f"accept length {accepted:.2f}, {row['seconds']} s",
            flush=True,
        )
        yield row


def cost(rounds: int, batches: list[int], specs: list[str]) -> Iterator[dict[str, Any]]:
    """Milliseconds a round of the 8B shape, fast and deterministic, one after the other.  specs: these alone, if any."""
    model, head = random_pair(4096, torch.device("cuda", 0))
    for case in COSTS:
        if case.batch not in batches or (specs and case.spec not in specs):
            continue
        ms = {}
        for deterministic in (False, True):
            row = measure(model, head, case, rounds, "round", traced=False, deterministic=deterministic)
            ms[deterministic] = row["ms"]
            torch.cuda.empty_cache()
        more = ms[True] / ms[False] - 1
        print(f"{case.name:<16} fast {ms[False]:6.3f} ms, deterministic {ms[True]:6.3f} ms, {more:+.1%}", flush=True)
        yield {**case._asdict(), "fast_ms": ms[False], "deterministic_ms": ms[True], "cost": more}
    for batch, tokens in COST_PREFILLS:
        if batch not in batches or (specs and "prompts" not in specs):
            continue
        fast, slow = (prefill_ms(model, head, batch, tokens, deterministic=each) for each in (False, True))
        print(
            f"prompts {batch} x {tokens}: fast {fast:6.2f} ms, deterministic {slow:6.2f} ms, {slow / fast - 1:+.1%}", flush=True
        )
        yield {
            "spec": "prompts", "batch": batch, "context": tokens, "fast_ms": fast, "deterministic_ms": slow,
            "cost": slow / fast - 1,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="some of them, separated by commas")
    parser.add_argument(
        "--ways", default="1,2,3,4,5,6,7", help="numbers of the ways to write texts, in the order of their turns"
    )
    parser.add_argument("--tokens", type=int, default=384, help="of each text")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--fast", action="store_true", help="with deterministic=False: differences are expected")
    parser.add_argument("--cost", action="store_true", help="measure rounds of the 8B shape, and compare no texts")
    parser.add_argument("--rounds", type=int, default=60, help="of each measurement of --cost")
    parser.add_argument("--batches", default="1,8", help="of --cost, separated by commas")
    parser.add_argument("--specs", nargs="*", default=[], help="of --cost: some of plain 5,1,6 5,8,32 7,10,60 prompts")
    parser.add_argument("--pool-share", type=float, default=0.85, help="of the free memory for kept prefixes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if unknown := ", ".join(name for name in args.models.split(",") if name not in MODELS):
        parser.error(f"argument --models: expected some of {', '.join(MODELS)}, got {unknown}")
    if any(number not in [str(n) for n in range(1, len(WAYS) + 1)] for number in args.ways.split(",")):
        parser.error(f"argument --ways: expected numbers from 1 to {len(WAYS)}, got {args.ways}")
    torch.manual_seed(0)
    memory.POOL_SHARE = args.pool_share
    costs: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for kind, row in measured(args):
        (rows if kind == "text" else costs).append(row)
        if args.out:  # after each line, so that a run that is cut short leaves what it found
            save(args.out, not args.fast, rows, costs)
    if rows:
        total, wrong = sum(row["tokens"] for row in rows), sum(row["texts_that_differ"] for row in rows)
        print(f"{total} tokens compared with plain decoding's, {wrong} texts differ")


def measured(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line of the result, as it is found."""
    if args.cost:
        batches = [int(batch) for batch in args.batches.split(",")]
        yield from (("cost", row) for row in cost(args.rounds, batches, args.specs))
        return
    ways = [WAYS[int(number) - 1] for number in args.ways.split(",")]
    for name in args.models.split(","):
        yield from (("text", row) for row in compare(name, ways, args.tokens, args.requests, not args.fast))
        torch.cuda.empty_cache()


def save(out: Path, deterministic: bool, rows: list[dict[str, Any]], costs: list[dict[str, Any]]) -> None:
    result = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "deterministic": deterministic,
        "tokens": sum(row["tokens"] for row in rows), "texts_that_differ": sum(row["texts_that_differ"] for row in rows),
        "rows": rows, "costs": costs,
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
