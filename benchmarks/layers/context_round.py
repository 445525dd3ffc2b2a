"""Milliseconds a round where ranks divide each sequence (decode_context_parallel_size), against ranks that keep whole ones.

    python benchmarks layers.context_round --ranks 2 --out benchmarks/layers/results/context_round_2xh200.json
    python benchmarks layers.context_round --ranks 8 --shapes "128 heads" --out FILE
    python benchmarks layers.context_round --device cpu --tiny --batch 2 --context 300 --rounds 1     # whether all of it runs

Rounds are those of a decoder, host included: plain steps, and rounds that verify chains of 6 nodes, which the n-gram drafter
proposes.  Models have random bf16 weights and a few layers of the shapes below, so `ms a layer` is the difference that each
layer more would make.  Nobody computes 8 prompts of 131,072 tokens for this: short prompts enter, with pages for a long text,
and then all ranks are told that so many tokens are committed.  Their keys and values are random.

Shapes: DeepSeek V3's latents (512 + 64) with the heads of a rank where 2 or 8 ranks hold the model, and one key/value head a
rank, with 8 query heads of 128, where 8 ranks hold a model of 4 key/value heads and 64 query heads.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import triton
from engine_internals import target_cache
from rounds.round_8b import random_prompts
from shapes import OF_LAYERS, SHAPES, Shape, tiny

from specdec.config import SamplingParams, SpecConfig
from specdec.decoder import SpecDecoder
from specdec.draft.ngram.drafter import NgramModel
from specdec.loading.pair import Loaded
from specdec.loading.ranks import Ranks
from specdec.loading.resolve import EngineSettings, choose_attention, resolve_device, resolve_settings
from specdec.models.causal_lm import CausalLM, decoder_layer
from specdec.models.checkpoints.loader import build
from specdec.models.config import ModelConfig
from specdec.models.latent.attention import LatentLayer
from specdec.models.latent.config import LatentConfig
from specdec.models.sharding import join, share_of
from specdec.models.target import Target
from specdec.options import EngineOptions
from specdec.parallel.group import Group
from specdec.parallel.shard import Shard
from specdec.prompts.tokenizer import Tokenizer
from specdec.session import Session

LAYERS = 4
PAGE = 64
SETTLE = 8  # rounds that compile and capture
SPECS = {"plain": None, "5,1,6": SpecConfig(5, 1, 6)}


def latents(heads: int, intermediate: int) -> LatentConfig:
    """A model of DeepSeek V3's sizes, all of whose layers are dense.  heads: of all ranks together."""
    whole = SHAPES["DeepSeek-V3"].config
    assert isinstance(whole, LatentConfig)
    return replace(
        whole, num_layers=LAYERS, num_heads=heads, num_kv_heads=heads, intermediate_size=intermediate, has_experts=False,
        experts=None, **OF_LAYERS,
    )  # fmt: skip


def shapes(ranks: int, tried: bool = False) -> dict[str, ModelConfig]:
    """By the heads of one rank, or of all.  tried: small ones of the same kinds."""
    one_head = ModelConfig(
        family="llama", hidden_size=4096, intermediate_size=1536 * ranks, num_layers=LAYERS, num_heads=8 * ranks,
        num_kv_heads=1, head_dim=128, vocab_size=151936, rms_norm_eps=1e-6, max_position=163840,
    )  # fmt: skip
    found: dict[str, ModelConfig] = {
        "latents, 64 heads a rank": latents(64 * ranks, 9216 * ranks),
        "latents, 16 heads a rank": latents(16 * ranks, 2304 * ranks),
        "latents, 128 heads in all": latents(128, 18432),
        "1 kv head, 8 heads a rank": one_head,
    }
    return {name: tiny(Shape(config)).config for name, config in found.items()} if tried else found


class RandomTarget(NamedTuple):
    """What every rank makes its share of: a target of the shape of that name."""

    shape: str
    options: EngineOptions
    tried: bool

    @property
    def config(self) -> ModelConfig:
        return shapes(self.options.tensor_parallel_size, self.tried)[self.shape]

    def check(self, size: int) -> None:
        share_of(self.config, Shard(0, size))

    def load(self, group: Group, options: EngineOptions) -> Loaded:
        torch.manual_seed(0)  # so that what all ranks hold alike is alike
        device, settings = resolve_device(options.device), resolve_settings(options, None, self.config)
        share, positions = share_of(self.config, Shard(group.rank, group.size)), settings.max_seq_len + 64

        def make() -> Target:
            layer = LatentLayer if isinstance(share, LatentConfig) else decoder_layer
            return CausalLM(share, positions, layer)

        model = build(make, device, settings.dtype)
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        join(model, group)
        return model, NgramModel(self.config.vocab_size), settings, Path("/nonexistent")


def settings_of(options: EngineOptions, spec: SpecConfig | None, config: ModelConfig) -> EngineSettings:
    settings = resolve_settings(options, spec, config)
    return replace(settings, attention_backend=choose_attention(settings, config))


def fill_caches(workers: Any) -> None:
    for buffer in workers.verifier.cache.buffers.values():
        buffer.normal_()


def commit(workers: Any, context: int) -> None:
    """Has every row that runs go on from that many committed tokens."""
    lens_B, active_B = workers.state.lens_B, workers.state.active_B
    lens_B.copy_(torch.where(active_B > 0, context, lens_B))


def measure(decoder: SpecDecoder, batch: int, context: int, rounds: int) -> dict[str, Any]:
    """Medians of rounds' wall and host milliseconds, and what the target's keys and values take of one rank's memory."""
    session, speculates = Session(decoder), decoder.head is not None
    session.on_all_ranks(fill_caches)
    sampling = [SamplingParams(max_tokens=context, ignore_eos=True)] * batch
    session.submit(random_prompts(batch, 16, decoder.model.config.vocab_size), sampling, speculate=speculates)
    while session.num_running < batch:
        session.step()
    session.on_all_ranks(commit, context)
    for _ in range(SETTLE):
        session.step()
    steps = [session.timed_step() for _ in range(rounds)]
    lens = session.on_all_ranks(shortest)
    assert context <= lens <= context + 6 * (SETTLE + rounds + 3), lens
    session.cancel()
    return {
        "ms": 1e3 * median(step.wall for step in steps), "host_ms": 1e3 * median(step.wall - step.waited for step in steps),
        "kv_bytes": target_cache(decoder).bytes,
    }  # fmt: skip


def shortest(workers: Any) -> int:
    """Committed tokens of the shortest row that runs."""
    state = workers.state
    return int(state.lens_B[state.active_B > 0].min())


def compare(shape: str, ranks: Ranks, options: EngineOptions, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each kind of round, of both ways."""
    wanted, rows = RandomTarget(shape, options, args.tiny), []
    model, drafter, _, _ = ranks.load(wanted)
    for name, spec in SPECS.items():
        row: dict[str, Any] = {"shape": shape, "spec": name, "batch": args.batch, "context": args.context, "layers": LAYERS}
        for way, sharers in (("whole", 1), ("sharded", ranks.size)):
            own = replace(options, decode_context_parallel_size=sharers)
            settings = settings_of(own, spec, model.config)
            with SpecDecoder(model, drafter if spec else None, settings, Tokenizer(Path("/nonexistent")), ranks) as decoder:
                row[way] = measure(decoder, args.batch, args.context, args.rounds)
        row["gain_us_a_layer"] = 1e3 * (row["whole"]["ms"] - row["sharded"]["ms"]) / LAYERS
        whole, sharded = row["whole"], row["sharded"]
        print(
            f"{shape:26} {name:>5} {args.batch} x {args.context:,}: whole {whole['ms']:.3f} ms, sharded {sharded['ms']:.3f} ms,"
            f" {row['gain_us_a_layer']:+.0f} us a layer of {LAYERS}; host {whole['host_ms']:.2f}, {sharded['host_ms']:.2f}; "
            f"{sharded['kv_bytes'] / whole['kv_bytes']:.3f} of the bytes of {whole['kv_bytes'] / 2**30:.2f} GiB",
            flush=True,
        )
        rows.append(row)
    return rows


def save(path: Path, rows: list[dict[str, Any]], ranks: int) -> None:
    result = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "ranks": ranks,
        "torch": torch.__version__, "triton": triton.__version__, "date": time.strftime("%Y-%m-%d"), "weights": "random",
        "dtype": "bfloat16", "rows": rows,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--shapes", default="", help="shapes whose name holds this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes of the same kinds: to try the script")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options = EngineOptions(
        device=args.device, dtype="bfloat16", page_size=PAGE, max_batch_size=args.batch, prefix_caching=False,
        max_seq_len=args.context + 4096, tensor_parallel_size=args.ranks, threads="auto" if args.device == "cuda" else 1,
    )  # fmt: skip
    ranks, rows = Ranks(options), []
    try:
        for shape in shapes(args.ranks, args.tiny):
            if args.shapes in shape:
                rows += compare(shape, ranks, options, args)
                if args.out:
                    save(args.out, rows, args.ranks)
    finally:
        ranks.close()
