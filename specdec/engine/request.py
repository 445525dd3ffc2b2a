"""One request while it runs: its prompt, its output so far, its counters.  This module knows no tensor and no page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.config import SamplingParams
from specdec.engine.trim import Trimmer
from specdec.generation import Chunk, Generation, Stats


@dataclass(eq=False)
class Request:
    """A request; two requests are equal only if they are the same object.

    seed: the seed that sampling uses, which was drawn at random if the caller gave none.
    speculate: whether the drafter proposes tokens for this request.
    error: what made this request fail, or None.  Other requests go on.
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int
    output: Trimmer
    speculate: bool = True
    stats: Stats = field(default_factory=Stats)
    error: BaseException | None = None
    cancelled: bool = False
    _has_turn: bool = False
    _unread: int = 0

    @classmethod
    def new(
        cls,
        prompt_ids: list[int],
        sampling: SamplingParams,
        seed: int,
        eos_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        streaming: bool,
        speculate: bool = True,
    ) -> Request:
        """A request that has no output yet.  eos_ids, decode, streaming: see Trimmer."""
        return cls(prompt_ids, sampling, seed, Trimmer(sampling, eos_ids, decode, prompt_ids, streaming), speculate)

    @property
    def is_done(self) -> bool:
        """Whether the request has finished, failed or been cancelled."""
        return self.output.finish_reason is not None or self.error is not None or self.cancelled

    def take_turn(self) -> None:
        """Marks the request as handed in.  RuntimeError if it was before: it holds its output, so it runs once."""
        if self._has_turn:
            raise RuntimeError("this request has been handed in before, and a request runs once; make another one")
        self._has_turn = True

    def take_first(self, token: int) -> None:
        """Takes the token that prefill sampled.  It belongs to no round."""
        self.stats.prefill_tokens += 1
        self.stats.truncated += 1 - self.output.take([token])

    def take_round(self, tokens: Sequence[int], drafted: int, depths: int) -> None:
        """Takes what one round emitted: the accepted draft tokens and the bonus token.

        drafted, depths: how many draft tokens and levels the round's tree had.
        """
        self.stats.count_round(drafted, depths, len(tokens) - 1)
        self.stats.truncated += len(tokens) - self.output.take(tokens)

    def next_chunk(self) -> Chunk:
        """The tokens and the text that came since the last call."""
        ids = self.output.token_ids[self._unread :]
        self._unread = len(self.output.token_ids)
        return Chunk(self.output.new_text(), ids)

    def result(self) -> Generation:
        """The finished generation.  RuntimeError, from the request's own error, if the request failed."""
        if self.error is not None:
            reason = str(self.error) or type(self.error).__name__  # a MemoryError or an interrupt says nothing
            raise RuntimeError(f"the request failed while it ran: {reason}") from self.error
        assert self.output.finish_reason is not None, "the request is not finished"
        self.stats.check_identity(len(self.output.token_ids))
        return Generation(self.prompt_ids, self.output.token_ids, self.output.text, self.output.finish_reason, self.stats)
