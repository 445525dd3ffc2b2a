"""Turns the fields of a body into a RequestPlan: prompts, sampling and how the answer is sent.  Knows no tokenizer and no limit
of a model, so what depends on these is checked later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.chat.tools import ToolRules, read_rules
from specdec.checks import field_of, require_bool, require_int, require_text, shown
from specdec.config import MAX_SEED, SamplingParams
from specdec.limits import MAX_LOGPROBS
from specdec.prompts.chat import ChatPrompt
from specdec.serve.chats.messages import effort_of, read_chat, text_part
from specdec.serve.wire import fields
from specdec.serve.wire.errors import ApiError, wrong
from specdec.serve.wire.grammar import GRAMMAR_FIELDS, grammar_of
from specdec.serve.wire.left_out import known_only

DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI's; a chat answer may be as long as the context allows
DEFAULT_TEMPERATURE = 1.0  # OpenAI's
MAX_ID_DIGITS = 10  # of a token id
THINKING_VARIABLES = ("enable_thinking", "thinking")  # of chat templates: of Qwen3, and of DeepSeek V3.1
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")
MAX_N = 2**31 - 1  # numbers of thousands of digits can't even be shown in an error


@dataclass(frozen=True)
class RequestPlan:
    """What a request asks for."""

    path: str  # the endpoint
    prompts: Sequence[Any]  # texts, lists of ids, or one ChatPrompt
    prompt_field: str  # what errors call them
    sampling: SamplingParams  # of choice 0 of each prompt, but for the next two
    max_tokens: int | None  # None: as many as fit
    min_tokens: int = 0  # before any end
    n: int = 1  # choices of each prompt
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False  # say in each event what has been used so far
    is_list: bool = False  # whether the prompts came as a list of prompts
    grammar_field: str = ""  # the field that says what the text must be
    return_origins: bool = False  # say of each token where it came from
    cache_salt: str | None = None  # of requests that may share cached pages and earlier answers
    return_trees: bool = False  # say what each round drafted, too
    echo: bool = False  # begin each choice with its prompt
    return_token_ids: bool = False  # of the prompt and of each choice
    prompt_logprobs: int | None = None  # how many likeliest tokens are given of each of the prompt's
    tool_rules: ToolRules = field(default_factory=ToolRules)
    effort: str | None = None  # how much the model is to think, for templates that read it
    thinks: bool | None = None  # whether it is to think at all, for templates that read that
    left_out: Sequence[str] = ()  # what --lenient has taken out of the body

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def is_chat(self) -> bool:
        return self.path == fields.CHAT

    @property
    def says_prompt(self) -> bool:
        """Whether the answer says anything of its prompts."""
        return self.echo or self.return_token_ids or self.prompt_logprobs is not None

    def prompt(self, index: int, variables: frozenset[str]) -> Any:
        """A prompt as the decoder takes it.  variables: those that the chat template reads."""
        return told_effort(self.prompts[index], self.effort, variables, self.thinks)

    def name_of(self, index: int) -> str:
        """What errors call a prompt."""
        return f"{self.prompt_field}[{index}]" if self.is_list else self.prompt_field

    def sampling_of(self, choice: int, max_tokens: int) -> SamplingParams:
        """Choice j of a seeded request has the seed + j.  ApiError 400 if it may not be as long as it must be."""
        if self.min_tokens > max_tokens:
            fault = f"min_tokens must be at most max_tokens, which is {max_tokens}, got {self.min_tokens}"
            raise wrong("min_tokens", f"{fault}; nearest setting that works: min_tokens={max_tokens}")
        seed = None if self.sampling.seed is None else self.sampling.seed + choice
        return replace(self.sampling, max_tokens=max_tokens, min_tokens=self.min_tokens, seed=seed)


def read_plan(
    body: dict[str, Any], path: str, model_name: str, max_tokens_cap: int | None, max_logprobs: int = MAX_LOGPROBS,
    lenient: bool = False,
) -> RequestPlan:  # fmt: skip
    """The plan of a body.  ApiError 400 or 404 with the name of the field that is wrong.

    max_logprobs: the most likeliest tokens whose log-probabilities may be asked for.  lenient: leave out fields that the server
    does not know.
    """
    body, left_out = known_only(body, path) if lenient else (body, [])
    values = fields.used_fields(body, path)
    check_model(values.get("model"), model_name)
    n = _checked("n", require_int, values.get("n", 1), 1, MAX_N)
    stream, include_usage, continuous = _streaming(values)
    rules = _rules(values)
    prompts, is_list = ([read_chat(values, rules)], False) if path == fields.CHAT else _prompts(values)
    sampling, echo = _sampling(values, n, path, max_logprobs), _flag(values, "echo")
    of_prompt = sampling.prompt_logprobs
    max_tokens = _max_tokens(values, path, max_tokens_cap, low=0 if of_prompt is not None or echo else 1)
    if echo and (sampling.logprobs is not None or max_tokens == 0):
        sampling = replace(sampling, prompt_logprobs=max(of_prompt or 0, sampling.logprobs or 0))
    return RequestPlan(
        path=path,
        prompts=prompts,
        prompt_field="messages" if path == fields.CHAT else "prompt",
        sampling=sampling,
        max_tokens=max_tokens,
        min_tokens=_checked("min_tokens", require_int, values.get("min_tokens", 0), 0),
        n=n,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous,
        is_list=is_list,
        grammar_field=next((name for name in GRAMMAR_FIELDS if name in values), ""),
        return_origins=_flag(values, "return_origins"),
        cache_salt=_checked("cache_salt", require_text, values["cache_salt"]) if "cache_salt" in values else None,
        return_trees=_flag(values, "return_trees"),
        echo=echo,
        return_token_ids=_flag(values, "return_token_ids"),
        prompt_logprobs=of_prompt,
        tool_rules=rules,
        effort=effort_of(values),
        left_out=left_out,
    )


def told_effort(prompt: Any, effort: str | None, variables: frozenset[str], thinks: bool | None = None) -> Any:
    """A prompt whose template is told how much the model is to think, if it is a chat.  variables: those that it reads.

    thinks: whether it is to think at all; None: as the effort says, or the template by itself.
    """
    if not isinstance(prompt, ChatPrompt):
        return prompt
    told: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none" or thinks is not None:
        told |= dict.fromkeys(THINKING_VARIABLES, bool(thinks) and effort != "none")
    return replace(prompt, kwargs={**{name: value for name, value in told.items() if name in variables}, **prompt.kwargs})


def _flag(values: dict[str, Any], name: str) -> bool:
    return _checked(name, require_bool, values.get(name, False), False)


def _rules(values: dict[str, Any]) -> ToolRules:
    try:
        return read_rules(*map(values.get, fields.TOOL_FIELDS))
    except (TypeError, ValueError) as error:
        raise wrong(field_of(error), str(error)) from None


def check_model(model: Any, served: str) -> None:
    """One that is left out is the one that is served.  ApiError 400 or 404 for any other."""
    if model is None:
        return
    if not isinstance(model, str):
        raise wrong("model", f"model must be a string, got {shown(model)}; nearest setting that works: model={served!r}")
    if model != served:
        raise unknown_model(model, served)


def unknown_model(model: str, served: str) -> ApiError:
    message = f"the model {model[:200]!r} does not exist here; nearest setting that works: model={served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def _streaming(values: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Whether the answer is streamed, whether its usage is, and whether each event has what was used so far."""
    stream = _checked("stream", require_bool, values.get("stream", False), False)
    options = values.get("stream_options")
    if options is None:
        return stream, False, False
    if not isinstance(options, dict):
        raise wrong("stream_options", f"stream_options must be an object, got {shown(options)}")
    used = fields.only_used(options, fields.STREAM_OPTIONS, fields.NEUTRAL_STREAM_VALUES, "stream_options.")
    if not stream:
        raise wrong("stream_options", "stream_options says how to stream, but stream is not true; leave one or the other out")
    usage, always = (
        bool(_checked(f"stream_options.{name}", require_bool, used.get(name, False), False)) for name in fields.STREAM_OPTIONS
    )
    return stream, usage, usage and always


def _sampling(values: dict[str, Any], n: int, path: str, max_logprobs: int) -> SamplingParams:
    """The checked options of sampling.  An error names the field of the body that says what the option is."""
    if "prompt_logprobs" in values:
        _checked("prompt_logprobs", require_int, values["prompt_logprobs"], 0, max_logprobs)
    given = {name: values[name] for name in fields.SAMPLING_FIELDS if name in values}
    if _is_integer(given.get("top_k")) and given["top_k"] == -1:  # vLLM's way to keep all tokens
        given["top_k"] = 0
    if isinstance(given.get("logit_bias"), dict):
        given["logit_bias"] = _logit_bias(given["logit_bias"])
    if "prediction" in values:
        given["prediction"] = _prediction(values["prediction"])
    given["logprobs"] = (_chat_logprobs if path == fields.CHAT else _completion_logprobs)(values, max_logprobs)
    if path == fields.CHAT and given["logprobs"] is None and given.get("logprobs_mode", "raw") != "raw":
        raise wrong("logprobs_mode", "logprobs_mode needs logprobs; nearest setting that works: logprobs=true")
    said_by = {}
    for name, rule in grammar_of(values).items():
        given |= rule
        said_by = dict.fromkeys(rule, name)
    try:
        sampling = SamplingParams(**{"temperature": DEFAULT_TEMPERATURE, **given})
    except (TypeError, ValueError, OverflowError) as error:
        raise wrong(said_by.get(field_of(error), field_of(error)), str(error)) from None
    if sampling.seed is not None and sampling.seed + n - 1 > MAX_SEED:
        nearest = MAX_SEED - n + 1
        raise wrong("seed", f"seed + n - 1 must be at most {MAX_SEED}; nearest setting that works: seed={nearest}")
    return sampling


def _prediction(value: Any) -> str:
    """The text of OpenAI's form of a prediction, whose content is a text or a list of parts."""
    if not isinstance(value, dict) or value.keys() != {"type", "content"} or value["type"] != "content":
        expected = "prediction must be {'type': 'content', 'content': ...}"
        raise wrong("prediction", f"{expected}, got {shown(value)}")
    content = value["content"]
    if isinstance(content, list):
        return "".join(text_part(part, f"prediction.content[{i}]") for i, part in enumerate(content))
    return _checked("prediction", _require_text, content)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _logit_bias(value: dict[str, Any]) -> dict[int, Any]:
    """The keys as numbers: JSON has no others than texts."""
    for token in value:
        if not (token.isascii() and token.isdigit() and len(token) <= MAX_ID_DIGITS):
            expected = 'logit_bias must have token ids as keys, such as {"50": -100}'
            raise wrong("logit_bias", f"{expected}, got the key {token[:100]!r}")
        if token != str(int(token)):
            raise wrong("logit_bias", f"logit_bias must name each token once, as {int(token)}, got the key {token[:100]!r}")
    return {int(token): added for token, added in value.items()}


def _completion_logprobs(values: dict[str, Any], most: int) -> int | None:
    """How many likeliest tokens are given; None: no log-probabilities are, which some clients write as false."""
    count = values.get("logprobs")
    if count is None or count is False:
        return None
    return _checked("logprobs", require_int, count, 0, most)


def _chat_logprobs(values: dict[str, Any], most: int) -> int | None:
    """How many likeliest tokens are given; None: no log-probabilities are."""
    wanted = _checked("logprobs", require_bool, values.get("logprobs", False), True)
    count = _checked("top_logprobs", require_int, values.get("top_logprobs", 0), 0, most)
    if count and not wanted:
        raise wrong("top_logprobs", "top_logprobs needs logprobs; nearest setting that works: logprobs=true")
    return count if wanted else None


def _max_tokens(values: dict[str, Any], path: str, cap: int | None, low: int) -> int | None:
    """low: 0 where an answer may hold its prompt alone."""
    given = [name for name in LIMIT_FIELDS if name in values]
    if len(given) > 1:
        raise wrong("max_tokens", "max_tokens and max_completion_tokens mean the same; leave one or the other out")
    for name in given:
        value = values[name]
        if isinstance(value, float) and value.is_integer():  # JSON has one kind of number, and some clients write 3.0
            value = int(value)
        if type(value) is int and value == 0 < low and path == fields.COMPLETIONS:
            also = "or echo=true beside it, with which 0 asks for the prompt alone"
            raise wrong(name, f"{name} must be >= 1, got 0; nearest setting that works: {name}=1, {also}")
        tokens: int = _checked(name, require_int, value, low)
        if cap is not None and tokens > cap:
            limit = f"{name} must be at most {cap}, the server's --max-tokens-cap, got {tokens}"
            raise wrong(name, f"{limit}; nearest setting that works: {name}={cap}")
        return tokens
    if path == fields.COMPLETIONS:
        return DEFAULT_MAX_TOKENS if cap is None else min(DEFAULT_MAX_TOKENS, cap)
    return None


def _prompts(values: dict[str, Any]) -> tuple[list[Any], bool]:
    """The prompts of a completion, and whether they came as a list of prompts."""
    prompt = values.get("prompt")
    if prompt is None:
        raise wrong("prompt", "prompt is missing: expected a text, a list of token ids, or a list of such prompts")
    if isinstance(prompt, str):
        return [prompt], False
    if not isinstance(prompt, list) or not prompt:
        got = "an empty list" if prompt == [] else shown(prompt)
        raise wrong("prompt", f"prompt must be a text, a list of token ids, or a list of such prompts, got {got}")
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt], False
    if kinds == {str} or (kinds == {list} and all({type(token) for token in item} == {int} for item in prompt)):
        return prompt, True
    raise wrong("prompt", f"prompt must hold texts alone, token ids alone, or lists of token ids alone, got {shown(prompt)}")


def _require_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {shown(value)} of type {type(value).__name__}")
    return value


def _checked(name: str, check: Any, value: Any, *bounds: Any) -> Any:
    """The checked value; what is wrong with it becomes ApiError 400 for the field."""
    try:
        return check(name, value, *bounds)
    except (TypeError, ValueError, OverflowError) as error:
        raise wrong(name, str(error)) from None
