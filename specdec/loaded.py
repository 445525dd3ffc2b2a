"""A loaded pair and the thread that runs its engine: turns prompts into checked requests, generates, and closes.

`SpecDecoder` adds how a pair is loaded, streams and the comparison with a reference; `Session` drives one for measurements.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

from specdec.checks import about, nearest_name, require_bool, require_text, shown
from specdec.config import SamplingParams, SpecConfig, names_settings
from specdec.draft.drafter import DraftModel
from specdec.engine.engine_thread import EngineThread
from specdec.engine.loop import Engine
from specdec.engine.output_queue import OutputQueue
from specdec.engine.request import Request
from specdec.generation import Generation
from specdec.grammar.wait import Wait
from specdec.loading.build import build_engine, ends_of, free_memory, grammars_of
from specdec.loading.ranks import Ranks
from specdec.loading.resolve import EngineSettings
from specdec.loading.tables.source_tables import SourceTables
from specdec.loading.threads import use_threads
from specdec.models.target import Target
from specdec.prompts.encode import (
    as_prompt_list,
    check_encoder_input,
    check_length,
    check_tokens,
    checked_ids,
    encode_prompt,
    is_one_prompt,
    prediction_of,
)
from specdec.prompts.tokenizer import Tokenizer
from specdec.runner.runner import DeviceRunner
from specdec.screen.progress import Progress, show_progress

SHOW_SECONDS = 0.1  # between two looks at the numbers that a progress bar shows


class LoadedParts(NamedTuple):
    """What takes memory, and is let go by `close`."""

    model: Target
    head: DraftModel | None
    engine: Engine[DeviceRunner]


class LoadedDecoder:
    """What a decoder is made of, and what it does for all its callers; SpecDecoder says what each part is.

    owns_ranks: whether `close` ends the ranks.
    """

    def __init__(
        self,
        model: Target,
        head: DraftModel | None,
        settings: EngineSettings,
        tokenizer: Tokenizer,
        ranks: Ranks | None = None,
        *,
        owns_ranks: bool = False,
    ) -> None:
        self.settings = settings = settings.with_drafter(head)
        self.tokenizer, self._ranks, self._owns_ranks = tokenizer, ranks, owns_ranks
        build = build_engine if ranks is None else ranks.build_engine
        self._parts: LoadedParts | None = LoadedParts(model, head, build(model, head, settings))
        self.owner = EngineThread(self._parts.engine, partial(use_threads, settings.threads))
        # Whoever closes the decoder second waits until it is closed, unless it is a signal handler within the first call.
        self._closing = threading.RLock()
        self.eos_ids = frozenset(ends_of(tokenizer, model.config))
        self.grammars = grammars_of(tokenizer, model.config, sorted(self.eos_ids))
        self._parts.engine.runner.use_grammars(self.grammars)
        self._tables = SourceTables({} if head is None else head.tables, tokenizer, model.config.vocab_size, self.owner)
        if (corpus := settings.options.corpus) is not None:
            self._tables.read_file(corpus, self.engine.runner.run)
        self._finalizer = weakref.finalize(self, self.owner.begin_to_close)  # ends the thread when the decoder is forgotten
        self._begin()

    def _begin(self) -> None:
        """For what a subclass adds to the engine before its first request."""

    # ---- what it is made of ----

    @property
    def model(self) -> Target:
        return self._open().model

    @property
    def head(self) -> DraftModel | None:
        return self._open().head

    @property
    def engine(self) -> Engine[DeviceRunner]:
        return self._open().engine

    @property
    def reasons(self) -> list[str]:
        """With SpecConfig("auto"), a line for each number of rows that has run: which shape runs there now, and why."""
        return self.engine.scheduler.speculation.reasons()

    def _open(self) -> LoadedParts:
        if self._parts is None:
            raise RuntimeError("this decoder is closed; nearest thing that works: load another one")
        return self._parts

    # ---- the end ----

    def close(self) -> None:
        """Ends all requests with an error, and frees the memory of models, caches and graphs, and the engine's thread.

        Any other call of a closed decoder raises RuntimeError, but for `close`, which does nothing then.  Several threads may
        close a decoder.  RuntimeError from inside a step, by the tokenizer for example.
        """
        if self.owner.is_fork:  # what belongs to the parent process can't be closed here
            return
        self.owner.check_outside()
        with self._closing:
            self.owner.close()
            if self._parts is not None:
                self._finalizer.detach()
                self._parts.engine.runner.close()
                self._parts = None
                self.owner.release()
                try:
                    free_memory(self.settings.device)  # an error if the device has failed
                finally:
                    if self._ranks is not None and self._owns_ranks:
                        self._ranks.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a decoder can't be copied or pickled; nearest thing that works: any number of threads may share one")

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- texts of which drafts are made ----

    def set_corpus(self, name: str, texts: Sequence[str]) -> int:
        """Adds a corpus of which drafts are made, or puts it in the place of the one of that name.  Returns its tokens.

        texts: none of them: the corpus is forgotten.  The table of all corpora is made on a thread of its own, and rounds read
        it as soon as it is ready.

        ValueError and TypeError say what is wrong with it; then the corpora are what they were.
        """
        self.owner.check_open()
        return self._tables.set_corpus(name, texts)

    def settle_tables(self, seconds: float = 60.0) -> bool:
        """Waits until rounds read all corpora and finished answers so far, for measurements.  Whether they do in that time."""
        done = self._tables.keeper.wait(seconds)
        self.owner.settle()
        return done

    @property
    def corpora(self) -> list[str]:
        """The names of the corpora; that of the option `corpus` is called "file"."""
        return [] if self._tables.corpora is None else self._tables.corpora.names

    # ---- requests ----

    @names_settings
    def generate(
        self,
        prompts: Any,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
        trees: bool = False,
        progress: bool = False,
        cache_salt: str | None = None,
    ) -> list[Generation]:
        """Generates for one prompt or many; results are in the order of the prompts, and of each prompt's n generations.

        prompts: a string, a list of token ids, chat messages, or a list of such prompts.
        sampling: one SamplingParams for all prompts, or a list with one for each; None: SamplingParams().
        speculate: False: the drafter proposes nothing for these prompts.  The texts are the same.
        trees: keep the tree of each round: see Generation.rounds.
        progress: show a bar on stderr.
        cache_salt: pages of the prefix cache are shared, and earlier answers proposed, among requests of the same salt
            alone; where there is neither, requests share nothing, and it does nothing.

        ValueError and TypeError name a prompt or a setting that can't be used; then nothing has run.  If a request fails while
        it runs, the other requests finish, and then RuntimeError is raised from its error.  Ctrl-C ends this call's requests.
        """
        require_bool("progress", progress, False)
        listed = as_prompt_list(prompts)
        requests: list[Request] = []
        for index, (prompt, params) in enumerate(zip(listed, per_prompt(sampling, len(listed)), strict=True)):
            name = "prompt" if is_one_prompt(prompts) else f"prompts[{index}]"
            ids = self.encode(prompt, name)
            for number in range(params.n):
                how: dict[str, Any] = {"speculate": speculate, "trees": trees, "cache_salt": cache_salt}
                requests.append(self.new_request(ids, params.of_choice(number), name, **how))
        with show_progress("generate", "requests") if progress else nullcontext() as show:
            return self.run(requests, show)

    def run(self, requests: Sequence[Request], show: Progress | None = None) -> list[Generation]:
        """Runs requests of `new_request` to their ends, as `generate` does.  show: gets the numbers now and then.

        ValueError for a request that has run before, RuntimeError if one fails.
        """
        # A queue, because an interrupt at the wrong moment leaves a semaphore or an event of `threading` locked for ever.
        news: SimpleQueue[None] = SimpleQueue()
        if not isinstance(requests, Sequence):
            raise TypeError(
                f"requests must be a list of what new_request made, got {requests!r} of type {type(requests).__name__}"
            )
        own = requests
        try:
            try:
                queues = self.owner.submit(requests, lambda: news.put(None))
            except (TypeError, ValueError):  # one of them may be somebody else's, who waits for it
                own = []
                raise
            _wait(queues, news, show)
        finally:
            for request in own:
                self.owner.cancel(request)
        return [request.result() for request in requests]

    def encode(self, prompt: Any, name: str = "prompt") -> list[int]:
        """Token ids of one prompt, checked against the target's vocabulary.  name: what errors call the prompt.

        ValueError and TypeError say what is wrong with it.
        """
        self.owner.check_open()
        return encode_prompt(prompt, name, self.tokenizer, self.model.config.vocab_size)

    def longest_output(self, ids: Sequence[int]) -> int:
        """How many tokens may follow a prompt; 0 or less: it is longer than max_seq_len or the KV pool.  ids: of `encode`."""
        encoder = self.model.config.encoder
        begin = len(ids) if encoder is None else len(encoder.start_ids)
        return self.engine.scheduler.admission.longest_text(self.settings.max_seq_len) - begin

    def new_request(
        self,
        ids: Sequence[int],
        sampling: SamplingParams,
        name: str = "prompt",
        *,
        streaming: bool = False,
        speculate: bool = True,
        trees: bool = False,
        cache_salt: str | None = None,
        wait: Wait | None = None,
        all_tokens: bool = False,
    ) -> Request:
        """A checked request, for callers that submit it themselves.  ValueError, TypeError: of its ids, length or sampling.

        ids: of `encode`.  name: what errors call the prompt.  streaming: make the text token by token.  cache_salt: see
        `generate`.  wait: from where on the grammar of `sampling` holds; None: from the first token.
        all_tokens: whether special tokens are part of the text, by their names.
        """
        self.owner.check_open()
        if cache_salt is not None:
            with about("cache_salt"):
                require_text("cache_salt", cache_salt)
        require_bool("speculate", speculate, True)
        require_bool("trees", trees, False)
        if not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling must be a SamplingParams, got {sampling!r} of type {type(sampling).__name__}")
        if sampling.n != 1:
            raise ValueError(
                f"n must be 1 where one generation is asked for, got {sampling.n}; nearest thing that works: "
                "SpecDecoder.generate, or several calls with different seeds"
            )
        config, encoder_ids = self.model.config, None
        prompt_ids = checked_ids(ids, name, config.vocab_size)
        if config.encoder is not None:  # the encoder reads the prompt, and the decoder's text begins with tokens of its own
            check_encoder_input(prompt_ids, name, self.settings.longest_encoder_input(config))
            prompt_ids, encoder_ids = list(config.encoder.start_ids), prompt_ids
        check_length(prompt_ids, sampling, name, self.settings.max_seq_len, config.max_position)
        if sampling.prompt_logprobs is not None and encoder_ids is not None:
            with about("prompt_logprobs"):
                fault = "prompt_logprobs needs a target whose decoder reads the prompt, and of this one the encoder does"
                also = "" if sampling.max_tokens else " and max_tokens=1"  # the prompt alone, as for `score`
                works = f"a decoder-only target; without scores of the prompt: prompt_logprobs=None{also}"
                raise ValueError(f"{fault}; nearest thing that works: {works}")
        bad_words = check_tokens(sampling, self.tokenizer, config.vocab_size)
        if (rule := sampling.grammar_rule) is not None:
            self.grammars.check(*rule)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        drafts = speculate and sampling.speculate and self.head is not None
        decode, left_after = self.tokenizer.decode_all if all_tokens else self.tokenizer.decode, self.grammars.left_after
        predicted = prediction_of(sampling, self.tokenizer, config.vocab_size, self.settings.max_seq_len)
        self._check_sources(sampling, speculate)
        names, scope = self.head.sources if self.head is not None else (), self._tables.scope_of(cache_salt)
        shape = self._shape_of(sampling, speculate)
        given = streaming, drafts, encoder_ids, bad_words, left_after, predicted, names, scope, trees, shape, cache_salt
        request = Request.new(prompt_ids, sampling, seed, self.eos_ids, decode, *given)
        if wait is not None and sampling.grammar_rule is not None:
            request.wait_for(wait, self.grammars.prepare(wait))
        self.engine.check(request)
        return request

    def _check_sources(self, sampling: SamplingParams, speculate: bool) -> None:
        """ValueError if what the request says of drafts would do nothing.  speculate: see `generate`."""
        head, said = self.head, {"prediction": sampling.prediction, "sources": sampling.sources}
        for name in (name for name, value in said.items() if value is not None):
            with about(name):
                if not speculate:
                    raise ValueError(
                        f"{name} would do nothing with speculate=False; nearest setting that works: speculate=True"
                    )
                if head is None or not (head.takes_predictions if name == "prediction" else head.takes_choices):
                    drafts = "nothing" if head is None else f"by {' and '.join(head.sources)} alone"
                    settings = "draft=[DRAFT, 'suffix']" + (", or draft='ngram'" if name == "prediction" else "")
                    raise ValueError(
                        f"{name} needs a decoder whose trees have several sources, and this one drafts {drafts}; "
                        f"nearest settings that work: {settings}"
                    )
        if unknown := [name for name in sampling.sources or () if head is not None and name not in head.sources]:
            with about("sources"):
                known = list(head.sources) if head is not None else []
                near = nearest_name(unknown[0][:100], known) or known[0]
                raise ValueError(f"sources names {shown(unknown[0])}; expected some of {known}; nearest: {near!r}")

    def _shape_of(self, sampling: SamplingParams, speculate: bool) -> SpecConfig | None:
        """The shape that the request asks for, as rounds name it.  ValueError if they have no such shape."""
        asked, shapes = sampling.shape, self.engine.scheduler.speculation.shapes
        if asked is None:
            return None
        with about("shape"):
            if not speculate:
                raise ValueError("shape would do nothing with speculate=False; nearest setting that works: speculate=True")
            if self.head is None:
                raise ValueError(
                    "shape is of draft trees, and this decoder drafts nothing; nearest setting that works: no shape"
                )
            assert isinstance(asked, SpecConfig)
            own = asked.numbers  # whose depth, where other sources' paths reach, may be left out
            made = next((shape for shape in shapes if own in (shape.numbers, shape.numbers[:3])), None)
            if made is None:
                known = " or ".join(f"[{', '.join(map(str, shape.numbers))}]" for shape in shapes)
                raise ValueError(
                    f"shape must be one that this decoder's rounds may have, got [{', '.join(map(str, asked.numbers))}]; "
                    f"nearest settings that work: {known}, or a decoder with that one in its option shapes"
                )
        return made


def _wait(queues: Sequence[OutputQueue], news: SimpleQueue[None], show: Progress | None) -> None:
    """Waits until all requests have ended.  news: gets an item from each that has.  show: gets the numbers now and then."""
    start, pending = time.perf_counter(), deque(queues)

    def report(count: int) -> None:
        if show is not None:
            tokens, seconds = sum(len(each.request.output.token_ids) for each in queues), time.perf_counter() - start
            show(f"{tokens:,} tokens, {tokens / max(seconds, 1e-3):,.0f} tok/s", count, len(queues))

    while pending:
        if pending[0].is_done:
            pending.popleft()
            continue
        try:
            news.get(timeout=None if show is None else SHOW_SECONDS)
        except Empty:
            report(sum(each.is_done for each in queues))
    report(len(queues))


def per_prompt(sampling: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts.  TypeError and ValueError if `sampling` can't be read so."""
    if sampling is None:
        sampling = SamplingParams()
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if not isinstance(sampling, Sequence):
        raise TypeError(
            f"sampling must be a SamplingParams or a list of them, got {sampling!r} of type {type(sampling).__name__}"
        )
    params = list(sampling)
    for item in params:
        if not isinstance(item, SamplingParams):
            raise TypeError(f"sampling must hold SamplingParams, got {item!r} of type {type(item).__name__}")
    if len(params) != count:
        raise ValueError(f"sampling must be one SamplingParams or one per prompt ({count}), got {len(params)}")
    return params
