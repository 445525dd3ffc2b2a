"""Which keys a segment calls fresh, held against what its layer stored: kernels read all others before they have waited.

Shapes: R rows, T tokens of a pass.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from toolkit.heads.block_zoo import HEADS
from toolkit.models import Zoo, ragged_prompts
from torch import Tensor

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.inputs import LayerCall
from specdec.attention.segment import Segment
from specdec.batch.trees import tables
from specdec.draft.block.rounds import passes
from specdec.draft.eagle import worker

CASES = [  # head, shape, settings
    ("eagle3", (4, 1, 5), {"page_size": 4, "prefill_chunk": 5}),
    ("eagle1", (3, 3, 9), {"page_size": 4, "prefix_caching": True}),
    ("p-eagle", (4, 2, 7), {"page_size": 4, "prefill_chunk": 5}),
    ("dflash", (4, 1, 5), {"page_size": 1}),
    ("dflash-mixed", (3, 4, 18), {"page_size": 4, "prefill_chunk": 5}),
    ("dflash2", (3, 4, 18), {"page_size": 4, "prefill_chunk": 5}),
]

assert {case[0] for case in CASES} - HEADS.keys() == {"eagle3", "eagle1"}  # the import makes the other heads known


def old_slots(segment: Segment) -> set[int]:
    """The slots of all keys that the segment does not call fresh."""
    found: set[int] = set()
    counts_R = segment.cu_seqlens_q.diff().tolist()
    for row, (length, queries) in enumerate(zip(segment.cache_seqlens.tolist(), counts_R, strict=True)):
        old = {"none": length, "queries": length - queries, "all": 0}[segment.fresh]
        positions = torch.arange(max(old, 0))
        found.update(segment.pages._replace(table=segment.pages.table[row : row + 1]).slots_at(positions[None])[0].tolist())
    return found


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Every segment's mark, and under "wrong" those of which some old key was stored by the layer that reads it."""
    marks: dict[str, list[str]] = {"told": [], "wrong": []}
    attend = LayerCall.attend

    def checked(self: LayerCall, q_THD: Tensor, view: Any = None) -> Tensor:
        stored = set(self.slots_T.tolist())
        for segment in self.plan.segments:
            marks["told"].append(segment.fresh)
            marks["wrong"] += [segment.fresh] if stored & old_slots(segment) else []
        return attend(self, q_THD, view)

    monkeypatch.setattr(LayerCall, "attend", checked)
    return marks


def generate(decoder: SpecDecoder) -> None:
    """Prompts of several chunks, rows of different lengths, and twice, so that cached pages are found where they are kept."""
    for _ in range(2):
        decoder.generate(ragged_prompts(40, 5), SamplingParams(max_tokens=12))
    decoder.generate(ragged_prompts(40, 3), SamplingParams(max_tokens=4), speculate=False)


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("head", "shape", "settings"), CASES, ids=str)
def test_no_key_is_called_old_that_the_layer_has_just_stored(
    zoo: Zoo, seen: dict[str, list[str]], head: str, shape: tuple[int, int, int], settings: dict[str, Any]
) -> None:
    """Keeps out: attention that reads a key before it is stored, which on a GPU is a race that few runs show."""
    generate(zoo.decoder("llama", head, SpecConfig(*shape), max_batch_size=3, **settings))
    assert not seen["wrong"]
    assert {"queries", "none"} & set(seen["told"]), "builders say of some segments what is old"


@pytest.mark.parametrize(("module", "head"), [(tables, "eagle3"), (worker, "eagle3"), (passes, "p-eagle")], ids=str)
def test_a_wrong_mark_would_be_found(zoo: Zoo, seen: dict[str, list[str]], module: Any, head: str, monkeypatch: Any) -> None:
    """Keeps out: a check above that can't fail."""
    build = module.causal_segment
    monkeypatch.setattr(module, "causal_segment", lambda *args: replace(build(*args), fresh="none"))
    generate(zoo.decoder("llama", head, SpecConfig(4, 1, 5), max_batch_size=3, page_size=4))
    assert seen["wrong"]
