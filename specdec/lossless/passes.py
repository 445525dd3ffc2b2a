"""Dense passes of a decoder's target over a whole text: in a wider dtype, in its own, and with its embedding a little off.

No page, tree, cache or attention kernel of specdec takes part.  Keys and values are rounded as the cache rounds them, and
queries as specdec's kernels round them; what flash-attn rounds over fp8 is not.

Shapes: T tokens, H hidden size, V vocabulary, R rows asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from specdec.attention.caches.int8_keys import rounded_queries
from specdec.attention.eager.dense import DenseAttention, StoreFn
from specdec.loading.resolve import EngineSettings
from specdec.lossless.passage import MadeWay, Passage
from specdec.lossless.widen import SMALL, replaced, widened
from specdec.models.linear import use_numerics
from specdec.models.target import Target
from specdec.ops.products.numerics import FAST

Poll = Callable[[], None]
MOVED = 1 << 24  # numbers of an embedding that are moved at once
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


def never() -> None:
    """A poll that ends no pass."""


class DensePasses:
    """Passes over texts of one decoder.  Nothing else may use the decoder's target meanwhile.

    poll: called before each layer of a pass and before logits; what it raises ends the pass, and leaves the model as it was.
    After MadeWay, the next call of `hidden` or `hidden_nearby` must be the same one, and goes on at that layer.

    model, settings: its own.  as_stored: keys and values as its cache would give them back; None: it keeps them exactly.
    choosing: whether the target chooses experts or keys by scores.  steps: whether keys and values are kept in 8 bits.  Where a
    score or a value lies on a boundary within rounding, a pass may take either side, and its logits are then far off.
    """

    def __init__(self, model: Target, settings: EngineSettings, as_stored: StoreFn | None, poll: Poll = never) -> None:
        self.model, self.dtype, self.device = model, settings.dtype, settings.device
        self._as_stored, self._numerics, self.poll = as_stored, settings.numerics, poll
        self._queries_as_read = rounded_queries if settings.options.int8_queries else None
        config = self.model.config
        self.choosing = config.has_experts or config.max_read is not None
        self.steps = self._as_stored is not None
        self._stopped: tuple[Passage, DenseAttention] | None = None  # a pass that has made way, and its attention

    @contextmanager
    def wide(self, small: int = SMALL) -> Iterator[None]:
        """Inside, passes and logits are computed in the wider dtype, in whichever order of sums.  small: see `widened`."""
        use_numerics(self.model, FAST)
        try:
            with widened(self.model, WIDER.get(self.dtype, self.dtype), small):
                yield
        finally:
            use_numerics(self.model, self._numerics)

    def hidden(self, ids: Sequence[int]) -> Tensor:
        """[T, H]: what `logits` takes, after each token."""
        (passage, attn), self._stopped = self._stopped or self._new_passage(), None
        ids_T = torch.tensor(ids, dtype=torch.int64, device=self.device)
        try:
            with passage.running():
                return self.model(ids_T, torch.arange(len(ids), dtype=torch.int64, device=self.device), attn).hidden_TH
        except MadeWay:
            self._stopped = (passage, attn) if self.model.goes_on else None
            raise

    def _new_passage(self) -> tuple[Passage, DenseAttention]:
        config = self.model.config
        attn = DenseAttention(
            config.layer_kinds,
            as_stored=self._as_stored,
            kv_layers=config.kv_source,
            queries_as_read=self._queries_as_read,
        )
        return Passage(self.model.chain(), lambda: self.poll()), attn

    def hidden_nearby(self, ids: Sequence[int], number: int) -> Tensor:
        """As `hidden`, with each number of the embedding an ulp up or down at random, so that every later rounding is another.

        number: the passes with different ones differ.
        """

        def move(table_VH: Tensor) -> Tensor:
            generator = torch.Generator(self.device).manual_seed(number)
            moved_VH, eps = torch.empty_like(table_VH), torch.finfo(self.dtype).eps
            rows = max(1, MOVED // table_VH.shape[1])  # at once: the factors of a whole table would take more than it does
            for some_RH, table_RH in zip(moved_VH.split(rows), table_VH.split(rows), strict=True):
                up = torch.randint(2, table_RH.shape, device=self.device, generator=generator, dtype=torch.int8)
                some_RH.copy_(table_RH * (1 + (2 * up - 1) * eps))
            return moved_VH

        with replaced([self.model.embed_tokens.weight], move):
            return self.hidden(ids)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        self.poll()
        return self.model.vocabulary.whole(self.model.logits(hidden_RH))
