"""Rows step back and grow on a GPU: captured rounds read what page tables say now, to the bit where that is asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.driver import Driver
from toolkit.inside.stepping import OPTIONS, PENALTIES, hold
from toolkit.models import Zoo, save_eagle3, save_target

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.shipped import draft_folder, target_folder

pytestmark = pytest.mark.gpu

CHAIN, TREE = SpecConfig(5, 1, 6), SpecConfig(3, 4, 12)
SMALL: dict[str, Any] = {"device": "cuda", "page_size": 16, "max_batch_size": 4, "max_seq_len": 256}


@pytest.mark.parametrize(
    ("spec", "settings"),
    [(TREE, {"prefix_caching": True}), (CHAIN, {}), (TREE, {"cuda_graphs": "step"}), (CHAIN, {"cuda_graphs": False})],
    ids=str,
)
def test_nobody_sees_that_rows_step_back(spec: SpecConfig, settings: dict[str, Any]) -> None:
    """Keeps out: a captured round or chunk that goes on with pages which its row no longer has."""
    pair = target_folder(), draft_folder()
    with SpecDecoder.from_pretrained(*pair, spec, dtype="float32", **SMALL, **settings) as decoder:
        for seed in range(2):  # the second time with graphs of chunks
            hold(decoder, OPTIONS, seed)


@pytest.mark.parametrize("spec", [TREE, CHAIN], ids=str)
def test_in_deterministic_mode_nothing_changes_to_the_bit(spec: SpecConfig) -> None:
    """Keeps out: keys and values of a text that was read again which differ from those that rounds had written."""
    pair = target_folder(), draft_folder()
    for caching in (False, True):
        settings = {"dtype": "bfloat16", "deterministic": True, "prefix_caching": caching, **SMALL}
        with SpecDecoder.from_pretrained(*pair, spec, **settings) as decoder:
            hold(decoder, OPTIONS, exact=True)


def test_grammars_go_on_where_they_were(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", "bytes", eos_token_id=383)
    head = save_eagle3(tmp_path / "head", target)
    with SpecDecoder.from_pretrained(target, head, TREE, dtype="float32", smoke=False, **SMALL) as decoder:
        hold(
            decoder, [dict(regex="[a-z]{2,9}( [0-9]{1,3}é)*"), dict(PENALTIES, regex="([a-z]{2,4} )*", temperature=0.7, seed=1)]
        )


@pytest.fixture()
def crowded(zoo: Zoo) -> Iterator[SpecDecoder]:
    settings = {**SMALL, "max_seq_len": 96, "page_size": 2, "cuda_graphs": False}  # a capture waits
    with SpecDecoder.from_pretrained(
        zoo.target("llama"), zoo.head("llama", "eagle3"), TREE, dtype="float32", smoke=False, **settings
    ) as decoder:
        yield decoder


def test_nobody_waits_for_the_device_when_rows_grow_or_step_back(crowded: SpecDecoder) -> None:
    """Keeps out: a page table that is written by a synchronous copy, which stalls every round of a full pool."""
    driver, chance = Driver(crowded), random.Random(2)
    driver.expect_short_outputs()
    prompts = [[chance.randrange(40) for _ in range(8)] for _ in range(6)]
    sampling = SamplingParams(max_tokens=48)
    want = [out.token_ids for out in crowded.generate(prompts, sampling)]  # every kernel is compiled
    before = driver.stepped_back[0]
    with driver.leave_room_for(56):
        requests = [driver.submit(prompt, sampling) for prompt in prompts]
        torch.cuda.set_sync_debug_mode("error")
        try:
            driver.run_until_idle()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert driver.stepped_back[0] - before >= 3
    assert [request.output.token_ids for request in requests] == want
    driver.assert_nothing_leaked()
