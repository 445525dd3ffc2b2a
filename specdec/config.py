"""Settings: the tree's shape and how a request is sampled.  Every ValueError about a setting alone is raised here.

Knows no model, so limits that depend on one (vocabulary, context) are checked at the decoder's door.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specdec.checks import require_float, require_int
from specdec.limits import MAX_AUTO_STEPS, MAX_PAUSE, MAX_STEPS

GraphMode = Literal["round", "step", False]  # one CUDA graph a round, one a phase, or none


@dataclass(frozen=True)
class SpecConfig:
    """The shape of the draft tree, in EAGLE's three numbers.

    num_steps: S, levels of the tree (an accepted path holds at most S draft tokens).  "auto" picks 0 to 7 of them (and fewer
    than num_draft_tokens) by batch size, from what rounds cost and how far drafts were accepted lately; 0 is plain decoding.
    topk: k, branches kept per level; 1 is a chain.
    num_draft_tokens: nd, nodes verified per round, the root included; with "auto", the most of them.
    """

    num_steps: int | Literal["auto"] = 5
    topk: int = 4
    num_draft_tokens: int = 16

    def __post_init__(self) -> None:
        if isinstance(self.num_steps, str) and not self.is_auto:
            raise ValueError(f"num_steps must be an int or 'auto', got {self.num_steps!r}; nearest setting: 'auto'")
        k = require_int("topk", self.topk, 1, 64)
        nd = require_int("num_draft_tokens", self.num_draft_tokens, 2, 1024)
        S = MAX_AUTO_STEPS if self.is_auto else require_int("num_steps", self.num_steps, 1, MAX_STEPS)
        if k == 1 and nd != S + 1 and not self.is_auto:
            other = f", or num_steps={nd - 1}" if nd - 1 <= MAX_STEPS else ""
            raise ValueError(
                f"num_draft_tokens must be num_steps + 1 = {S + 1} when topk=1 (a chain, and its root), got {nd}; "
                f"nearest setting that works: num_draft_tokens={S + 1}{other}"
            )
        most = k + k * k * (S - 1) if k > 1 else S
        if nd - 1 > most:
            raise ValueError(
                f"num_draft_tokens - 1 must be at most topk + topk*topk*(num_steps-1) = {most}, the candidates of a tree "
                f"with num_steps={S} and topk={k}; got num_draft_tokens={nd}; "
                f"nearest setting that works: num_draft_tokens={most + 1}"
            )

    @property
    def is_auto(self) -> bool:
        return self.num_steps == "auto"

    @property
    def max_steps(self) -> int:
        """The most levels a tree can have."""
        return min(MAX_AUTO_STEPS, self.num_draft_tokens - 1) if self.num_steps == "auto" else self.num_steps

    def at(self, steps: int) -> SpecConfig:
        """The tree of so many levels: as many nodes as allowed, where there are as many candidates."""
        k = self.topk
        candidates = k + k * k * (steps - 1) if k > 1 else steps
        return SpecConfig(steps, k, min(self.num_draft_tokens, candidates + 1))

    @property
    def label(self) -> str:
        """S,k,nd: how tables name a shape."""
        return f"{self.num_steps},{self.topk},{self.num_draft_tokens}"

    @property
    def lookahead(self) -> int:
        """Slots that rounds may write behind the tokens the host knows of.

        A round writes verify's nodes, the draft's branches and extend's rows; one before it, whose tokens the host has not
        read yet, may have moved it num_steps + 1 tokens on.
        """
        S = self.max_steps
        round_writes = max(self.num_draft_tokens, self.topk * (S - 1), S + 1, MAX_PAUSE if self.is_auto else 0)
        return round_writes + S + 1


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    max_tokens: the most tokens to generate.  temperature: 0 is greedy.  top_p, top_k: applied in the order temperature,
    top_k, top_p; top_k=0 keeps all.  seed: equal seeds give equal text, whatever the batch and the draft; None draws one.
    stop: strings that end the text, and are not part of it.  stop_token_ids: ids that end it, besides the model's own EOS.
    ignore_eos: go on behind the model's EOS.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        require_int("max_tokens", self.max_tokens, 1)
        require_float("temperature", self.temperature, 0.0, 100.0)
        if 0 < self.temperature < 1e-4:
            raise ValueError(f"temperature must be 0 (greedy) or at least 0.0001, got {self.temperature}; nearest: 0")
        require_float("top_p", self.top_p, 0.0, 1.0, above_low=True)
        require_int("top_k", self.top_k, 0, 2**31 - 1)
        if self.seed is not None:
            require_int("seed", self.seed, -(2**63), 2**63 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be a bool, got {self.ignore_eos!r}")
        if self.stop is not None and not isinstance(self.stop, str | Sequence):
            raise TypeError(f"stop must be a string or a list of strings, got {self.stop!r} of type {type(self.stop).__name__}")
        if self.stop_token_ids is not None and not isinstance(self.stop_token_ids, Sequence):
            raise TypeError(f"stop_token_ids must be a list of ints, got {self.stop_token_ids!r}")
        for text in self.stop_strings:
            if not isinstance(text, str):
                raise TypeError(f"stop must be a string or a list of strings, got {text!r} of type {type(text).__name__}")
            if not text:
                raise ValueError("stop must not hold an empty string: it would end every text at once; leave it out")
        for token in self.stop_token_ids or ():
            require_int("stop_token_ids", token, 0, 2**31 - 1)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
