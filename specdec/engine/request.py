"""One request while it runs: its prompt, its output so far, its counters, its row.  This module knows no tensor and no page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from specdec.config import SamplingParams, SpecConfig
from specdec.engine.chunks import PromptRest
from specdec.engine.needs import RowChoice
from specdec.engine.trim import Trimmer
from specdec.generation import Chunk, Emitted, Generation, Logprobs, Round, Stats, TokenLogprob, source_name
from specdec.grammar.wait import Wait
from specdec.grammar.wait_table import WaitTable
from specdec.steps import EncoderInput, Grammar, Needs, PromptPart

LeftAfter = Callable[[Grammar | None, Sequence[int]], tuple[list[int], str]]


@dataclass(eq=False)
class Request:
    """A request; two requests are equal only if they are the same object.

    origins, sources, logprobs: of the output's tokens: see Generation; no logprobs where the request did not ask for them.
    scores: of the prompt's tokens after the first one, as far as chunks have brought them, where the request asked for them.
    source_names: what the bits of Emitted.sources stand for.  rounds: see Generation; None where nobody asked for trees.
    left_after: the tokens that a grammar allows after an output (without one, all), and what its library said if it failed
        there; for errors.
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    choice: RowChoice
    output: Trimmer
    speculate: bool = True  # whether the drafter proposes tokens
    streaming: bool = False  # whether its text is made token by token, for chunks
    stats: Stats = field(default_factory=Stats)
    error: BaseException | None = None  # what made this request fail; others go on
    cancelled: bool = False
    has_entered: bool = False  # whether it has had a row
    is_submitted: bool = False  # whether an engine's thread has taken it; that can happen once only
    encoder_ids: list[int] | None = None  # what the target's encoder reads; None for a target without one
    prediction_ids: Sequence[int] | None = None  # what the output may well be; None: nobody said
    drafted_until: int | None = None  # how many tokens the drafter knows, since it stopped there; None: it goes on
    source_names: tuple[str, ...] = ("drafter",)
    origins: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    rounds: list[Round] | None = None
    left_after: LeftAfter | None = None
    shape: SpecConfig | None = None  # of the trees that it asks for, as rounds name it; None: it takes any
    scope: int = 0  # the key of those whose earlier answers it may be proposed, as they may be this one's; 0: nobody's
    cache_salt: str | None = None  # of those with which it may share pages of the prefix cache
    waits: WaitTable | None = None  # see RowEntry; here at the text's beginning
    is_halted: bool = False  # whether the text needs masks where it stands, as far as rounds have said
    _unread: int = 0
    _unread_rounds: int = 0
    _names: dict[int, str] = field(default_factory=dict)  # of `_named`

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
        encoder_ids: list[int] | None = None,
        bad_words: Sequence[Sequence[int]] = (),
        left_after: LeftAfter | None = None,
        prediction_ids: Sequence[int] | None = None,
        source_names: tuple[str, ...] = ("drafter",),
        scope: int = 0,
        trees: bool = False,
        shape: SpecConfig | None = None,
        cache_salt: str | None = None,
    ) -> Request:
        """A request that has no output yet.  eos_ids: see Trimmer.  source_names, shape: see the class.

        seed: the caller's, or one that was drawn.  bad_words, prediction_ids: those of `sampling` as ids.  trees: keep each
        round's tree.
        """
        output = Trimmer(sampling, eos_ids, decode, prompt_ids, streaming)
        choice = RowChoice.of(sampling, seed, prompt_ids, bad_words, eos_ids, trees)
        of_drafts = {"prediction": prediction_ids, "sources": sampling.sources}
        if speculate and (steps := [step for step, said in of_drafts.items() if said is not None]):
            choice = choice.with_steps(*steps)
        more = {
            "encoder_ids": encoder_ids,
            "left_after": left_after,
            "prediction_ids": prediction_ids,
            "source_names": source_names,
            "scope": scope,
            "shape": shape,
            "rounds": [] if trees else None,
            "cache_salt": cache_salt,
        }
        return cls(prompt_ids, sampling, choice, output, speculate, streaming, **more)  # type: ignore[arg-type]

    def wait_for(self, wait: Wait, table: WaitTable | None) -> None:
        """Lets its grammar begin to hold later.  table: see RowEntry.waits."""
        self.choice = self.choice.waiting(wait, table)
        self.waits, self.is_halted = table, table is not None and table.halts

    @property
    def round_needs(self) -> Needs:
        """What its next round needs: no masks while the device follows the text."""
        return self.choice.needs if self.waits is None or self.is_halted else self.choice.needs.unmasked

    @property
    def source_bits(self) -> int | None:
        """Who may draft, see RowEntry.sources."""
        wanted = self.sampling.sources
        return None if wanted is None else sum(1 << self.source_names.index(name) for name in wanted)

    @property
    def given_ids(self) -> list[int]:
        """The prompt that the caller gave: what the encoder reads, for a target that has one."""
        return self.prompt_ids if self.encoder_ids is None else self.encoder_ids

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""
        return len(self.prompt_ids) + len(self.output.token_ids)

    @property
    def most_read(self) -> int:
        """The most tokens that launches read.  A single one comes from the prompt's own pass, and no round goes on from it."""
        most = self.sampling.max_tokens
        return len(self.prompt_ids) + (most if most > 1 else 0)

    @property
    def text_length(self) -> int:
        """The length of `text`."""
        return len(self.prompt_ids) + max(0, len(self.output.token_ids) - 1)

    @property
    def text(self) -> list[int]:
        """The tokens whose keys and values its rounds read: its prompt, and all of its output but the last token."""
        return [*self.prompt_ids, *self.output.token_ids[:-1]] if self.output.token_ids else self.prompt_ids

    @property
    def is_scored(self) -> bool:
        """Whether chunks of its prompt hand out log-probabilities.  Kept pages have none, so it finds nothing in the cache."""
        return self.sampling.prompt_logprobs is not None and not self.output.token_ids

    @property
    def is_done(self) -> bool:
        """Whether the request has finished, failed or been cancelled."""
        return self.output.finish_reason is not None or self.error is not None or self.cancelled

    def take_scores(self, start: int, scores: Sequence[Logprobs]) -> None:
        """Takes what a chunk's part says of the prompt's tokens.  start: the position of its first token.

        A request that has stepped back before its first token gets them again.
        """
        tops = self.sampling.prompt_logprobs or 0
        tokens = self.prompt_ids[start + 1 : start + 1 + len(scores)]
        found = [_logprob(*each, tops) for each in zip(tokens, scores, strict=True)]
        assert start <= len(self.scores), "chunks come in the order of the prompt"
        self.scores[start : start + len(found)] = found
        for place, each in enumerate(found, start + 1):
            if each.logprob != each.logprob:
                raise FloatingPointError(f"the target's logits are not finite (NaN or inf) before the prompt's token {place}")

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """See Generation."""
        return None if self.sampling.prompt_logprobs is None else [None, *self.scores]

    def take_first(self, emitted: Emitted) -> None:
        """Takes the token that prefill sampled.  It belongs to no round."""
        self.stats.prefill_tokens += 1
        self._take(emitted)

    def take_round(self, emitted: Emitted, drafted: int, depths: int) -> None:
        """Takes what one round emitted.  drafted, depths: how many draft tokens and levels the round's tree had."""
        self.stats.count_round(drafted, depths, len(emitted.tokens) - 1)
        if self.rounds is not None:
            assert emitted.tree is not None, "a batch with such a request hands out its trees"
            tree = emitted.tree if drafted else emitted.tree.root  # a row that does not speculate has nobody's drafts
            self.rounds.append(Round.of(len(self.output.token_ids), len(emitted.tokens) - 1, tree, self.source_names))
        self._take(emitted)

    def _take(self, emitted: Emitted) -> None:
        tokens, drafted = emitted.tokens, len(emitted.tokens) - 1
        if drafted:  # before the tokens are taken, since a tokenizer may fail at one of them
            self.origins += range(1, drafted + 1)
            self.sources += map(self._named, emitted.sources) if emitted.sources else [self._named(1)] * drafted
        self.origins.append(0)
        self.sources.append("")
        kept = self.output.take(tokens)
        if kept < len(tokens):
            del self.origins[kept - len(tokens) :]
            del self.sources[kept - len(tokens) :]
        self.stats.truncated += len(tokens) - kept
        if self.sampling.logprobs is not None:
            assert len(emitted.logprobs) >= kept, "a batch with such a request computes log-probabilities"
            tops = self.sampling.logprobs
            self.logprobs += [_logprob(*each, tops) for each in zip(tokens[:kept], emitted.logprobs, strict=False)]

    def _named(self, bits: int) -> str:
        """The sources of one token.  bits: see Emitted.sources."""
        name = self._names.get(bits)
        if name is None:
            name = self._names[bits] = source_name(bits, self.source_names)
        return name

    def next_chunk(self) -> Chunk:
        """The tokens and the text that came since the last call."""
        begin, self._unread = self._unread, len(self.output.token_ids)
        logprobs, rounds = None if self.sampling.logprobs is None else self.logprobs[begin:], None
        if self.rounds is not None:
            rounds, self._unread_rounds = self.rounds[self._unread_rounds :], len(self.rounds)
        ids, new = self.output.token_ids[begin:], slice(begin, self._unread)
        of_prompt = None if begin else self.prompt_logprobs
        return Chunk(self.output.new_text(), ids, self.origins[new], logprobs, self.sources[new], rounds, of_prompt)

    def result(self) -> Generation:
        """The finished generation.  RuntimeError, from the request's own error, if the request failed."""
        if self.error is not None:
            said = str(self.error) or type(self.error).__name__  # a MemoryError or an interrupt says nothing
            raise RuntimeError(f"the request failed while it ran: {said}") from self.error
        output, logprobs = self.output, None if self.sampling.logprobs is None else self.logprobs
        ids, reason = output.token_ids, output.finish_reason
        assert reason is not None, "the request is not finished"
        self.stats.check_identity(len(ids))
        assert len(self.logprobs) in (0, len(ids)) and len(self.origins) == len(self.sources) == len(ids)
        assert self.sampling.prompt_logprobs is None or len(self.scores) == len(self.prompt_ids) - 1
        more = self.origins, logprobs, self.sources, len(self.prediction_ids or ()), self.rounds, self.prompt_logprobs
        return Generation(self.given_ids, ids, output.text, reason, self.stats, *more, stop_text=output.stop_text)


@dataclass(eq=False)
class RequestState:
    """A request that waits or holds a row of the batch; then its index in `BatchRows.states` is the row."""

    request: Request
    arrival: int  # how many requests arrived before this one
    text: list[int] = field(default_factory=list)  # what chunks read: see Request.text
    next_token: int = -1  # the last token of the output, where the request has had a row before; -1: there is none
    done: int = 0  # how many tokens of the text are in the cache or in chunks that have been planned
    runs: bool = False  # whether chunks have been planned for the whole text, so that the row takes part in rounds
    unread: int = 0  # launches that emit tokens for the request and have not been read yet
    recomputed: int = 0  # tokens that chunks read again, because their keys and values were lost when the row stepped back

    def begin(self, start: int) -> None:
        """The request gets a row, where the keys and values of its first `start` tokens are there."""
        assert not self.unread, "nobody knows the text while tokens of it are on their way"
        text, output = self.request.text, self.request.output.token_ids
        self.recomputed = max(0, (len(text) if self.runs else self.done) - start)
        self.text, self.next_token = text, output[-1] if output else -1
        self.done, self.runs = start, False

    def next_part(
        self, row: int, tokens: int, encoder_input: EncoderInput | None, keep: tuple[int, int] | None = None
    ) -> PromptPart:
        """Plans a chunk's part of so many tokens.  If the text ends with it, the row runs from now on.

        keep: see PromptPart.
        """
        start, self.done = self.done, self.done + tokens
        ends = self.done == len(self.text)
        next_token = self.next_token if ends else self.text[self.done]
        more = ends and self.resumes, keep, self.request.is_scored
        part = PromptPart(row, self.text[start : self.done], start, next_token, encoder_input, *more)
        if part.is_last:
            self.runs, self.unread = True, int(part.emits)
        return part

    @property
    def resumes(self) -> bool:
        """Whether the first token of the output is known."""
        return self.next_token >= 0

    @property
    def takes_turns(self) -> bool:
        """Whether no round and chunk run in one pass beside it: its rounds run phase by phase, or its prompt is scored."""
        return self.request.choice.grammar is not None or (self.request.is_scored and not self.runs)

    @property
    def left(self) -> PromptRest:
        """The part of the text that no chunk has been planned for."""
        return PromptRest(self.done, len(self.text) - self.done)

    @property
    def tokens_left(self) -> int:
        """The most tokens the request can still take; each launch that is not read yet emits at least one."""
        return self.request.sampling.max_tokens - len(self.request.output.token_ids) - self.unread


def _logprob(token: int, numbers: Logprobs, tops: int) -> TokenLogprob:
    """tops: how many likeliest tokens were asked for; the numbers may have more."""
    own, *likeliest = numbers.values
    some = islice(zip(numbers.ids, likeliest, strict=True), tops)
    return TokenLogprob(token, own, {other: logp for other, logp in some if logp > -inf})


def tokens_of(states: Sequence[RequestState | None]) -> int:
    """Tokens of all rows together, prompts included, as far as they were handed out."""
    return sum(state.request.num_tokens for state in states if state is not None)
