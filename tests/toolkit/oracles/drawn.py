"""What a draft of a running batch computed, node by node, and how far that is from the head alone along each node's path."""

from collections.abc import Iterator
from inspect import getmodule
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.draft.eagle import worker
from specdec.draft.tree.expand import Candidates
from toolkit.driver import Driver, Request, new_request
from toolkit.models import Zoo, ragged_prompts
from toolkit.oracles.heads import PathDrafter

TOLERANCE = 1e-4  # scores are float32; wrong ancestors are off by 0.1


class Drawn(NamedTuple):
    """All that one draft of the batch computed.

    paths: of each row's candidates, the tokens from the root's child to itself.  scores_BC: of trees; chains have none.
    steps: each step's branches [B, K] (indices of candidates) and hidden states [B, K, H].
    """

    paths: list[list[tuple[int, ...]]]
    scores_BC: Tensor | None
    steps: list[tuple[Tensor, Tensor]]


def running_decoder(
    zoo: Zoo, target: str, kind: str, spec: SpecConfig, page_size: int, batch: int, temperatures: tuple[float, ...] = (0.0,),
    steps: int = 4, is_known: bool = False, **settings: Any,
) -> tuple[SpecDecoder, list[Request]]:  # fmt: skip
    """A decoder that has run a prefill and some rounds of requests of different lengths.  Temperatures are taken in turn.

    is_known: whether the same prompts have run before.
    settings: of the decoder, where it is not to be one in float64 on a CPU.
    """
    settings = {"dtype": "float64", **settings}
    decoder = zoo.decoder(target, kind, spec, page_size=page_size, max_batch_size=batch, **settings)
    requests = [
        new_request(prompt, SamplingParams(max_tokens=60, temperature=temperatures[row % len(temperatures)], seed=row - 1))
        for row, prompt in enumerate(ragged_prompts(40, batch + 2, seed=3)[2:])
    ]
    if is_known:
        decoder.generate([request.prompt_ids for request in requests], SamplingParams(max_tokens=3))
    driver = Driver(decoder)
    driver.set_depth(0)  # on a GPU the requests' texts would be a round older than the batch
    for request in requests:
        driver.add(request)
    for _ in range(steps):
        driver.step()
    while not all(request.output.token_ids for request in requests):  # chunks of prompts are still to come
        driver.step()
    return decoder, requests


def draw(decoder: SpecDecoder, spec: SpecConfig, batch: int, monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """Drafts once with the running batch, and records all that the draft computes.

    Steps are those of heads that draft a level a pass from keys of their own.
    """
    grown: list[Candidates] = []
    beams, hiddens = [torch.arange(spec.topk, device=decoder.settings.device).expand(batch, -1)], []
    head = decoder.head
    assert head is not None
    home = getmodule(type(Driver(decoder).drafter).draft)  # of the worker that grows trees
    expand, level_of = worker.expand, getattr(head, "level", None)

    def watched_expand(candidates: Candidates, level: int, *rest: Any) -> Any:
        beam = expand(candidates, level, *rest)
        grown.append(candidates)
        beams.append(beam.indices_BK)
        return beam

    def watched_level(*inputs: Any) -> tuple[Tensor, Tensor]:
        assert level_of is not None
        hidden, logits = level_of(*inputs)
        hiddens.append(hidden.view(batch, spec.topk, -1).clone())
        return hidden, logits

    monkeypatch.setattr(home, "expand", watched_expand)
    if level_of is not None:
        monkeypatch.setattr(head, "level", watched_level)
    tree = Driver(decoder).draft(batch, spec)
    if spec.topk > 1:
        paths = [paths_of(grown[-1], row) for row in range(batch)]
        steps = list(zip(beams[:-1], hiddens, strict=True)) if hiddens else []  # some workers read all levels anew
        return Drawn(paths, grown[-1].scores_BC, steps)
    paths = [[tuple(tokens[1 : n + 1]) for n in range(1, len(tokens))] for tokens in tree.tokens_BN.tolist()]
    return Drawn(paths, None, [(torch.full((batch, 1), step), hidden) for step, hidden in enumerate(hiddens)])


def paths_of(candidates: Candidates, row: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(candidates.tokens_BC[row].tolist(), candidates.parents_BC[row].tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def row_errors(drawn: Drawn, row: int, alone: PathDrafter) -> Iterator[float]:
    """How far every score and every hidden state of the tree is from the head alone on that path, relative to its size."""
    paths = drawn.paths[row]
    if drawn.scores_BC is not None:
        for path, score in zip(paths, drawn.scores_BC[row].tolist(), strict=True):
            want = sum(alone.log_probs(path[:i]).get(token, -1e9) for i, token in enumerate(path))
            yield abs(score - want) / max(1, abs(want))
    for branches_BK, hidden_BKH in drawn.steps:
        for branch, hidden_H in zip(branches_BK[row].tolist(), hidden_BKH[row], strict=True):
            want_H = alone.hidden(paths[branch])
            hidden_H = hidden_H[: len(want_H)]  # a state of several layers begins with the output that was just drafted from
            yield float((hidden_H.double().cpu() - want_H).abs().max() / want_H.abs().max().clamp(min=1))


def hold_best_siblings(drawn: Drawn, row: int, alone: PathDrafter, topk: int) -> None:
    """Every node's children are the tokens that the head alone finds best after that node's path, in their order."""
    children: dict[tuple[int, ...], list[int]] = {}
    for path in drawn.paths[row]:
        children.setdefault(path[:-1], []).append(path[-1])
    for path, tokens in children.items():
        logp = alone.log_probs(path)
        assert tokens == sorted(logp, key=lambda token: -logp[token])[:topk]
