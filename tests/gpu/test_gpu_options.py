"""Sampling options on a GPU: captured rounds choose what the CPU chooses, without waiting for the host."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from toolkit.driver import Driver
from toolkit.serving.options import NUMBERS, other_number

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.config import GraphMode
from specdec.shipped import draft_folder, prompts_file, target_folder
from specdec.steps import STEPS

pytestmark = pytest.mark.gpu

EACH: list[dict[str, Any]] = [
    {},
    dict(logit_bias={token: -2.0 for token in range(0, 400, 3)}),
    dict(repetition_penalty=1.3),
    dict(presence_penalty=0.8, frequency_penalty=0.5),
    dict(bad_words=["the", "a little", "was", ". "]),
    dict(min_tokens=40, stop_token_ids=list(range(260, 300))),
    dict(temperature=0.9, seed=5, min_p=0.05, logprobs=5),
    dict(
        temperature=0.8, seed=6, top_p=0.9, repetition_penalty=1.2, bad_words=["he had"], logprobs=20,
        logprobs_mode="processed",
    ),
]  # fmt: skip


def load(device: str = "cuda", **settings: Any) -> SpecDecoder:
    merged = {"spec": SpecConfig(5, 4, 16), "dtype": "float32", "max_seq_len": 256, **settings}
    return SpecDecoder.from_pretrained(target_folder(), draft_folder(), device=device, **merged)


def prompts() -> list[str]:
    return [json.loads(line)["prompt"] for line in prompts_file().read_text().splitlines()[: len(EACH)]]


def params() -> list[SamplingParams]:
    return [SamplingParams(max_tokens=48, **each) for each in EACH]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The ids of plain decoding on the CPU, each request alone in its batch."""
    decoder = load("cpu", max_batch_size=1)
    return [decoder.generate(text, one, speculate=False)[0].token_ids for text, one in zip(prompts(), params(), strict=True)]


@pytest.mark.parametrize("spec", [SpecConfig(5, 4, 16), SpecConfig(5, 1, 6)], ids=str)
@pytest.mark.parametrize("cuda_graphs", ["round", "step", False])
def test_float32_ids_equal_the_cpu_s(spec: SpecConfig, cuda_graphs: GraphMode, expected: list[list[int]]) -> None:
    """Keeps out: counts that a capture's warm-ups leave behind; tables that a graph reads at an old address; rows that move
    away from their rules.  Eight requests on five rows: graphs of many needs are captured, and replayed by other rows."""
    decoder = load(spec=spec, cuda_graphs=cuda_graphs, max_batch_size=5)
    for speculate in (True, True, False):
        outputs = decoder.generate(prompts(), params(), speculate=speculate)
        assert [out.token_ids for out in outputs] == expected
    assert decoder.generate(prompts()[0], params()[0])[0].token_ids == expected[0]


def test_bfloat16_rounds_are_their_phases() -> None:
    """A round as one graph and as a graph a phase computes the same numbers, so all ids and log-probabilities are equal."""
    outputs = [load(dtype="bfloat16", cuda_graphs=graphs).generate(prompts(), params()) for graphs in ("round", "step")]
    assert [out.token_ids for out in outputs[0]] == [out.token_ids for out in outputs[1]]
    assert [out.logprobs for out in outputs[0]] == [out.logprobs for out in outputs[1]]
    for out, one in zip(outputs[0], params(), strict=True):
        assert (out.logprobs is None) == (one.logprobs is None)


def test_bfloat16_logprobs_are_the_target_s_own() -> None:
    """They differ from those of other passes over the same ids by what the layers round, 1e-2 on average; logits in float32
    would hardly change that (benchmarks/texts/logprob_rounding.py).  Keeps out: numbers of another node, which differ by whole
    units."""
    decoder, places = load(dtype="bfloat16"), range(48)
    (out,) = decoder.generate(prompts()[0], SamplingParams(max_tokens=48, logprobs=3))
    texts = [out.prompt_token_ids + out.token_ids[:at] for at in places]
    forced = decoder.generate(texts, SamplingParams(max_tokens=1, logprobs=3))
    assert out.logprobs is not None
    off = []
    for mine, one in zip(out.logprobs, forced, strict=True):
        assert one.logprobs is not None
        off.append(abs(mine.logprob - one.logprobs[0].top[mine.token]))
    print(f"bfloat16 log-probabilities are off by {sum(off) / len(off):.4f} on average, at most {max(off):.4f}")
    assert sum(off) / len(off) < 1e-2 and max(off) < 0.25, off


def test_no_phase_of_them_waits_for_the_device() -> None:
    """Keeps out: a host read in a step that only some batches run."""
    decoder = load(cuda_graphs=False)
    driver = Driver(decoder)
    everything = {name: other_number(name) for name in NUMBERS}
    everything |= {key: value for each in EACH for key, value in each.items()}
    request = driver.submit(prompts()[0], SamplingParams(**everything))
    while not driver.running:
        driver.step()
    # Masks come from the host, and texts wait for them; the others are of drafters with several sources.
    assert request.choice.needs.steps == {*STEPS} - {"grammar", "waits", "prediction", "sources"}, request.choice.needs
    torch.cuda.set_sync_debug_mode("error")
    try:
        driver.run_phases(1, SpecConfig(5, 4, 16))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    driver.cancel_all()
