"""Every sampling option over HTTP is that of SpecDecoder.generate, and log-probabilities come in both of OpenAI's forms."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from typing import Any

import pytest
from toolkit.serving.options import NUMBERS, other_number
from toolkit.serving.server import Served, error_of

from specdec import SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.serve.chats import messages
from specdec.serve.wire import grammar, requests
from specdec.serve.wire.fields import CHAT, COMPLETIONS, SAMPLING_FIELDS, USED_FIELDS
from specdec.serve.wire.requests import read_plan

GOOD: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
LONG = 36  # tokens, within which penalties change something
OPTIONS: list[dict[str, Any]] = [
    {"frequency_penalty": 1.5},
    {"presence_penalty": 2},
    {"repetition_penalty": 1.5},
    {"logit_bias": {"300": 20, "301": 20.5}},
    {"bad_words": [" there", " was", "a little"]},
    {"min_tokens": 12, "stop_token_ids": list(range(260, 700))},
    {"temperature": 1.2, "seed": 3, "min_p": 0.2},
]


@pytest.mark.slow_cases
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_an_option_is_the_decoder_s(served: Served, options: dict[str, Any]) -> None:
    """Keeps out: a field that is taken and not handed on."""
    own = dict(options)
    if "logit_bias" in own:
        own["logit_bias"] = {int(token): added for token, added in own["logit_bias"].items()}
    base = {name: own[name] for name in ("temperature", "seed") if name in own}
    params = [SamplingParams(**{"max_tokens": LONG, **each}) for each in (own, base)]
    expected, plain = (out.text for out in served.decoder.generate([GOOD["prompt"]] * 2, params))
    assert expected != plain, "the option changes nothing here"
    answer = served.post(COMPLETIONS, {**GOOD, "max_tokens": LONG, **options, "stream": "min_p" in options})
    if "min_p" not in options:
        assert answer.json()["choices"][0]["text"] == expected
        return
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == expected


def test_greedy_requests_may_have_what_only_sampling_looks_at(served: Served) -> None:
    """Keeps out: a 400 for what OpenAI's clients send with temperature 0, and a greedy text that depends on it."""
    want = served.post(COMPLETIONS, GOOD).json()["choices"][0]["text"]
    idle = {"top_p": 0.1, "top_k": 1000, "min_p": 0.5, "seed": 3, "n": 2, "user": "somebody"}
    assert [choice["text"] for choice in served.post(COMPLETIONS, {**GOOD, **idle}).json()["choices"]] == [want] * 2


# Fields that are read by code of their own, and who reads them.
OTHERS = {
    "prompt": "_prompts", "messages": "read_chat", "model": "check_model", "max_tokens": "_max_tokens",
    "max_completion_tokens": "_max_tokens", "n": "read_plan", "stream": "_streaming", "stream_options": "_streaming",
    "prediction": "_sampling", "min_tokens": "read_plan", "logprobs": "_completion_logprobs",
    "top_logprobs": "_chat_logprobs", "response_format": "grammar_of",
    "structured_outputs": "grammar_of", "return_origins": "read_plan",
    "cache_salt": "read_plan",
    "return_trees": "read_plan", "return_token_ids": "read_plan", "echo": "read_plan",
    "tools": "read_rules", "tool_choice": "read_rules", "parallel_tool_calls": "read_rules",
    "chat_template_kwargs": "read_chat", "add_generation_prompt": "read_chat", "continue_final_message": "read_chat",
    "reasoning_effort": "effort_of",
}  # fmt: skip
# Of each field of SamplingParams: fields of a body, and the value that they give it, which is not its default.
ASKED: dict[str, tuple[dict[str, Any], Any]] = {
    "max_tokens": ({"max_tokens": 7}, 7),
    "temperature": ({"temperature": 0.5}, 0.5),
    "stop": ({"stop": ["a", "b"]}, ("a", "b")),
    "stop_token_ids": ({"stop_token_ids": [5]}, (5,)),
    "ignore_eos": ({"ignore_eos": True}, True),
    "logit_bias": ({"logit_bias": {"5": 2}}, {5: 2.0}),
    "bad_words": ({"bad_words": [[5, 6]]}, ((5, 6),)),
    "json_schema": ({"response_format": {"type": "json_object"}}, '{"type": "object"}'),
    "regex": ({"structured_outputs": {"regex": "a"}}, "a"),
    "grammar": ({"structured_outputs": {"grammar": "start: x"}}, "start: x"),
    "logprobs": ({"logprobs": 2}, 2),
    "logprobs_mode": ({"logprobs": 0, "logprobs_mode": "processed"}, "processed"),
    "prediction": ({"prediction": {"type": "content", "content": [{"type": "text", "text": "a b"}]}}, "a b"),
    "sources": ({"sources": ["drafter"]}, ("drafter",)),
    "shape": ({"shape": [3, 1]}, SpecConfig(3, 1)),
    "speculate": ({"speculate": False}, False),
    "prompt_logprobs": ({"prompt_logprobs": 3}, 3),
    "include_stop_str_in_output": ({"include_stop_str_in_output": True}, True),
    "n": ({"n": 2}, 2),  # of the plan, which makes requests of one choice each
    **{name: ({name: other_number(name)}, other_number(name)) for name in NUMBERS},
}


def test_every_field_has_a_reader() -> None:
    """Keeps out: a field of the table that the server takes and nobody hands on, and a reader of a field that it refuses."""
    used = {*USED_FIELDS[COMPLETIONS], *USED_FIELDS[CHAT]}
    assert not set(SAMPLING_FIELDS) & set(OTHERS)
    assert used == {*SAMPLING_FIELDS, *OTHERS}, "a field that is no option of the same name belongs here, beside its reader"
    readers = {**vars(requests), **vars(grammar), **vars(messages)}
    assert [name for name, reader in OTHERS.items() if name not in inspect.getsource(readers[reader])] == []


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_every_option_is_a_field(name: str) -> None:
    """Keeps out: an option of SamplingParams that can't be had over HTTP, and one whose field is read and lost."""
    asked, value = ASKED[name]
    assert getattr(SamplingParams(), name) != value
    plan = read_plan({"model": "tiny", "prompt": "a", **asked}, COMPLETIONS, "tiny", None)
    assert plan.max_tokens is not None
    given = plan.n if name == "n" else getattr(plan.sampling_of(0, plan.max_tokens), name)
    assert given == value and asked.keys() <= set(USED_FIELDS[COMPLETIONS])


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (COMPLETIONS, {"frequency_penalty": 3}, "frequency_penalty", "nearest setting that works: frequency_penalty=2.0"),
        (COMPLETIONS, {"frequency_penalty": False}, "frequency_penalty", "frequency_penalty must be a number, got False"),
        (COMPLETIONS, {"logit_bias": {"a": 1}}, "logit_bias", "token ids as keys"),
        (COMPLETIONS, {"logit_bias": {"5": 101}}, "logit_bias", "logit_bias[5] must be in"),
        (COMPLETIONS, {"logit_bias": {"4000": 1}}, "logit_bias", "logit_bias holds 4000; expected ids in [0, 2047]"),
        (COMPLETIONS, {"logit_bias": [5]}, "logit_bias", "logit_bias must be a dict"),
        (COMPLETIONS, {"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "must name each token once, as 5, got the key '05'"),
        (COMPLETIONS, {"bad_words": "a"}, "bad_words", "bad_words must be a list"),
        (COMPLETIONS, {"bad_words": [[5, 4000]]}, "bad_words", "bad_words holds 4000"),
        (COMPLETIONS, {"min_p": 2}, "min_p", "nearest setting that works: min_p=1.0"),
        (COMPLETIONS, {"min_tokens": 17}, "min_tokens", "nearest setting that works: min_tokens=16"),
        (COMPLETIONS, {"min_tokens": -1}, "min_tokens", "nearest setting that works: min_tokens=0"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs", "nearest setting that works: logprobs=20"),
        (COMPLETIONS, {"logprobs": True}, "logprobs", "logprobs must be an int, got True"),
        (COMPLETIONS, {"top_logprobs": 1}, "top_logprobs", "top_logprobs is a field of /v1/chat/completions"),
        (COMPLETIONS, {"logprobs_mode": "processed"}, "logprobs_mode", "would do nothing without logprobs"),
        (COMPLETIONS, {"logprobs": 1, "logprobs_mode": "all"}, "logprobs_mode", "must be 'raw' or 'processed'"),
        (CHAT, {"logprobs": 1}, "logprobs", "logprobs must be a bool, got 1"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "nearest setting that works: logprobs=true"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "nearest setting that works: top_logprobs=20"),
        (COMPLETIONS, {"return_origins": 1}, "return_origins", "return_origins must be a bool, got 1"),
        (CHAT, {"return_origins": "yes"}, "return_origins", "return_origins must be a bool, got 'yes'"),
        (CHAT, {"min_tokens": 10**6}, "min_tokens", "nearest setting that works: min_tokens="),
    ],
)
def test_a_wrong_option_is_named(chat_served: Served, path: str, body: dict[str, Any], param: str, said: str) -> None:
    """Keeps out: a 500, or a message about another field."""
    asked = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "Once", "max_tokens": 16}
    said = said.replace("2047", str(chat_served.decoder.model.config.vocab_size - 1))
    error = error_of(chat_served.post(path, {"model": "tiny", **asked, **body}), 400)
    assert error["param"] == param and said in error["message"], error


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_completions(served: Served, stream: bool) -> None:
    """Keeps out: tokens whose texts are not the text, numbers of others, offsets that begin anew with each chunk."""
    (want,) = served.decoder.generate(GOOD["prompt"], SamplingParams(max_tokens=16, logprobs=2))
    answer = served.client().completions.create(**GOOD, logprobs=2, stream=stream)
    found = [chunk.choices[0].logprobs for chunk in (answer if stream else [answer])]
    tokens, numbers, tops, offsets = (
        [item for each in found if each is not None for item in getattr(each, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    assert want.logprobs is not None and "".join(tokens) == want.text
    assert numbers == [each.logprob for each in want.logprobs]
    assert [sorted(top.values()) for top in tops] == [sorted({*each.top.values(), each.logprob}) for each in want.logprobs]
    assert all(want.text[offset:].startswith(token) for token, offset in zip(tokens, offsets, strict=True))
    assert served.client().completions.create(**GOOD).choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_chats(chat_served: Served, stream: bool) -> None:
    """Keeps out: the form of completions, and bytes of a token that holds a part of a character only."""
    ask: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hé"}], "max_tokens": 12, "temperature": 0}
    (want,) = chat_served.decoder.generate(ask["messages"], SamplingParams(max_tokens=12, logprobs=3))
    answer = chat_served.client().chat.completions.create(**ask, logprobs=True, top_logprobs=3, stream=stream)
    found = [chunk.choices[0].logprobs for chunk in (answer if stream else [answer])]
    content = [each for logprobs in found if logprobs is not None for each in logprobs.content or ()]
    assert want.logprobs is not None and [each.logprob for each in content] == [each.logprob for each in want.logprobs]
    for mine, theirs in zip(content, want.logprobs, strict=True):
        assert [each.logprob for each in mine.top_logprobs] == list(theirs.top.values())
        assert mine.bytes == (None if "\ufffd" in mine.token else list(mine.token.encode()))


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("logprobs", [False, True])
def test_origins_come_where_they_are_asked_for(chat_served: Served, path: str, logprobs: bool) -> None:
    """Keeps out: origins of another choice, those of a stream that are not the whole answer's, chunks whose tokens have no text
    yet and that are left out; and a field of our own in answers that nobody asked it for."""
    messages = [{"role": "user", "content": "hé"}]
    ask: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "temperature": 0.7, "seed": 5, "n": 2}
    ask |= {"messages": messages} if path == CHAT else {"prompt": "Once upon"}
    ask |= {"logprobs": True if path == CHAT else 1} if logprobs else {}
    params = SamplingParams(max_tokens=24, temperature=0.7, seed=5, n=2)
    want = [out.origins for out in chat_served.decoder.generate(messages if path == CHAT else "Once upon", params)]
    assert want[0] != want[1] and max(map(max, want)) > 0
    whole = chat_served.post(path, {**ask, "return_origins": True}).json()
    assert [choice["origins"] for choice in whole["choices"]] == want
    found: list[list[int]] = [[], []]
    for line in chat_served.post(path, {**ask, "return_origins": True, "stream": True}).text.split("\n\n"):
        if line.startswith("data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            found[choice["index"]] += choice["origins"]
            assert choice["finish_reason"] is None or choice["origins"] == []
    assert found == want
    for more in ({}, {"stream": True}, {"return_origins": False}, {"return_origins": None}):
        assert "origins" not in chat_served.post(path, {**ask, **more}).text


SCHEMA = {
    "type": "object", "properties": {"who": {"enum": ["Tom", "Lily"]}, "n": {"type": "integer", "maximum": 9}},
    "required": ["who", "n"], "additionalProperties": False,
}  # fmt: skip


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(
    ("field", "rule"),
    [
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
         {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": SCHEMA}, "stream": True}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"regex": "(He|She) [a-z]{3,6}\\."}}, {"regex": "(He|She) [a-z]{3,6}\\."}),
        ({"structured_outputs": {"grammar": 'start: "yes" | "no"'}, "n": 2}, {"grammar": 'start: "yes" | "no"'}),
    ],
    ids=["text", "json_schema", "json", "regex", "grammar"],
)  # fmt: skip
def test_what_a_text_must_be_is_the_decoder_s(served: Served, field: dict[str, Any], rule: dict[str, Any]) -> None:
    """Keeps out: a form that is asked for and not held to, in answers and in streams."""
    (want,) = served.decoder.generate(GOOD["prompt"], SamplingParams(max_tokens=60, **rule))
    answer = served.post(COMPLETIONS, {**GOOD, "max_tokens": 60, **field})
    if "stream" in field:
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == want.text
    else:
        assert {choice["text"] for choice in answer.json()["choices"]} == {want.text}
    assert "json_schema" not in rule or json.loads(want.text).keys() == {"who", "n"}


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize(
    ("names", "nearest"),
    [
        (["structured_outputs", "min_tokens"], "min_tokens="),
        (["bad_words"], "fewer bad_words"),
        (["bad_words", "min_tokens"], "fewer bad_words, or min_tokens="),
        (["stop_token_ids", "min_tokens"], "min_tokens="),
        (["phrases"], "fewer bad_words"),
    ],
    ids=str,
)
def test_options_that_leave_no_token_are_the_caller_s_error(
    served: Served, names: list[str], nearest: str, speculate: bool
) -> None:
    """Keeps out: options that ban every token, with a grammar or without, answered as a fault of the server or of the model's
    weights, and an answer that names an option which bans nothing."""
    every, ends = range(served.decoder.model.config.vocab_size), served.decoder.model.config.eos_ids
    kept = ends if "min_tokens" in names else ()
    options = {
        "structured_outputs": {"regex": "dog"},
        "bad_words": [[token] for token in every if token not in kept],
        "stop_token_ids": list(every),
        "min_tokens": 20,
        "phrases": [[token] for token in every if token != 300] + [[300, 300]],  # so the second token is the one that lacks
    }
    asked = {"bad_words" if name == "phrases" else name: options[name] for name in names}
    error = error_of(served.post(COMPLETIONS, {**GOOD, **asked, "max_tokens": 30, "speculate": speculate}), 400)
    assert error["code"] == "request_failed" and error["message"].rstrip("0123456789").endswith(nearest), error
    said = error["message"].partition("nearest")[0]
    for name in ("min_tokens", "bad_words", "stop_token_ids", "logit_bias", "NaN"):
        assert (name in said) == (name in asked), error


def test_a_json_object_of_a_chat(chat_served: Served) -> None:
    """Keeps out: response_format of chats taken and ignored.  The random target ends no string, so max_tokens ends its text."""
    ask: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
    error = error_of(chat_served.post(CHAT, {**ask, "response_format": {"type": "json_object"}}), 400)
    assert error["param"] == "response_format" and "names an eos_token_id" in error["message"]


def test_predictions_over_http() -> None:
    """Keeps out: a prediction that is taken and not handed on, counts of other drafts, names of another token."""
    draft = [shipped.draft_folder(), "suffix"]
    with SpecDecoder.from_pretrained(shipped.target_folder(), draft, device="cpu", smoke=False, max_batch_size=2) as decoder:
        want = decoder.generate(GOOD["prompt"], SamplingParams(max_tokens=LONG), speculate=False)[0]
        guess = want.text.replace(" a ", " one ")
        (expected,) = decoder.generate(GOOD["prompt"], SamplingParams(max_tokens=LONG, prediction=guess))
        asked = {**GOOD, "max_tokens": LONG, "return_origins": True}
        with Served(decoder) as server:
            given = {**asked, "prediction": {"type": "content", "content": guess}}
            answer = server.post(COMPLETIONS, given).json()
            (choice,), details = answer["choices"], answer["usage"]["completion_tokens_details"]
            assert choice["text"] == want.text and len(choice["sources"]) == len(choice["origins"]) == LONG
            accepted = sum("prediction" in source.split("+") for source in choice["sources"])
            assert details == {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": expected.predicted_tokens - accepted,
            }
            assert accepted > LONG // 2
            own = server.post(COMPLETIONS, {**asked, "sources": ["drafter"]}).json()["choices"][0]
            assert own["text"] == want.text and "drafter" in own["sources"]
            for wrong, message in (
                ({"prediction": "a"}, "prediction must be {'type': 'content', 'content': ...}, got 'a'"),
                ({"prediction": {"type": "content", "content": 5}}, "prediction must be a string, got 5"),
                ({**given, "speculate": False}, "prediction would do nothing with speculate=False"),
                ({**given, "sources": ["drafter"]}, "sources leaves out the prediction"),
                ({"sources": ["corpse"]}, "sources names 'corpse'; expected some of"),
                ({"sources": ["drafter"] * 10_000}, "each once, got ['drafter',"),
                ({"sources": ["corpse" * 10_000]}, "expected some of"),
                ({"prompt": [1, "a" * 10_000]}, "prompt must hold texts alone"),
                ({"max_tokens": [1] * 10_000}, "max_tokens must be an int, got [1, 1,"),
            ):
                error = error_of(server.post(COMPLETIONS, {**asked, **wrong}), 400)
                assert message in error["message"] and len(error["message"]) < 600, error


def test_a_server_without_sources_refuses_predictions(served: Served) -> None:
    given = {**GOOD, "prediction": {"type": "content", "content": "a"}}
    error = error_of(served.post(COMPLETIONS, given), 400)
    assert error["param"] == "prediction" and "draft=[DRAFT, 'suffix']" in error["message"]
