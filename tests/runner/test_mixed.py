"""A round and a chunk in one pass: it leaves behind what the round and then the chunk leave.

The oracle is the same pass as two, which a runner makes of it while phases are timed.  The whole texts of random requests in
such passes are held in tests/lossless/test_random_traffic.py.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
from toolkit.driver import Driver
from toolkit.models import Zoo
from toolkit.oracles.reference import ReferenceBackend

from specdec import SamplingParams, SpecConfig
from specdec.batch.ragged import ChunkShape
from specdec.ops.cuda_graph import GraphSet
from specdec.runner.mixed import bucket_of

CHAIN, TREE = SpecConfig(3, 1, 4), SpecConfig(3, 4, 10)
SAMPLING = [
    SamplingParams(max_tokens=30),
    SamplingParams(max_tokens=24, repetition_penalty=1.3, logprobs=2),
    SamplingParams(max_tokens=27, temperature=0.9, top_k=9, seed=3),
    SamplingParams(max_tokens=9),
]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(
    ("target", "head", "spec", "pads"),
    [
        ("llama", "eagle3", CHAIN, False),
        ("llama", "eagle3", TREE, True),
        ("mistral", "eagle1", CHAIN, True),
        ("qwen2", "eagle1-window", CHAIN, True),
    ],
)
def test_one_pass_leaves_what_two_leave(zoo: Zoo, target: str, head: str, spec: SpecConfig, pads: bool) -> None:
    """Keeps out: a node that reads a prompt's keys, a layer that takes a prompt's position for a node's, a prompt whose first
    token is chosen by a running row's options, a drafter that has not read the prompt or the round."""
    decoders = [zoo.decoder(target, head, spec, dtype="float64", page_size=4, max_batch_size=4) for _ in range(2)]
    one, two = drivers = [Driver(decoder) for decoder in decoders]
    if pads:  # the backend that can
        one.replace_backend(ReferenceBackend())
    seen = one.mix(1, pads)
    two.mix(1)
    arriving = {2 * row + row // 2: row for row in range(4)}
    requests = []
    for driver in drivers:
        driver.set_chunk(24)
        driver.pad_rows()
    turn = 0
    with two.timed_phases():
        while arriving or not (one.is_idle and two.is_idle):
            if (row := arriving.pop(turn, None)) is not None:
                speculate = row != 1
                asked = [3 + row, 5, 8] * (2 + 9 * row)
                requests.append([driver.submit(asked, SAMPLING[row], speculate) for driver in drivers])
            for driver in drivers:
                driver.step()
            check_rows(one, two)
            turn += 1
    for got, want in requests:
        assert got.is_done and got.output.token_ids == want.output.token_ids
        assert [each.token for each in got.logprobs] == [each.token for each in want.logprobs]
        for own, other in zip(got.logprobs, want.logprobs, strict=True):
            assert own.logprob == pytest.approx(other.logprob, rel=1e-9)
    assert len(seen) > 5 and any(part.is_last for step in seen for part in step.chunk.parts)


class Replays(GraphSet):
    """Runs functions as replays do: the first one that came with a key."""

    def __init__(self) -> None:
        super().__init__(False)
        self.enabled, self.uses = True, Counter[Hashable]()
        self.first: dict[Hashable, Callable[[], Any]] = {}

    def __len__(self) -> int:
        return len(self.first)

    def __contains__(self, key: Hashable) -> bool:
        return key in self.first

    def run(self, key: Hashable, fn: Callable[[], Any], *given: Any, **named: Any) -> Any:
        self.uses[key] += 1
        return self.first.setdefault(key, fn)()


def test_replays_read_what_is_new(zoo: Zoo) -> None:
    """Keeps out: a captured pass that goes on with the prompts, rows or options of the pass that was captured."""
    decoder = zoo.decoder("llama", "eagle3", CHAIN, dtype="float64", page_size=4, max_batch_size=4)
    driver, graphs = Driver(decoder), Replays()
    driver.replace_backend(ReferenceBackend())
    prompts = [[3 + row, 5, 8 + row] * (2 + 5 * (row % 3)) for row in range(12)]
    sampling = [replace(SAMPLING[row % 4], max_tokens=6 + row % 7) for row in range(12)]
    want = [output.token_ids for output in decoder.generate(prompts, sampling)]
    driver.set_chunk(24)
    driver.pad_rows()
    driver.mix(1)
    driver.use_mixed_graphs(graphs)
    for turn in range(2):
        asked = []
        for row, (prompt, options) in enumerate(zip(prompts, sampling, strict=True)):
            asked.append(driver.submit(prompt, options, speculate=(row + turn) % 3 > 0))
            driver.step()
        driver.run_until_idle()
        assert [request.output.token_ids for request in asked] == want
    assert sum(uses > 1 for uses in graphs.uses.values()) > 2


def check_rows(one: Driver, two: Driver) -> None:
    """Compares the running rows of both, and what the caches hold of them; nothing of the drafter where rows have none."""
    assert len(one.running) == len(two.running)
    for row in range(4):
        if (request := one.request_in(row)) is None:
            continue
        assert (one.lens(row), one.bonus(row)) == (two.lens(row), two.bonus(row))
        for model in ("target", "draft")[: 1 + request.speculate]:
            if len(one.cache(model).group_numbers) == 1:
                got, want = (driver.committed_kv(model, row) for driver in (one, two))
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("nodes", [1, 6, 96, 192])
def test_buckets_are_few_and_waste_little(nodes: int) -> None:
    """Keeps out: a graph for each length of a prompt's rest, and a short rest that takes as long as a whole chunk."""
    shapes = {tokens: bucket_of(ChunkShape(tokens, 1, tokens, True, 0), nodes) for tokens in range(1, 2049 - nodes)}
    for tokens, shape in shapes.items():
        total, padded = tokens + nodes, shape.tokens + nodes
        assert total <= padded < total + max(64, total / 2) and padded % 64 == 0 and shape.most == shape.tokens
    assert len({shape.tokens for shape in shapes.values()}) <= 12
