"""A real browser: headless Chromium through Playwright.  Without one the tests skip, and say what is missing.

Where SPECDEC_BROWSER=1 says that there must be one, as CI does, they fail instead.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    program = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None  # type: ignore[assignment]
    missing = [name for name, found in (("chromium", program), ("playwright", sync_playwright)) if not found]
    if missing:
        said = f"needs {' and '.join(missing)}"
        pytest.fail(said) if os.environ.get("SPECDEC_BROWSER") == "1" else pytest.skip(said)
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address, and in the end holds that nothing was said on the console and no script failed."""
    said: list[str] = []
    opened: list[Any] = []

    def opened_page(address: str, width: int = 1200, height: int = 800, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on(
            "request", lambda request: said.append(request.url) if not request.url.startswith((address[:24], "data:")) else 0
        )
        page.goto(address)
        opened.append(context)
        return page

    yield opened_page
    for context in opened:
        context.close()
    assert not said
