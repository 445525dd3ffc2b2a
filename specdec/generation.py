"""What a request gives back, and the raw counters from which every published number follows.  Knows no model and no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

NOBODY = 1 << 29  # the bit of nodes that fill a tree because the request does without their sources: none is ever accepted
FinishReason = Literal["eos", "stop", "length"]


@dataclass
class Stats:
    """Raw counters of one request or, added up, of many.

    rounds: verify passes.  drafted: draft tokens that were proposed.  accepted: draft tokens that were accepted.
    emitted: tokens that rounds gave out, bonus tokens included, before trimming.  truncated: tokens cut off after the end.
    prefill_tokens: tokens sampled by prefill (one a request), which belong to no round.
    cached_tokens: prompt tokens whose keys and values were found in the prefix cache, not computed.
    reached_by_depth[i]: rounds that accepted all of the first i levels.  accepted_by_depth[i]: rounds that accepted one more.
    accepted_per_round: accepted draft tokens of each round.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    truncated: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    reached_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    accepted_per_round: list[int] = field(default_factory=list)

    def count_round(self, drafted: int, depths: int, accepted: int) -> None:
        """Counts one verify pass that accepted `accepted` tokens of a tree of `drafted` tokens and `depths` levels."""
        assert 0 <= accepted <= depths, (accepted, depths)
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += accepted + 1
        self.accepted_per_round.append(accepted)
        missing = depths - len(self.reached_by_depth)
        if missing > 0:
            self.reached_by_depth += [0] * missing
            self.accepted_by_depth += [0] * missing
        for depth in range(min(accepted + 1, depths)):
            self.reached_by_depth[depth] += 1
        for depth in range(accepted):
            self.accepted_by_depth[depth] += 1

    @property
    def accept_length(self) -> float:
        """Tokens emitted per verify pass, bonus included (tau)."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of the rounds that reached a depth in which it was accepted.  The product over depths says something about one
        request, or about counters added up, but not about averages of these shares over requests."""
        pairs = zip(self.accepted_by_depth, self.reached_by_depth, strict=True)
        return [accepted / reached if reached else 0.0 for accepted, reached in pairs]

    def check_identity(self, output_length: int) -> None:
        """Asserts that every output token was sampled by a prefill or emitted by a round, and that none was counted twice."""
        counted = self.prefill_tokens + self.emitted - self.truncated
        assert counted == output_length, (
            f"counters disagree: prefill {self.prefill_tokens} + emitted {self.emitted} - truncated {self.truncated} "
            f"= {counted}, but {output_length} tokens were put out"
        )

    @classmethod
    def total(cls, parts: list[Stats]) -> Stats:
        """The sum over several requests."""
        total = cls()
        for name in ("rounds", "drafted", "accepted", "emitted", "truncated", "prefill_tokens", "cached_tokens"):
            setattr(total, name, sum(getattr(part, name) for part in parts))
        for name in ("reached_by_depth", "accepted_by_depth"):
            depths = max((len(getattr(part, name)) for part in parts), default=0)
            columns = ([getattr(p, name)[i] for p in parts if i < len(getattr(p, name))] for i in range(depths))
            setattr(total, name, [sum(column) for column in columns])
        total.accepted_per_round = [accepted for part in parts for accepted in part.accepted_per_round]
        return total


@dataclass(frozen=True)
class TokenLogprob:
    """The natural log of an output token's probability, and the likeliest tokens at its place, best first, with theirs.

    token: the id.  top: as many as were asked for; fewer where options left fewer.
    """

    token: int
    logprob: float
    top: dict[int, float]


class Logprobs(NamedTuple):
    """values: the log-probability of an emitted token, then those of the likeliest tokens at its place.  ids: of the latter."""

    values: list[float]
    ids: list[int]


class NodeTable(NamedTuple):
    """The nodes of a tree that a round verified, the root first; a parent stands before its children.

    tokens, parents: of each node; the root is its own parent.  chosen: the target's own token after each node, -1 where its
    logits were not finite.  scores: the logarithm of each node's survival as its drafter estimates it; empty without estimates.
    sources: a bit for each source that proposed a node, or NOBODY; 0 for the root, and where there is one source.
    """

    tokens: list[int]
    parents: list[int]
    chosen: list[int]
    scores: list[float]
    sources: list[int]

    @property
    def root(self) -> NodeTable:
        """The root alone."""
        return NodeTable(self.tokens[:1], self.parents[:1], self.chosen[:1], self.scores[:1], self.sources[:1])


class Emitted(NamedTuple):
    """What a round emitted in one row, or a chunk for one of its parts.

    tokens: of a round, the accepted draft tokens and then the target's own token; none in a row that had halted before it.
        Of a chunk, the first output token if the prompt ends with the part, else nothing.  A token of -1 says that the target's
        logits were not finite.
    best: of a round, how many of the drafter's first choices were accepted, and how many that path has.
    sources: of a round, for each accepted draft token a bit for each source that proposed it; empty: there is one source.
    halted: of a round that needs `waits`, whether the text needs masks where it now stands; see WaitTable.
    logprobs: one for each of the tokens, and more, which mean nothing; empty where the launch needed none.
    tree: of a round whose needs ask for trees; a plain round's is only a root.
    scores: of a scored part, those of the prompt's tokens after its first one; see PromptPart.
    """

    tokens: list[int]
    best: tuple[int, int] = (0, 0)
    sources: Sequence[int] = ()
    halted: bool = False
    logprobs: Sequence[Logprobs] = ()
    tree: NodeTable | None = None
    scores: Sequence[Logprobs] = ()


class Pending(Protocol):
    """What a chunk, a round or both emit, or what a Try measures, while it is on its way from the device.

    ended: rows in which the runner has ended drafts, because they became too much for the library of grammars.
    """

    ended: Sequence[int]

    def read(self) -> list[Emitted]:
        """Waits for the device: one for each row of a round or part of a chunk.  To be called once.  A Try emits nothing."""

    def drop(self) -> None:
        """Gives the result up without reading it."""

    def seconds(self) -> float:
        """Seconds of a timed round or a Try.  To be called only after `read`."""


@dataclass(frozen=True)
class Round:
    """One verify pass of a request: the tree, and where the target's path through it stands in the output.

    first: the place among the output's tokens of the first token that the round emitted.
    accepted: how many draft tokens were accepted, those included that stand after the output's end.
    tree: see NodeTable; a plain round's is only its root.  names: what the bits of its sources stand for.
    """

    first: int
    accepted: int
    tree: NodeTable
    names: tuple[str, ...] = ("drafter",)

    @classmethod
    def of(cls, first: int, accepted: int, read: NodeTable, names: tuple[str, ...]) -> Round:
        """Of a tree as the target read it, in which a node without a token of its own may repeat an earlier sibling."""
        numbers, seen = list[int](), dict[tuple[int, int], int]()  # of each node; by (parent, token)
        kept = [(0, read.tokens[0])]
        for node, token in enumerate(read.tokens):
            key = numbers[read.parents[node]] if node else 0, token
            numbers.append(seen.setdefault(key, len(kept)) if node else 0)
            if numbers[-1] == len(kept):
                kept.append(key)
        places = [numbers.index(n) for n in range(len(kept))]
        scores = [read.scores[place] for place in places] if read.scores else []
        parents, tokens = map(list, zip(*kept, strict=True))
        chosen, sources = ([column[place] for place in places] for column in (read.chosen, read.sources))
        return cls(first, accepted, NodeTable(tokens, parents, chosen, scores, sources), names)

    @property
    def path(self) -> list[int]:
        """The nodes that the target accepted, the root first: each holds the token that the target chose after its parent."""
        tokens, parents, chosen = self.tree[:3]
        path = [0]
        while len(path) <= self.accepted:
            at = path[-1]
            path.append(next(n for n in range(at + 1, len(tokens)) if parents[n] == at and tokens[n] == chosen[at]))
        return path

    @property
    def sources(self) -> list[str]:
        """Who proposed each node, as in Generation.sources; empty where there is one source."""
        bits = self.tree.sources
        return ["", *(source_name(each, self.names) for each in bits[1:])] if any(bits) else []


def source_name(bits: int, names: tuple[str, ...]) -> str:
    """The sources of a node, such as "drafter+suffix"; without one a grammar has made it.  bits: one for each of names.

    "nobody": it only fills the tree, since its request does without whoever proposed it.
    """
    if bits & NOBODY:
        return "nobody"
    return "+".join(name for number, name in enumerate(names) if bits >> number & 1) or "grammar"


@dataclass(frozen=True)
class Generation:
    """One finished request.  token_ids includes the EOS or stop token that ended it; text doesn't show that token.

    origins: for each of token_ids, the depth at which the drafter's token was accepted in its round's tree, from 1 on; 0 where
        the token is the target's own: the first, the last of each round, and all of plain decoding.
    sources: for each of token_ids, who drafted the token if a draft was accepted: "drafter", "suffix" (the text's own matches),
        "prediction" and so on, several of them as "drafter+suffix", or "grammar"; "" where the token is the target's own.
    logprobs: one for each of token_ids; None if they were not asked for.
    predicted_tokens: how many tokens the request's prediction had.
    rounds: with the tree of each; None if trees were not asked for.
    prompt_logprobs: one for each of prompt_token_ids, of which the first has none: None; None if they were not asked for.
    stop_text: which of the texts of `stop` ended it; None: none did.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stats: Stats
    origins: list[int]
    logprobs: list[TokenLogprob] | None = None
    sources: list[str] = field(default_factory=list)
    predicted_tokens: int = 0
    rounds: list[Round] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    stop_text: str | None = None


@dataclass(frozen=True)
class Chunk:
    """A piece of a stream.  All texts joined are the final text, and all token_ids joined are the final ids.

    origins, sources: one for each of token_ids, as in Generation.
    logprobs: one for each of token_ids; None if they were not asked for.
    rounds: those that emitted these tokens; None if trees were not asked for.
    prompt_logprobs: of the first chunk, as in Generation.
    """

    text: str
    token_ids: list[int]
    origins: list[int]
    logprobs: list[TokenLogprob] | None = None
    sources: list[str] = field(default_factory=list)
    rounds: list[Round] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
