"""Settings: the tree's shape and how a request is sampled.  Every ValueError about a setting alone is raised here.

Knows no model, so limits that depend on one (vocabulary, context) are checked at the decoder's door.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specdec.checks import is_array, require_float, require_int, store
from specdec.limits import MAX_AUTO_STEPS, MAX_PAUSE, MAX_STEPS

GraphMode = Literal["round", "step", False]  # one CUDA graph a round, one a phase, or none


@dataclass(frozen=True, init=False)
class SpecConfig:
    """The shape of the draft tree, in EAGLE's three numbers.

    num_steps: S, levels of the tree (an accepted path holds at most S draft tokens).  "auto" picks 0 to 7 of them (and fewer
    than num_draft_tokens) by batch size, from what rounds cost and how far drafts were accepted lately; 0 is plain decoding.
    topk: k, branches kept per level; 1 is a chain.
    num_draft_tokens: nd, nodes verified per round, the root included; with "auto", the most of them.  None for what suits the
    other two: all of a chain, or the best 16 nodes of a tree, all if it has fewer.  Once made, it is always a number.
    """

    num_steps: int | Literal["auto"]
    topk: int
    num_draft_tokens: int

    def __init__(self, num_steps: int | Literal["auto"] = 5, topk: int = 4, num_draft_tokens: int | None = None) -> None:
        if isinstance(num_steps, str) and num_steps != "auto":
            raise ValueError(f"num_steps must be an int or 'auto', got {num_steps!r}; nearest setting: 'auto'")
        S = num_steps if num_steps == "auto" else require_int("num_steps", num_steps, 1, MAX_STEPS)
        k = require_int("topk", topk, 1, 64)
        most = _candidates(MAX_AUTO_STEPS if S == "auto" else S, k) + 1
        if num_draft_tokens is None:
            nd = most if k == 1 else min(16, most)
        else:
            nd = require_int("num_draft_tokens", num_draft_tokens, 2, 1024)
        if k == 1 and nd != most and S != "auto":
            other = f", or num_steps={nd - 1}" if nd - 1 <= MAX_STEPS else ""
            raise ValueError(
                f"num_draft_tokens must be num_steps + 1 = {most} when topk=1 (a chain, and its root), got {nd}; "
                f"nearest setting that works: num_draft_tokens={most}{other}"
            )
        if nd > most:
            raise ValueError(
                f"num_draft_tokens - 1 must be at most topk + topk*topk*(num_steps-1) = {most - 1}, the candidates of a tree "
                f"with num_steps={S} and topk={k}; got num_draft_tokens={nd}; "
                f"nearest setting that works: num_draft_tokens={most}"
            )
        store(self, num_steps=S, topk=k, num_draft_tokens=nd)

    @property
    def is_auto(self) -> bool:
        return self.num_steps == "auto"

    @property
    def max_steps(self) -> int:
        """The most levels a tree can have."""
        return min(MAX_AUTO_STEPS, self.num_draft_tokens - 1) if self.num_steps == "auto" else self.num_steps

    def at(self, steps: int) -> SpecConfig:
        """The tree of so many levels: as many nodes as allowed, where there are as many candidates."""
        return SpecConfig(steps, self.topk, min(self.num_draft_tokens, _candidates(steps, self.topk) + 1))

    @property
    def label(self) -> str:
        """S,k,nd: how tables name a shape."""
        return f"{self.num_steps},{self.topk},{self.num_draft_tokens}"

    @property
    def lookahead(self) -> int:
        """How many KV slots after the last token that the host knows of must be free for rounds to write to.

        A round writes the nodes it verifies, the draft's branches, and the rows by which the draft follows the target.  It
        may begin num_steps + 1 tokens later than the host knows, since the round before it has not been read yet.
        """
        S = self.max_steps
        round_writes = max(self.num_draft_tokens, self.topk * (S - 1), S + 1, MAX_PAUSE if self.is_auto else 0)
        return round_writes + S + 1


def _candidates(steps: int, topk: int) -> int:
    """How many draft tokens a tree can choose from: topk at the first level, topk for each of topk branches at the others."""
    return topk + topk * topk * (steps - 1) if topk > 1 else steps


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    max_tokens: the most tokens to generate.  temperature: 0 is greedy.  top_p, top_k: applied in the order temperature,
    top_k, top_p; top_k=0 keeps all.  seed: equal seeds give equal text, whatever the batch and the draft; None draws one.
    stop: strings that end the text, and are not part of it.  stop_token_ids: ids that end it, besides the model's own EOS.
    ignore_eos: go on after the model's EOS.
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
        max_tokens = require_int("max_tokens", self.max_tokens, 1)
        temperature = require_float("temperature", self.temperature, 0.0, 100.0)
        if 0 < temperature < 1e-4:
            raise ValueError(f"temperature must be 0 (greedy) or at least 0.0001, got {temperature}; nearest: 0")
        top_p = require_float("top_p", self.top_p, 0.0, 1.0, above_low=True)
        top_k = require_int("top_k", self.top_k, 0, 2**31 - 1)
        seed = None if self.seed is None else require_int("seed", self.seed, -(2**63), 2**63 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be a bool, got {self.ignore_eos!r}")
        if self.stop is not None and not isinstance(self.stop, str | Sequence):
            raise TypeError(f"stop must be a string or a list of strings, got {self.stop!r} of type {type(self.stop).__name__}")
        for text in self.stop_strings:
            if not isinstance(text, str):
                raise TypeError(f"stop must be a string or a list of strings, got {text!r} of type {type(text).__name__}")
            if not text:
                raise ValueError("stop must not hold an empty string: it would end every text at once; leave it out")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError(f"stop holds {text!r}, which no text can hold: half of a surrogate pair is no character")
        store(self, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        if self.stop is not None and not isinstance(self.stop, str):
            store(self, stop=tuple(self.stop))
        if self.stop_token_ids is not None:
            store(self, stop_token_ids=_stop_token_ids(self.stop_token_ids))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    """The ids of a sequence or of a one-dimensional array of numpy or torch, checked."""
    ids = value.tolist() if is_array(value) and value.ndim == 1 else value
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise TypeError(f"stop_token_ids must be a list of ints, got {value!r} of type {type(value).__name__}")
    return tuple(require_int("stop_token_ids", token, 0, 2**31 - 1) for token in ids)
