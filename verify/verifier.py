"""The target verifier: it turns prompts into first tokens, then trees into accepted tokens, whose KV it commits.

This module knows the target, trees and attention; it knows neither requests nor the drafter.

Shapes: B sequences, N nodes, E = max_depth + 1 places on a path, R rows of logits, T packed tokens, V vocabulary, F features.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import Tensor

from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.backend import Backend
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.planes import HeadsView
from specdec.attention.context.divided import DividedContext
from specdec.batch.choose import choose_tokens
from specdec.batch.logprobs import token_logprobs
from specdec.batch.masks import BitMasks
from specdec.batch.packed import PackedPrompts
from specdec.batch.sampling import RowSampling
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.models.target import EncoderDecoder, Target, TargetOutput
from specdec.ops.rows import take_rows
from specdec.steps import Needs
from specdec.verify.accept import accept
from specdec.verify.synthetic import SyntheticAcceptance
from specdec.verify.tables import TreeTables, divided_tables, tree_tables


class VerifyResult(NamedTuple):
    """One round's result.

    tokens_BE: int64, the emitted tokens: accepted ones, then the bonus token, then padding.
    accepted_B: int64, how many draft tokens were accepted.
    base_lens_B: int32, the committed lengths before the round.
    emitted_BX: int64, what the host reads, see `Accepted`: tokens are -1 where the target's logits were not finite.
    features_BEF: the target's features along the path, for the drafter's extend; None if they were not asked for.
    logprobs_BEX: float64, of the emitted tokens (see logprobs.py); None if they were not asked for.
    """

    tokens_BE: Tensor
    accepted_B: Tensor
    base_lens_B: Tensor
    emitted_BX: Tensor
    features_BEF: Tensor | None
    logprobs_BEX: Tensor | None = None


class TreePass(NamedTuple):
    """One pass of the target over trees, before any token is chosen.

    logits_TV: of all nodes.  out: what the target handed out.  positions_T: of the nodes.
    tables: where each group of layers stored the nodes.
    """

    logits_TV: Tensor
    out: TargetOutput
    positions_T: Tensor
    tables: dict[int, TreeTables]


class PrefillResult(NamedTuple):
    """What a chunk of prompts gave.

    first_B: int64, the first token of each prompt; -1 where the logits are not finite.
    features_TF: the target's features of all tokens.
    logprobs_BX: float64, of the first tokens; None if they were not asked for.
    """

    first_B: Tensor
    features_TF: Tensor
    logprobs_BX: Tensor | None


class TargetVerifier:
    """Runs the target over prompts and trees.

    sources: the cache of the encoder's texts; None for a target without an encoder.
    aux_layers: the layers whose outputs are captured as the drafter's features; empty: the drafter wants the final hidden
        state; None: nobody wants features.
    context: how ranks divide each sequence's keys and values among them; None: this rank keeps whole sequences.
    """

    def __init__(
        self,
        model: Target,
        cache: KVCache,
        backend: Backend,
        aux_layers: tuple[int, ...] | None = None,
        sources: KVCache | None = None,
        context: DividedContext | None = None,
    ) -> None:
        self.model, self.cache, self.backend, self.aux_layers = model, cache, backend, aux_layers
        self.sources, self.context = sources, context
        self.synthetic: SyntheticAcceptance | None = None  # forces acceptance; set before the first round is captured

    def read_source(self, slots_S: Tensor, ids_S: Tensor) -> None:
        """Runs the encoder over a text, and keeps each decoder layer's keys and values of it.

        slots_S: int64, where `sources` keeps them.  ids_S: int64.
        """
        assert isinstance(self.model, EncoderDecoder) and self.sources is not None
        for layer, kv_S2KD in enumerate(self.model.read_text(ids_S, self.backend)):
            view = cast(HeadsView, self.sources.view(layer))
            assert hasattr(view, "write"), f"an encoder's texts need a cache of ordinary heads, got {view}"
            view.write(slots_S, kv_S2KD)

    def prefill(self, prompts: PackedPrompts, sampling: RowSampling, needs: Needs, with_features: bool = True) -> PrefillResult:
        """Runs the target over parts of prompts.

        sampling: the options of each prompt, with tables that hold it and masks where `needs` asks for them.
        with_features: if False, the features are not meant for a drafter.
        """
        tables, divided = prompts.tables_of(self.cache.group_numbers), []
        if self.context is not None:
            divided = [self.context.of_prompts(each) for each in tables]
            tables = [each.tables for each in divided]
        attn = PagedAttention(self.backend, self.cache, *tables, sources=self.sources)
        aux_layers = self.aux_layers if with_features else None
        if aux_layers == ():  # the drafter reads the final hidden state of every token
            out = self.model(prompts.ids_T, prompts.positions_T, attn)
            hidden_BH = out.hidden_TH.index_select(0, prompts.last_B)
        else:
            out = self.model(prompts.ids_T, prompts.positions_T, attn, aux_layers or (), prompts.last_B)
            hidden_BH = out.hidden_TH
        for group, each in zip(self.cache.group_numbers, divided):
            self.cache.keep(each.tables.slots_T, each.slots_T, group)
        logits_BV = self.model.logits(hidden_BH)
        last_positions_B = prompts.positions_T.index_select(0, prompts.last_B)
        chosen = choose_tokens(logits_BV, sampling, last_positions_B, needs, self.model.vocabulary)
        return PrefillResult(chosen.tokens_R, self._features(out), self._logprobs(chosen.weighed_RW, chosen.tokens_R, needs))

    def verify(self, state: BatchState, tree: DraftTree, needs: Needs, with_features: bool = True) -> VerifyResult:
        """One target pass over every tree; accepts, commits KV, and updates lengths and bonus tokens in `state`.

        A tree that is only a root is plain decoding, which needs no features.
        """
        return self.choose(state, tree, needs, self.read_tree(state, tree, with_features), with_features)

    def read_tree(self, state: BatchState, tree: DraftTree, with_features: bool = True) -> TreePass:
        """The target's pass over every tree.  It changes nothing but the slots after each row's length."""
        tables = {group: self._tables(state.of_group(group), tree) for group in self.cache.group_numbers}
        positions_T = tables[self.cache.group_numbers[0]].positions_T
        passes = [PassTables(each.plan, each.slots_BN.flatten()) for each in tables.values()]
        attn = PagedAttention(self.backend, self.cache, *passes, sources=self.sources)
        aux_layers = self.aux_layers if with_features else None
        out = self.model(tree.tokens_BN.flatten(), positions_T, attn, aux_layers or ())
        return TreePass(self.model.logits(out.hidden_TH), out, positions_T, tables)

    def choose(
        self,
        state: BatchState,
        tree: DraftTree,
        needs: Needs,
        done: TreePass,
        with_features: bool = True,
        masks: BitMasks | None = None,
    ) -> VerifyResult:
        """What follows from the pass: the target's tokens, the accepted path, its KV, and the rows' new state.

        masks: of the nodes, where some row has a grammar.
        """
        out, positions_T, tables, sampling = done.out, done.positions_T, done.tables, state.sampling._replace(masks=masks)
        chosen = choose_tokens(done.logits_TV, sampling, positions_T, needs, self.model.vocabulary, tree)
        tokens_BN = chosen.tokens_R.view(tree.tokens_BN.shape)
        if self.synthetic is not None:
            tokens_BN = self.synthetic.force(tree, tokens_BN, state.sampling.seed_R, state.lens_B, state.speculates_B)
        accepted, base_lens_B = accept(tree, tokens_BN, state)
        if needs.history:
            emitted_B = (accepted.accepted_B + 1) * state.active_B
            state.record(accepted.tokens_BE, emitted_B, self.model.vocabulary.first)
        for group, each in tables.items():
            if each.targets_BN is not None:
                self.cache.move(each.slots_BN, accepted.path_BE, group, each.targets_BN[:, : accepted.path_BE.shape[1]])
            elif not tree.is_chain:  # the accepted path of a chain already lies in the right slots
                self.cache.move(each.slots_BN, accepted.path_BE, group)
        features_BEF = None
        if with_features and self.aux_layers is not None:
            features_BEF = self._on_path(self._features(out), tree, accepted.path_BE)
        weighed = None if chosen.weighed_RW is None else self._on_path(chosen.weighed_RW, tree, accepted.path_BE).flatten(0, 1)
        logprobs = self._logprobs(weighed, accepted.tokens_BE.flatten(), needs)
        return VerifyResult(
            accepted.tokens_BE, accepted.accepted_B, base_lens_B, accepted.emitted_BX, features_BEF,
            None if logprobs is None else logprobs.unflatten(0, accepted.tokens_BE.shape),
        )  # fmt: skip

    def _tables(self, state: BatchState, tree: DraftTree) -> TreeTables:
        return tree_tables(state, tree) if self.context is None else divided_tables(state, tree, self.context)

    def _features(self, out: TargetOutput) -> Tensor:
        return out.hidden_TH if out.aux_TA is None else out.aux_TA

    def _on_path(self, x_TF: Tensor, tree: DraftTree, path_BE: Tensor) -> Tensor:
        """[B, E, F]: the rows of the path's nodes."""
        x_BNF = x_TF.view(*tree.tokens_BN.shape, x_TF.shape[1])
        return x_BNF if tree.is_chain else take_rows(x_BNF, path_BE)

    def _logprobs(self, weighed_RW: Tensor | None, tokens_R: Tensor, needs: Needs) -> Tensor | None:
        """Log-probabilities of tokens; None if they were not asked for.  weighed_RW: see Chosen."""
        if weighed_RW is None:
            return None
        return token_logprobs(weighed_RW, tokens_R, needs.logprobs - 1, self.model.vocabulary)
