"""Where a request ends: the one place that looks at EOS, stop ids, stop strings and max_tokens, a token at a time.

Counters, streams and results only see what came through here.  Knows no model and no batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from specdec.config import SamplingParams
from specdec.engine.detokenize import Decode, Detokenizer, decode_all, held_back
from specdec.generation import FinishReason


class Trimmer:
    """The output of one request: takes emitted tokens, keeps those up to the end, and their text.

    eos_ids: the model's own ends.  decode: ids to text.  prompt_ids: what the text continues.  streaming: make text as
    tokens come, as stop strings need it too; otherwise it is made at the end, in one go.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        eos_ids: frozenset[int],
        decode: Decode,
        prompt_ids: Sequence[int],
        streaming: bool,
    ) -> None:
        self.sampling = sampling
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self._eos_ids = frozenset() if sampling.ignore_eos else eos_ids
        self._stop_ids = frozenset(sampling.stop_token_ids or ())
        self._stops = sampling.stop_strings
        self._longest_stop = max(map(len, self._stops), default=0)
        self._decode = decode
        self._prompt_ids = prompt_ids
        self._incremental = streaming or bool(self._stops)
        self._shown = 0

    def take(self, emitted: Sequence[int]) -> int:
        """Takes tokens in order until the request ends.  Returns how many were kept; the rest is cut off."""
        for kept, token in enumerate(emitted):
            if self.finish_reason is not None:
                return kept
            self._take_one(token)
        return len(emitted)

    def new_text(self) -> str:
        """Text that has become certain since the last call: what a stream shows next."""
        certain = len(self.text)
        if self.finish_reason is None:
            certain -= held_back(self.text, self._stops)
        piece = self.text[self._shown : certain]
        self._shown = max(self._shown, certain)
        return piece

    @cached_property
    def _detokenizer(self) -> Detokenizer:
        """Made with the first token, so that a tokenizer that fails fails this request alone."""
        return Detokenizer(self._decode, self._prompt_ids)

    def _take_one(self, token: int) -> None:
        self.token_ids.append(token)
        if token in self._eos_ids:
            return self._finish("eos")
        if token in self._stop_ids:
            return self._finish("stop")
        if self._incremental and self._append(self._detokenizer.add(token)):
            self.finish_reason = "stop"
            return None
        if len(self.token_ids) >= self.sampling.max_tokens:
            self._finish("length")
        return None

    def _finish(self, reason: FinishReason) -> None:
        """Completes the text.  An ending token is not shown, and the last bytes may still complete a stop string."""
        self.finish_reason = reason
        if not self._incremental:
            shown = self.token_ids if reason == "length" else self.token_ids[:-1]
            self.text = decode_all(self._decode, self._prompt_ids, shown)
        elif self._append(self._detokenizer.flush()):
            self.finish_reason = "stop"

    def _append(self, piece: str) -> bool:
        """Adds to the text, and cuts it where a stop string begins; whether one was found."""
        begin = max(0, len(self.text) - self._longest_stop + 1)  # a stop string that is new reaches into the piece
        self.text += piece
        found = [at for stop in self._stops if (at := self.text.find(stop, begin)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)
