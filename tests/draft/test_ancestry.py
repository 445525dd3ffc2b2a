"""Each tree node's draft output equals running the head alone along that node's own path (float64, no cache: dense.py).

Keeps out: a branch that reads another branch's keys.  Verified by mutation: without the re-gathering by parent (the slots
of a branch's number at every step, SGLang's scheme) scores are off by more than 0.1, and the last test holds that.
"""

import copy
from typing import Any, TypeVar

import pytest
import torch
from toolkit.driver import Request
from toolkit.models import Zoo
from toolkit.oracles.drawn import TOLERANCE, draw, hold_best_siblings, row_errors, running_decoder
from toolkit.oracles.heads import DenseHead, PathDrafter
from torch import Tensor

from specdec import SpecConfig
from specdec.draft.tree import branches
from specdec.ops.noise.gumbel import gumbel_noise

Drafter = TypeVar("Drafter", bound=PathDrafter)


def alone_of(zoo: Zoo, target: str, kind: str, request: Request, drafter: type[Drafter] = PathDrafter) -> Drafter:
    hf = copy.deepcopy(zoo.hf(target)).double()
    return drafter(DenseHead(zoo.head(target, kind), hf), hf, request.prompt_ids + request.output.token_ids)


CASES = [
    ("llama", "eagle3", (4, 4, 16), 1, 3),
    ("llama", "eagle3", (4, 4, 16), 16, 1),
    ("llama", "eagle1", (4, 3, 12), 16, 3),
    ("llama3-tied-dim8", "eagle3-full", (5, 2, 10), 16, 3),
    ("llama-linear-8-layers", "eagle3", (3, 8, 30), 1, 1),
    ("qwen2", "eagle1-two-layers", (4, 4, 16), 1, 3),
    ("qwen3", "eagle3", (5, 1, 6), 16, 3),
    ("qwen2", "eagle1", (4, 1, 5), 1, 1),
    # windows shorter than a path, so that they end inside the tree
    ("llama", "eagle3-window", (5, 3, 16), 16, 3),
    ("mistral", "eagle1-window", (5, 2, 12), 5, 1),
    ("llama", "eagle3-window", (5, 1, 6), 1, 3),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("target", "kind", "shape", "page_size", "batch"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_every_node_equals_its_own_path(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, target: str, kind: str, shape: tuple[int, int, int], page_size: int, batch: int
) -> None:
    """Also holds features, positions, d2t, the recurrence and the draft's committed KV: each would move every score."""
    decoder, requests = running_decoder(zoo, target, kind, SpecConfig(*shape), page_size, batch)
    drawn = draw(decoder, SpecConfig(*shape), batch, monkeypatch)
    for row, request in enumerate(requests):
        alone = alone_of(zoo, target, kind, request)
        assert max(row_errors(drawn, row, alone)) < TOLERANCE
        hold_best_siblings(drawn, row, alone, shape[1])


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_static_ancestry_is_seen(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The test above would be blind if these heads did not read the tree's own keys."""
    spec = SpecConfig(4, 4, 16)
    decoder, requests = running_decoder(zoo, "llama", kind, spec, 16, 3)
    fill, own_slots = branches.fill_draft_suffix, []

    def fill_without_gathering(out: Any, ancestors_BKS: Tensor, step: int) -> None:
        own_slots.append(ancestors_BKS[..., step])
        fill(out, torch.stack(own_slots, dim=-1), step)

    monkeypatch.setattr(branches, "fill_draft_suffix", fill_without_gathering)
    drawn = draw(decoder, spec, 3, monkeypatch)
    alone = [alone_of(zoo, "llama", kind, request) for request in requests]
    worst = [max(row_errors(drawn, row, alone_in_row)) for row, alone_in_row in enumerate(alone)]
    assert max(worst) > 100 * TOLERANCE


class NoisyDrafter(PathDrafter):
    """Knows the noise with which the target will sample; the rule is written out anew."""

    request: Request

    def log_probs(self, path: tuple[int, ...]) -> dict[int, float]:
        logp, sampling = super().log_probs(path), self.request.sampling
        if sampling.temperature == 0:
            return logp
        text = len(self.request.prompt_ids) + len(self.request.output.token_ids)
        noise_V = gumbel_noise(torch.tensor([sampling.seed]), torch.tensor([text + len(path)]), 40)[0].double()
        weighed = {token: 1.5 * value + 1.2 * sampling.temperature * float(noise_V[token]) for token, value in logp.items()}
        total = float(torch.tensor(list(weighed.values()), dtype=torch.float64).logsumexp(0))
        return {token: value - total for token, value in weighed.items()}


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(
    ("target", "kind", "shape", "steps"),
    [
        ("llama", "eagle3", (4, 4, 16), 4),
        ("llama", "eagle3", (5, 1, 6), 4),
        ("qwen2", "eagle1", (4, 3, 12), 1),
        ("qwen2", "eagle1", (5, 1, 6), 1),
    ],
)
def test_sampled_rows_are_drafted_with_the_target_s_noise(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, target: str, kind: str, shape: tuple[int, int, int], steps: int
) -> None:
    """The law of scores; the first level comes from an extend, or after one step from the prefill.  Keeps out: noise of another
    position, level, row or id; of the draft's ids; in a greedy row."""
    decoder, requests = running_decoder(zoo, target, kind, SpecConfig(*shape), 16, 3, (0.8, 0.0, 1.4), steps)
    drawn = draw(decoder, SpecConfig(*shape), 3, monkeypatch)
    for row, request in enumerate(requests):
        alone = alone_of(zoo, target, kind, request, NoisyDrafter)
        alone.request = request
        assert max(row_errors(drawn, row, alone)) < TOLERANCE
        hold_best_siblings(drawn, row, alone, shape[1])
