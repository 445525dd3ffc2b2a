"""From a plan to finished generations: checks every prompt, then runs all choices.  Knows no HTTP but its errors."""

from __future__ import annotations

from asyncio import TaskGroup
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from specdec.async_decoder import AsyncSpecDecoder
from specdec.chat.form import ReplyForm
from specdec.chat.plan import ReplyPlan
from specdec.chat.reply import ReplyReader
from specdec.checks import NoTokenLeft, PromptTooLong, field_of
from specdec.decoder import SpecDecoder
from specdec.engine.request import Request
from specdec.generation import Generation
from specdec.prompts.replies import plan_reply
from specdec.serve.wire.errors import REQUEST_FAILED, ApiError, engine_failed, request_failed, wrong
from specdec.serve.wire.fields import COMPLETIONS
from specdec.serve.wire.prompts_said import ChoicePrompt
from specdec.serve.wire.requests import RequestPlan

NO_TEMPLATE = (
    "this model has no chat template: neither chat_template.jinja nor tokenizer_config.json in its folder holds one; nearest "
    "things that work: {} with a prompt, or a server that was started with --chat-template FILE"
)


class MadeRequests(NamedTuple):
    """The engine's requests of a plan.  reader: makes what reads an answer's parts; None: its text is its content."""

    requests: list[Request]
    reader: Callable[[], ReplyReader] | None = None


async def make_requests(decoder: AsyncSpecDecoder, plan: RequestPlan, cap: int | None, form: ReplyForm) -> MadeRequests:
    """The engine's requests, in the order of the choices: prompt by prompt, choice by choice.  None of them runs yet.

    cap: the most tokens of a choice where the plan names no number.  form: how the model writes calls and thoughts.

    ApiError 400 if a prompt can't be used or does not fit.
    """
    made = MadeRequests([])
    for index in range(len(plan.prompts)):
        try:
            own = await decoder.prepared(partial(_of_prompt, plan=plan, index=index, cap=cap, form=form))
            made = MadeRequests(made.requests + own.requests, own.reader)
        except (ValueError, TypeError) as error:
            raise _wrong_prompt(decoder.decoder, plan, error) from None
        except RuntimeError as error:
            raise failure_of(decoder, error) from error
    return made


def _of_prompt(decoder: SpecDecoder, plan: RequestPlan, index: int, cap: int | None, form: ReplyForm) -> MadeRequests:
    """The requests of one prompt's choices."""
    name, max_tokens = plan.name_of(index), plan.max_tokens
    ids = decoder.encode(plan.prompt(index, decoder.tokenizer.template_variables), name)
    if max_tokens is None:
        left = max(1, decoder.longest_output(ids))
        max_tokens = left if cap is None else min(left, cap)
    how: dict[str, Any] = {"streaming": plan.stream, "trees": plan.return_trees, "cache_salt": plan.cache_salt}
    reply = ReplyPlan(plan.sampling)
    if plan.is_chat:
        reply = plan_reply(form, plan.sampling, plan.tool_rules, ids, decoder.tokenizer, decoder.grammars)
        how |= {"wait": reply.wait, "all_tokens": reply.reader is not None}
    own = replace(plan, sampling=reply.sampling)
    requests = [decoder.new_request(ids, own.sampling_of(choice, max_tokens), name, **how) for choice in range(plan.n)]
    return MadeRequests(requests, reply.reader)


def prompts_of(decoder: SpecDecoder, plan: RequestPlan, requests: Sequence[Request]) -> list[ChoicePrompt]:
    """The prompt of each choice, as its answer shows it.  A text is shown as it was given."""
    prompts = []
    for choice, request in enumerate(requests):
        given = plan.prompts[choice // plan.n]
        text = "" if not plan.echo else given if isinstance(given, str) else decoder.tokenizer.decode(request.given_ids)
        prompts.append(ChoicePrompt(request.given_ids, text))
    return prompts


def _wrong_prompt(decoder: SpecDecoder, plan: RequestPlan, error: ValueError | TypeError) -> ApiError:
    if isinstance(error, PromptTooLong):
        # litellm and LangChain look for these words in the message, whatever the code is.
        said = f"This model's maximum context length is {decoder.settings.max_seq_len} tokens (context_length_exceeded)"
        return wrong(plan.prompt_field, f"{said}: {error}", "context_length_exceeded")
    if plan.is_chat and not decoder.tokenizer.has_chat_template:
        return wrong("messages", NO_TEMPLATE.format(COMPLETIONS))
    option, rule = field_of(error), plan.sampling.grammar_rule
    if plan.tool_rules.callable_tools and option == "grammar":
        return wrong("tools", str(error))
    if option == "prompt_logprobs" and plan.prompt_logprobs is None:  # an echo asks for them
        fault = "echo with logprobs, or with max_tokens=0, needs a target whose decoder reads the prompt, and of this one the"
        works = "nearest thing that works: a decoder-only target, or max_tokens=1 without logprobs"
        return wrong("echo", f"{fault} encoder does; {works}")
    is_grammar = rule is not None and option == rule[0]
    said = decoder.tokenizer.without_folder(str(error))
    return wrong(plan.grammar_field if is_grammar else option or plan.prompt_field, said)


async def run_all(decoder: AsyncSpecDecoder, requests: Sequence[Request]) -> list[Generation]:
    """The results of all requests.  ApiError if one of them fails; the others are cancelled then."""
    try:
        async with TaskGroup() as group:
            tasks = [group.create_task(decoder.run(request)) for request in requests]
    except BaseExceptionGroup as errors:
        raise failure_of(decoder, errors.exceptions[0]) from errors.exceptions[0]
    return [task.result() for task in tasks]


def failure_of(decoder: AsyncSpecDecoder, error: BaseException) -> ApiError:
    """What to answer when a request has failed while it ran, or could not be run."""
    failure = decoder.failure
    if failure is None and isinstance(error.__cause__, NoTokenLeft):
        return wrong(None, str(error), REQUEST_FAILED)
    return request_failed(str(error)) if failure is None else engine_failed(failure)
