"""SpecDecoder, the way in for users: it loads a pair, checks what users hand in, and generates.  The engine does the rest."""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from specdec.checks import require_bool
from specdec.config import SamplingParams, SpecConfig
from specdec.draft.drafter import DraftModel
from specdec.engine.loop import Engine
from specdec.engine.owner import EngineOwner
from specdec.engine.request import Request
from specdec.generation import Chunk, Generation
from specdec.loading.build import build_engine, ends_of, free_memory, grammars_of
from specdec.loading.drafters import smoke_check
from specdec.loading.pair import WantedPair
from specdec.loading.ranks import Ranks, start_ranks
from specdec.loading.resolve import EngineSettings
from specdec.loading.threads import use_threads, using_threads
from specdec.models.target import Target
from specdec.options import EngineOptions, shows_options
from specdec.progress import Progress, show_progress
from specdec.prompts import Tokenizer, as_prompt_list, check_length, check_source, check_tokens, encode_prompt, is_one_prompt
from specdec.runner.runner import DeviceRunner
from specdec.startup import STARTUP

if TYPE_CHECKING:
    from specdec.lossless.verification import Verification

SHOW_SECONDS = 0.1  # between two looks at the numbers that a progress bar shows


class Parts(NamedTuple):
    """What takes memory, and is let go by `close`."""

    model: Target
    head: DraftModel | None
    engine: Engine[DeviceRunner]


class SpecDecoder:
    """A target model, usually with a drafter: a draft head, or a kind that needs none.  The output is the target's own.

    model, head, settings: the target and the loaded drafter, and what the options were resolved to.  tokenizer: the target's.
    ranks: those that hold the models, if there are several.  grammars: compiles what texts must be.  eos_ids: the tokens with
    which texts end by themselves.

    Any number of threads may call one decoder, and their requests share the batch.  `with SpecDecoder.from_pretrained(...) as
    decoder:` closes it at the end of the block.
    """

    def __init__(
        self,
        model: Target,
        head: DraftModel | None,
        settings: EngineSettings,
        tokenizer: Tokenizer,
        ranks: Ranks | None = None,
    ) -> None:
        self.settings = settings = settings.with_drafter(head)
        self.tokenizer, self._ranks = tokenizer, ranks
        build = build_engine if ranks is None else ranks.build_engine
        self._parts: Parts | None = Parts(model, head, build(model, head, settings))
        self._owns_ranks = False
        self.owner = EngineOwner(self._parts.engine, partial(use_threads, settings.threads))
        # Whoever closes the decoder second waits until it is closed, unless it is a signal handler within the first call.
        self._closing = threading.RLock()
        self.eos_ids = frozenset(ends_of(tokenizer, model.config))
        self.grammars = grammars_of(tokenizer, model.config, sorted(self.eos_ids))
        self._parts.engine.runner.use_grammars(self.grammars)
        self._finalizer = weakref.finalize(self, self.owner.begin_to_close)  # ends the thread when the decoder is forgotten

    @classmethod
    @shows_options
    def from_pretrained(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        spec: SpecConfig | None = None,
        *,
        options: EngineOptions | None = None,
        **settings: Any,
    ) -> SpecDecoder:
        """Loads a Hugging Face causal LM and, if given, a drafter for it.

        target, draft: folders or hub ids; the target also a GGUF file.  draft may also be "mtp", the target's own layers of
        multi-token prediction, or "ngram", a drafter without a checkpoint that repeats what followed the last tokens earlier in
        the text; None: plain autoregressive decoding.
        spec: the draft tree's shape; None: SpecConfig(), with fewer levels where the head drafts fewer tokens.
        options: all engine settings together.
        settings: engine settings by name, if there are no options.

        Where a launcher such as torchrun has started `tensor_parallel_size` processes, the first gets the decoder.  The others
        serve it until it is closed, and then end: SystemExit is raised in them.

        ValueError and TypeError say what is wrong, what was expected, and the nearest setting that works.
        """
        chosen = EngineOptions.of(options, settings)
        if spec is not None and draft is None:
            raise ValueError("spec says how to draft, but draft is None; nearest: name a draft head, or leave spec out")
        with start_ranks(chosen) as ranks:
            wanted = WantedPair(target, draft, spec, chosen)
            model, head, resolved, folder = ranks.load(wanted)
            STARTUP.begin("reading the tokenizer")
            tokenizer = Tokenizer(folder)
            STARTUP.lap("tokenizer")
            STARTUP.begin("comparing the head with the target on a short text")
            with using_threads(resolved.threads):
                resolved = replace(resolved, first_accepted=smoke_check(model, head, tokenizer, resolved))
            STARTUP.lap("look at the draft")
            STARTUP.begin("making room for keys and values")
            decoder = cls(model, head, resolved, tokenizer, ranks)
            decoder._owns_ranks = True
            STARTUP.begin("waiting for the first token")
            return decoder

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

    def _open(self) -> Parts:
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

    def __enter__(self) -> SpecDecoder:
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- requests ----

    def generate(
        self,
        prompts: Any,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
        progress: bool = False,
    ) -> list[Generation]:
        """Generates for one prompt or many; results are in the order of the prompts, and of each prompt's n generations.

        prompts: a string, a list of token ids, chat messages, or a list of such prompts.
        sampling: one SamplingParams for all prompts, or a list with one for each; None: SamplingParams().
        speculate: False: the drafter proposes nothing for these prompts.  The texts are the same.
        progress: show a bar on stderr.

        ValueError and TypeError name a prompt or a setting that can't be used; then nothing has run.  If a request fails while
        it runs, the other requests finish, and then RuntimeError is raised from its error.  Ctrl-C ends this call's requests.
        """
        require_bool("progress", progress, False)
        listed = as_prompt_list(prompts)
        requests: list[Request] = []
        for index, (prompt, params) in enumerate(zip(listed, _per_prompt(sampling, len(listed)), strict=True)):
            name = "prompt" if is_one_prompt(prompts) else f"prompts[{index}]"
            for number in range(params.n):
                requests.append(self.new_request(prompt, params.of_choice(number), name, speculate=speculate))
                prompt = requests[-1].given_ids  # a text is encoded once
        # A queue, because an interrupt at the wrong moment leaves a semaphore or an event of `threading` locked for ever.
        ended: SimpleQueue[None] = SimpleQueue()
        try:
            with show_progress("generate", "requests") if progress else nullcontext() as show:
                self.owner.submit([(request, False) for request in requests], lambda: ended.put(None))
                _wait(requests, ended, show)
        finally:
            for request in requests:
                self.owner.cancel(request)
        return [request.result() for request in requests]

    def verify(
        self, prompts: Any, sampling: SamplingParams | Sequence[SamplingParams] | None = None, *, progress: bool = False
    ) -> Verification:
        """Generates with and without speculation, and compares every token with a reference of higher precision.

        prompts, sampling, progress: see `generate`.  Whoever samples gives a seed.

        Other requests wait while the reference runs: it needs the weights of the target in a wider dtype, a layer at a time.
        ValueError if this decoder has nothing to compare, beside those of `generate`.
        """
        from specdec.lossless.verify import verify

        require_bool("progress", progress, False)
        listed = as_prompt_list(prompts)
        with show_progress("verify", "prompts") if progress else nullcontext(lambda *_: None) as show:
            return verify(self, listed, _per_prompt(sampling, len(listed)), show)

    def stream(
        self, prompt: Any, sampling: SamplingParams | None = None, *, speculate: bool = True
    ) -> Generator[Chunk, None, Generation]:
        """Generates for one prompt, and yields what each round adds; a reader that is slower gets several rounds in one chunk.

        prompt: a string, a list of token ids, or chat messages.  sampling, speculate: see `generate`.

        The chunks' texts joined are the final text, and their token ids joined are the final ids.  The generator returns the
        finished Generation.  Whoever closes the generator early ends the request and frees its row and pages.

        ValueError and TypeError name what can't be used, and RuntimeError is raised if the request fails while it runs.
        """
        check_one_prompt(prompt, "generate")
        (params,) = _per_prompt(sampling, 1)
        return self._chunks(self.new_request(prompt, params, "prompt", streaming=True, speculate=speculate))

    def _chunks(self, request: Request) -> Generator[Chunk, None, Generation]:
        """The chunks of one request.  It is submitted with the first `next`, so an unused iterator has nothing to free."""
        news: SimpleQueue[None] = SimpleQueue()  # see `generate`; it never holds more than one
        try:
            (mailbox,) = self.owner.submit([(request, True)], lambda: news.put(None) if news.empty() else None)
            while True:
                is_done = mailbox.is_done  # asked before taking: whatever came before the end is taken now
                if chunk := mailbox.take():
                    yield chunk
                elif is_done:
                    return request.result()
                else:
                    news.get()
        finally:
            self.owner.cancel(request)

    def new_request(
        self,
        prompt: Any,
        sampling: SamplingParams,
        name: str = "prompt",
        *,
        streaming: bool = False,
        speculate: bool = True,
    ) -> Request:
        """A checked request, for callers that submit it themselves, as AsyncSpecDecoder and the benchmark do.

        name: what errors call the prompt.  streaming: make the text token by token.

        ValueError and TypeError say what is wrong with the prompt or its sampling.
        """
        self.owner.check_open()
        require_bool("speculate", speculate, True)
        if sampling.n != 1:
            raise ValueError(
                f"n must be 1 where one generation is asked for, got {sampling.n}; nearest thing that works: "
                "SpecDecoder.generate, or several calls with different seeds"
            )
        vocab_size = self.model.config.vocab_size
        ids, source_ids, encoder = encode_prompt(prompt, name, self.tokenizer, vocab_size), None, self.model.config.encoder
        if encoder is not None:  # the encoder reads the prompt, and the decoder's text begins with tokens of its own
            check_source(ids, name, self.settings.longest_source(self.model.config))
            ids, source_ids = list(encoder.start_ids), ids
        check_length(ids, sampling, name, self.settings.max_seq_len, self.model.config.max_position)
        bad_words = check_tokens(sampling, self.tokenizer, vocab_size)
        if (rule := sampling.grammar_rule) is not None:
            self.grammars.check(*rule)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        speculates = speculate and self.head is not None
        decode, left_after = self.tokenizer.decode, self.grammars.left_after
        request = Request.new(
            ids, sampling, seed, self.eos_ids, decode, streaming, speculates, source_ids, bad_words, left_after
        )
        self.engine.check(request)
        return request


def check_one_prompt(prompt: Any, several: str) -> None:
    """TypeError for a list of prompts.  several: what takes those."""
    if not is_one_prompt(prompt):
        got = " ".join(f"{prompt!r} of type {type(prompt).__name__}".split())[:400]
        raise TypeError(
            f"prompt must be one string, one list of token ids or one list of chat messages, got {got}; "
            f"nearest thing that works for several prompts: {several}"
        )


def _wait(requests: list[Request], ended: SimpleQueue[None], show: Progress | None) -> None:
    """Waits until all requests have ended.  ended: gets an item from each that has.  show: gets the numbers now and then."""
    start = time.perf_counter()

    def report(count: int) -> None:
        if show is not None:
            tokens, seconds = sum(len(request.output.token_ids) for request in requests), time.perf_counter() - start
            show(f"{tokens:,} tokens, {tokens / max(seconds, 1e-3):,.0f} tok/s", count, len(requests))

    for count in range(len(requests)):
        while True:
            try:
                ended.get(timeout=None if show is None else SHOW_SECONDS)
                break
            except Empty:
                report(count)
    report(len(requests))


def _per_prompt(sampling: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
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
