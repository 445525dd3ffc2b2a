"""SpecDecoder, the way in for users: it loads a pair, generates, streams, and compares its texts with a reference."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from specdec.chat.answer import ChatAnswer
from specdec.chat.form import AUTO, REASONING_PARSERS, TOOL_PARSERS
from specdec.chat.reply import reply_of
from specdec.chat.tools import ToolRules, read_rules
from specdec.checks import require_bool, require_choice, require_int
from specdec.config import SamplingParams, SpecConfig, names_settings
from specdec.draft.kind import Draft
from specdec.engine.request import Request
from specdec.generation import Chunk, Generation, TokenLogprob
from specdec.limits import MOST_LOGPROBS
from specdec.loaded import LoadedDecoder, per_prompt
from specdec.loading.about.drafters import smoke_check
from specdec.loading.pair import WantedPair
from specdec.loading.ranks import start_ranks
from specdec.loading.threads import using_threads
from specdec.options import EngineOptions, shows_options
from specdec.prompts.chat import ChatPrompt
from specdec.prompts.encode import as_prompt_list, is_one_prompt
from specdec.prompts.replies import form_of, plan_reply
from specdec.prompts.tokenizer import Tokenizer
from specdec.screen.progress import show_progress
from specdec.startup import STARTUP

if TYPE_CHECKING:
    from specdec.audit.auditor import Auditor
    from specdec.lossless.verification import Verification
    from specdec.trace.trace import Trace


class SpecDecoder(LoadedDecoder):
    """A target model, usually with a drafter: a draft head, a small model or another kind.  The output is the target's own.

    model, head, settings: the target and the loaded drafter, and what the options were resolved to.  tokenizer: the target's.
    ranks: those that hold the models, if there are several.  grammars: compiles what texts must be.  eos_ids: the tokens with
    which texts end by themselves.

    Any number of threads may call one decoder, and their requests share the batch.  `with SpecDecoder.from_pretrained(...) as
    decoder:` closes it at the end of the block.
    """

    auditor: Auditor | None = None  # with the option `audit`

    def _begin(self) -> None:
        if self.settings.options.audit:
            from specdec.audit.auditor import Auditor  # which most programs never need
            from specdec.audit.idle_pass import check_share, run_once, why_anew

            scheduler, vocab_size = self.engine.scheduler, self.model.config.vocab_size
            self.auditor = Auditor(self.settings, scheduler.totals, self.grammars, vocab_size, self.tokenizer)
            if self.settings.device.type == "cuda":  # elsewhere nothing is compiled
                self.engine.runner.on_all_ranks(run_once, self.settings)
            if why := self.engine.runner.on_all_ranks(why_anew, self.settings):
                check_share(self.settings.options, why)
                said = "a comparison that makes way for requests will begin its pass anew: this model's can't go on"
                self.auditor.tell(f"{said} ({why})")
            scheduler.on_answer.append(self.auditor.take)
            self.owner.idle_work = self.auditor

    @classmethod
    @shows_options
    def from_pretrained(
        cls,
        target: str | Path,
        draft: Draft = None,
        spec: SpecConfig | None = None,
        *,
        options: EngineOptions | None = None,
        **settings: Any,
    ) -> SpecDecoder:
        """Loads a Hugging Face causal LM and, if given, a drafter for it.

        target, draft: folders or hub ids; a model also a GGUF file.  draft: of a draft head or of a small causal model; or
        "mtp", the target's own layers of multi-token prediction, or "ngram", a drafter without a checkpoint that repeats what
        followed the last tokens earlier in the text; None: plain autoregressive decoding.  A list of a drafter and "suffix"
        joins both: what the drafter proposes, and what followed the last tokens earlier in the text, become one tree, of which
        the best nodes are verified.
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
            tokenizer = Tokenizer(folder, chosen.chat_template)
            STARTUP.lap("tokenizer")
            STARTUP.begin("comparing the head with the target on a short text")
            with using_threads(resolved.threads):
                resolved = replace(resolved, first_accepted=smoke_check(model, head, tokenizer, resolved))
            STARTUP.lap("look at the draft")
            STARTUP.begin("making room for keys and values")
            decoder = cls(model, head, resolved, tokenizer, ranks, owns_ranks=True)
            if decoder.auditor is not None:
                decoder.auditor.names = named(target, draft)
            STARTUP.begin("waiting for the first token")
            return decoder

    def set_drafting(self, enabled: bool) -> None:
        """Whether the drafter proposes anything, for all callers; the texts are the same.

        What runs when it is switched off goes on plainly to its end.
        """
        require_bool("enabled", enabled, True)
        self.owner.check_open()
        self.owner.set_drafting(enabled)

    @property
    def is_drafting(self) -> bool:
        """Whether it may: nobody has switched it off, and no audit has (`audit_stop`).  False without a drafter."""
        return self.head is not None and self.owner.is_drafting

    def score(self, prompts: Any, top: int = 0, *, progress: bool = False) -> list[list[TokenLogprob | None]]:
        """How likely each token of the prompts is after those before it: for each prompt, one TokenLogprob for each of its ids,
        of which the first has none: None.

        prompts, progress: see `generate`; each may be max_seq_len long.  top: how many likeliest tokens are given too.

        Errors are those of `generate` with SamplingParams(0, prompt_logprobs=top), which does the same.
        """
        outputs = self.generate(prompts, scoring(top), speculate=False, progress=progress)
        return [output.prompt_logprobs or [] for output in outputs]

    @names_settings
    def chat(
        self,
        messages: Sequence[Any],
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        speculate: bool = True,
        cache_salt: str | None = None,
    ) -> ChatAnswer:
        """Answers a chat, with thoughts and calls of tools apart from the content, as the model's chat template tells of them.

        messages: as OpenAI's API has them; those of earlier answers may hold tool_calls.  tools, tool_choice,
        parallel_tool_calls: as there, see docs/SERVING.md.  sampling: n must be 1.  chat_template_kwargs: variables of the
        template.  tool_parser, reasoning_parser: how the model writes calls and thoughts, as those flags of `specdec serve`.
        speculate, cache_salt: see `generate`.

        ValueError and TypeError name what can't be used, and RuntimeError is raised if the request fails while it runs.
        """
        rules = read_rules(tools, tool_choice, parallel_tool_calls)
        prompt = ChatPrompt(messages, rules.for_template, chat_template_kwargs or {})
        how: dict[str, Any] = {"speculate": speculate, "cache_salt": cache_salt}
        request, answer_of = new_chat(self, prompt, sampling, rules, tool_parser, reasoning_parser, **how)
        (generation,) = self.run([request])
        return answer_of(generation)

    def verify(
        self, prompts: Any, sampling: SamplingParams | Sequence[SamplingParams] | None = None, *, progress: bool = False
    ) -> Verification:
        """Generates with and without speculation, and compares every token with a reference of higher precision.

        prompts, sampling, progress: see `generate`.  Whoever samples gives a seed.

        Other requests wait while the reference runs: it needs the weights of the target in a wider dtype, a layer at a time.
        ValueError if this decoder has nothing to compare, beside those of `generate`.
        """
        from specdec.lossless.verify import verify  # which most programs never need
        from specdec.session import Session

        require_bool("progress", progress, False)
        listed = as_prompt_list(prompts)
        with show_progress("verify", "prompts") if progress else nullcontext(lambda *_: None) as show:
            return verify(Session(self), listed, per_prompt(sampling, len(listed)), show)

    def trace(
        self,
        prompts: Any,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
        times: bool = True,
    ) -> Trace:
        """Generates, and keeps what every round did: `save_html` draws it, and `as_json` keeps it.

        prompts, sampling, speculate: see `generate`; n must be 1.
        times: run the first prompt twice more, alone and phase by phase, to measure what its rounds take.
        """
        from specdec.trace.record import record  # which most programs never need

        return record(self, prompts, sampling, speculate=speculate, times=times)

    @names_settings
    def stream(
        self,
        prompt: Any,
        sampling: SamplingParams | None = None,
        *,
        speculate: bool = True,
        trees: bool = False,
        cache_salt: str | None = None,
    ) -> Generator[Chunk, None, Generation]:
        """Generates for one prompt, and yields what each round adds; a reader that is slower gets several rounds in one chunk.

        prompt: a string, a list of token ids, or chat messages.  sampling, speculate, trees, cache_salt: see `generate`.

        The chunks' texts joined are the final text, and their token ids joined are the final ids.  The generator returns the
        finished Generation.  Whoever closes the generator early ends the request and frees its row and pages.

        ValueError and TypeError name what can't be used, and RuntimeError is raised if the request fails while it runs.
        """
        check_one_prompt(prompt, "generate")
        (params,) = per_prompt(sampling, 1)
        how: dict[str, Any] = {"streaming": True, "speculate": speculate, "trees": trees, "cache_salt": cache_salt}
        request = self.new_request(self.encode(prompt), params, **how)
        return self._chunks(request)

    def _chunks(self, request: Request) -> Generator[Chunk, None, Generation]:
        """The chunks of one request.  It is submitted with the first `next`, so an unused iterator has nothing to free."""
        news: SimpleQueue[None] = SimpleQueue()  # see `generate`; it never holds more than one
        try:
            (queue,) = self.owner.submit([request], lambda: news.put(None) if news.empty() else None)
            while True:
                is_done = queue.is_done  # asked before taking: whatever came before the end is taken now
                if chunk := queue.take():
                    yield chunk
                elif is_done:
                    return request.result()
                else:
                    news.get()
        finally:
            self.owner.cancel(request)


def scoring(top: Any) -> SamplingParams:
    """How a prompt is scored: alone.  top: see `SpecDecoder.score`."""
    require_int("top", top, 0, MOST_LOGPROBS)
    return SamplingParams(0, prompt_logprobs=top)


def new_chat(
    decoder: SpecDecoder,
    prompt: ChatPrompt,
    sampling: SamplingParams | None,
    rules: ToolRules,
    tool_parser: str,
    reasoning_parser: str,
    **how: Any,
) -> tuple[Request, Callable[[Generation], ChatAnswer]]:
    """The checked request of a chat, and what makes its answer of its generation.  how: see `LoadedDecoder.new_request`."""
    require_choice("tool_parser", tool_parser, TOOL_PARSERS, AUTO)
    require_choice("reasoning_parser", reasoning_parser, REASONING_PARSERS, AUTO)
    ids, tokenizer = decoder.encode(prompt, "messages"), decoder.tokenizer
    form = form_of(tokenizer, tool_parser, reasoning_parser)
    params = SamplingParams() if sampling is None else sampling
    plan = plan_reply(form, params, rules, ids, tokenizer, decoder.grammars)
    own: dict[str, Any] = {"wait": plan.wait, "all_tokens": plan.reader is not None}

    def answer_of(generation: Generation) -> ChatAnswer:
        reply = reply_of(plan.reader, generation.text)
        return ChatAnswer(reply.content, reply.thought, reply.calls, generation)

    return decoder.new_request(ids, plan.sampling, "messages", **own, **how), answer_of


def named(target: str | Path, draft: Draft) -> dict[str, Any]:
    """What a decoder was loaded from, as plain data."""
    drafts = draft if isinstance(draft, str | Path | None) else [str(each) for each in draft]
    return {"target": str(target), "draft": str(drafts) if isinstance(drafts, Path) else drafts}


def check_one_prompt(prompt: Any, several: str) -> None:
    """TypeError for a list of prompts.  several: what takes those."""
    if not is_one_prompt(prompt):
        got = " ".join(f"{prompt!r} of type {type(prompt).__name__}".split())[:400]
        raise TypeError(
            f"prompt must be one string, one list of token ids or one list of chat messages, got {got}; "
            f"nearest thing that works for several prompts: {several}"
        )
