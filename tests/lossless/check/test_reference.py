"""The noise of each place of a text, and the bounds that follow, against the definition; and the passes that measure it.

Shapes: T places of the text, R of them that count, I of the output, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median_low
from typing import Any

import pytest
import torch
from toolkit.bench import StubSession
from toolkit.models import Zoo
from torch import Tensor

from specdec import SamplingParams
from specdec.lossless.choice import GeneratedText
from specdec.lossless.passes import DensePasses
from specdec.lossless.reference import FACTOR, LEADING, PASSES_STEPS, PROMPT_PLACES, read_text

V = LEADING + 8


class Scripted:
    """Passes whose logits were written down.  own_TV: of the model's own dtype.  nearby: of those a little off, by number."""

    def __init__(self, wide_TV: Tensor, own_TV: Tensor, nearby: list[Tensor] | None = None) -> None:
        self.device, self.choosing, self.steps = torch.device("cpu"), False, nearby is not None
        self._wide_TV, self._own_TV, self._nearby = wide_TV, own_TV, nearby or []
        self._is_wide, self.asked = False, list[int]()

    @contextmanager
    def wide(self) -> Iterator[None]:
        self._is_wide = True
        yield
        self._is_wide = False

    def hidden(self, ids: list[int]) -> Tensor:
        assert len(ids) == len(self._wide_TV)
        return self._wide_TV if self._is_wide else self._own_TV

    def hidden_nearby(self, ids: list[int], number: int) -> Tensor:
        self.asked.append(number)
        return self._nearby[number]

    def logits(self, hidden_RV: Tensor) -> Tensor:
        return hidden_RV

    def poll(self) -> None:
        """Nobody waits."""


def noise_of(wide_V: Tensor, own_V: Tensor, token: int) -> float:
    """How far the errors of the leading tokens, and of the text's own, lie apart."""
    leading = [*wide_V.argsort(descending=True)[:LEADING].tolist(), token]
    errors = [(own_V[each] - wide_V[each]).item() for each in leading]
    return max(errors) - min(errors)


@pytest.mark.parametrize("prompt", [1, 4, PROMPT_PLACES + 1, PROMPT_PLACES + 30])
@pytest.mark.parametrize("piece", [7, 256])
def test_bounds_are_those_of_the_definition(prompt: int, piece: int) -> None:
    """Keeps out: another average in place of the median, or a place below it with a bound of its own; places of the prompt
    that are too far away, or none of them; errors of tokens that nobody would take; a piece's places counted from elsewhere."""
    generator, length = torch.Generator().manual_seed(prompt), 21
    places = prompt - 1 + length
    wide_TV = 4 * torch.randn(places, V, generator=generator, dtype=torch.float64)
    own_TV = wide_TV + 0.1 * torch.rand(places, 1, generator=generator) * torch.randn(places, V, generator=generator)
    own_TV.scatter_(1, wide_TV.argsort(1)[:, :3], 1e6)  # the least likely ones are far off
    skipped = max(0, prompt - 1 - PROMPT_PLACES)
    own_TV[:skipped] += 1e3 * torch.randn(skipped, V, generator=generator)
    own_TV[max(skipped, prompt - 1 - 20) : prompt - 1] *= 1.5  # the prompt's noise moves the median
    prompt_ids = torch.randint(V, (prompt,), generator=generator).tolist()
    ids = wide_TV[prompt - 1 :].argmax(1).tolist()
    for place, rank in ((2, 1), (9, 2), (20, 5)):
        ids[place] = int(wide_TV[prompt - 1 + place].argsort(descending=True)[rank])
    text = GeneratedText(prompt_ids, ids, SamplingParams())
    passes: Any = Scripted(wide_TV, own_TV)
    found = read_text(passes, text, [(4, 3), (9, 1)], piece)
    following = [*prompt_ids, *ids][1:]
    noise = [noise_of(wide_TV[at], own_TV[at], following[at]) for at in range(skipped, places)]
    usual = median_low(noise)
    bounds = [FACTOR * max(usual, each) for each in noise[prompt - 1 - skipped :]]
    assert found.bound == pytest.approx(median_low(bounds), rel=1e-6)
    assert [each.index for each in found.off] == [2, 9, 20] and [each.rank for each in found.off] == [2, 3, 6]
    assert [(each.index, each.token) for each in found.asked] == [(4, 3), (9, 1)]
    for each in (*found.off, *found.asked):
        logits_V = wide_TV[prompt - 1 + each.index]
        assert each.bound == pytest.approx(bounds[each.index], rel=1e-6) and each.best == int(logits_V.argmax())
        assert each.margin == pytest.approx((logits_V.max() - logits_V[each.token]).item(), abs=1e-5)
    gaps = [(best[0] - best[1]).item() for best in wide_TV[prompt - 1 :].topk(2).values]
    assert found.unsure == sum(gap <= bound for gap, bound in zip(gaps, bounds, strict=True)) > 0


def test_more_passes_run_until_each_token_is_explained() -> None:
    """Keeps out: a pass that runs though nothing is left to explain; noise of the last pass in place of the largest; a median
    that grows with the passes, and so excuses places at which none of them saw noise."""
    wide_TV = torch.zeros(6, V)
    wide_TV[:, 3], wide_TV[:, 5] = 9.0, 8.0  # a text of 3s, but for two places with a 5, 1 below the best

    def moved(*places: int) -> Tensor:
        own_TV = wide_TV.clone()
        own_TV[list(places), 3] += 0.6  # a bound of 1.2
        return own_TV

    text = GeneratedText([3, 3, 3], [5, 3, 5, 3], SamplingParams())
    nearby = [moved(2), moved(3), moved(), moved(4), moved(0, 1, 2, 3, 4, 5)]
    passes: Any = Scripted(wide_TV, wide_TV.clone(), nearby)
    found = read_text(passes, text)
    assert passes.asked == [0, 1, 2, 3] and all(each.is_explained for each in found.off)
    assert [each.bound for each in found.off] == [pytest.approx(1.2)] * 2 and found.unsure == 3
    passes = Scripted(wide_TV, wide_TV.clone(), [nearby[0], nearby[-1]])
    assert len(read_text(passes, text).off) == 2 and passes.asked == [0, 1]
    passes = Scripted(wide_TV, wide_TV.clone(), [moved(0, 1, 2, 3)] * PASSES_STEPS + nearby)
    first, second = read_text(passes, text).off
    assert passes.asked == list(range(PASSES_STEPS)) and first.is_explained and not second.is_explained
    assert second.bound == 0.0, "four passes saw no noise there, and the first one none anywhere"


class Embeddings(DensePasses):
    """Passes that show the embeddings that they would read."""

    def hidden(self, ids: Sequence[int]) -> Tensor:
        return self.model.embed_tokens.weight.clone()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@torch.no_grad()
def test_passes_nearby_differ_by_their_numbers_alone(zoo: Zoo, dtype: str) -> None:
    """Keeps out: passes that are all alike, so that 32 of them see what one sees; ranks whose embeddings differ, because each
    draws on its own; numbers that stay or move by more than an ulp; an embedding that stays moved."""
    with zoo.decoder("llama", None, None, dtype=dtype) as decoder:
        session = StubSession()
        session.model, session.settings = decoder.model, decoder.settings
        passes, weight = Embeddings(session.model, session.settings, session.as_stored), decoder.model.embed_tokens.weight
        before, tables = weight.clone(), list[Tensor]()
        for seed, number in ((1, 0), (2, 0), (1, 1), (1, 2)):
            torch.manual_seed(seed)
            tables.append(passes.hidden_nearby([1, 2], number))
            assert torch.equal(weight, before)
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2]) and not torch.equal(tables[2], tables[3])
    for table in tables[1:]:
        moved = (table.double() / before.double() - 1)[before != 0] / torch.finfo(before.dtype).eps
        assert 0.5 < moved.abs().min() and moved.abs().max() < 1.5
        assert 0.4 < (moved > 0).double().mean() < 0.6
    (a, b) = (tables[number] > before for number in (1, 2))
    assert 0.4 < (a == b).double().mean() < 0.6, "each number moves on its own in each pass"
