"""SpecDecoder, the way in for users: it loads a pair, checks what users hand in, and generates.  The engine does the rest."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from specdec.config import SamplingParams, SpecConfig
from specdec.draft.eagle import DraftHead
from specdec.engine.loop import Engine
from specdec.engine.request import Request
from specdec.generation import Chunk, Generation
from specdec.loading.build import build_engine
from specdec.loading.load import load_pair
from specdec.loading.resolve import EngineSettings
from specdec.models.target import Target
from specdec.options import EngineOptions, shows_options
from specdec.prompts import Tokenizer, as_prompt_list, check_length, encode_prompt, is_one_prompt
from specdec.runner.runner import DeviceRunner
from specdec.startup import STARTUP


class SpecDecoder:
    """A target model, usually with an EAGLE head that drafts for it.  The output is the target's own.

    model, head, settings: both models on their device, and what the options were resolved to.  tokenizer: the target's.
    """

    def __init__(self, model: Target, head: DraftHead | None, settings: EngineSettings, tokenizer: Tokenizer) -> None:
        self.model, self.head, self.settings, self.tokenizer = model, head, settings, tokenizer
        self.engine: Engine[DeviceRunner] = build_engine(model, head, settings)
        self._eos_ids = frozenset(model.config.eos_ids)

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
        """Loads a Hugging Face causal LM and, if given, an EAGLE head for it.

        target, draft: folders or hub ids; draft None: plain autoregressive decoding.
        spec: the draft tree's shape; None: SpecConfig().
        options: all engine settings together.
        settings: engine settings by name, if there are no options.

        ValueError and TypeError say what is wrong, what was expected, and the nearest setting that works.
        """
        chosen = EngineOptions.of(options, settings)
        if spec is not None and draft is None:
            raise ValueError("spec says how to draft, but draft is None; nearest: name a draft head, or leave spec out")
        model, head, resolved, folder = load_pair(target, draft, SpecConfig() if spec is None else spec, chosen)
        tokenizer = Tokenizer(folder)
        STARTUP.lap("tokenizer")
        return cls(model, head, resolved, tokenizer)

    def generate(
        self,
        prompts: Any,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
    ) -> list[Generation]:
        """Generates for one prompt or many; results are in the order of the prompts.

        prompts: a string, a list of token ids, chat messages, or a list of such prompts.
        sampling: one SamplingParams for all prompts, or a list with one for each; None: SamplingParams().
        speculate: whether draft tokens may be accepted; False decodes plainly, in one batch with requests that speculate.

        ValueError and TypeError name a prompt or a setting that can't be used; then nothing has run.  If a request fails while
        it runs, the other requests finish, and then RuntimeError is raised from its error.
        """
        listed = as_prompt_list(prompts)
        requests = [
            self.new_request(prompt, params, "prompt" if is_one_prompt(prompts) else f"prompts[{index}]", speculate=speculate)
            for index, (prompt, params) in enumerate(zip(listed, _per_prompt(sampling, len(listed)), strict=True))
        ]
        self._submit(requests)
        try:
            while not all(request.is_done for request in requests):
                self.engine.step()
        finally:
            for request in requests:
                self.engine.cancel(request)
        return [request.result() for request in requests]

    def stream(
        self, prompt: Any, sampling: SamplingParams | None = None, *, speculate: bool = True
    ) -> Generator[Chunk, None, Generation]:
        """Generates for one prompt, and yields a chunk for each round.

        prompt: a string, a list of token ids, or chat messages.  sampling, speculate: see `generate`.

        The chunks' texts joined are the final text, and their token ids joined are the final ids.  The generator returns the
        finished Generation.  Whoever closes the generator early ends the request and frees its row and pages.

        ValueError and TypeError name what can't be used, and RuntimeError is raised if the request fails while it runs.
        """
        if not is_one_prompt(prompt):
            got = f"{prompt!r} of type {type(prompt).__name__}"[:400]
            raise TypeError(
                f"prompt must be one string, one list of token ids or one list of chat messages, got {got}; "
                "nearest thing that works for several prompts: generate"
            )
        (params,) = _per_prompt(sampling, 1)
        request = self.new_request(prompt, params, "prompt", streaming=True, speculate=speculate)
        self.engine.check(request)
        return self._chunks(request)

    def _chunks(self, request: Request) -> Generator[Chunk, None, Generation]:
        """The chunks of one request.  It is submitted with the first `next`, so an unused iterator has nothing to free."""
        self._submit([request])
        try:
            while True:
                with self.engine.lock:  # the steps of other callers run this request too
                    chunk, is_done = request.next_chunk(), request.is_done
                if chunk.token_ids or chunk.text:
                    yield chunk
                elif is_done:
                    return request.result()
                else:
                    self.engine.step()
        finally:
            self.engine.cancel(request)

    def _submit(self, requests: list[Request]) -> None:
        self.engine.submit(requests)

    def new_request(
        self, prompt: Any, sampling: SamplingParams, name: str = "prompt", *, streaming: bool = False, speculate: bool = True
    ) -> Request:
        """A checked request, for callers that run `engine` themselves, as the benchmark does.

        name: what errors call the prompt.  streaming: make the text token by token.  speculate: see `generate`.

        ValueError and TypeError say what is wrong with the prompt or its sampling.
        """
        self.engine.check_process()
        _check_speculate(speculate)
        vocab_size = self.model.config.vocab_size
        ids = encode_prompt(prompt, name, self.tokenizer, vocab_size)
        check_length(ids, sampling, name, self.settings.max_seq_len)
        for token in sampling.stop_token_ids or ():
            if token >= vocab_size:
                raise ValueError(f"stop_token_ids holds {token}; expected ids in [0, {vocab_size - 1}]")
        if sampling.stop_strings and not self.tokenizer.is_present:
            raise ValueError("stop needs a tokenizer, but the target's folder holds none; nearest: stop_token_ids")
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        return Request.new(ids, sampling, seed, self._eos_ids, self.tokenizer.decode, streaming, speculate)


def _check_speculate(value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"speculate must be a bool, got {value!r} of type {type(value).__name__}; nearest: True")


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
