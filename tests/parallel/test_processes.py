"""Decoders over processes: what they write, and how they end when a rank fails."""

import multiprocessing
import os
import signal
import time

import pytest
from toolkit.models import Zoo, ragged_prompts

from specdec import SamplingParams, SpecConfig, SpecDecoder

SPEC = SpecConfig(num_steps=3, topk=3, num_draft_tokens=8)
SETTINGS = {"device": "cpu", "max_seq_len": 80, "threads": 1}
SAMPLINGS = [SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=0.9, seed=3)]


def load(zoo: Zoo, size: int) -> SpecDecoder:
    pair = zoo.target("qwen3"), zoo.head("qwen3", "eagle3")
    return SpecDecoder.from_pretrained(*pair, SPEC, **SETTINGS, tensor_parallel_size=size)  # type: ignore[arg-type]


@pytest.mark.slow
def test_two_processes_write_what_one_writes(zoo: Zoo) -> None:
    """Keeps out: steps that do not reach the other rank, or in another order; a process that stays after `close`."""
    prompts = ragged_prompts(40, 2, seed=5)
    with load(zoo, 1) as decoder:
        want = [out.token_ids for out in decoder.generate(prompts, SAMPLINGS)]
    with load(zoo, 2) as decoder:
        for _ in range(2):
            assert [out.token_ids for out in decoder.generate(prompts, SAMPLINGS)] == want
        assert len(multiprocessing.active_children()) == 1
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_requests(zoo: Zoo) -> None:
    """Keeps out: a request that waits for ever for a rank that is gone."""
    with load(zoo, 2) as decoder:
        (child,) = multiprocessing.active_children()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            decoder.generate(ragged_prompts(40, 1, seed=5), SAMPLINGS[0])
        assert time.monotonic() - began < 10
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_sizes_that_do_not_fit_are_refused(zoo: Zoo) -> None:
    """Keeps out: a refusal that leaves a process behind, or comes as another rank's traceback."""
    with pytest.raises(ValueError, match="tensor_parallel_size 3 does not fit 4 attention heads; nearest .*: 2"):
        load(zoo, 3)
    assert not multiprocessing.active_children()
