"""Chunks and rounds in one pass on a GPU: as one graph it writes what the CPU writes without speculation."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from toolkit.driver import Driver

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.shipped import draft_folder, prompts_file, target_folder

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_tokens=48)
SAMPLED = SamplingParams(max_tokens=48, temperature=0.8, top_p=0.9, seed=5)


def prompts(count: int) -> list[str]:
    return [json.loads(line)["prompt"] for line in prompts_file().read_text().splitlines()[:count]]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """By the torch backend on the CPU, without speculation: greedy and sampled texts by turns."""
    decoder = SpecDecoder.from_pretrained(target_folder(), device="cpu", max_seq_len=256)
    outputs = decoder.generate(prompts(12), [(GREEDY, SAMPLED)[row % 2] for row in range(12)])
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("cuda_graphs", ["round", "step", False])
def test_prompts_that_arrive_beside_rounds(head: bool, cuda_graphs: Any, expected: list[list[int]]) -> None:
    """Keeps out: a captured pass that remembers rows, prompts or lengths; padding that reaches a row; a graph's result that
    another graph of the pool has overwritten before it is read."""
    decoder = SpecDecoder.from_pretrained(
        target_folder(),
        draft_folder() if head else None,
        SpecConfig(5, 1, 6) if head else None,
        device="cuda",
        dtype="float32",
        max_seq_len=256,
        max_batch_size=6,
        cuda_graphs=cuda_graphs,
    )
    driver = Driver(decoder)
    seen = driver.mix(48)
    driver.set_chunk(64)
    driver.poison_free_slots(torch.nan)
    for turn in range(6):  # each shape runs eagerly twice, and is captured then
        asked = []
        for row, text in enumerate(prompts(12)):
            speculate = head and (row + turn) % 3 > 0
            asked.append(driver.submit(text, (GREEDY, SAMPLED)[row % 2], speculate))
            for _ in range(3):
                driver.step()
        driver.run_until_idle()
        assert [request.output.token_ids for request in asked] == expected
    driver.assert_nothing_leaked()
    assert len(seen) > 12 and (driver.num_graphs("mixed") > 2) == bool(cuda_graphs)


def test_which_decoders_mix() -> None:
    """Keeps out: a mixed pass of trees or in deterministic mode, whose rows must not depend on what is computed with them."""
    folders = target_folder(), draft_folder()
    chain, tree = SpecConfig(5, 1, 6), SpecConfig(5, 4, 16)
    for spec, settings, mixes in (
        (chain, {}, True),
        (chain, {"deterministic": True}, False),
        (chain, {"cuda_graphs": False}, False),
        (tree, {}, False),
        (SpecConfig("auto"), {}, False),
    ):
        decoder = SpecDecoder.from_pretrained(*folders, spec, device="cuda", max_seq_len=256, **settings)  # type: ignore[arg-type]
        driver = Driver(decoder)
        assert driver.mixes == mixes, (spec, settings)
