"""From a plan to finished generations: checks every prompt, then runs all choices.  Knows no HTTP but its errors."""

from __future__ import annotations

from asyncio import TaskGroup
from collections.abc import Sequence
from dataclasses import replace

from specdec.async_decoder import AsyncSpecDecoder
from specdec.checks import NoTokenLeft, PromptTooLong
from specdec.config import SamplingParams
from specdec.engine.request import Request
from specdec.generation import Generation
from specdec.serve.wire.errors import REQUEST_FAILED, ApiError, engine_failed, request_failed, wrong
from specdec.serve.wire.fields import COMPLETIONS
from specdec.serve.wire.requests import Plan

NO_TEMPLATE = "this model has no chat template: neither chat_template.jinja nor tokenizer_config.json in its folder holds one"
TOKEN_FIELDS = ("stop_token_ids", "stop", "logit_bias", "bad_words")  # checked against the vocabulary


async def make_requests(decoder: AsyncSpecDecoder, plan: Plan, cap: int | None) -> list[Request]:
    """The engine's requests, in the order of the choices: prompt by prompt, choice by choice.  None of them runs yet.

    cap: the most tokens of a choice where the plan names no number.

    ApiError 400 if a prompt can't be used or does not fit.
    """
    requests = []
    for index, prompt in enumerate(plan.prompts):
        max_tokens = plan.max_tokens
        if max_tokens is None:
            probe = await _checked(decoder, plan, prompt, replace(plan.sampling, max_tokens=1), index)
            prompt = probe.given_ids
            most = decoder.decoder.engine.longest_text(decoder.decoder.settings.max_seq_len)
            left = max(1, most - len(probe.prompt_ids))
            max_tokens = left if cap is None else min(left, cap)
        for choice in range(plan.n):
            request = await _checked(decoder, plan, prompt, plan.sampling_of(choice, max_tokens), index)
            prompt = request.given_ids  # a text is encoded once
            requests.append(request)
    return requests


async def _checked(decoder: AsyncSpecDecoder, plan: Plan, prompt: object, sampling: SamplingParams, index: int) -> Request:
    try:
        return await decoder.new_request(
            prompt, sampling, name=plan.name_of(index), speculate=plan.speculate, streaming=plan.stream
        )
    except PromptTooLong as error:
        raise wrong(plan.prompt_field, str(error), "context_length_exceeded") from None
    except (ValueError, TypeError) as error:
        if plan.is_chat and not decoder.decoder.tokenizer.has_chat_template:
            path = f"{COMPLETIONS} with a prompt"
            raise wrong("messages", f"{NO_TEMPLATE}; nearest thing that works: {path}") from None
        about = next((name for name in TOKEN_FIELDS if str(error).startswith(f"{name} ")), plan.prompt_field)
        if plan.sampling.grammar_rule and str(error).startswith(f"{plan.sampling.grammar_rule[0]} "):
            about = plan.grammar_field
        raise wrong(about, str(error)) from None
    except RuntimeError as error:
        raise failure_of(decoder, error) from error


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
