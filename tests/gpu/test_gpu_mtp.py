"""MTP layers on a GPU: drafts against the float64 definition, in float32 and bfloat16, and texts in every graph mode.

Keeps out: a kernel that reads another branch's latents or another layer's rotation; a draft that a replay repeats.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.models import ragged_prompts
from toolkit.mtp_layers.oracle import DenseMtp, MtpPaths
from toolkit.mtp_layers.targets import MtpZoo
from toolkit.oracles.drawn import draw, row_errors, running_decoder

from specdec import SamplingParams, SpecConfig
from specdec.config import GraphMode

pytestmark = pytest.mark.gpu

PROMPTS = ragged_prompts(40, 5, seed=11)
SAMPLING = [SamplingParams(max_tokens=n) for n in (24, 9, 16, 1, 20)]
SAMPLED = [SamplingParams(max_tokens=14, temperature=0.9, seed=seed) for seed in range(5)]
MODES: list[GraphMode] = [
    mode for mode in ("round", "step", False) if str(mode) in os.environ.get("GRAPHS", "round,step,False")
]  # type: ignore[misc]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> MtpZoo:
    return MtpZoo(tmp_path_factory.mktemp("mtp"))


def errors(zoo: MtpZoo, patch: pytest.MonkeyPatch, target: str, spec: SpecConfig, dtype: str) -> list[float]:
    """How far each score and hidden state of one draft is from the layers alone, in float64, along the node's path."""
    settings: dict[str, Any] = {"device": "cuda", "dtype": dtype, "cuda_graphs": False}
    decoder, requests = running_decoder(zoo, target, "mtp", spec, 16, 3, **settings)
    drawn = draw(decoder, spec, 3, patch)
    hf, found = copy.deepcopy(zoo.hf(target)).double(), []
    head = DenseMtp(zoo.target(target), hf)
    for row, request in enumerate(requests):
        alone: Any = MtpPaths(head, hf, request.prompt_ids + request.output.token_ids)
        found += row_errors(drawn, row, alone)
    return sorted(found)


@pytest.mark.parametrize("target", ["v3", "glm4", "mimo", "v3-two"])
@pytest.mark.parametrize("shape", [(4, 4, 16)], ids=str)
def test_float32_drafts_equal_the_definition(
    zoo: MtpZoo, monkeypatch: pytest.MonkeyPatch, target: str, shape: tuple[int, int, int]
) -> None:
    found = errors(zoo, monkeypatch, target, SpecConfig(*shape), "float32")
    print(f"\n{target} {shape} float32: median {found[len(found) // 2]:.2g}, worst {found[-1]:.2g}", end=" ")
    assert found[-1] < 2e-3


@pytest.mark.parametrize("target", ["v3", "glm4", "mimo"])
def test_bfloat16_drafts_are_near_the_definition(zoo: MtpZoo, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """The target's own states are rounded too, and a router may choose another expert of nearly equal score."""
    found = errors(zoo, monkeypatch, target, SpecConfig(4, 4, 16), "bfloat16")
    print(f"\n{target} bfloat16: median {found[len(found) // 2]:.2g}, worst {found[-1]:.2g}", end=" ")
    assert found[len(found) // 2] < 0.1


@pytest.mark.parametrize("target", ["v3", "mimo-two", "glm4", "v32"])
def test_texts_are_the_target_s_in_every_graph_mode(zoo: MtpZoo, target: str) -> None:
    """Two runs: the second replays graphs dirtied by the first.  Of the last targets captured rounds alone, which hold most."""
    plain = zoo.decoder(target, device="cpu", max_batch_size=4)
    expected = [[out.token_ids for out in plain.generate(PROMPTS, each)] for each in (SAMPLING, SAMPLED)]
    for mode in MODES if target in ("v3", "mimo-two") else MODES[:1]:
        for shape, page_size in (((4, 3, 12), 16), ((4, 1, 5), 5)):
            settings: dict[str, Any] = {"device": "cuda", "attention": "triton", "cuda_graphs": mode, "page_size": page_size}
            decoder = zoo.decoder(target, "mtp", SpecConfig(*shape), max_batch_size=4, **settings)
            for _ in range(2):
                found = [[out.token_ids for out in decoder.generate(PROMPTS, each)] for each in (SAMPLING, SAMPLED)]
                assert found == expected, (mode, shape)
            Driver(decoder).assert_nothing_leaked()
