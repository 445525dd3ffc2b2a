"""What a kind of drafter says of itself, and what rounds and prompts ask of it.  A kind is a `DraftModel` and a `Drafter`.

A `DraftModel` is what loading makes: weights, if the kind has any, without a batch.  It says what it needs of the target and of
the pool, and makes the `Drafter` that works on a batch.  This module knows no kind.

Shapes: B rows of a state, R some of the rows, E emitted tokens of a row with padding, T tokens of
ragged prompts, F features of one token.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from specdec.attention.backend import Backend
from specdec.attention.caches.kv_cache import KVCache
from specdec.batch.emitted import NewTokens
from specdec.batch.ragged import RaggedPrompts
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.models.config import ModelConfig
from specdec.models.target import Target
from specdec.steps import Needs, RowEntry
from specdec.tables.steps import TableName, TableStep


class BorrowedKeys(NamedTuple):
    """The target's own keys and values, as a drafter's layers read them.

    layers: for each of the drafter's layers, the target's layer that stores what it reads.  config: of the drafter's layers,
    which store nothing.
    """

    layers: tuple[int, ...]
    config: ModelConfig


@dataclass(frozen=True)
class DraftNeeds:
    """What a drafter needs of its target and of the pool.

    features: the target's layers whose outputs it reads, 0-based and ascending; (): the target's final hidden state; None: it
        reads token ids alone.
    models: the configs of the parts that keep keys and values in the target's pages.
    slot_bytes: what else it keeps of each token of the first group of layers.
    page_values: how many numbers in the models' dtype it keeps of each page in which its models' layers keep keys, which are
        of one group then.
    borrowed: what it reads of the target's keys and values; None: nothing.
    """

    features: tuple[int, ...] | None
    models: tuple[ModelConfig, ...] = ()
    slot_bytes: int = 0
    page_values: int = 0
    borrowed: BorrowedKeys | None = None

    @property
    def configs(self) -> tuple[ModelConfig, ...]:
        """Of all its layers that attend."""
        return self.models if self.borrowed is None else (*self.models, self.borrowed.config)


class CachedBySlot(Protocol):
    """Something kept by slot: a KV cache, or what a drafter keeps of each token."""

    @property
    def bytes(self) -> int: ...

    def copy_pages(self, sources_N: Tensor, targets_N: Tensor, page_size: int, group: int) -> None: ...


class DrafterContext(NamedTuple):
    """What a drafter is given to work with.

    spec: the shape of trees, or "auto".  shapes: those that it may be asked for, each round another one.
    caches: empty, one for each of the models in `DraftNeeds`.  target_cache: the target's own, to be read alone.
    slots: of the first group of layers, page_size of them a page.
    span: how many tokens back the first group's slots are kept; None: all of them.  max_positions: of the longest text.
    states: how many numbers of recurrent states there are, how many of them nodes may follow, and the most nodes of a tree;
        None: neither model keeps states.
    rows: of the batch, the last one of padding included.  max_pause: the most tokens of a row that rounds may emit without the
    drafter (see `Drafter.keep`); 0 if no round is ever paused.
    """

    spec: SpecConfig
    shapes: tuple[SpecConfig, ...]
    backend: Backend
    caches: tuple[KVCache, ...]
    target_cache: KVCache
    slots: int
    page_size: int
    span: int | None
    max_positions: int
    rows: int
    max_pause: int
    device: torch.device
    dtype: torch.dtype
    states: tuple[int, int, int] | None = None

    @property
    def max_topk(self) -> int:
        """The most branches of any shape."""
        return max(shape.topk for shape in self.shapes)

    @property
    def max_steps(self) -> int:
        """The most levels of any shape."""
        return max(shape.max_steps for shape in self.shapes)


class Impression(NamedTuple):
    """What a look at a drafter along a text showed.

    complaint: what seems to be wrong with it; empty: nothing.
    first: the share of places in which the target would accept the first token of a chain; None: nobody looked.
    """

    complaint: str = ""
    first: float | None = None


class DraftModel(nn.Module, ABC):
    """A loaded drafter of any kind.  feature_size: how many numbers of a token it reads of the target, beside ids."""

    feature_size: int = 0
    takes_predictions = False  # whether a request's own prediction is among what it proposes
    takes_choices = False  # whether a request may choose among its sources

    @property
    def tables(self) -> Mapping[TableName, int]:
        """The tables of other texts that it reads, and how many tokens each holds."""
        return {}

    @property
    @abstractmethod
    def needs(self) -> DraftNeeds: ...

    @property
    def sources(self) -> tuple[str, ...]:
        """Who proposes nodes, by their bits in DraftTree.sources_BN."""
        return ("drafter",)

    @abstractmethod
    def check(self, spec: SpecConfig) -> None:
        """ValueError if it can't grow trees of that shape, which is not "auto"."""

    def doubt(self, spec: SpecConfig) -> str:
        """Why trees of a shape that `check` lets pass can hardly be worth it; empty if nothing speaks against them."""
        return ""

    def default_shape(self) -> SpecConfig:
        """The shape of trees where nobody names one."""
        return SpecConfig()

    def resolved(self, spec: SpecConfig) -> SpecConfig:
        """What rounds make of a shape.  ValueError if it says something that means nothing for this drafter."""
        if spec.max_depth is not None:
            raise ValueError(
                f"max_depth says how deep paths of other sources reach, and the drafter is the only one here; got "
                f"max_depth={spec.max_depth}; nearest settings that work: max_depth=None, or draft=[DRAFT, 'suffix']"
            )
        return spec

    def asked_shapes(self, spec: SpecConfig, asked: Sequence[SpecConfig] | None) -> tuple[SpecConfig, ...]:
        """What rounds make of shapes that requests may ask for besides `spec`, which is resolved.  ValueError if they can't."""
        made = tuple(map(self.resolved, asked or ()))
        if made and (spec.is_auto or spec in made or len(set(made)) < len(made)):
            got = "num_steps='auto'" if spec.is_auto else f"shapes='{' '.join(shape.label for shape in made)}'"
            raise ValueError(
                f"shapes are others than the decoder's own, SpecConfig({spec.label}), each once, and 'auto' has its own; "
                f"got {got}; nearest setting that works: leave {'shapes' if spec.is_auto else spec.label} out"
            )
        return made

    def shapes(self, spec: SpecConfig, warns: bool = False, asked: Sequence[SpecConfig] = ()) -> tuple[SpecConfig, ...]:
        """The shapes among those of `spec` that it can grow, and then those of `asked`, of which it must grow each.  ValueError
        if it can grow none of the first, or not all of the others.

        "auto" also leaves out shapes in doubt.  warns: whether users are to be warned of another shape; several places ask for
        shapes, and one of them is enough.
        """
        found, problem = list[SpecConfig](), None
        for shape in spec.shapes:
            try:
                self.check(shape)
                if (doubt := self.doubt(shape)) and spec.is_auto:
                    raise ValueError(doubt)
            except ValueError as error:
                problem = error
                continue
            if doubt and warns:
                warnings.warn(doubt, stacklevel=2)
            found.append(shape)
        if problem is not None and not found:
            raise problem
        return (*found, *(shape for one in asked for shape in self.shapes(one, warns)))

    @abstractmethod
    def worker(self, context: DrafterContext) -> Drafter:
        """The drafter at work on a batch."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What it is and how its files were read, in one line."""

    @property
    def trained_length(self) -> int | None:
        """The most tokens of a text that it was trained on; None: that means nothing for it."""
        return None

    def smoke(self, target: Target, ids_T: Tensor) -> Impression:
        """What a look at it along a text (int64) shows."""
        return Impression()

    def slots(self, spec: SpecConfig) -> int:
        """How many slots a round's draft and extend write after the tokens that are committed before the round."""
        return spec.max_steps + 1

    def passes(self, spec: SpecConfig) -> int:
        """How often a round of that shape reads the weights; 0: there are none."""
        return 0

    def source_bytes(self, rows: int, positions: int) -> int:
        """Bytes that it keeps for so many rows of so many positions besides weights and what is kept by slot, at most."""
        return 0

    def once_bytes(self, rows: int) -> int:
        """Bytes of the weights that only one of these passes reads."""
        return 0


@dataclass(frozen=True)
class Rows:
    """A drafter's own tensors of the batch's rows: every field is one, and its first dimension is the rows."""

    def tensors(self) -> list[Tensor]:
        return [getattr(self, each.name) for each in fields(self)]

    def narrow(self, rows: int) -> Self:
        """Views of the first `rows` rows."""
        return type(self)(*(tensor[:rows] for tensor in self.tensors()))

    def move(self, sources_R: Tensor, targets_R: Tensor) -> None:
        """Makes each target row what its source row was before.  Both are int64, and no target occurs twice."""
        if sources_R.shape[0]:
            for tensor in self.tensors():
                tensor.index_copy_(0, targets_R, tensor.index_select(0, sources_R))


class Drafter(ABC):
    """Proposes trees for the running batch.

    caches: what it keeps by slot, in the same pages as the target.  rows: what it keeps by row; None: nothing.
    head: whose weights it reads, if these may hold experts.
    keeps_text: whether it has what follows each token of the rows' texts, and hands it out by `text`, as sources of paths do.
    catches_up: whether there is anything that it learns after a pause; if not, `keep` has learnt it.
    keeps_states: whether its layers keep states by row, under the same numbers as the target's (specdec/batch/trees/states.py).
    """

    keeps_text = keeps_states = False
    catches_up = True
    caches: Sequence[CachedBySlot] = ()
    rows: Rows | None = None
    head: DraftModel | None = None

    @abstractmethod
    def draft(self, state: BatchState, spec: SpecConfig, needs: Needs) -> DraftTree:
        """The next tree of every row, of exactly that shape.  needs: here and below, how the target will choose the tokens."""

    @abstractmethod
    def extend(self, state: BatchState, needs: Needs, new: NewTokens) -> None:
        """Learns what a round emitted, and prepares the next draft.  state.lens_B is already the length after the round.

        new: with features unless `DraftNeeds` asks for none.
        """

    @abstractmethod
    def prefill(self, state: BatchState, needs: Needs, prompts: RaggedPrompts, first_B: Tensor, features_TF: Tensor) -> None:
        """Learns parts of prompts.  state: all rows; a part's is prompts.rows_B.

        first_B: int64, the first output token of each prompt that ends here.  What is left for a draft counts if it ends.
        """

    @abstractmethod
    def keep(self, state: BatchState, new: NewTokens) -> None:
        """Records the one token that a paused round emitted in each row; only running rows that speculate count."""

    @abstractmethod
    def catch_up(self, state: BatchState, needs: Needs) -> None:
        """Learns all tokens that were kept.  A row without such tokens keeps its next draft as it is."""

    def enter(self, entries: Sequence[RowEntry]) -> None:  # noqa: B027
        """Requests take rows, outside of any graph; see EnterRows."""

    def bring_table(self, step: TableStep) -> None:
        """Takes a part of a table of texts that it reads, between two rounds; see `DraftModel.tables`."""
        raise NotImplementedError

    def changed(self, state: BatchState) -> list[Tensor]:
        """The tensors that `draft`, `extend`, `keep` and `catch_up` change and that a later phase or round reads, of the rows.

        A capture restores them after its warm-ups.  What a phase overwrites with the same values each time need not be listed.
        """
        return self.changed_rows(state)

    def changed_rows(self, state: BatchState) -> list[Tensor]:
        """Those of them whose first dimension is the rows."""
        return []

    def move_rows(self, sources_R: Tensor, targets_R: Tensor) -> None:
        """Makes each target row what its source row was before.  Both are int64, and no target occurs twice."""
        if self.rows is not None:
            self.rows.move(sources_R, targets_R)

    def clear_rows(self, rows_R: Tensor) -> None:  # noqa: B027
        """Forgets rows (int64) whose requests have ended.  Values that nobody reads may stay."""
