"""What the tests of the HTTP server share: the shipped pair, a tiny pair that can chat, and a server over each."""

import json
from collections.abc import Iterator

import pytest
from toolkit.driver import Driver
from toolkit.models import save_eagle3, save_target
from toolkit.serving.server import Served

from specdec import SpecConfig, SpecDecoder, shipped

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}|{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def pair() -> Iterator[SpecDecoder]:
    """The shipped pair."""
    with SpecDecoder.from_pretrained(
        shipped.target_folder(), shipped.draft_folder(), device="cpu", max_batch_size=4
    ) as decoder:
        yield decoder


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpecDecoder]:
    """A tiny random pair whose tokens are bytes, so that characters span tokens, with a chat template."""
    folder = tmp_path_factory.mktemp("chatty")
    target = save_target(folder / "target", "bytes")
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    head = save_eagle3(folder / "head", target)
    with SpecDecoder.from_pretrained(
        target, head, SpecConfig(2, 2, 4), device="cpu", dtype="float32", max_seq_len=128, max_batch_size=4
    ) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def served(pair: SpecDecoder) -> Iterator[Served]:
    """A server over the shipped pair.  Afterwards no request may be left in the engine."""
    with Served(pair) as server:
        yield server
    Driver(pair).assert_nothing_leaked()


@pytest.fixture(scope="module")
def chat_served(chatty: SpecDecoder) -> Iterator[Served]:
    """A server over the tiny pair that can chat."""
    with Served(chatty) as server:
        yield server
    Driver(chatty).assert_nothing_leaked()
