"""What rounds give to CUDA graphs reads no value and copies nothing from the host: no capture takes that, and every CPU does.

Calls of torch's functions are watched on a CPU, which sees the definitions that kernels stand for on a GPU, too.  Attention of
the torch backend may read: it never runs in a capture.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.checkpoints.mixtures import MixtureZoo
from toolkit.deepseek import SparseZoo
from toolkit.driver import Driver
from toolkit.inside.captures import HostUses
from toolkit.models import Zoo, ragged_prompts
from toolkit.mtp_layers.targets import MtpZoo

from specdec import SamplingParams, SpecConfig
from specdec.ops.cuda_graph import GraphSet
from specdec.session import Session

SAMPLING = [
    SamplingParams(max_tokens=5, temperature=0.7, seed=1, top_p=0.9, top_n_sigma=2.0, logprobs=2),
    SamplingParams(max_tokens=5, presence_penalty=0.5, min_tokens=2, bad_words=[[1, 2]], logit_bias={3: 1.0}),
    SamplingParams(max_tokens=5, logprobs=0, logprobs_mode="processed"),
]


class Watched(GraphSet):
    """Calls functions that would be captured, and watches them."""

    def __init__(self) -> None:
        super().__init__(True)
        self.phases, self.uses = set[str](), HostUses()

    def run(self, key: Any, fn: Callable[[], Any], *given: Any, **named: Any) -> Any:
        self.phases.add(key[0])
        with self.uses:
            return fn()


@pytest.fixture(params=["llama", "qwen2-moe", "glm4", "v32"])
def watched(request: pytest.FixtureRequest, zoo: Zoo, tmp_path: Path) -> Iterator[tuple[Session, Watched]]:
    """Trees of an EAGLE head; chains beside a mixture; MTP layers with experts; keys that an indexer chooses."""
    zoos = {"qwen2-moe": MixtureZoo, "glm4": MtpZoo, "v32": SparseZoo}
    kind, spec = ("mtp" if request.param == "glm4" else "eagle3"), SpecConfig(2, 1 if request.param == "qwen2-moe" else 2, 3)
    made = zoos[request.param](tmp_path) if request.param in zoos else zoo
    with made.decoder(request.param, kind, spec, page_size=4, max_batch_size=4) as decoder:
        driver, graphs = Driver(decoder), Watched()
        driver.pad_rows()
        driver.use_graphs(graphs, True)
        yield Session(decoder), graphs


def test_rounds_read_nothing(watched: tuple[Session, Watched]) -> None:
    """Keeps out: a value that the host reads in a pass, or a constant that it copies to the device."""
    session, graphs = watched
    prompts = ragged_prompts(40, 3, seed=1)
    with session.counted_experts():
        session.generate(prompts, SAMPLING, speculate=True)
    session.generate(prompts, SAMPLING[:1] * 3, speculate=False)
    assert graphs.phases == {"round", "decode"} and not graphs.uses.found


def test_what_is_watched() -> None:
    """Keeps out: a test above that finds nothing."""
    x, uses = torch.zeros(3), HostUses()
    for use in (lambda: x[0].item(), lambda: bool(x[1] > 0), lambda: x[[0, 1]], lambda: x.new_tensor([1.0]), lambda: x[x > 0]):
        with uses:
            use()
        assert len(uses.found) == 1, use
        uses.found.clear()
    with uses:
        x[1:].fill_(1)
        x[1:] = 2
        x[0] = x[1]
    assert not uses.found
    with uses:
        x[0] = 1
    assert len(uses.found) == 1
