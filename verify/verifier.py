"""The target verifier: it turns prompts into first tokens, then trees into accepted tokens, whose KV it commits.

This module knows the target, trees and attention; it knows neither requests nor the drafter.

Shapes: B sequences, N nodes, E = max_depth + 1 places on a path, R rows of logits, T tokens of ragged prompts, V vocabulary,
W a rank's run of it, F features, Y numbers of a token's log-probabilities, S tokens of an encoder's text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor

from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.backend import Backend
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.layout import HeadsView
from specdec.attention.context_parallel.tables import ContextParallel
from specdec.attention.inputs import AttentionFn
from specdec.batch.choose import choose_tokens
from specdec.batch.emitted import FirstTokens, NewTokens, RoundResult, token_logprobs, tree_numbers
from specdec.batch.grammars.masks import BitMasks
from specdec.batch.ragged import RaggedPrompts, ScoredTokens
from specdec.batch.sampling import RowSampling
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.batch.trees.tables import TreeTables, context_parallel_tables, tree_tables
from specdec.models.target import EncoderDecoder, Target, TargetOutput
from specdec.ops.rows import take_rows
from specdec.steps import Needs
from specdec.verify.accept import Accepted, accept
from specdec.verify.halt import halt
from specdec.verify.synthetic import SyntheticAcceptance

SCORED_LOGITS = 1 << 25  # that a rank computes at once for tokens of prompts: their float32 numbers take 128 MiB


class TreePass(NamedTuple):
    """One pass of the target over trees, before any token is chosen.

    logits_TV: of all nodes.  out: what the target handed out.  positions_T: of the nodes.
    tables: where each group of layers stored the nodes.
    """

    logits_TV: Tensor
    out: TargetOutput
    positions_T: Tensor
    tables: dict[int, TreeTables]


class TargetVerifier:
    """Runs the target over prompts and trees.

    encoder_cache: the cache of the encoder's texts; None for a target without an encoder.
    aux_layers: the layers whose outputs are captured as the drafter's features; empty: the drafter wants the final hidden
        state; None: nobody wants features.
    contexts: by group of layers, how ranks share each sequence's keys and values (context parallelism); empty: this rank keeps
        whole sequences.
    keeps_states: whether the target has layers that keep a state by row (hybrid.py), for which the methods at the end are.
    """

    keeps_states = False

    def __init__(
        self,
        model: Target,
        cache: KVCache,
        backend: Backend,
        aux_layers: tuple[int, ...] | None = None,
        encoder_cache: KVCache | None = None,
        contexts: Mapping[int, ContextParallel] | None = None,
    ) -> None:
        self.model, self.cache, self.backend, self.aux_layers = model, cache, backend, aux_layers
        self.encoder_cache, self.contexts = encoder_cache, contexts or {}
        self.scored_logits = SCORED_LOGITS
        self.synthetic: SyntheticAcceptance | None = None  # forces acceptance; set before the first round is captured

    def read_encoder_input(self, slots_S: Tensor, ids_S: Tensor) -> None:
        """Runs the encoder over a text, and keeps each decoder layer's keys and values of it.

        slots_S: int64, where `encoder_cache` keeps them.  ids_S: int64.
        """
        assert isinstance(self.model, EncoderDecoder) and self.encoder_cache is not None
        for layer, kv_S2KD in enumerate(self.model.read_text(ids_S, self.backend)):
            view = cast(HeadsView, self.encoder_cache.view(layer))
            assert hasattr(view, "write"), f"an encoder's texts need a cache of ordinary heads, got {view}"
            view.write(slots_S, kv_S2KD)

    def prefill(
        self,
        prompts: RaggedPrompts,
        sampling: RowSampling,
        needs: Needs,
        with_features: bool = True,
        scored: ScoredTokens | None = None,
    ) -> tuple[FirstTokens, Tensor]:
        """Runs the target over parts of prompts: their first tokens, and the target's features [T, F] of all tokens.

        sampling: the options of each prompt, with tables that hold it and masks where `needs` asks for them.
        with_features: if False, the features are not meant for a drafter.  scored: tokens of scored parts; None: none are.
        """
        groups = self.cache.group_numbers
        tables, sharded = prompts.tables_of(groups), []
        if self.contexts:
            sharded = [self.contexts[group].of_prompts(each) for group, each in zip(groups, tables, strict=True)]
            tables = [each.tables for each in sharded]
        attn = self.over_prompts(PagedAttention(self.backend, self.cache, *tables, encoder_cache=self.encoder_cache), prompts)
        aux_layers = self.aux_layers if with_features else None
        if aux_layers == () or scored is not None:  # somebody reads the final hidden state of every token
            out = self.model(prompts.ids_T, prompts.positions_T, attn, aux_layers or ())
            hidden_BH = out.hidden_TH.index_select(0, prompts.last_B)
        else:
            out = self.model(prompts.ids_T, prompts.positions_T, attn, aux_layers or (), prompts.last_B)
            hidden_BH = out.hidden_TH
        for group, each in zip(groups, sharded):
            self.cache.keep(each.tables.slots_T, each.slots_T, group)
        self.ran(prompts)
        first = self.first_tokens(self.model.logits(hidden_BH), prompts, sampling, needs)
        if scored is not None:
            first = first._replace(scores_RY=self._scores(out.hidden_TH, prompts.next_T, scored))
        return first, self._features(out)

    def _scores(self, hidden_TH: Tensor, next_T: Tensor, scored: ScoredTokens) -> Tensor:
        """[R, Y]: the log-probabilities of the tokens after those that are scored, a slice of rows after the other, so that
        their logits take little memory.  next_T: the id after each token.
        """
        vocabulary = self.model.vocabulary
        widest = -(-vocabulary.size // vocabulary.group.size)  # the same on all ranks, which exchange what they find of a slice
        return torch.cat(
            [
                token_logprobs(
                    self.model.logits(hidden_TH.index_select(0, rows_R)), next_T.index_select(0, rows_R), scored.top, vocabulary
                )
                for rows_R in scored.rows_R.split(max(1, self.scored_logits // widest))
            ]
        )

    def first_tokens(self, logits_BV: Tensor, prompts: RaggedPrompts, sampling: RowSampling, needs: Needs) -> FirstTokens:
        """Chooses the token after each part, where it is not known.  logits_BV: of the parts' last tokens.  sampling: see
        `prefill`.
        """
        last_positions_B = prompts.positions_T.index_select(0, prompts.last_B)
        chosen = choose_tokens(logits_BV, sampling, last_positions_B, needs, self.model.vocabulary)
        weighed_BW = chosen.weighed_RW
        logprobs_BY = None if weighed_BW is None else self._logprobs(weighed_BW, chosen.tokens_R, needs)
        return FirstTokens(prompts.known_or(chosen.tokens_R), logprobs_BY)

    def read_tree(self, state: BatchState, tree: DraftTree, with_features: bool = True) -> TreePass:
        """The target's pass over every tree.  It changes nothing but the slots after each row's length.

        A tree that is only a root is plain decoding, which needs no features.
        """
        tables = {group: self._tables(state.of_group(group), tree) for group in self.cache.group_numbers}
        positions_T = tables[self.cache.group_numbers[0]].positions_T
        passes = [PassTables(each.plan, each.slots_BN.flatten()) for each in tables.values()]
        paged = PagedAttention(self.backend, self.cache, *passes, encoder_cache=self.encoder_cache)
        attn = self.over_trees(paged, state, tree)
        aux_layers = self.aux_layers if with_features else None
        out = self.model(tree.tokens_BN.flatten(), positions_T, attn, aux_layers or ())
        return TreePass(self.model.logits(out.hidden_TH), out, positions_T, tables)

    def read_mixed(
        self, state: BatchState, tree: DraftTree, prompts: RaggedPrompts, with_features: bool = True
    ) -> tuple[TreePass, Tensor, Tensor]:
        """One pass over every tree and parts of prompts: what `read_tree` returns, each part's last logits [B, V], and the
        target's features [T, F] of the prompts' tokens.

        No row is in both.  It is for targets without an encoder and states, and for ranks that keep whole sequences.
        """
        assert self.encoder_cache is None and not self.contexts and not self.keeps_states
        tables = {group: self._tables(state.of_group(group), tree) for group in self.cache.group_numbers}
        positions_T, nodes = tables[self.cache.group_numbers[0]].positions_T, tree.tokens_BN.numel()
        attn = PagedAttention(self.backend, self.cache, *(each.before(prompts.tables[group]) for group, each in tables.items()))
        ids_T, all_positions_T = (
            torch.cat(pair) for pair in ((tree.tokens_BN.flatten(), prompts.ids_T), (positions_T, prompts.positions_T))
        )
        rows_R = torch.cat((torch.arange(nodes, dtype=torch.int64, device=ids_T.device), prompts.last_B + nodes))
        aux_layers = self.aux_layers if with_features else None
        if aux_layers == ():  # the drafter reads the final hidden state of every token
            out = self.model(ids_T, all_positions_T, attn)
            hidden_RH = out.hidden_TH.index_select(0, rows_R)
        else:
            out = self.model(ids_T, all_positions_T, attn, aux_layers or (), rows_R)
            hidden_RH = out.hidden_TH
        logits_RV = self.model.logits(hidden_RH)
        of_nodes = TargetOutput(hidden_RH[:nodes], None if out.aux_TA is None else out.aux_TA[:nodes])
        return TreePass(logits_RV[:nodes], of_nodes, positions_T, tables), logits_RV[nodes:], self._features(out)[nodes:]

    def accept(
        self,
        state: BatchState,
        tree: DraftTree,
        needs: Needs,
        done: TreePass,
        with_features: bool = True,
        masks: BitMasks | None = None,
    ) -> RoundResult:
        """Chooses the target's tokens, accepts a path, commits its KV, and updates lengths and bonus tokens in `state`.

        masks: of the nodes, where some row has a grammar.
        """
        sampling = state.sampling._replace(masks=masks)
        if needs.halts and "ends" in needs.steps:
            sampling = state.waiting.without_ends(sampling)
        chosen = choose_tokens(done.logits_TV, sampling, done.positions_T, needs, self.model.vocabulary, tree)
        tokens_BN = chosen.tokens_R.view(tree.tokens_BN.shape)
        if self.synthetic is not None:
            tokens_BN = self.synthetic.force(tree, tokens_BN, state.sampling.seed_R, state.lens_B, state.speculates_B)
        trees_B5N = tree_numbers(tree, tokens_BN) if needs.trees else None  # before the root, a plain round's, is another token
        root_B = tree.tokens_BN[:, 0].clone() if needs.waits else None
        accepted, base_lens_B = accept(tree.to_accept if "sources" in needs.steps else tree, tokens_BN, state)
        if root_B is not None:
            accepted = halt(state, accepted, base_lens_B, root_B, needs.halts)
        if needs.history:
            emitted_B = (accepted.accepted_B + 1) * state.active_B
            state.record(accepted.tokens_BE, emitted_B, self.model.vocabulary.first)
        self.commit(done.tables, state, tree, accepted)
        features_BEF = logprobs_BEY = None
        if with_features and self.aux_layers is not None:
            features_BEF = self._on_path(self._features(done.out), tree, accepted.path_BE)
        if chosen.weighed_RW is not None:
            weighed_BEW, tokens_BE = self._on_path(chosen.weighed_RW, tree, accepted.path_BE), accepted.tokens_BE
            numbers = self._logprobs(weighed_BEW.flatten(0, 1), tokens_BE.flatten(), needs)
            logprobs_BEY = numbers.unflatten(0, tokens_BE.shape)
        new, emitted = NewTokens(base_lens_B, accepted.tokens_BE, accepted.accepted_B, features_BEF), accepted.emitted
        return RoundResult(new, emitted, logprobs_BEY, trees_B5N)

    def commit(self, tables: dict[int, TreeTables], state: BatchState, tree: DraftTree, accepted: Accepted) -> None:
        """Moves the accepted paths' keys and values to the slots after the committed ones."""
        path_BE = accepted.path_BE
        for group, each in tables.items():
            if each.targets_BN is not None:
                self.cache.move(each.slots_BN, path_BE, group, each.targets_BN[:, : path_BE.shape[1]])
            elif not tree.is_chain:  # the accepted path of a chain already lies in the right slots
                self.cache.move(each.slots_BN, path_BE, group)

    def _tables(self, state: BatchState, tree: DraftTree) -> TreeTables:
        if not self.contexts:
            return tree_tables(state, tree)
        return context_parallel_tables(state, tree, self.contexts[state.group])

    def _features(self, out: TargetOutput) -> Tensor:
        return out.hidden_TH if out.aux_TA is None else out.aux_TA

    def _on_path(self, x_TF: Tensor, tree: DraftTree, path_BE: Tensor) -> Tensor:
        """[B, E, F]: the rows of the path's nodes."""
        x_BNF = x_TF.view(*tree.tokens_BN.shape, x_TF.shape[1])
        return x_BNF if tree.is_chain else take_rows(x_BNF, path_BE)

    def _logprobs(self, weighed_RW: Tensor, tokens_R: Tensor, needs: Needs) -> Tensor:
        """Log-probabilities of tokens.  weighed_RW: see Chosen."""
        return token_logprobs(weighed_RW, tokens_R, needs.logprobs - 1, self.model.vocabulary)

    # ---- what states by row add to ----

    def over_prompts(self, attention: AttentionFn, prompts: RaggedPrompts) -> AttentionFn:
        """The pass's AttentionFn.  attention: of the layers that read keys."""
        return attention

    def ran(self, prompts: RaggedPrompts) -> None:
        """The target has run these parts of prompts."""

    def over_trees(self, attention: AttentionFn, state: BatchState, tree: DraftTree) -> AttentionFn:
        """The pass's AttentionFn.  attention: of the layers that read keys."""
        return attention

    def written(self, state: BatchState, needs: Needs) -> list[Tensor]:
        """The tensors that `accept` changes and whose values matter afterwards."""
        return state.written(needs)

    def enter_rows(self, rows_R: Tensor, states_R: Tensor) -> None:
        """Rows (int64) go on with states (int64): see RowEntry.state."""

    def move_rows(self, sources_R: Tensor, targets_R: Tensor) -> None:
        """Each target row (int64) becomes what its source was."""
