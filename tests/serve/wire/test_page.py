"""The playground's files, and the trees that requests may ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from toolkit.serving.server import Served

from specdec import SamplingParams, SpecDecoder
from specdec.generation import Round
from specdec.serve.page.files import PATHS
from specdec.serve.wire.fields import CHAT, COMPLETIONS
from specdec.trace.trace import round_as_json


def test_files_are_static_and_guarded(served: Served, pair: SpecDecoder) -> None:
    """Keeps out: a page that another site can frame or add scripts to, that wants a key, or that --no-page leaves there."""
    for path in PATHS:
        answer = served.get(path)
        policy = answer.headers["content-security-policy"]
        assert answer.status_code == 200 and "unsafe" not in policy and "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy and answer.headers["x-content-type-options"] == "nosniff"
        assert answer.text and "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
    assert served.get("/page/../options.py").status_code == 404 and served.get("/page/x.js").status_code == 404
    assert served.post("/").status_code == 405
    with Served(pair, api_key="secret") as locked:
        assert all(locked.get(path).status_code == 200 for path in PATHS)
        assert locked.get("/page/secret").status_code == locked.get("/v1/models").status_code == 401
    with Served(pair, page=False) as bare:
        assert [bare.get(path).status_code for path in PATHS] == [404] * len(PATHS)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_trees_come_where_they_are_asked_for(chat_served: Served, path: str) -> None:
    """Keeps out: rounds of another choice, that a stream loses, or that nobody asked for; token texts that are missing."""
    messages = [{"role": "user", "content": "hé"}]
    ask: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "temperature": 0.7, "seed": 5, "n": 2, "return_trees": True}
    ask |= {"messages": messages} if path == CHAT else {"prompt": "Once upon"}
    params = SamplingParams(max_tokens=24, temperature=0.7, seed=5, n=2)
    done = chat_served.decoder.generate(messages if path == CHAT else "Once upon", params, trees=True)
    wanted = [[round_as_json(each) for each in out.rounds or list[Round]()] for out in done]
    said = [choice["specdec"] for choice in chat_served.post(path, ask).json()["choices"]]
    assert [each["rounds"] for each in said] == wanted and [each["origins"] for each in said] == [out.origins for out in done]
    for each, out in zip(said, done, strict=True):
        assert each["pieces"] == [chat_served.decoder.tokenizer.piece(token) for token in out.token_ids]
        assert {*each["texts"]} == {str(t) for made in out.rounds or () for t in (*made.tree.tokens, *made.tree.chosen)}
    found: list[list[Any]] = [[], []]
    for line in chat_served.post(path, {**ask, "stream": True}).text.split("\n\n"):
        if line.startswith("data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            found[choice["index"]] += choice["specdec"]["rounds"]
    assert found == wanted
    assert '"specdec":{' not in chat_served.post(path, {**ask, "return_trees": False}).text.replace(" ", "")
    wrong = chat_served.post(path, {**ask, "return_trees": 1})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "return_trees"
