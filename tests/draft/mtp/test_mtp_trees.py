"""MTP layers in an engine: each node of a tree is what the layers draft alone along its path, and the text stays the target's.

Keeps out: a branch that reads another branch's latents; an entry of the layers' cache that a chunk, a round or a cached page
left wrong; a drafter that changes the text.
"""

import copy
from typing import Any

import pytest
from toolkit.driver import Driver, Request
from toolkit.models import ragged_prompts
from toolkit.mtp_layers.oracle import DenseMtp, MtpPaths
from toolkit.mtp_layers.targets import MtpZoo
from toolkit.oracles.drawn import TOLERANCE, draw, hold_best_siblings, row_errors, running_decoder

from specdec import SamplingParams, SpecConfig

KEPT = {"prefix_caching": True, "is_known": True}
TREES = [  # target, shape, page size, batch, settings
    ("v3", (3, 3, 10), 16, 2, {}),
    ("mimo", (4, 3, 12), 1, 2, {}),
    ("glm4", (3, 3, 10), 16, 2, {"prefill_chunk": 7}),
    ("v3-two", (4, 2, 8), 16, 2, {}),
    ("hy3", (3, 3, 10), 16, 2, {}),
    ("ernie", (3, 3, 10), 5, 2, {"prefill_chunk": 7}),
    ("mimo-two", (3, 3, 10), 4, 2, KEPT),
    ("mimo-two", (4, 1, 5), 1, 2, {"prefill_chunk": 5}),
    ("glm4-three-normed", (5, 3, 14), 5, 2, {}),
    ("glm4-three-normed", (3, 1, 4), 2, 2, KEPT),
    ("mimo-two", (2, 4, 12), 16, 2, {}),
    ("v3-plain-queries", (5, 1, 6), 1, 2, {}),
    ("glm4", (5, 1, 6), 16, 1, {}),
    ("v3-dense-tied", (3, 5, 20), 1, 1, {}),
    ("hy3-biased-two", (4, 2, 8), 4, 2, {}),
    ("ernie-tied", (4, 1, 5), 16, 1, {}),
    ("mimo-v2", (4, 3, 12), 4, 2, {"prefill_chunk": 5}),
    ("mimo-v2-three", (5, 3, 14), 1, 2, {"prefill_chunk": 3}),
    ("mimo-v2-three", (3, 1, 4), 4, 2, KEPT),
    ("mimo-v2-three", (5, 1, 6), 2, 2, {}),
    ("mimo-v2-three", (2, 4, 9), 16, 2, {}),
]


def alone_of(zoo: MtpZoo, target: str, request: Request) -> Any:
    hf = copy.deepcopy(zoo.hf(target)).double()
    return MtpPaths(DenseMtp(zoo.target(target), hf), hf, request.prompt_ids + request.output.token_ids)


@pytest.mark.slow_cases(keep=4)
@pytest.mark.parametrize(("target", "shape", "page_size", "batch", "settings"), TREES, ids=lambda v: str(v).replace(" ", ""))
def test_every_node_equals_its_own_path(
    mtp_zoo: MtpZoo,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    shape: tuple[int, int, int],
    page_size: int,
    batch: int,
    settings: dict[str, Any],
) -> None:
    """Also holds the target's features, the recycled state and the layer's committed cache: each would move every score."""
    decoder, requests = running_decoder(mtp_zoo, target, "mtp", SpecConfig(*shape), page_size, batch, **settings)
    drawn = draw(decoder, SpecConfig(*shape), batch, monkeypatch)
    for row, request in enumerate(requests):
        alone = alone_of(mtp_zoo, target, request)
        assert max(row_errors(drawn, row, alone)) < TOLERANCE
        hold_best_siblings(drawn, row, alone, shape[1])


TEXTS = [  # target, shape, settings
    ("v3", (4, 1, 5), {"page_size": 16}),
    ("v32", (4, 3, 12), {"page_size": 1}),
    ("glm4", (3, 2, 7), {"page_size": 5, "prefill_chunk": 5}),
    ("mimo", (4, 4, 16), {"prefix_caching": True, "page_size": 4, "prefill_chunk": 5}),
    ("mimo", ("auto", 1, 5), {"prefix_caching": True, "page_size": 4}),
    ("v3", ("auto", 2, 6), {"page_size": 4}),
    ("hy3", (3, 1, 4), {"prefix_caching": True, "page_size": 4}),
    ("ernie", (4, 1, 5), {"prefill_chunk": 5, "page_size": 4}),
    ("glm-dsa", (3, 1, 4), {"page_size": 16}),
    ("glm4-lite", (3, 2, 7), {"page_size": 5}),
    ("mimo-two", (4, 3, 12), {"prefix_caching": True, "page_size": 4, "prefill_chunk": 5}),
    ("v3-two", ("auto", 2, 6), {"prefix_caching": True, "page_size": 4}),
    ("mimo-v2-three", (4, 3, 12), {"prefix_caching": True, "page_size": 4, "prefill_chunk": 5}),
    ("mimo-v2-three", ("auto", 2, 6), {"page_size": 2}),
    ("mimo-v2", (5, 1, 6), {"prefix_caching": True, "page_size": 1}),
]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("target", "shape", "settings"), TEXTS, ids=str)
def test_text_is_the_target_s(mtp_zoo: MtpZoo, target: str, shape: Any, settings: dict[str, Any]) -> None:
    """More prompts than rows; twice, so that cached pages are found; greedy and sampled, and with a cancelled request."""
    decoder = mtp_zoo.decoder(target, "mtp", SpecConfig(*shape), max_batch_size=3, **settings)
    driver = Driver(decoder)
    if shape[0] == "auto":
        driver.script_levels(2, 0, 0, 3, 0, 1)
    prompts = ragged_prompts(40, 4, seed=11)
    for _ in range(2):
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=12))
        assert [out.token_ids for out in outputs] == [mtp_zoo.greedy(target, prompt, 12) for prompt in prompts]
        stream = decoder.stream(prompts[3], SamplingParams(max_tokens=20))
        next(stream)
        stream.close()
    sampled = SamplingParams(max_tokens=9, temperature=1.1, seed=3)
    fast, plain = (decoder.generate(prompts[:2], sampled, speculate=on) for on in (True, False))
    assert [out.token_ids for out in fast] == [out.token_ids for out in plain]
    driver.assert_nothing_leaked()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("target", "shape", "page_size"),
    [
        ("mimo-v2-three", (4, 3, 12), 4),
        ("mimo-v2-three", (5, 1, 6), 16),
        ("mimo-v2", (3, 3, 10), 1),
        ("mimo-two", (4, 3, 12), 16),
    ],
    ids=str,
)
def test_captured_rounds_draft_the_same(mtp_zoo: MtpZoo, target: str, shape: Any, page_size: int) -> None:
    """In float32 on a GPU.  Keeps out: a state of a token before, or a first key, that a graph holds from its capture."""
    prompts, sampling, found = ragged_prompts(40, 4, seed=11), SamplingParams(max_tokens=20), []
    for settings in ({"device": "cuda", "cuda_graphs": "round"}, {"device": "cuda", "cuda_graphs": False}, {"device": "cpu"}):
        spec = SpecConfig(*shape)
        with mtp_zoo.decoder(target, "mtp", spec, page_size=page_size, max_batch_size=3, **settings) as decoder:
            found.append(decoder.generate(prompts, sampling))
    for outputs in found:
        assert [out.token_ids for out in outputs] == [mtp_zoo.greedy(target, prompt, 20) for prompt in prompts]
    for outputs in found[:2]:
        for ours, theirs in zip(outputs, found[2], strict=True):
            assert ours.stats.accepted_per_round == theirs.stats.accepted_per_round
