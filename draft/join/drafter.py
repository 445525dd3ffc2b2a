"""A drafter joined by matches in each request's own text: both propose, and the best nodes of both are verified.

What the drafter proposes comes as a tree with scores, or as a chain without any; the chain's survival is learnt as that of
matches is.  The text's matches are what an n-gram drafter finds.  Nothing is kept by row but what a round leaves for its own
extend.

Shapes: B sequences, P paths of each, D tokens of a path, T tokens of ragged prompts, F features.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from specdec.batch.emitted import NewTokens
from specdec.batch.ragged import RaggedPrompts
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.draft.drafter import Drafter, DrafterContext, DraftModel, DraftNeeds, Impression
from specdec.draft.join.join import joined_tree
from specdec.draft.join.paths import Paths, find_paths
from specdec.draft.join.survival import Survival
from specdec.draft.ngram.lookup import PagedTexts
from specdec.draft.ngram.store import ENTRY_BYTES, TokenStore
from specdec.models.target import Target
from specdec.steps import Needs


class JoinedModel(DraftModel):
    """A drafter, and the text's own matches beside it."""

    def __init__(self, drafter: DraftModel) -> None:
        super().__init__()
        self.drafter, self.feature_size = drafter, drafter.feature_size

    @property
    def needs(self) -> DraftNeeds:
        own = self.drafter.needs
        return replace(own, slot_bytes=own.slot_bytes + ENTRY_BYTES)

    def resolved(self, spec: SpecConfig) -> SpecConfig:
        if spec.is_auto:
            raise ValueError(
                "num_steps='auto' chooses among the trees of a drafter alone, got several sources; nearest settings that work: "
                f"SpecConfig({SpecConfig().label}), or one drafter"
            )
        return spec.joined

    def check(self, spec: SpecConfig) -> None:
        self.drafter.check(spec.of_drafter)

    def doubt(self, spec: SpecConfig) -> str:
        return self.drafter.doubt(spec.of_drafter)

    def default_shape(self) -> SpecConfig:
        return self.drafter.default_shape()

    def worker(self, context: DrafterContext) -> JoinedDrafter:
        own = context._replace(spec=context.spec.of_drafter, shapes=tuple(shape.of_drafter for shape in context.shapes))
        return JoinedDrafter(self.drafter.worker(own), context)

    @property
    def description(self) -> str:
        return f"{self.drafter.description}; joined by matches in the text"

    @property
    def trained_length(self) -> int | None:
        return self.drafter.trained_length

    def smoke(self, target: Target, ids_T: Tensor) -> Impression:
        return self.drafter.smoke(target, ids_T)

    def slots(self, spec: SpecConfig) -> int:
        """An extend of more tokens than the drafter's own rounds emit begins as much later, or writes as many more."""
        return self.drafter.slots(spec.of_drafter) + max(0, spec.levels - spec.max_steps)

    def passes(self, spec: SpecConfig) -> int:
        return self.drafter.passes(spec.of_drafter)

    def once_bytes(self, rows: int) -> int:
        return self.drafter.once_bytes(rows)


class JoinedDrafter(Drafter):
    """Has the drafter grow its tree, finds the text's matches, and joins them."""

    def __init__(self, drafter: Drafter, context: DrafterContext) -> None:
        self.drafter, self.head, self.span = drafter, drafter.head, context.span
        self.store = TokenStore(context.slots, context.device)
        self.caches = (*drafter.caches, self.store)
        self.survival = Survival(context.device)
        depth = max(shape.levels for shape in context.shapes)
        self.paths = Paths.empty(context.rows, depth, context.device)  # of a round's draft, for the same round's extend

    def draft(self, state: BatchState, spec: SpecConfig, needs: Needs) -> DraftTree:
        tree = self.drafter.draft(state, spec.of_drafter, needs)
        text = PagedTexts(self.store.tokens_N, state.pages, state.lens_B, self.span)
        paths = self.paths.narrow(state.rows)
        steps_BPD = find_paths(text, tree, self.survival, spec.levels, paths)
        return joined_tree(tree, paths.tokens_BPD, steps_BPD, spec.num_draft_tokens)

    def extend(self, state: BatchState, needs: Needs, new: NewTokens) -> None:
        self.drafter.extend(state, needs, new)
        self.survival.learn(*self.paths.narrow(state.rows), new, state.active_B)
        self._learn(state, new)

    def prefill(self, state: BatchState, needs: Needs, prompts: RaggedPrompts, first_B: Tensor, features_TF: Tensor) -> None:
        self.drafter.prefill(state, needs, prompts, first_B, features_TF)
        (tables,) = prompts.tables_of([0])
        self.store.write(tables.slots_T, prompts.next_ids(first_B))

    def keep(self, state: BatchState, new: NewTokens) -> None:
        self.drafter.keep(state, new)
        self._learn(state, new)

    def catch_up(self, state: BatchState, needs: Needs) -> None:
        self.drafter.catch_up(state, needs)

    def changed(self, state: BatchState) -> list[Tensor]:
        return [*self.drafter.changed(state), self.survival.counts_CLG2]

    @property
    def keeps_states(self) -> bool:  # type: ignore[override]
        return self.drafter.keeps_states

    def enter_rows(self, rows_R: Tensor, states_R: Tensor) -> None:
        self.drafter.enter_rows(rows_R, states_R)

    def move_rows(self, sources_R: Tensor, targets_R: Tensor) -> None:
        self.drafter.move_rows(sources_R, targets_R)

    def clear_rows(self, rows_R: Tensor) -> None:
        self.drafter.clear_rows(rows_R)

    def _learn(self, state: BatchState, new: NewTokens) -> None:
        """Writes what the texts have grown by; padding comes after the text's end, where nobody reads."""
        rows = state.pages.next_tokens(new.base_lens_B, new.tokens_BE.shape[1])
        self.store.write(rows.slots.flatten(), new.tokens_BE.flatten())
