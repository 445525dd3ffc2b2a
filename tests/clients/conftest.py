"""Programs that others wrote, against the server.

Without SPECDEC_CLIENTS=1 these tests skip; with it, as in CI's step "clients", one that is not installed is a failure.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toolkit.serving.scripted import save_scripted
from toolkit.serving.server import Served

from specdec import SpecConfig, SpecDecoder, shipped

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
# A thought, a call, and after a tool's answer (which ends with "9") content alone.
SCRIPT = {
    ":": "<think>", "<think>": "h", "h": "</think>", "</think>": "<tool_call>", "</tool_call>": "</s>", "9": "O", "O": "k",
    "k": "</s>",
}  # fmt: skip
CALLER_TEMPLATE = (
    "{% for m in messages %}{{ m.content or '' }};{% endfor %}{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% if messages[-1].role == 'tool' %}9{% else %}:{% endif %}{# <tool_call> </think> #}"
)
# Nothing here is fetched, neither models nor litellm's prices.
os.environ |= {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@pytest.fixture(scope="session", autouse=True)
def asked_for() -> None:
    if os.environ.get("SPECDEC_CLIENTS") != "1":
        pytest.skip("needs SPECDEC_CLIENTS=1, and the packages of .ci/clients.txt")


@pytest.fixture(scope="session")
def chat_target(asked_for: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped target with a chat template, under which it goes on with the last message as with any text."""
    folder = tmp_path_factory.mktemp("chat") / "target"
    folder.mkdir()
    for file in shipped.target_folder().iterdir():
        (folder / file.name).symlink_to(file)
    config = folder / "tokenizer_config.json"
    read = json.loads(config.read_text())
    config.unlink()
    config.write_text(json.dumps({**read, "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def pair_served(chat_target: Path) -> Iterator[Served]:
    """A server over the shipped pair in float32, with kept prefixes, as evaluators would meet it."""
    with SpecDecoder.from_pretrained(
        chat_target, shipped.draft_folder(), device="cpu", dtype="float32", max_batch_size=4, prefix_caching=True
    ) as decoder:
        with Served(decoder) as server:
            yield server


@pytest.fixture(scope="session", params=["plain", "speculating"])
def caller_served(
    request: pytest.FixtureRequest, asked_for: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server over a target that thinks and then calls a tool by itself, without a drafter and with one."""
    target = save_scripted(tmp_path_factory.mktemp("scripted"), SCRIPT, CALLER_TEMPLATE)
    how: tuple[Any, ...] = ("ngram", SpecConfig(4, 2, 9)) if request.param == "speculating" else ()
    with SpecDecoder.from_pretrained(target, *how, device="cpu", max_batch_size=4) as decoder, Served(decoder) as server:
        yield server


@pytest.fixture(scope="session")
def shipped_served(asked_for: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server over the shipped pair with a template that tells of tools, which it calls only where it must."""
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text("{{ messages[0].content }}{% if tools %} {{ tools[0].function.name }}{% endif %}{# <tool_call> #}")
    with (
        SpecDecoder.from_pretrained(
            shipped.target_folder(), shipped.draft_folder(), device="cpu", max_batch_size=4, chat_template=template
        ) as decoder,
        Served(decoder) as server,
    ):
        yield server
