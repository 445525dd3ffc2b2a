"""Targets whose layer kinds have heads of their own write what transformers writes, in float32, whatever the tree.

Keeps out: a token that moves in the layers of one kind alone, a slot of another kind's width, a ring or a cached page that
holds keys of one kind only, and a layer that reads with another kind's sinks or rotation.
"""

import pytest
import toolkit.heads.block_zoo
import toolkit.unlike.targets  # noqa: F401 (and its targets)
from toolkit.drafters import Substitute
from toolkit.driver import Driver
from toolkit.models import Zoo
from toolkit.oracles.texts import LENGTHS, PROMPTS, hold_captured_text, hold_text

from specdec import SamplingParams, SpecConfig, SpecDecoder

# target, head, shape, page size, rows, tokens of a chunk
CASES = [
    ("mimo", "eagle3", (4, 4, 14), 1, 3, 7),
    ("mimo", "eagle1", (5, 1, 6), 16, 2, 64),
    ("mimo", "ngram", (3, 2, 6), 4, 1, 10),
    ("mimo", None, None, 16, 2, 1024),
    ("mimo-alike", "eagle3", (5, 8, 32), 5, 4, 9),
    ("gemma", "eagle3", (4, 4, 14), 1, 3, 7),
    ("gemma", "eagle1", (5, 1, 6), 16, 2, 64),
    ("gemma", None, None, 4, 2, 1024),
    ("gemma-small", "eagle3", (5, 8, 32), 16, 4, 9),
    ("gemma-small", "ngram", (4, 1, 5), 1, 2, 10),
    ("gemma-mixture", "eagle3", (4, 4, 14), 5, 3, 7),
    ("gemma-mixture", "dspark", (4, 3, 12), 16, 3, 9),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("target", "head", "shape", "page_size", "rows", "chunk"), CASES, ids=lambda v: str(v).replace(" ", "")
)
def test_text_is_transformers(
    zoo: Zoo, target: str, head: str | None, shape: tuple[int, int, int] | None, page_size: int, rows: int, chunk: int
) -> None:
    """More prompts than rows, so that rows leave, move and enter in the middle of others' rounds."""
    spec = None if shape is None else SpecConfig(*shape)
    decoder = zoo.decoder(target, head, spec, page_size=page_size, max_batch_size=rows)
    outputs = hold_text(zoo, target, decoder, chunk)
    if spec is not None:
        _expect_long_paths(decoder, spec, {tuple(out.prompt_token_ids): out.token_ids for out in outputs})
    Driver(decoder).assert_nothing_leaked()


def _expect_long_paths(decoder: SpecDecoder, spec: SpecConfig, texts: dict[tuple[int, ...], list[int]]) -> None:
    """The same texts, where a drafter that knows them puts them on a path of each tree: random heads are seldom right."""
    driver = Driver(decoder)
    driver.replace_drafter(Substitute(driver, spec, "oracle", 40, texts))
    outputs = decoder.generate(PROMPTS, [SamplingParams(max_tokens=max(1, n - 8)) for n in LENGTHS])
    for out in outputs:
        assert out.token_ids == texts[tuple(out.prompt_token_ids)][: len(out.token_ids)]
    assert sum(out.stats.accepted for out in outputs) > sum(len(out.token_ids) for out in outputs) / 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("target", "shape", "page_size"),
    [("gemma wide", (4, 4, 14), 5), ("gemma-small wide", (5, 8, 32), 16), ("gemma-mixture wide", (5, 1, 6), 1)]
    + [("mimo wide", (4, 4, 14), 16)],
    ids=str,
)
def test_captured_rounds_write_the_same(zoo: Zoo, target: str, shape: tuple[int, int, int], page_size: int) -> None:
    """Keeps out: a table of one kind's positions, or a slot of one kind's width, that a graph holds from its capture."""
    hold_captured_text(zoo, target, shape, page_size)
