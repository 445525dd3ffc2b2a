"""Finds where a request ends: the one place that looks at EOS, stop ids, stop strings and max_tokens, token by token.

Counters, streams and results see only tokens that this module has kept.  It knows no model and no batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from specdec.config import SamplingParams
from specdec.engine.detokenize import Decode, Detokenizer, StopStrings, decode_all
from specdec.generation import FinishReason


class Trimmer:
    """The output of one request: takes emitted tokens, and keeps those up to the request's end and their text.

    eos_ids: the tokens with which the model itself ends a text.
    streaming: make the text while tokens come, which stop strings need too; otherwise the text is made once, at the end.
    """

    def __init__(
        self, sampling: SamplingParams, eos_ids: frozenset[int], decode: Decode, prompt_ids: Sequence[int], streaming: bool
    ) -> None:
        self.sampling = sampling
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stop_text: str | None = None  # the stop string that ended the text
        self._eos_ids = frozenset() if sampling.ignore_eos else eos_ids
        self._stop_ids = frozenset(sampling.stop_token_ids or ())
        self._last_ids = self._eos_ids | self._stop_ids
        self._stops = StopStrings(sampling.stop_strings)
        self._decode, self._prompt_ids = decode, prompt_ids
        self._incremental = streaming or bool(sampling.stop_strings)
        self._shown = 0

    def take(self, emitted: Sequence[int]) -> int:
        """Takes tokens in order until the request ends.  Returns how many it kept; the others are dropped."""
        ids, is_open = self.token_ids, self.finish_reason is None and not self._incremental
        if is_open and len(ids) + len(emitted) < self.sampling.max_tokens and self._last_ids.isdisjoint(emitted):
            ids += emitted  # as below, for tokens that end nothing: most of them, of every row in every round
            return len(emitted)
        if not self.sampling.max_tokens:  # the prompt alone was asked for, and its pass samples a token all the same
            self.finish_reason = "length"
        for kept, token in enumerate(emitted):
            if self.finish_reason is not None:
                return kept
            self._take_one(token)
        return len(emitted)

    def new_text(self) -> str:
        """The text that has become certain since the last call, which is what a stream shows next."""
        certain = len(self.text)
        if self.finish_reason is None:
            certain -= self._stops.held_back(self.text)
        piece = self.text[self._shown : certain]
        self._shown = max(self._shown, certain)
        return piece

    @cached_property
    def _detokenizer(self) -> Detokenizer:
        """Made with the first token, so that a tokenizer that fails makes only this request fail."""
        return Detokenizer(self._decode, self._prompt_ids)

    def _take_one(self, token: int) -> None:
        self.token_ids.append(token)
        if token in self._eos_ids:
            return self._finish("eos")
        if token in self._stop_ids:
            return self._finish("stop", shows_last=self.sampling.include_stop_str_in_output)
        if self._incremental and self._append(self._detokenizer.add(token)):
            self.finish_reason = "stop"
            return None
        if len(self.token_ids) >= self.sampling.max_tokens:
            self._finish("length")
        return None

    def _finish(self, reason: FinishReason, shows_last: bool = False) -> None:
        """Ends the request and completes its text; the last bytes may complete a stop string.

        shows_last: whether the EOS or stop token that ended it adds its text.
        """
        self.finish_reason = reason
        if not self._incremental:
            shown = self.token_ids if reason == "length" or shows_last else self.token_ids[:-1]
            self.text = decode_all(self._decode, self._prompt_ids, shown)
            return
        if (shows_last and self._append(self._detokenizer.add(self.token_ids[-1]))) or self._append(self._detokenizer.flush()):
            self.finish_reason = "stop"

    def _append(self, piece: str) -> bool:
        """Adds the piece to the text, and cuts the text at a stop string.  Returns whether one was found."""
        seen = len(self.text)
        self.text += piece
        if len(self.token_ids) < self.sampling.min_tokens:
            return False
        found = self._stops.find(self.text, seen)
        if found is not None:
            self.stop_text = self.text[slice(*found)]
            self.text = self.text[: found[self.sampling.include_stop_str_in_output]]
        return found is not None
