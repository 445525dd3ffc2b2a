"""What a chunk of prompts and a round take in one pass over the target, and what they take one after the other.

    python benchmarks serving.mixed_times --out benchmarks/serving/results/mixed_times_h200.json
    python benchmarks serving.mixed_times --quantize none,int4 --tree
    python benchmarks serving.mixed_times --tiny   (a small random pair on a CPU: whether this script works, no numbers)

Today chunks and rounds take turns, and each reads the target's weights.  A mixed pass drafts, then runs the target once over
the nodes of the running rows' trees and the tokens of a chunk together, then accepts, and has the drafter read both.  Nothing
in the product runs such a pass: it lives in this file alone.  Its products, norms and MLPs run over all tokens at once.  Its
attention runs in one of two ways:
- two: nodes and chunk by the kernels and plans that they have now, one after the other.  Their outputs are joined by a copy,
  which a product could do without; `copies_ms` is the time of those copies.
- one: for chains alone, whose nodes are one more part of a ragged prompt for each row.

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
from dataclasses import replace
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
from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.inputs import AttentionFn, HeadInputs, LayerInputs
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.segment import AttentionPlan, Segment
from specdec.batch.choose import choose_tokens
from specdec.batch.ragged import ChunkShape, RaggedPrompts, flat_chunk
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.decoder import SpecDecoder
from specdec.loading.build import free_memory
from specdec.models.target import TargetOutput
from specdec.ops.compiling.rehearsal import compile_ahead, compiles_ahead
from specdec.ops.cuda_graph import GraphSet
from specdec.ops.launch import launching
from specdec.ops.rope import Rotation
from specdec.steps import Needs, PromptPart
from specdec.verify.tables import TreeTables, tree_tables
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


class TwoParts:
    """The attention of a mixed pass whose first tokens are nodes, by two calls (an AttentionFn).

    rows_R of a call: all nodes, then the last tokens of the chunk's parts; `last_B` are those, counted within the chunk.
    """

    def __init__(self, nodes: int, of_nodes: AttentionFn, of_chunk: AttentionFn, last_B: Tensor) -> None:
        self.nodes, self.of_nodes, self.of_chunk, self.last_B = nodes, of_nodes, of_chunk, last_B

    def __call__(self, layer: int, inputs: LayerInputs, rows_R: Tensor | None = None, scoring: Scoring = PLAIN) -> Tensor:
        assert type(inputs) is HeadInputs and inputs.prep.rotation is not None, "ordinary heads, rotated here"
        table_P2D, positions_T = inputs.prep.rotation.table_P2D, inputs.prep.rotation.positions_T
        outs = []
        for attn, part, asked in (
            (self.of_nodes, slice(None, self.nodes), None),
            (self.of_chunk, slice(self.nodes, None), None if rows_R is None else self.last_B),
        ):
            prep = replace(inputs.prep, rotation=Rotation(table_P2D, positions_T[part]))
            outs.append(attn(layer, HeadInputs(inputs.qkv_TXD[part], prep), asked, scoring))
        return torch.cat(outs)


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

    def mixed(self, batch: int, prompts: RaggedPrompts, in_one: bool) -> tuple[Tensor, Tensor]:
        """A round and a chunk in one pass over the target: what `round` and `chunk` return.

        in_one: whether attention is one call over a ragged plan, which chains alone allow.
        """
        verifier, state, tree = self.workers.verifier, self.state.narrow(batch), self.draft(batch)
        tables, nodes = tree_tables(state, tree), tree.tokens_BN.numel()
        positions_T = torch.cat((tables.positions_T, prompts.positions_T))
        attn = self._in_one(tables, prompts, tree.num_nodes) if in_one else self._in_two(tables, prompts, nodes)
        rows_R = torch.cat((torch.arange(nodes, device=positions_T.device), prompts.last_B + nodes))
        ids_T = torch.cat((tree.tokens_BN.flatten(), prompts.ids_T))
        out = verifier.model(ids_T, positions_T, attn, verifier.aux_layers or (), rows_R)
        logits_RV = verifier.model.logits(out.hidden_TH)
        assert out.aux_TA is not None
        of_nodes = TargetOutput(out.hidden_TH[:nodes], out.aux_TA[:nodes])
        done = TreePass(logits_RV[:nodes], of_nodes, tables.positions_T, {0: tables})
        result = verifier.accept(state, tree, NEEDS, done)
        sampling = self.state.sampling_of(prompts.rows_B, NEEDS)
        last_B = prompts.positions_T.index_select(0, prompts.last_B)
        first_B = choose_tokens(logits_RV[nodes:], sampling, last_B, NEEDS, verifier.model.vocabulary).tokens_R
        self.drafter.extend(state, NEEDS, result.new)
        self.drafter.prefill(self.state, NEEDS, prompts, first_B.clamp(min=0), out.aux_TA[nodes:])
        return result.emitted.numbers_BX, first_B

    def _in_two(self, tables: TreeTables, prompts: RaggedPrompts, nodes: int) -> AttentionFn:
        backend, cache = self.workers.verifier.backend, self.workers.verifier.cache
        of_nodes = PagedAttention(backend, cache, PassTables(tables.plan, tables.slots_BN.flatten()))
        return TwoParts(nodes, of_nodes, PagedAttention(backend, cache, *prompts.tables), prompts.last_B)

    def _in_one(self, tables: TreeTables, prompts: RaggedPrompts, nodes: int) -> AttentionFn:
        """Each row's chain is one more part of the ragged prompts, with `nodes` tokens."""
        (chains,), (own,) = tables.plan.segments, prompts.tables
        (parts,), batch = own.plan.segments, len(tables.slots_BN)
        pages = PageTable(torch.cat((chains.pages.table, parts.pages.table)), parts.pages.page_size)
        lens = torch.cat((chains.cache_seqlens, parts.cache_seqlens))
        begun = batch * nodes

        def plan(cu_B: Tensor, most: int) -> AttentionPlan:
            cu = torch.cat((chains.cu_seqlens_q, cu_B[1:] + begun))
            whole = Segment(pages, lens, cu, max(nodes, most), True, ragged=True, fresh="queries")
            return AttentionPlan((whole,), torch.cat((tables.positions_T, own.plan.positions_T)))

        slots_T = torch.cat((tables.slots_BN.flatten(), own.slots_T))
        one_each = torch.arange(len(prompts.last_B) + 1, dtype=torch.int32, device=lens.device)
        rows_plan = replace(plan(one_each, 1), positions_T=None)
        of_all = PassTables(plan(parts.cu_seqlens_q, parts.max_seqlen_q), slots_T, rows_plan)
        return PagedAttention(self.workers.verifier.backend, self.workers.verifier.cache, of_all)


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
    passes, config = clock.passes, clock.passes.workers.verifier.model.config
    shape = config.num_heads, config.head_dim
    kinds = {"device": clock.device, "dtype": clock.passes.workers.verifier.model.embed_tokens.weight.dtype}
    parts = [torch.zeros(tokens, *shape, **kinds) for tokens in (batch * passes.spec.num_draft_tokens, len(given.ids_T))]
    named: dict[str, Callable[[], object]] = {
        "round": lambda: passes.round(batch),
        "chunk": lambda: passes.chunk(whole),
        "two": lambda: passes.mixed(batch, given, in_one=False),
        "copies": lambda: [torch.cat(parts) for _ in range(config.num_layers)],
    }
    if passes.spec.topk == 1:
        named["one"] = lambda: passes.mixed(batch, given, in_one=True)
    return clock.ms(named)


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
            passes.mixed(1, prompts, in_one=False)
            if passes.spec.topk == 1:
                passes.mixed(1, prompts, in_one=True)

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
