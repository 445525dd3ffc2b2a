"""Each node's score is the sum of what the small model alone says along that node's path (transformers, float64, no cache).

Keeps out: a branch that reads another branch's keys, a bonus token that nobody read, positions one off.
"""

from __future__ import annotations

import pytest
from toolkit.heads.kinds.small_models import AloneModel
from toolkit.models import Zoo
from toolkit.oracles.drawn import TOLERANCE, draw, hold_best_siblings, row_errors, running_decoder

from specdec import SpecConfig

CASES = [  # target, drafter, shape, page size, batch, whether prompts are cached
    ("llama", "model-near", (4, 4, 16), 1, 3, False),
    ("llama", "model-llama", (4, 3, 12), 16, 3, True),
    ("qwen2", "model-window", (5, 2, 12), 5, 2, False),  # windows that end inside of the tree
    ("mistral", "model-narrow", (5, 3, 16), 4, 2, False),
    ("qwen3", "model-differential", (3, 3, 12), 4, 2, True),
    ("qwen3", "model-mixed", (5, 1, 6), 16, 3, False),
    ("llama", "model-near", (4, 1, 5), 4, 1, True),
]


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize(("target", "drafter", "shape", "page_size", "batch", "is_known"), CASES, ids=str)
def test_every_node_equals_its_own_path(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, target: str, drafter: str, shape: tuple[int, int, int], page_size: int,
    batch: int, is_known: bool,
) -> None:  # fmt: skip
    settings = {"prefix_caching": True} if is_known else {}
    spec = SpecConfig(*shape)
    decoder, requests = running_decoder(zoo, target, drafter, spec, page_size, batch, is_known=is_known, **settings)
    drawn = draw(decoder, spec, batch, monkeypatch)
    for row, request in enumerate(requests):
        alone = AloneModel(zoo, target, drafter, request.prompt_ids + request.output.token_ids)
        assert max(row_errors(drawn, row, alone)) < TOLERANCE
        hold_best_siblings(drawn, row, alone, shape[1])
