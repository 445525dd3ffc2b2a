"""A target with ALiBi writes, through chains and trees, what dense attention over its whole text writes.

The target is a Llama of our own whose layers get slopes, half of them with windows, which no family with ALiBi has.

Keeps out: a node's distances counted by its number or its slot; slopes that only prompts, or only rounds, have; a draft head
that reads its target's kind of layer.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts
from torch import Tensor

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.eager.dense import DenseAttention
from specdec.attention.inputs import AttentionFn, LayerInputs
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import PLAIN, LayerKind, Scoring
from specdec.loading import devices
from specdec.models import registry
from specdec.models.causal_lm import DecoderLayer
from specdec.ops.rope import Rotation

SLOPES = torch.tensor([0.5, 0.25, 0.9, 0.06])
KINDS = (LayerKind(alibi=True), LayerKind(window=9, alibi=True)) * 2


class AlibiLayer(DecoderLayer):
    """A Llama's layer that scores by distance besides."""

    def forward(
        self, x_TH: Tensor, normed_TH: Tensor, rotation: Rotation, attn: AttentionFn, layer: int, rows_R: Any = None
    ) -> tuple[Tensor, Any]:
        def with_slopes(layer: int, inputs: LayerInputs, rows_R: Any = None, scoring: Scoring = PLAIN) -> Tensor:
            return attn(layer, inputs, rows_R, replace(scoring, slopes_H=SLOPES))

        return super().forward(x_TH, normed_TH, rotation, with_slopes, layer, rows_R)


@pytest.fixture()
def with_alibi(monkeypatch: pytest.MonkeyPatch) -> None:
    own = registry.family_of("llama")
    assert own is not None
    alibi = own._replace(
        parse=lambda *args: replace(own.parse(*args), layer_kinds=KINDS), layer=lambda config, _: AlibiLayer(config)
    )
    monkeypatch.setattr(registry, "family_of", lambda name: alibi)


@torch.inference_mode()
def dense_greedy(decoder: SpecDecoder, prompt: list[int], max_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(max_tokens):
        ids_T = torch.tensor(ids)
        out = decoder.model(ids_T, torch.arange(len(ids)), DenseAttention(KINDS), (), ids_T.new_tensor([len(ids) - 1]))
        best, second = decoder.model.logits(out.hidden_TH)[0].topk(2).values
        assert best - second > 1e-4, "a near-tie: choose another prompt"
        ids.append(int(decoder.model.logits(out.hidden_TH)[0].argmax()))
    return ids[len(prompt) :]


def hold_lossless(
    zoo: Zoo, spec: tuple[int, int, int], tokens: int, count: int = 4, backend: Any = None, **settings: Any
) -> None:
    with zoo.decoder("llama", "eagle3", SpecConfig(*spec), max_batch_size=min(3, count), **settings) as decoder:
        prompts = ragged_prompts(40, count)
        if backend is not None:
            Driver(decoder).replace_backend(backend)
        for out in decoder.generate(prompts, SamplingParams(max_tokens=tokens)):
            assert out.token_ids == dense_greedy(decoder, out.prompt_token_ids, tokens)


@pytest.mark.slow_cases
@pytest.mark.parametrize(("spec", "page_size"), [((3, 3, 8), 1), ((4, 2, 7), 16), ((4, 1, 5), 4)], ids=str)
def test_text_is_that_of_dense_attention(zoo: Zoo, with_alibi: None, spec: Any, page_size: int) -> None:
    hold_lossless(zoo, spec, 16, page_size=page_size, prefill_chunk=7)


def test_with_shared_prefixes(zoo: Zoo, with_alibi: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that begin alike read their pages together, although on a CPU that saves nothing."""
    monkeypatch.setitem(devices.MIN_SAVED, "cpu", 0.0)
    with zoo.decoder("llama", "eagle3", SpecConfig(3, 3, 8), page_size=4, prefix_caching=True) as decoder:
        start = ragged_prompts(40, 3)[2]
        prompts = [[*start, token] for token in (3, 9, 17)]
        decoder.generate(prompts[0], SamplingParams(max_tokens=2))
        for out in decoder.generate(prompts, SamplingParams(max_tokens=12)):
            assert out.token_ids == dense_greedy(decoder, out.prompt_token_ids, 12)


@pytest.mark.slow
def test_by_our_kernels(zoo: Zoo, with_alibi: None) -> None:
    """On a CPU Triton's interpreter runs them."""
    hold_lossless(zoo, (2, 2, 4), 5, count=2, backend=TritonBackend(4), page_size=4)
