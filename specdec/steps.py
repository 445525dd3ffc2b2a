"""The contract between the scheduler and a runner: plain steps one way, emitted tokens the other.

The scheduler turns requests into steps, and a runner executes the steps in order on one rank's device.  Steps hold numbers
only, so that several ranks can be given the same ones.  This module knows no request, no tensor and no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from specdec.config import OF_DRAFTS, SAMPLING_OPTIONS, GrammarKind, SpecConfig
from specdec.generation import Pending
from specdec.grammar.wait import Wait
from specdec.grammar.wait_table import WaitTable
from specdec.limits import ZEROS
from specdec.tables.steps import TableStep

RoundKind = Literal["plain", "paused", "speculative"]
STEPS = (*dict.fromkeys(declared.step for declared in SAMPLING_OPTIONS.values() if declared.step), "waits")
DRAFTED = frozenset(declared.step for declared in SAMPLING_OPTIONS.values() if declared.drafted)  # steps that drafts know of
DRAFTING = frozenset(SAMPLING_OPTIONS[name].step for name in OF_DRAFTS)  # steps of rows in which somebody drafts
# The columns of the table of rows' options, by type.
FLOATS = tuple(name for name, declared in SAMPLING_OPTIONS.items() if declared.column is float)
INTS = (*(name for name, declared in SAMPLING_OPTIONS.items() if declared.column is int), "first_end", "processed")


class Needs(NamedTuple):
    """What choosing and drafting tokens takes for at least one row of a pass.

    A pass runs the steps that are needed, and no other; a step changes nothing in rows without its option.  So any needs
    besides a batch's own would give the same tokens, more slowly.  A CUDA graph is captured for each combination that occurs.

    steps: names of steps of one pass over the logits, those that options are declared with (see SamplingOption).
        sampled: noise; without it all rows are greedy.  filtered: top-k or top-p, whose cutoff is searched.  min_p: min-p.
        bias: TokenRules.bias.  penalties: what a row's text holds.  bad_words, ends: TokenRules of these names.
        grammar: RowEntry.grammar.  The host completes trees before the target reads them, and makes masks meanwhile, so such a
            round runs phase by phase.
        waits: RowEntry.waits.  The device follows the texts; without masks, a row emits nothing past the place where it halts.
        processed: log-probabilities after the options.  prediction, sources: RowEntry's of these names.
    logprobs: 1 + the number of likeliest tokens whose log-probabilities are computed beside the chosen one's; 0: none are.
    trees: whether a round also hands out its trees, see Emitted.
    """

    steps: frozenset[str] = frozenset()
    logprobs: int = 0
    trees: bool = False

    @classmethod
    def of(cls, *steps: str, logprobs: int = 0, trees: bool = False) -> Needs:
        assert set(steps) <= set(STEPS), steps
        return cls(frozenset(steps), logprobs, trees)

    def __or__(self, other: Needs) -> Needs:
        """What serves both."""
        return Needs(self.steps | other.steps, max(self.logprobs, other.logprobs), self.trees or other.trees)

    @property
    def sampled(self) -> bool:
        return "sampled" in self.steps

    @property
    def grammar(self) -> bool:
        return "grammar" in self.steps

    @property
    def waits(self) -> bool:
        return "waits" in self.steps

    @property
    def halts(self) -> bool:
        """Whether rows halt where they need masks: the pass has none."""
        return self.waits and not self.grammar

    @property
    def unmasked(self) -> Needs:
        """Those without a grammar's masks."""
        return self._replace(steps=self.steps - {"grammar"})

    @property
    def drafts(self) -> Needs:
        """Those needs that a drafter looks at."""
        return Needs(self.steps & DRAFTED)

    def where(self, drafts: bool) -> Needs:
        """Those of the row where somebody drafts in it, or nobody does."""
        return self if drafts or self.steps.isdisjoint(DRAFTING) else self._replace(steps=self.steps - DRAFTING)

    @property
    def rules(self) -> bool:
        """Whether some row has rules for single tokens, which are kept in tables."""
        return not self.steps.isdisjoint(("bias", "penalties", "bad_words", "ends"))

    @property
    def history(self) -> bool:
        """Whether the device must know what rows have written."""
        return not self.steps.isdisjoint(("penalties", "bad_words"))


class RowOptions(NamedTuple):
    """How a row chooses its tokens, as numbers of the columns FLOATS and INTS.

    first_end: the first position at which a token of TokenRules.ends may stand.  processed: 1 where log-probabilities are those
    after the options, else 0.  The others: see SamplingParams.
    """

    floats: tuple[float, ...]
    ints: tuple[int, ...]

    @classmethod
    def of(cls, **numbers: float) -> RowOptions:
        """Some numbers by name; the others change nothing."""
        assert numbers.keys() <= {*FLOATS, *INTS}, numbers
        every = {name: declared.default or 0 for name, declared in SAMPLING_OPTIONS.items()} | numbers
        return cls(tuple(float(every[name]) for name in FLOATS), tuple(int(every.get(name, 0)) for name in INTS))

    @property
    def first_end(self) -> int:
        return self.ints[INTS.index("first_end")]


@dataclass(frozen=True)
class TokenRules:
    """What a row's options say of single tokens.

    prompt_ids: the tokens before the output, as far as an option looks at them.
    bias: (id, what is added to its logit); -inf bans the token.
    bad_words: sequences of two ids or more, whose last id is banned where the text ends with the others.
    ends: ids that are banned before the position RowOptions.first_end.
    """

    prompt_ids: Sequence[int] = ()
    bias: Sequence[tuple[int, float]] = ()
    bad_words: Sequence[Sequence[int]] = ()
    ends: Sequence[int] = ()


class Grammar(NamedTuple):
    """What a row's output must be.  kind: how `text` says it: as a JSON schema, a regular expression or a context-free grammar.
    ends: ids that end the text, and may stand where it is complete.  wait: from where on it holds; None: from the first token.
    """

    kind: GrammarKind
    text: str
    ends: tuple[int, ...] = ()
    wait: Wait | None = None


@dataclass(frozen=True)
class EncoderInput:
    """A text that the target's encoder reads.  page: where the encoder's cache keeps it."""

    page: int
    token_ids: Sequence[int]


@dataclass(frozen=True)
class RowEntry:
    """A request that takes a row of the batch.

    pages: for each group of layers, numbers of pages in the KV pool, by position; equally many for each group.
    speculates: whether draft tokens may be accepted in the row.  rules, grammar: None where the row has none.
    encoder_input: None for a target without an encoder.  written: of a request that had a row, its output but the last token.
    state: of a target with recurrent layers, the number of the state with which the text goes on: a kept one, or ZEROS.
    prediction: what the output may well be; None: nobody said.  sources: who may draft, by bits (see Emitted); None: all.
    scope: the key of those whose earlier answers may be proposed; 0: nobody's.
    waits: how the text waits for its grammar, after `written`; None: the grammar holds from the first token on, or there is
        none, or only the host can follow the text.
    """

    row: int
    pages: Sequence[Sequence[int]]
    options: RowOptions
    speculates: bool
    rules: TokenRules | None = None
    encoder_input: EncoderInput | None = None
    grammar: Grammar | None = None
    written: Sequence[int] = ()
    state: int = ZEROS
    prediction: Sequence[int] | None = None
    sources: int | None = None
    scope: int = 0
    waits: WaitTable | None = None


@dataclass(frozen=True)
class EnterRows:
    """Requests take rows of the batch.  A row takes no part in rounds until its whole prompt has run."""

    entries: tuple[RowEntry, ...]


class RowGrowth(NamedTuple):
    """More pages of a running row, see RowEntry.  first: the position of the first of them in the row's page table."""

    row: int
    first: int
    pages: Sequence[Sequence[int]]


@dataclass(frozen=True)
class GrowRows:
    """Running rows get more pages, before the next round."""

    growths: tuple[RowGrowth, ...]


@dataclass(frozen=True)
class PromptPart:
    """Consecutive tokens of one prompt.

    start: the position of the first token; the keys and values of all tokens before it are in the cache.  next_token: the
    token after the last one here, or -1 if nobody knows it yet, because the prompt ends here.
    encoder_input: a text that the target's encoder has to read before this part, the first of its prompt.
    resumes: whether the row runs after this part, with `next_token` as its last emitted token: the request had a row before.
    keep: (number, n): the recurrent state after the first n > 0 tokens is kept under that number too, for later prompts.
    scored: whether the log-probability of the token after each token here is handed out, where that is one of the prompt's.
    """

    row: int
    token_ids: Sequence[int]
    start: int
    next_token: int
    encoder_input: EncoderInput | None = None
    resumes: bool = False
    keep: tuple[int, int] | None = None
    scored: bool = False

    @property
    def is_last(self) -> bool:
        """Whether the row runs after this part."""
        return self.next_token < 0 or self.resumes

    @property
    def emits(self) -> bool:
        """Whether the first token of an output comes after this part."""
        return self.next_token < 0

    @property
    def end(self) -> int:
        """The number of the prompt's tokens up to the end of this part."""
        return self.start + len(self.token_ids)

    @property
    def num_scores(self) -> int:
        """How many log-probabilities are handed out."""
        return len(self.token_ids) - self.emits if self.scored else 0


@dataclass(frozen=True)
class RunChunk:
    """One pass over parts of prompts.  A row whose prompt ends in it gets its first token, and runs from now on.

    needs: what the rows whose prompts end here need to choose their first token.
    drafted: whether the drafter reads the prompts too; so it must if the row of any part speculates.
    cost: what the pass costs; the unit is the cost of a token at position 0, and a token that reads many others costs more.
    may_capture: whether there is time to capture a CUDA graph for the pass; a graph that exists is replayed anyway.
    tops: how many likeliest tokens are given beside each token of a scored part.  A chunk with such parts is never captured.
    """

    parts: tuple[PromptPart, ...]
    needs: Needs
    drafted: bool
    cost: float
    may_capture: bool
    tops: int = 0


@dataclass(frozen=True)
class RunRound:
    """One round over the first `rows` rows.

    kind: "plain" decodes one token for each row; "paused" does the same and keeps what the drafter will need to catch up;
        "speculative" drafts a tree of shape `spec`, of which rows that do not speculate accept nothing.
    needs: what the rows need to choose their tokens.  shared: read the pages of the last ShareRows once for all its rows.
    timed: measure how long it takes: from the end of the step before it, if that was a round, else from its own start.
    """

    rows: int
    kind: RoundKind
    spec: SpecConfig | None
    needs: Needs
    shared: bool = False
    timed: bool = False

    @property
    def drafted(self) -> int:
        """How many draft tokens its trees have."""
        return self.spec.num_draft_tokens - 1 if self.spec else 0

    @property
    def nodes(self) -> int:
        """How many nodes the target reads in all rows."""
        return self.rows * (self.drafted + 1)

    @property
    def depths(self) -> int:
        """How many levels its trees have."""
        return min(self.spec.levels, self.drafted) if self.spec else 0


@dataclass(frozen=True)
class RunMixed:
    """A round and a chunk in one pass over the target.  It does what the round does, and after it the chunk.

    round: not timed, without grammars, of chains or single tokens.  chunk: without grammars, encoder inputs and
    scored parts.
    It emits what the round does for each row, then what the chunk does for each part.
    """

    round: RunRound
    chunk: RunChunk

    @property
    def needs(self) -> Needs:
        """What either of both needs."""
        return self.round.needs | self.chunk.needs


@dataclass(frozen=True)
class CatchUp:
    """The drafter reads all tokens that paused rounds have emitted in the first `rows` rows.  needs, shared: see RunRound."""

    rows: int
    needs: Needs
    shared: bool = False


@dataclass(frozen=True)
class Try:
    """Runs a round or a catching up on the side and measures it: afterwards the batch is what it was.

    Graphs that the step needs are captured first, and that is not measured.  No row may be full of tokens that the drafter has
    not seen (see Drafter.keep).
    """

    step: RunRound | CatchUp


@dataclass(frozen=True)
class ShareRows:
    """These rows begin with the same pages, which hold `tokens` tokens; rounds with `shared` set read them once.

    The pages are those of the first group of layers.  Layers of another group read each row's own pages.
    """

    rows: tuple[int, ...]
    pages: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class LeaveRows:
    """moves: (source, target): each target becomes what its source was; no row is both.  cleared: become padding after that."""

    moves: tuple[tuple[int, int], ...]
    cleared: tuple[int, ...]


@dataclass(frozen=True)
class StopDrafting:
    """These rows go on without the drafter: no draft token is accepted in them any more."""

    rows: tuple[int, ...]


@dataclass(frozen=True)
class CopyPages:
    """In all layers of a group, page targets[i] becomes what page sources[i] was before this step.  No target occurs twice."""

    group: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class TimePhases:
    """From now on each phase of a round is waited for and timed, or no longer.  That slows rounds."""

    enabled: bool


@dataclass(frozen=True)
class ForceAcceptance:
    """Level d + 1 of a tree is accepted with probability probs[d], given that level d was; before the first round."""

    probs: tuple[float, ...]


Pass = RunChunk | RunRound | RunMixed
RowStep = EnterRows | GrowRows | ShareRows | LeaveRows | StopDrafting | CopyPages
Step = Pass | CatchUp | Try | RowStep | TableStep | TimePhases | ForceAcceptance


class Runner(Protocol):
    """Executes steps on one rank's device, in the order given; decides nothing by itself."""

    def run(self, step: Step) -> Pending | None:
        """Launches the step.  Returns what a chunk or a round emits, or what a Try measures, to be read later; else None."""
