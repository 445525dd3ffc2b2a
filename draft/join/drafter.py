"""A drafter joined by sources of paths (source.py): all propose, and the best nodes of all are verified.

What the drafter proposes comes as a tree with scores, or as a chain without any; the chain's survival is learnt as that of
sources' paths is.  This module knows no source.

Shapes: B sequences, P paths of each, D tokens of a path, T tokens of ragged prompts, F features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple, cast

import torch
from torch import Tensor

from specdec.batch.emitted import NewTokens
from specdec.batch.ragged import RaggedPrompts
from specdec.batch.state import BatchState
from specdec.batch.transfer import to_device
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.draft.drafter import Drafter, DrafterContext, DraftModel, DraftNeeds, Impression
from specdec.draft.join.join import ALL_SOURCES, DRAFTER, joined_chain, joined_tree, without_some
from specdec.draft.join.paths import Paths, end_paths
from specdec.draft.join.source import PathFinder, PathSource, TextKeeper
from specdec.draft.join.survival import CHAIN, Survival
from specdec.models.target import Target
from specdec.steps import Needs, RowEntry
from specdec.tables.steps import TableName, TableStep


class JoinedModel(DraftModel):
    """A drafter, and the sources beside it.

    Where all of them run in some rounds only, shapes and other rounds are as the drafter has them alone.
    """

    takes_predictions = takes_choices = True

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.drafter.sources, *(source.name for source in self.path_sources))

    def __init__(self, drafter: DraftModel, sources: Sequence[PathSource]) -> None:
        super().__init__()
        self.drafter, self.feature_size, self.path_sources = drafter, drafter.feature_size, tuple(sources)

    @property
    def needs(self) -> DraftNeeds:
        own = self.drafter.needs
        return replace(own, slot_bytes=own.slot_bytes + sum(source.slot_bytes for source in self.path_sources))

    @property
    def tables(self) -> Mapping[TableName, int]:
        return {name: held for source in self.path_sources for name, held in source.tables.items()}

    @property
    def is_always_joined(self) -> bool:
        return any(not source.step for source in self.path_sources)

    def resolved(self, spec: SpecConfig) -> SpecConfig:
        return spec.joined if self.is_always_joined else self.drafter.resolved(spec)

    def check(self, spec: SpecConfig) -> None:
        own = spec.of_drafter
        self.drafter.check(own)
        if spec.num_draft_tokens > own.num_draft_tokens and not any(source.fills for source in self.path_sources):
            raise ValueError(
                f"trees of {' and '.join(self.sources)} alone have at most {own.num_draft_tokens} nodes, got "
                f"SpecConfig({spec.label}); nearest setting that works: num_draft_tokens={own.num_draft_tokens}"
            )

    def doubt(self, spec: SpecConfig) -> str:
        return self.drafter.doubt(spec.of_drafter)

    def default_shape(self) -> SpecConfig:
        return self.drafter.default_shape()

    def worker(self, context: DrafterContext) -> JoinedDrafter:
        shapes = tuple(dict.fromkeys(shape.of_drafter for shape in context.shapes))
        own = context._replace(spec=context.spec.of_drafter, shapes=shapes)
        return JoinedDrafter(self.drafter.worker(own), self.path_sources, context)

    @property
    def description(self) -> str:
        if not self.is_always_joined:
            return self.drafter.description
        return f"{self.drafter.description}; joined by {', '.join(source.description for source in self.path_sources)}"

    @property
    def trained_length(self) -> int | None:
        return self.drafter.trained_length

    def smoke(self, target: Target, ids_T: Tensor) -> Impression:
        return self.drafter.smoke(target, ids_T)

    def slots(self, spec: SpecConfig) -> int:
        """An extend of more tokens than the drafter's own rounds emit begins as much later, or writes as many more."""
        return max(
            self.drafter.slots(shape.of_drafter) + max(0, shape.levels - shape.max_steps) for shape in {spec, *spec.shapes}
        )

    def passes(self, spec: SpecConfig) -> int:
        return self.drafter.passes(spec.of_drafter)

    def source_bytes(self, rows: int, positions: int) -> int:
        own = self.drafter.source_bytes(rows, positions)
        return own + sum(source.table_bytes + rows * source.row_bytes(positions) for source in self.path_sources)

    def once_bytes(self, rows: int) -> int:
        return self.drafter.once_bytes(rows)


class SourcePlace(NamedTuple):
    """A source of a round, and which of the round's paths are its own."""

    finder: PathFinder
    first: int
    paths: int


class RoundSources(NamedTuple):
    """The sources that some rounds have.

    paths: of a round's draft, for the same round's extend.  bits_P: int64, what a node's sources hold if a path proposes it.
    """

    places: list[SourcePlace]
    paths: Paths
    bits_P: Tensor


class JoinedDrafter(Drafter):
    """Has the drafter grow its tree and the sources fill their paths, and joins all of them."""

    def __init__(self, drafter: Drafter, sources: Sequence[PathSource], context: DrafterContext) -> None:
        self.drafter, self.head, self.sources = drafter, drafter.head, sources
        self.finders = [source.finder(context) for source in sources]
        texts = cast(TextKeeper, drafter if drafter.keeps_text else self.finders[0])
        for finder in self.finders:
            finder.follow(texts)
        self.caches = (*drafter.caches, *(cache for finder in self.finders for cache in finder.caches))
        classes = [*(each for source in sources for each in source.classes), CHAIN]
        self.survival = Survival(classes, context.device)
        self._rounds = self._all_rounds(context)
        self.allowed_R = torch.full((context.rows,), ALL_SOURCES, dtype=torch.int64, device=context.device)

    def _all_rounds(self, context: DrafterContext) -> dict[tuple[bool, ...], RoundSources]:
        """What rounds have for each choice of sources that may run: a captured graph keeps its paths where they are.  All have
        them in the same memory, since one round runs at a time.
        """
        depth, device = max(shape.levels for shape in context.shapes), context.device
        every = [path for source in self.sources for path in source.paths]
        memory = Paths.empty(context.rows, [*every, 0], depth, device)
        chosen = dict[tuple[bool, ...], RoundSources]()
        for running in product(*((True, False) if source.step else (True,) for source in self.sources)):
            places, classes, bits, offset = list[SourcePlace](), list[int](), list[int](), 0
            for number, (source, finder, runs) in enumerate(zip(self.sources, self.finders, running, strict=True)):
                if runs:
                    places.append(SourcePlace(finder, len(classes), len(source.paths)))
                    classes += [offset + each for each in source.paths]
                    bits += [DRAFTER << (1 + number)] * len(source.paths)
                offset += len(source.classes)
            bits_P = torch.tensor([*bits, DRAFTER], dtype=torch.int64, device=device)
            chosen[running] = RoundSources(places, memory.with_classes([*classes, offset]), bits_P)
        return chosen

    def _round(self, needs: Needs) -> RoundSources:
        return self._rounds[tuple(source.runs(needs) for source in self.sources)]

    def draft(self, state: BatchState, spec: SpecConfig, needs: Needs) -> DraftTree:
        tree = self.drafter.draft(state, spec.of_drafter, needs)
        allowed_B = self.allowed_R[: state.rows] if "sources" in needs.steps else None
        places, paths, bits_P = self._round(needs)
        if not places:  # the round has its drafter's tree alone
            return tree if allowed_B is None else tree.of_source(DRAFTER).without(allowed_B)
        paths = paths.narrow(state.rows)
        for finder, first, own in places:
            finder.fill(state, spec.levels, paths.of_source(first, own))
        steps_BPD = end_paths(paths, tree, self.survival, spec.levels)
        if allowed_B is not None:
            tree, steps_BPD = without_some(tree, steps_BPD, bits_P, allowed_B)
        if spec.is_chain:
            made = joined_chain(tree, paths.tokens_BPD, steps_BPD, bits_P)
        else:
            made = joined_tree(tree, paths.tokens_BPD, steps_BPD, bits_P, spec.num_draft_tokens)
        return made if allowed_B is None else made.without(allowed_B)

    def extend(self, state: BatchState, needs: Needs, new: NewTokens) -> None:
        self.drafter.extend(state, needs, new)
        places, paths, _ = self._round(needs)
        if places:
            self.survival.learn(paths.narrow(state.rows), new, state.active_B)
            for place in places:
                place.finder.extend(state, new)

    def prefill(self, state: BatchState, needs: Needs, prompts: RaggedPrompts, first_B: Tensor, features_TF: Tensor) -> None:
        self.drafter.prefill(state, needs, prompts, first_B, features_TF)
        for finder in self.finders:
            finder.prefill(state, prompts, first_B)

    def enter(self, entries: Sequence[RowEntry]) -> None:
        self.drafter.enter(entries)
        for finder in self.finders:
            finder.enter(entries)
        allowed = [ALL_SOURCES if entry.sources is None else entry.sources for entry in entries]
        rows_E = to_device([entry.row for entry in entries], self.allowed_R.device)
        self.allowed_R.index_copy_(0, rows_E, to_device(allowed, self.allowed_R.device))

    def keep(self, state: BatchState, new: NewTokens) -> None:
        self.drafter.keep(state, new)
        for finder in self.finders:
            finder.keep(state, new)

    def catch_up(self, state: BatchState, needs: Needs) -> None:
        self.drafter.catch_up(state, needs)

    def bring_table(self, step: TableStep) -> None:
        for source, finder in zip(self.sources, self.finders, strict=True):
            if step.table in source.tables:
                finder.bring_table(step)

    def changed(self, state: BatchState) -> list[Tensor]:
        return [*self.changed_rows(state), self.survival.counts_CLKG2]

    def changed_rows(self, state: BatchState) -> list[Tensor]:
        return [*self.drafter.changed_rows(state), *(tensor for finder in self.finders for tensor in finder.changed(state))]

    @property
    def catches_up(self) -> bool:  # type: ignore[override]
        return self.drafter.catches_up

    @property
    def keeps_states(self) -> bool:  # type: ignore[override]
        return self.drafter.keeps_states

    def move_rows(self, sources_R: Tensor, targets_R: Tensor) -> None:
        self.drafter.move_rows(sources_R, targets_R)
        self.allowed_R.index_copy_(0, targets_R, self.allowed_R.index_select(0, sources_R))
        for finder in self.finders:
            finder.move_rows(sources_R, targets_R)

    def clear_rows(self, rows_R: Tensor) -> None:
        self.drafter.clear_rows(rows_R)
        for finder in self.finders:
            finder.clear_rows(rows_R)
