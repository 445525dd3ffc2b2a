"""What a chunk of prompts and a round take in one pass over the target, and what they take one after the other.

    python benchmarks serving.mixed_times --out benchmarks/serving/results/mixed_times_h200.json
    python benchmarks serving.mixed_times --quantize none,int4 --tree
    python benchmarks serving.mixed_times --tiny   (a small random pair on a CPU: whether this script works, no numbers)

A mixed pass drafts, then runs the target once over the nodes of the running rows' trees and the tokens of a chunk together,
then accepts, and has the drafter read both (specdec/runner/mixed.py).  Its attention is two calls, whose outputs are joined by
a copy.  Attention in one call, with each chain as one more part of the ragged prompts, was slower: beside 32 rows 31.5 ms for
29.3 at 1,024 tokens.

The Llama-3.1-8B shape with an EAGLE-3 head of the real shape, random bf16 weights, each pass as one CUDA graph, between events.
Every round, chunk and mixed pass of a line takes turns with the others, so that all run at the same clocks.  `total`: the nodes
and the chunk's tokens of a mixed pass together; the chunk that runs alone has as many tokens as that.  serving.mixed_load
reads the file.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import triton
from engine_internals import workers_of
from rounds.round_8b import make_decoder, random_pair, store_weights
from torch import Tensor

from specdec import shipped
from specdec.batch.ragged import ChunkShape, RaggedPrompts, flat_chunk
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.decoder import SpecDecoder
from specdec.loading.build import free_memory
from specdec.ops.compiling.rehearsal import compile_ahead, compiles_ahead
from specdec.ops.cuda_graph import GraphSet
from specdec.ops.launch import launching
from specdec.steps import Needs, PromptPart
from specdec.verify.verifier import TreePass

CHAIN, TREE, NEEDS = SpecConfig(5, 1, 6), SpecConfig(5, 8, 32), Needs()


class Sizes(NamedTuple):
    """What is measured.  context: tokens of each running row; `longer` once more for rounds.  cached: of the chunk's prompt.

    chunks: of passes over chunks alone; the second to last also after `longer` tokens.  totals: of mixed passes.
    """

    batches: tuple[int, ...] = (1, 8, 16, 32)
    chunks: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096)
    totals: tuple[int, ...] = (256, 512, 1024, 2048)
    context: int = 2304
    cached: int = 1024
    longer: int = 4096
    replays: int = 8

    @property
    def longest(self) -> int:
        """The most tokens of any row."""
        return self.longer + self.chunks[-2]


TINY = Sizes((1, 2), (8, 16, 32), (24, 72), 48, 16, 64, 1)


class Passes:
    """The rows of a decoder's batch, filled with random texts, and the passes over them.

    rows: that may run; one more row's prompt runs in chunks.  context: tokens of each running row.
    """

    def __init__(self, decoder: SpecDecoder, rows: int, spec: SpecConfig, context: int) -> None:
        self.workers, self.rows, self.spec = workers_of(decoder), rows, spec
        self.state, self.drafter = self.workers.state, self.workers.need_drafter()
        state, device = self.state, self.state.lens_B.device
        width, size = state.page_table_BGW.shape[2], state.page_size
        pages = torch.randperm((rows + 1) * width, device=device).add_(1).view(rows + 1, width).int()
        state.page_table_BGW[:rows, 0], state.prompt_table_BGW[: rows + 1, 0] = pages[:rows], pages
        state.active_B[:rows], state.speculates_B[: rows + 1] = 1, 1
        self.set_context(context)
        for cache in (self.workers.verifier.cache, *self.drafter.caches):
            cache.buffers["kv"][:, : ((rows + 1) * width + 1) * size].normal_()
        kept: Any = self.drafter.rows
        kept.level1_tokens_BK.random_(self.workers.verifier.model.config.vocab_size // 2)
        kept.level1_hidden_BH.normal_()

    def set_context(self, tokens: int) -> None:
        self.context = tokens
        self.reset()

    def reset(self) -> None:
        """Undoes what rounds change of the rows' lengths and bonus tokens."""
        self.state.lens_B[: self.rows] = self.context
        self.state.bonus_B[: self.rows] = 7

    def part(self, tokens: int, cached: int) -> PromptPart:
        """The next `tokens` tokens of the prompt that enters, in the middle of it."""
        ids = torch.randint(5, 5000, (tokens,), generator=torch.Generator().manual_seed(tokens))
        ids %= self.workers.verifier.model.config.vocab_size
        return PromptPart(self.rows, ids.tolist(), cached, 7)

    def prompts(self, part: PromptPart, shape: ChunkShape | None = None) -> RaggedPrompts:
        shape = ChunkShape.of([part]) if shape is None else shape
        flat = flat_chunk([part], shape, self.state.rows - 1).to(self.state.lens_B.device)
        return RaggedPrompts.from_flat(flat, shape, self.state.prompt_pages)

    def draft(self, batch: int) -> DraftTree:
        return self.drafter.draft(self.state.narrow(batch), self.spec, NEEDS)

    def verify(self, batch: int, tree: DraftTree) -> TreePass:
        return self.workers.verifier.read_tree(self.state.narrow(batch), tree)

    def round(self, batch: int) -> Tensor:
        """A round: the numbers that it emits."""
        state, tree = self.state.narrow(batch), self.draft(batch)
        result = self.workers.verifier.accept(state, tree, NEEDS, self.verify(batch, tree))
        self.drafter.extend(state, NEEDS, result.new)
        return result.emitted.numbers_BX

    def chunk(self, prompts: RaggedPrompts) -> Tensor:
        """A chunk by both models: the target's next token after each part."""
        sampling = self.state.sampling_of(prompts.rows_B, NEEDS)
        first, features_TF = self.workers.verifier.prefill(prompts, sampling, NEEDS)
        self.drafter.prefill(self.state, NEEDS, prompts, first.tokens_B.clamp(min=0), features_TF)
        return first.tokens_B

    def mixed(self, batch: int, prompts: RaggedPrompts) -> tuple[Tensor, Tensor]:
        """A round and a chunk in one pass over the target: what `round` and `chunk` return."""
        verifier, state, tree = self.workers.verifier, self.state.narrow(batch), self.draft(batch)
        read, logits_BV, features_TF = verifier.read_mixed(state, tree, prompts)
        result = verifier.accept(state, tree, NEEDS, read)
        self.drafter.extend(state, NEEDS, result.new)
        sampling = self.state.sampling_of(prompts.rows_B, NEEDS)
        first = verifier.first_tokens(logits_BV, prompts, sampling, NEEDS)
        self.drafter.prefill(self.state, NEEDS, prompts, first.tokens_B.clamp(min=0), features_TF)
        return result.emitted.numbers_BX, first.tokens_B


class Clock:
    """Runs passes as CUDA graphs on a GPU, eagerly on a CPU, and measures them."""

    def __init__(self, passes: Passes, replays: int) -> None:
        self.passes, self.replays = passes, replays
        self.device = passes.state.lens_B.device
        self.graphs = GraphSet(self.device.type == "cuda")

    def ms(self, named: dict[str, Callable[[], object]]) -> dict[str, float]:
        """The median milliseconds of each pass.  They run in turn, so that all of them run at the same clocks."""
        found: dict[str, list[float]] = {name: [] for name in named}
        mutable = [self.passes.state.lens_B, self.passes.state.bonus_B]
        graphs = GraphSet(self.graphs.enabled)  # given back afterwards, with the memory of large passes
        for turn in range(self.replays + 2):
            for name, run in named.items():
                self.passes.reset()
                seconds = self._seconds(lambda name=name, run=run: graphs.run(name, run, mutable))
                if turn > 1:  # captured in the first, cold in the second
                    found[name].append(1e3 * seconds)
        return {f"{name}_ms": median(times) for name, times in found.items()}

    def _seconds(self, run: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def measure(passes: Passes, sizes: Sizes) -> dict[str, Any]:
    """All lines of one pair of models and one shape of trees."""
    clock, nodes = Clock(passes, sizes.replays), passes.spec.num_draft_tokens
    rounds, chunks, mixed = [], [], []
    for batch in sizes.batches:
        tree = passes.draft(batch)
        alone = {"draft": partial(passes.draft, batch), "verify": partial(passes.verify, batch, tree)}
        times = clock.ms({"round": partial(passes.round, batch), **alone})
        rounds.append({"batch": batch, "context": sizes.context, **times})
    passes.set_context(sizes.longer)
    longer = clock.ms({"round": partial(passes.round, sizes.batches[-1])})
    rounds.append({"batch": sizes.batches[-1], "context": sizes.longer, **longer})
    passes.set_context(sizes.context)
    for tokens, cached in [*((tokens, 0) for tokens in sizes.chunks), (sizes.chunks[-2], sizes.longer)]:
        prompts = passes.prompts(passes.part(tokens, cached))
        chunks.append({"tokens": tokens, "cached": cached, **clock.ms({"chunk": partial(passes.chunk, prompts)})})
    for line in (*rounds, *chunks):
        show(line)
    for total in sizes.totals:
        whole = passes.prompts(passes.part(total, sizes.cached))
        for batch in sizes.batches:
            if (tokens := total - batch * nodes) > 0:
                given = passes.prompts(passes.part(tokens, sizes.cached))
                line = mixed_line(clock, batch, whole, given)
                mixed.append({"batch": batch, "total": total, "cached": sizes.cached, **line})
                show(mixed[-1])
    return {"spec": passes.spec.label, "nodes": nodes, "rounds": rounds, "chunks": chunks, "mixed": mixed}


def mixed_line(clock: Clock, batch: int, whole: RaggedPrompts, given: RaggedPrompts) -> dict[str, float]:
    """A round, a chunk of as many tokens as the mixed pass has in all, and the mixed pass with its chunk.

    whole, given: the chunk that runs alone, and the mixed pass's.
    """
    passes = clock.passes
    return clock.ms(
        {
            "round": lambda: passes.round(batch),
            "chunk": lambda: passes.chunk(whole),
            "mixed": lambda: passes.mixed(batch, given),
        }
    )


def show(line: dict[str, Any]) -> None:
    print("  ".join(f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in line.items()),
          flush=True)  # fmt: skip


def rehearse(passes: Passes, sizes: Sizes) -> None:
    """Compiles side by side the kernels of all passes, or nearly all: mixed passes of other batches differ in few."""
    alone = [passes.prompts(passes.part(tokens, 0)) for tokens in sizes.chunks]
    mixed = [passes.prompts(passes.part(total - passes.spec.num_draft_tokens, sizes.cached)) for total in sizes.totals]

    def all_passes() -> None:
        for batch in sizes.batches:
            passes.round(batch)
        for prompts in alone:
            passes.chunk(prompts)
        for prompts in mixed:
            passes.mixed(1, prompts)

    compile_ahead(all_passes, passes.state.lens_B.device)


def measured(make: Callable[[SpecConfig, Sizes], SpecDecoder], spec: SpecConfig, sizes: Sizes) -> dict[str, Any]:
    """All lines of one shape of trees.  make: a decoder with a row more than the largest batch."""
    start, decoder = time.perf_counter(), make(spec, sizes)
    device = decoder.settings.device
    with torch.inference_mode(), launching(device):
        passes = Passes(decoder, max(sizes.batches), spec, sizes.context)
        if device.type == "cuda" and compiles_ahead():
            rehearse(passes, sizes)
        print(f"{spec.label}: ready after {time.perf_counter() - start:.1f} s", flush=True)
        found = measure(passes, sizes)
    print(f"{spec.label}: {time.perf_counter() - start:.1f} s", flush=True)
    del passes, decoder
    free_memory(device)
    return found


def tiny_decoder(spec: SpecConfig, sizes: Sizes) -> SpecDecoder:
    folders = shipped.target_folder(), shipped.draft_folder()
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_seq_len": sizes.longest + 64}
    return SpecDecoder.from_pretrained(*folders, spec, max_batch_size=max(sizes.batches) + 1, **options)


def large_pair(quantize: str) -> Callable[[SpecConfig, Sizes], SpecDecoder]:
    """What makes decoders of one random pair.  quantize: how the target's weights are stored."""
    torch.manual_seed(0)
    model, head = random_pair(Sizes().longest + 2048, torch.device("cuda", 0))
    store_weights(model, head, quantize, "none", False)
    return lambda spec, sizes: make_decoder(model, head, spec, max(sizes.batches) + 1, sizes.longest, "round")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantize", default="none", help="how the target's weights are stored: none, fp8, int4; with commas")
    parser.add_argument("--tree", action="store_true", help="trees (5,8,32) in one and 8 rows too")
    parser.add_argument("--tiny", action="store_true", help="a small pair on a CPU, no numbers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sizes, found = TINY if args.tiny else Sizes(), []
    few = sizes._replace(totals=(72,)) if args.tiny else sizes._replace(batches=(1, 8), totals=(512, 1024, 2048))
    for quantize in args.quantize.split(","):
        make = None  # the pair before is given back before the next one is made
        make = tiny_decoder if args.tiny else large_pair(quantize)
        for spec, given in ((CHAIN, sizes), (TREE, few))[: 1 + args.tree]:
            found.append({"quantize": quantize, **measured(make, spec, given)})
    result = {
        "device": "cpu" if args.tiny else torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
        "weights": "random", "settings": found,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
