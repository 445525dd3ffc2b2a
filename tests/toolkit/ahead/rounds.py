"""What rounds launch between the layers: sampling, drafts, acceptance, exchanges of ranks.  See passes.py.

Shapes: B sequences, N nodes or rows of each, R = B * N, K topk, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from specdec.attention.pages import PageTable
from specdec.batch.emitted import EmittedRows, NewTokens
from specdec.batch.grammars.masks import BitMasks, masked_logits
from specdec.batch.grammars.waits import WaitRows
from specdec.batch.tree import DraftTree
from specdec.batch.trees.numbers_triton import launch_tree_numbers
from specdec.batch.trees.states_triton import launch_commit_states, launch_state_numbers
from specdec.batch.trees.tables_triton import launch_path_tables
from specdec.draft.block.dflash2.children_triton import launch_best_children
from specdec.draft.block.dflash2.convolve_triton import launch_convolve, launch_convolve_add_norm
from specdec.draft.block.rounds.correct_triton import launch_corrected_logits, launch_greedy_chain
from specdec.draft.block.rounds.grow_triton import launch_best_paths
from specdec.draft.block.rounds.pairs_triton import launch_fill_pairs
from specdec.draft.block.rounds.tables_triton import launch_block_tables
from specdec.draft.join.join_triton import launch_candidates, launch_joined_chain
from specdec.draft.join.paths import Paths
from specdec.draft.join.paths_triton import launch_rates
from specdec.draft.join.survival import CHAIN, Survival
from specdec.draft.join.survival_triton import launch_learn
from specdec.draft.ngram.lookup import MAX_MATCH, PagedTexts
from specdec.draft.ngram.lookup_triton import launch_match_keys
from specdec.draft.ngram.paths_triton import launch_paths
from specdec.draft.ngram.store_triton import launch_write
from specdec.draft.prediction.places_triton import launch_follow
from specdec.draft.prediction.places_triton import launch_paths as launch_predicted
from specdec.draft.prediction.source import PredictionRows
from specdec.draft.suffix.device_table import DeviceTable
from specdec.draft.suffix.lookup import Continuations
from specdec.draft.suffix.lookup_triton import launch_continuations
from specdec.draft.tree.branches_triton import launch_fork
from specdec.draft.tree.build_tree_triton import launch_best_nodes
from specdec.draft.tree.expand import Beam, Candidates
from specdec.draft.tree.expand_triton import launch_expand, launch_first_level
from specdec.ops.noise.cutoff import cutoffs
from specdec.ops.noise.filters import Filters
from specdec.ops.noise.gumbel import Noise, gumbel_noise, perturb
from specdec.ops.noise.sample import sampled_tokens
from specdec.ops.products.partials import Partials
from specdec.ops.topk import greedy_tokens, top_tokens
from specdec.parallel.scan_triton import launch_scan_ranks
from specdec.parallel.symmetric.flat_triton import launch_flat
from specdec.parallel.symmetric.rows_triton import launch_rows
from specdec.train.lesson.entropy_triton import launch_entropy, launch_gradient
from specdec.verify.accept import Accepted
from specdec.verify.accept_triton import launch_accept
from specdec.verify.halt_triton import launch_halt
from toolkit.ahead.made import HIDDEN, PAGE, VOCABULARY, counts, floats, halves, here, ids, inbox_of


def filters_of(B: int) -> Filters:
    options = floats(B, 6)
    return Filters(options[:, 0], ids(B), options[:, 1], options[:, 2])


def sampling() -> None:
    """Top-k, greedy and sampled tokens of logits, filters, shared noise, and bans."""
    for V, dtype in ((VOCABULARY, torch.bfloat16), (32000, torch.float32)):
        for B, N in ((1, 1), (1, 60), (8, 60)):
            R = B * N
            logits, options = torch.empty(R, V, dtype=dtype), filters_of(B)
            noise = Noise(options.temperature_B, ids(B), counts(B), 1, 1.0, 1.0)
            filtered = noise._replace(cutoff_weight=4.0, filters=options)
            top_tokens(logits, 8)
            top_tokens(logits, 8, noise=filtered)
            top_tokens(logits, 8, ids(V))
            greedy_tokens(logits)
            greedy_tokens(logits, noise=noise)
            perturb(logits, noise)
            perturb(logits, filtered, ids(V))
            cutoff = cutoffs(logits, options)
            for cut in (None, cutoff):
                sampled_tokens(logits, options.temperature_B, ids(B), ids(R), cut)
            masked_logits(logits, BitMasks(counts(2, N, -(-V // 32)), counts(B)))
    gumbel_noise(ids(4), ids(4), 32000)


def losses() -> None:
    """What training compares of the target's distributions and the head's."""
    for dtype in (torch.bfloat16, torch.float32):
        logits, teacher = (torch.empty(64, VOCABULARY, dtype=dtype) for _ in range(2))
        entropy, _, sums = launch_entropy(logits, teacher)
        launch_gradient(logits, teacher, sums, entropy)


def joining(B: int) -> None:
    """A drafter's tree, or its chain, and paths of a text."""
    text = PagedTexts(counts(8192), PageTable(counts(B, 512), PAGE), counts(B), None)
    for nodes, depth, scores in ((32, 31, floats(B, 32)), (6, 5, None)):
        parents = ids(B, nodes)
        tree = DraftTree(ids(B, nodes), parents, 5, is_chain=scores is None, scores_BN=scores)
        survival, paths = Survival([CHAIN] * 3, here()), Paths(ids(B, 3, depth), ids(B, 3), ids(B, 3), ids(3), ids(B, 3))
        launch_paths(text, ids(B, 4), 4, 2, ids(B), depth, paths.of_source(0, 2))
        launch_write(text.pages, text.lens_B, ids(B, depth + 1), text.tokens_N)
        launch_continuations(DeviceTable(1 << 20, here()), text, ids(B), depth, Continuations(*paths.of_source(0, 2)[:3]))
        steps = launch_rates(paths, tree, survival, depth)
        predicted = PredictionRows(counts(B, 2048), ids(B), ids(B, MAX_MATCH), ids(B), ids(B))
        launch_predicted(predicted, depth, paths.of_source(0, 2))
        launch_follow(predicted, ids(B, depth + 1), ids(B))
        launch_candidates(tree, paths.tokens_BPD, steps, ids(3))
        if scores is None:
            launch_joined_chain(tree.tokens_BN, paths.tokens_BPD, steps, ids(3))
        new = NewTokens(counts(B), ids(B, depth + 1), ids(B), None)
        launch_learn(survival.counts_CLKG2, paths, new, ids(B))


def drafting() -> None:
    """Trees of EAGLE heads, blocks and n-grams."""
    pages, device = PageTable(counts(8, 512), PAGE), here()
    for B in (1, 8):
        for K in (4, 10):
            candidates = Candidates.empty(B, K, 6, device)
            launch_first_level(candidates, ids(B, K), floats(B, K))
            beam = Beam(ids(B, K), floats(B, K), ids(B, K), ids(B, K))
            for offsets in (None, ids(32000)):
                launch_expand(candidates, 2, beam, halves(B * K, 32000), offsets)
            launch_best_nodes(candidates, ids(B), 60)
            launch_best_nodes(candidates, ids(B), 60, 32)
            launch_best_paths(floats(B, 7, 1, K), ids(B, 7, K), ids(B), 60)
        codebook, selecting = halves(VOCABULARY, 256), (floats(B, 7, 16), ids(B, 7, 16), ids(B), halves(B, 7, 256))
        for K in (1, 8):
            launch_best_children(*selecting, codebook, codebook, K)
            launch_best_paths(floats(B, 7, 16, K), ids(B, 7, 16), ids(B), 32, ids(B, 7, 16, K))
            own = PageTable(counts(B, 512), PAGE)
            launch_fork(own, counts(B), ids(B, K), halves(B, HIDDEN), counts(B, 0))
            launch_fork(own, counts(B), ids(B, K), halves(B * K, HIDDEN), counts(B * K, 3))
        joining(B)
        for rank in (64, 256):
            w1, w2, offsets = halves(VOCABULARY, rank), halves(32000, rank), ids(32000)
            launch_corrected_logits(halves(B, 32000), ids(B * 8), w1, w2)
            launch_greedy_chain(halves(B, 7, 32000), ids(B), w1, w2, offsets)
    x, own, base = halves(16, HIDDEN), halves(16, 4 * (HIDDEN // 16)), halves(2, 2, HIDDEN)
    launch_convolve(x, own, base, 0, 8, halves(6, HIDDEN))
    for delta in (x, Partials(floats(3, 16, HIDDEN), x.dtype)):
        launch_convolve_add_norm(x, delta, own, base, 8, halves(HIDDEN), 1e-5)
    launch_fill_pairs(ids(8, 6), ids(8), halves(8, 6, HIDDEN), 5, halves(1, HIDDEN), 12)
    launch_block_tables(pages, counts(8), counts(8), ids(8, 6), ids(8), 16, 5)
    launch_match_keys(PagedTexts(counts(1 << 16), pages, counts(8), None), ids(8), 8)


def verifying() -> None:
    from specdec.batch.tree import DraftTree

    class State:
        """The columns of a batch that acceptance reads."""

        lens_B, bonus_B, active_B, speculates_B = counts(8), ids(8), counts(8), counts(8)
        waiting = WaitRows.empty(8, VOCABULARY, here())

    for N, depth in ((60, 7), (7, 6)):
        tree = DraftTree(ids(8, N), ids(8, N), depth, is_chain=N == depth + 1)
        for sources in (None, ids(8, N)):
            launch_accept(replace(tree, sources_BN=sources), ids(8, N), State())  # type: ignore[arg-type]
        accepted = Accepted(ids(8, depth + 1), ids(8), ids(8, depth + 1), EmittedRows.empty(8, depth + 1, here()))
        for halts in (True, False):
            launch_halt(State(), accepted, counts(8), ids(8), halts)  # type: ignore[arg-type]
        launch_path_tables(PageTable(counts(8, 512), PAGE), counts(8), ids(8, N), depth + 1)
        launch_state_numbers(counts(8), ids(8, 3), counts(8))
        launch_tree_numbers(tree, ids(8, N))
        launch_commit_states(counts(8), ids(8, depth + 1), ids(8), ids(8, 3), ids(8, 60), counts(8))


def exchanges() -> None:
    """Sums, gathers and all-to-alls of 2 and of 8 ranks."""
    for ranks in (2, 8):
        inbox = inbox_of(ranks)
        for T, few in ((1, True), (60, True), (2048, False)):
            launch_rows(inbox, 1, 10**9, halves(T, HIDDEN), halves(T, HIDDEN), halves(HIDDEN), 1e-5, few)
            launch_rows(inbox, 1, 10**9, halves(T, HIDDEN), halves(T, HIDDEN), floats(HIDDEN), 1e-5, few)
            launch_rows(inbox, 1, 10**9, None, halves(T, HIDDEN), None, 0.0, few)
        for kind in ("sum", "gather", "all_to_all"):
            launch_flat(inbox, 1, 10**9, halves(ranks, 4096), kind)  # type: ignore[arg-type]
        launch_scan_ranks(halves(60, VOCABULARY // ranks), 8, True, lambda own: ids(ranks, len(own)), 1)  # noqa: B023
