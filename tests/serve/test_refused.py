"""Everything that a request can get wrong: a 4xx in OpenAI's form that names the field, never a 500, never in silence."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from toolkit.serving.server import Served, error_of

from specdec import SamplingParams
from specdec.serve.wire.fields import CHAT, COMPLETIONS, NEUTRAL_VALUES, SILENT_FIELDS, USED_FIELDS

PATH = "/v1/completions"
GOOD: dict[str, Any] = {"model": "tiny", "prompt": "Once"}


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"model": 3}, "model", "model must be a string, got 3"),
        ({"prompt": None}, "prompt", "prompt is missing"),
        ({"prompt": ""}, "prompt", "prompt is an empty string"),
        ({"prompt": []}, "prompt", "got an empty list"),
        ({"prompt": 3}, "prompt", "prompt must be a text"),
        ({"prompt": {"a": 1}}, "prompt", "prompt must be a text"),
        ({"prompt": ["a", 3]}, "prompt", "prompt must hold texts alone"),
        ({"prompt": [True, False]}, "prompt", "prompt must hold texts alone"),
        ({"prompt": [[1], []]}, "prompt", "prompt must hold texts alone"),
        ({"prompt": [[1], [[2]]]}, "prompt", "prompt must hold texts alone"),
        ({"prompt": [1.5]}, "prompt", "prompt must hold texts alone"),
        ({"prompt": ["Once", ""]}, "prompt", "prompt[1] is an empty string"),
        ({"prompt": [[1], [2, 2048]]}, "prompt", "prompt[1] holds the token id 2048; expected ids in [0, 2047]"),
        ({"prompt": [-1]}, "prompt", "prompt holds the token id -1"),
        ({"prompt": [10**30]}, "prompt", "prompt holds the token id 1000"),
        ({"prompt": [{"role": "user", "content": "hi"}]}, "prompt", "prompt must hold texts alone"),
        ({"max_tokens": 0}, "max_tokens", "nearest setting that works: max_tokens=1, or echo=true beside it"),
        ({"max_tokens": "5"}, "max_tokens", "max_tokens must be an int"),
        ({"max_tokens": 5.5}, "max_tokens", "max_tokens must be an int"),
        ({"max_tokens": True}, "max_tokens", "max_tokens must be an int"),
        ({"temperature": -1}, "temperature", "nearest setting that works: temperature=0.0"),
        ({"temperature": "hot"}, "temperature", "temperature must be a number"),
        ({"temperature": 1e-9}, "temperature", "at least 0.0001"),
        ({"temperature": 10**400}, "temperature", "temperature must be in"),
        ({"top_p": 0}, "top_p", "top_p must be in (0.0, 1.0]"),
        ({"top_p": 2}, "top_p", "nearest setting that works: top_p=1.0"),
        ({"top_k": -2}, "top_k", "nearest setting that works: top_k=0"),
        ({"top_k": 2**40}, "top_k", "top_k must be in"),
        ({"seed": 2**63}, "seed", "seed must be in"),
        ({"seed": 1.5}, "seed", "seed must be an int"),
        ({"seed": 2**63 - 1, "n": 2}, "seed", "seed + n - 1 must be at most"),
        ({"stop": ""}, "stop", "stop must not hold an empty string"),
        ({"stop": 5}, "stop", "stop must be a string"),
        ({"stop": {"a": 1}}, "stop", "stop must be a string"),
        ({"stop": ["a", None]}, "stop", "stop must be a string"),
        ({"stop_token_ids": 5}, "stop_token_ids", "stop_token_ids must be a list of ints"),
        ({"stop_token_ids": [5, 4000]}, "stop_token_ids", "stop_token_ids holds 4000"),
        ({"ignore_eos": 1}, "ignore_eos", "ignore_eos must be a bool"),
        ({"speculate": "no"}, "speculate", "speculate must be a bool"),
        ({"shape": "wide"}, "shape", "shape must be a SpecConfig, or a list of its numbers"),
        ({"shape": [5, 1, 9]}, "shape", "must be num_steps + 1 = 6"),
        ({"shape": [9, 1]}, "shape", "shape must be one that this decoder's rounds may have, got [9, 1, 10]; nearest"),
        ({"n": 0}, "n", "nearest setting that works: n=1"),
        ({"n": 10**9}, "n", "this server takes at most 260 at once"),
        ({"n": 10**4299, "prompt": ["Once"] * 10}, "n", "n must be in [1, 2147483647]"),  # times 10, too long to be shown
        ({"stream": "yes"}, "stream", "stream must be a bool"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
        ({"stream": True, "stream_options": []}, "stream_options", "stream_options must be an object"),
        ({"stream": True, "stream_options": {"include_usag": 1}}, "stream_options.include_usag", "nearest: include_usage"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "must be a bool"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "leave it"),
        ({"max_token": 7}, "max_token", "nearest: max_tokens"),
        ({"max_new_tokens": 7}, "max_new_tokens", "nearest: max_tokens"),
        ({"guided_json": {}}, "guided_json", 'nearest: structured_outputs {"json": ...}'),
        ({"structured_outputs": {"choice": ["a", 3]}}, "structured_outputs.choice", "must be a list of texts"),
        (
            {"structured_outputs": {"json": {"tipe": "object"}}},
            "structured_outputs",
            "json_schema has the unknown keyword 'tipe' at #; ",
        ),
        ({"x" * 5000: 7}, "x" * 100, "there is no such field"),
        ({"messages": []}, "messages", "messages is a field of /v1/chat/completions, not of /v1/completions; nearest: prompt"),
        ({"tools": []}, "tools", "tools is a field of /v1/chat/completions"),
        (
            {"best_of": 2},
            "best_of",
            "best_of is not supported by this server; nearest thing that works: leave it out or send 1",
        ),
        ({"suffix": "x"}, "suffix", "leave it out or send"),
        ({"suffix": "end"}, "suffix", "is not supported"),
    ],
)
def test_a_wrong_field_is_named(served: Served, body: dict[str, Any], param: str, said: str) -> None:
    """Keeps out: fields that are taken and ignored, and errors from deep inside, without the field's name."""
    error = error_of(served.post(PATH, {**GOOD, **body}), 400)
    assert error["param"] == param and said in error["message"] and error["type"] == "invalid_request_error", error


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_that_do_not_fit(served: Served, stream: bool) -> None:
    """Keeps out: a prompt that is cut, a stream that fails after status 200, and an error without the setting that works."""
    fitting = len(served.decoder.generate("Once", SamplingParams(max_tokens=1))[0].prompt_token_ids)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt": [5] * 512}, "expected at most max_seq_len - 1 = 511"),
        ({"prompt": "Once", "max_tokens": 512}, f"nearest setting that works: max_tokens={512 - fitting}"),
        ({"prompt": ["Once", "Once " * 600]}, "prompt[1] has "),
    ]
    for body, said in cases:
        error = error_of(served.post(PATH, {**GOOD, "stream": stream, **body}), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt") and said in error["message"], error
    most = served.post(PATH, {**GOOD, "max_tokens": 512 - fitting, "temperature": 0, "stop": " "})
    assert most.status_code == 200, "the setting that the error proposes does not work"


@pytest.mark.parametrize("prompts", [["Once", ""], [[5], [5000]]])
def test_nothing_runs_if_one_prompt_is_wrong(served: Served, prompts: list[Any]) -> None:
    """Keeps out: half of a request that runs although the answer is an error."""
    before = served.state.decoder.totals.prompt_tokens
    error_of(served.post(PATH, {**GOOD, "prompt": prompts}), 400)
    assert served.state.decoder.totals.prompt_tokens == before and served.state.queue.is_empty


def test_an_unknown_model(served: Served) -> None:
    """Keeps out: a client that believes it talks to another model."""
    error = error_of(served.post(PATH, {**GOOD, "model": "gpt-9"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model") and "model='tiny'" in error["message"]
    assert error_of(served.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        served.client().models.retrieve("org/other")
    (card,) = served.client().models.list().data
    assert card == served.client().models.retrieve("tiny") and (card.id, card.object) == ("tiny", "model")


def test_wrong_paths_and_methods(served: Served) -> None:
    """Keeps out: HTML, redirects and FastAPI's own form of errors, and its pages that load scripts from elsewhere."""
    for path in ("/ui", "/docs", "/redoc", "/openapi.json", "/v1/completions/", "/v1/embeddings", "/v1", "/v1/completion"):
        assert error_of(served.get(path), 404)["code"] == "not_found"
    assert "nearest: /v1/completions" in error_of(served.post("/v1/completion", {}), 404)["message"]
    answer = served.get("/v1/chat/completions")
    assert error_of(answer, 405)["code"] == "method_not_allowed" and answer.headers["allow"] == "POST"
    assert error_of(served.post("/v1/models", {}), 405)["message"].startswith("POST is not what /v1/models takes")


def test_the_client_raises_its_own_errors(served: Served) -> None:
    """Keeps out: errors that the openai package can't read, so that a program sees text instead of a class and a param."""
    with pytest.raises(openai.BadRequestError, match="nearest setting that works: top_p=1.0") as error:
        served.client().completions.create(model="tiny", prompt="Once", top_p=7)
    assert (error.value.param, error.value.type) == ("top_p", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as error:
        served.client().completions.create(model="tiny", prompt="Once", suffix="x", stream=True)
    assert (error.value.param, error.value.code) == ("suffix", "unsupported_parameter")


@pytest.mark.parametrize(("path", "params"), [(COMPLETIONS, CompletionParams), (CHAT, ChatParams)])
def test_every_field_of_the_client_is_known(path: str, params: Any) -> None:
    """Keeps out: a field of OpenAI's that is called a typing mistake, because a newer client has it and no table here does."""
    missing = set(params.__annotations__) | {"stream"}
    assert missing - {*USED_FIELDS[path], *NEUTRAL_VALUES[path], *SILENT_FIELDS} == set()
    assert not set(USED_FIELDS[path]) & set(NEUTRAL_VALUES[path])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is empty"),
        (b"  \n", "the body is empty"),
        (b"{", "not usable JSON"),
        (b"prompt=hi", "not usable JSON"),
        (b"[]", "must be a JSON object, got list"),
        (b'"text"', "must be a JSON object, got str"),
        (b"null", "must be a JSON object, got NoneType"),
        (b'{"model": "tiny", "prompt": "Once", "temperature": NaN}', "NaN is no JSON number"),
        (b'{"model": "tiny", "prompt": "Once", "top_p": -Infinity}', "-Infinity is no JSON number"),
        (b'{"model": "tiny", "prompt": "Once", "temperature": 1e999}', "temperature must be in"),
        (b'{"model": "tiny", "prompt": "Once", "model": "tiny"}', "the key 'model' stands twice"),
        (b'{"model": "tiny", "logit_bias": {"1": 0, "1": 0}, "prompt": "Once"}', "the key '1' stands twice"),
        (
            b'{"model": "tiny", "prompt": "Once", "seed": ' + b"9" * 5000 + b"}",
            "JSON: it holds a number of thousands of digits",
        ),
        (b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"model": "tiny", "prompt": ' + b"[" * 800 + b"]" * 800 + b"}", "prompt must hold"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"model": "tiny", "prompt": "Once", "stop": "\\uDC00x"}', "half of a surrogate pair"),
        (b'{"model": "\\ud800", "prompt": "Once"}', "half of a surrogate pair"),
        (b'{"model": "tiny", "prompt": "Once", "\\ud800": 1}', "half of a surrogate pair"),
        (b'{"model": "tiny", "prompt": "\xff"}', "not UTF-8"),
        (b'\xef\xbb\xbf{"model": "tiny"}', "not usable JSON"),
    ],
)
def test_a_body_that_is_no_object(served: Served, body: bytes, said: str) -> None:
    """Keeps out: a 500 for what any script can send, and values of which JSON knows nothing."""
    assert said in error_of(served.post(PATH, body), 400)["message"]
    assert served.post(PATH, {**GOOD, "max_tokens": 1}).status_code == 200


def test_a_pair_of_surrogates_is_a_character(served: Served) -> None:
    """Keeps out: emoji refused, which many clients write as two escapes."""
    escaped = json.dumps({**GOOD, "prompt": "🙂", "max_tokens": 1, "temperature": 0})
    assert "\\ud83d" in escaped
    assert served.post(PATH, escaped.encode()).status_code == 200


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "text/plain; application/json"])
def test_a_body_of_another_type(served: Served, kind: str) -> None:
    """Keeps out: a web page that starts requests on its reader's machine; browsers send these types without asking first."""
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 1}
    answer = served.post("/v1/completions", body, headers={"content-type": kind})
    assert answer.status_code == 415 and answer.json()["error"]["code"] == "unsupported_media_type"
    assert served.post("/v1/completions", body, headers={"content-type": "Application/JSON; charset=utf-8"}).status_code == 200
