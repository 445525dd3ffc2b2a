"""The result of `specdec verify`: what was looked at, what was found, and whether the decoder passes.  Knows no model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

FORMAT = "specdec verify 1"
FEW_ACCEPTED = 0.05  # threshold: the share of tokens that are accepted drafts, below which draft trees were hardly looked at
DEFINITIONS = {
    "EXACT": "plain and speculative decoding wrote the same tokens, each of them the reference's or explained by rounding",
    "near-tie": "the texts part where rounding explains both tokens, and it explains every other token of both texts",
    "DIVERGED": "the texts part where rounding does not explain it; in float32 (without 8-bit KV) and in deterministic mode "
    "wherever they part",
    "OFF TARGET": "a text holds a token that the reference would not take, and that rounding does not explain",
    "EMPTY": "there was no speculative round to check: the output ended with the prompt's pass",
    "reference": "a dense pass over the whole text in the next wider dtype, without pages, trees, caches and attention kernels",
    "margin": "how far a token's logit is from being chosen, after the same prefix, by the reference's logits: greedily, how "
    "far it lies below the best; null where no logit would help",
    "bound": "what rounding explains at a place: twice the larger of the noise there and the text's median noise. Noise is how "
    "far a dense pass in the model's own dtype shifts the leading tokens' logits against each other, so no speculation and no "
    "page takes part in it",
    "accepted": "tokens of the speculative texts that are accepted drafts; all others follow a tree's root, which is computed "
    "as in plain decoding but for the nodes beside it, so faults of a tree's other nodes show in accepted drafts alone",
    "unsure": "places at which the two best tokens are closer than the bound, where a wrong one would go unseen",
}

Verdict = Literal["EXACT", "near-tie", "DIVERGED", "OFF TARGET", "EMPTY"]


@dataclass(frozen=True)
class Divergence:
    """Where two outputs of one prompt part.  Ranks (1 is best) and margin are the reference's, after the common part.

    margin: the larger of both tokens' (see DEFINITIONS).  bound: the largest margin that is a near-tie.  None where nothing
    could be compared.
    """

    prompt: int
    index: int
    token_baseline: int | None
    token_speculative: int | None
    rank_baseline: int | None = None
    rank_speculative: int | None = None
    margin: float | None = None
    bound: float | None = None
    verdict: Literal["near-tie", "DIVERGED"] = "DIVERGED"


@dataclass(frozen=True)
class OffTarget:
    """A token that rounding does not explain.  best: what the reference takes there.  side: whose text holds it."""

    index: int
    token: int
    best: int
    margin: float | None
    bound: float
    side: Literal["both", "baseline", "speculative"]


@dataclass(frozen=True)
class PromptVerdict:
    """One prompt.

    prompt: its number, from 0.  seed: with which both texts were sampled, if they were.
    tokens: how many were compared with the reference, those of both texts if they differ.
    rounds: of speculation.  difference: the first one, if any.  off_target: in the order of the output.
    bound: the median over the places.  unsure: see DEFINITIONS.
    """

    prompt: int
    tokens: int
    rounds: int
    difference: Divergence | None
    off_target: list[OffTarget]
    bound: float
    unsure: int
    seed: int | None = None

    @property
    def verdict(self) -> Verdict:
        if self.difference is not None and self.difference.verdict == "DIVERGED":
            return "DIVERGED"
        if self.off_target:
            return "OFF TARGET"
        if not self.rounds:
            return "EMPTY"
        return "EXACT" if self.difference is None else "near-tie"


@dataclass(frozen=True)
class Verification:
    """Whether speculation changed what the target writes.

    prompts: a verdict for each.  accept_length: tokens emitted by a round of speculation.  accepted: see DEFINITIONS.
    settings: what ran, by name.
    """

    prompts: list[PromptVerdict]
    accept_length: float
    accepted: int
    settings: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether every prompt is EXACT, or differs at near-ties alone."""
        return all(each.verdict in ("EXACT", "near-tie") for each in self.prompts)

    @property
    def tokens(self) -> int:
        """How many tokens were compared with the reference."""
        return sum(each.tokens for each in self.prompts)

    @property
    def unsure(self) -> int:
        """At how many of them a wrong token would have gone unseen, because another one is as good within rounding."""
        return sum(each.unsure for each in self.prompts)

    @property
    def saw_trees(self) -> bool:
        """Whether enough drafts were accepted that a fault in how draft trees are computed would have shown."""
        return self.accepted >= FEW_ACCEPTED * self.tokens

    def count(self, verdict: Verdict) -> int:
        """How many prompts have that verdict."""
        return sum(each.verdict == verdict for each in self.prompts)

    def as_json(self) -> dict[str, Any]:
        """Plain data: every field, what follows from them, and the definitions."""
        prompts = [{**asdict(each), "verdict": each.verdict} for each in self.prompts]
        facts = ("passed", "tokens", "unsure", "accept_length", "accepted", "saw_trees")
        found = {name: getattr(self, name) for name in facts}
        return {"format": FORMAT, "definitions": DEFINITIONS, "settings": self.settings, **found, "prompts": prompts}
