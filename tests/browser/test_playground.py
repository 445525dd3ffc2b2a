"""The server's page, in a real browser, over the shipped pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.serving.scripted import save_scripted
from toolkit.serving.server import Served
from toolkit.serving.traces import HOSTILE

from specdec import SamplingParams, SpecConfig, SpecDecoder, shipped

DONE = "#run:not([disabled])"


@pytest.fixture(scope="module")
def pair() -> Iterator[SpecDecoder]:
    settings: dict[str, Any] = {"device": "cpu", "max_batch_size": 4, "max_seq_len": 256}
    with SpecDecoder.from_pretrained(shipped.target_folder(), shipped.draft_folder(), **settings) as decoder:
        yield decoder


def run(page: Any, prompt: str, tokens: int) -> None:
    page.fill("#prompt", prompt)
    page.fill("#max-tokens", str(tokens))
    page.click("#run")
    page.wait_for_selector("#run[disabled]", state="detached")
    page.wait_for_selector(DONE)


def test_it_streams_and_compares(pair: SpecDecoder, open_page: Callable[..., Any]) -> None:
    """Keeps out: another text than the decoder's, a tree of another round, speeds that are not shown, keys that do nothing."""
    (want,) = pair.generate("Once upon a time", SamplingParams(max_tokens=40), trees=True)
    with Served(pair) as server:
        page = open_page(server.url + "/", 390, 800, "dark")
        page.get_by_text("model tiny").wait_for()  # no script of ours: the page's policy lets none be evaluated while it waits
        run(page, "Once upon a time", 40)
        assert page.text_content("#text") == want.text
        assert page.inner_text("#speeds").count("tok/s") == 2 and "the same text" in page.inner_text("#speeds")
        assert page.inner_text("#error") == "" and page.is_hidden("#key-row")
        page.locator("h1").click()
        for number in range(len(want.rounds or ()), 0, -1):
            each = (want.rounds or [])[number - 1]
            assert page.inner_text("#where").startswith(f"round {number} of {len(want.rounds or ())}: {each.accepted} of")
            shown = page.evaluate("[...document.querySelectorAll('#tree .node')].map((node) => Number(node.dataset.token))")
            assert shown[:-1] == each.tree.tokens and shown[-1] == each.tree.chosen[each.path[-1]]
            page.keyboard.press("ArrowLeft")
        page.wait_for_selector("#depth .bar")
        assert "running" in page.inner_text("#load") and f" of {Driver(pair).pages_total}" in page.inner_text("#load")
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        page.context.close()


@pytest.mark.parametrize("hostile", [HOSTILE[0], HOSTILE[2], HOSTILE[3][:200], HOSTILE[4]])
def test_hostile_prompts_stay_texts(pair: SpecDecoder, open_page: Callable[..., Any], hostile: str) -> None:
    """Keeps out: a prompt that becomes an element or runs, and an answer that makes the page wider than its window."""
    with Served(pair) as server:
        page = open_page(server.url + "/", 390, 800)
        page.uncheck("#compare")
        run(page, hostile, 20)
        assert page.evaluate("document.querySelectorAll('script').length") == 4 and page.inner_text("#error") == ""
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        page.context.close()


def test_errors_and_keys(pair: SpecDecoder, browser: Any) -> None:
    """Keeps out: a key that outlives the page or is asked for in vain, a refusal that nobody sees."""
    with Served(pair, api_key="secret") as server:
        page = browser.new_context().new_page()
        page.goto(server.url + "/")
        page.wait_for_selector("#key-row:not([hidden])")
        run(page, "Once", 5)
        assert "key" in page.inner_text("#error")
        page.fill("#key", "secret")
        run(page, "Once", 5)
        assert page.inner_text("#error") == "" and page.text_content("#text")
        run(page, "Once", 100_000)
        assert "max_tokens" in page.inner_text("#error")
        assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        page.context.close()


def test_thoughts_are_shown_and_counted(open_page: Callable[..., Any], tmp_path: Path) -> None:
    """Keeps out: an answer that looks empty while the model thinks, and a speed that counts its tokens and not its time."""
    script = {":": "<think>", "<think>": "h", "h": "i", "i": "</think>", "</think>": "L", "L": "o", "o": "</s>"}
    target = save_scripted(tmp_path, script)
    with SpecDecoder.from_pretrained(target, "ngram", SpecConfig(4, 2, 9), device="cpu") as decoder, Served(decoder) as server:
        page = open_page(server.url + "/", 390, 800)
        page.select_option("#mode", "chat")
        run(page, "a", 20)
        assert page.text_content("#text") == "hi\n\nLo" and page.text_content("#text .thought") is not None
        thought = page.evaluate("[...document.querySelectorAll('#text .thought')].map((each) => each.textContent).join('')")
        assert thought == "hi" and "the same text" in page.inner_text("#speeds")
        page.context.close()


def test_several_sources_have_a_legend(open_page: Callable[..., Any]) -> None:
    """Keeps out: a token or a node in a colour that no key explains, and a key to what is not there."""
    drafts, settings = [str(shipped.draft_folder()), "suffix"], {"device": "cpu", "max_seq_len": 256, "smoke": False}
    said = "[...document.querySelectorAll('#legend .source')].map((key) => key.textContent)"
    with SpecDecoder.from_pretrained(shipped.target_folder(), drafts, **settings) as joined, Served(joined) as server:  # type: ignore[arg-type]
        page = open_page(server.url + "/", 390, 800)
        page.uncheck("#compare")
        run(page, "Tom said no. Lily said no. Tom said no. Lily said", 30)
        assert page.evaluate(said) == ["from drafter", "from suffix", "several sources"]
        kinds = "[...document.querySelectorAll('#text .source')].map((token) => token.classList[3])"
        assert {*page.evaluate(kinds)} <= {"drafter", "suffix", "several"} and len({*page.evaluate(kinds)}) > 1
        tops = "[...document.querySelectorAll('#before, #after, #where')].map((e) => e.getBoundingClientRect().bottom)"
        assert max(page.evaluate(tops)) - min(page.evaluate(tops)) < 20, "a round's buttons stand in two lines"
        page.context.close()
