"""Mixtures through the kernels of few tokens: layers, and a text in Triton's interpreter.

tests/ops/products/experts/ holds each kernel against its definition.

Shapes: T tokens, H hidden size.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toolkit.checkpoints.mixtures import MixtureZoo
from toolkit.inside.captures import capturing
from toolkit.kernels import HAS_GPU, modules_that_say, use_kernels_everywhere
from toolkit.models import ragged_prompts
from torch import nn

from specdec import SamplingParams, SpecConfig
from specdec.models.config import ModelConfig
from specdec.models.linear import use_numerics
from specdec.models.making import making
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.ops.norm import add_rms_norm
from specdec.ops.products import experts, routing
from specdec.ops.products.experts import Relu2, SwiGLU
from specdec.ops.products.numerics import Numerics
from specdec.ops.products.routing import RouterRule
from specdec.ops.products.tiles.experts import ExpertsKind, ExpertTiles, MixtureTiles, RouterTiles, few_tokens_tiles

interpreted = pytest.mark.skipif(HAS_GPU, reason="the interpreter's turn")

LAUNCHES = ("launch_router", "launch_router_one", "launch_norm_router"), ("launch_few_gate_up",), ("launch_few_down",)
GROUPED = RouterRule(3, "sigmoid", True, groups=4, top_groups=2, group_best=2, normed=True, scaling=1.5)
MIXTURES = {
    "qwen2-moe": ExpertsConfig(8, 24, RouterRule(3, "softmax", normed=True), shared_size=20, shared_gated=True),
    "qwen3.5-moe": ExpertsConfig(8, 24, RouterRule(3, "softmax", normed=True), shared_size=48, shared_gated=True),
    "glm4-moe": ExpertsConfig(8, 24, GROUPED, shared_size=24),
    "nemotron-h": ExpertsConfig(8, 24, GROUPED, Relu2(), shared_size=48),
    "latents": ExpertsConfig(8, 24, GROUPED, Relu2(), shared_size=48, latent_size=24),
    "gpt-oss": ExpertsConfig(
        4, 24, RouterRule(2, "softmax of chosen", biased=True), SwiGLU(1.702, 7.0), biased=True, kept_float32=True
    ),
}


LARGE = ExpertTiles(4, 64, 4, 2, 1, 2)  # for the interpreter, which takes long for many programs


class FewTokens(Numerics):
    """Takes the kernels for up to 4 tokens, in any dtype."""

    def mixture_tiles(self, tokens: int, *others: object) -> MixtureTiles | None:
        return MixtureTiles("few_tokens_triton", LARGE, LARGE) if tokens <= 4 else None

    def router_tiles(self, tokens: int, *others: object) -> RouterTiles | None:
        return RouterTiles(4, 16, 512, 4) if tokens <= 4 else None


class OfGpus(Numerics):
    """As the policy will be when the kernels are on."""

    def mixture_tiles(self, tokens: int, top_k: int, experts: int, kind: ExpertsKind, *others: object) -> MixtureTiles:
        return few_tokens_tiles(tokens, kind)

    def router_tiles(self, tokens: int, *others: object) -> RouterTiles:
        return RouterTiles(4, 16, 512, 4)


def use_few_tokens(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Returns a counter of launches by function name."""
    use_numerics(model, FewTokens())
    others = [module for module in modules_that_say("^from specdec.*use_kernels") if module not in (experts, routing)]
    return use_kernels_everywhere(monkeypatch, *others)


def launched(launches: Counter[str]) -> list[int]:
    """How often the router, gate and up, and down were launched."""
    return [sum(launches[name] for name in names) for names in LAUNCHES]


@pytest.mark.slow_cases(keep=2)
@interpreted
@pytest.mark.parametrize("name", MIXTURES)
@torch.inference_mode()
def test_a_layer_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a rule, a bias, a gate or a shared expert that the launches of few tokens leave out; other rows' experts."""
    config = ModelConfig("llama", 32, 40, 1, 2, 1, 16, 40, 1e-5)
    layer, generator = MixtureOfExperts(config, MIXTURES[name]), torch.Generator().manual_seed(1)
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.copy_(0.4 * torch.randn(tensor.shape, generator=generator))
    x_TH = torch.randn(5, 32, generator=generator)
    want = [layer(x_TH[:T]) for T in (4, 1)]
    called: list[object] = []
    if layer.shared is not None:
        layer.shared.register_forward_hook(lambda *_: called.append(None))
    launches = use_few_tokens(layer, monkeypatch)
    for T, right in zip((4, 1), want):
        torch.testing.assert_close(layer(x_TH[:T]), right, atol=1e-5, rtol=1e-5)
    assert launched(launches) == [2, 2, 2]
    assert len(called) == 2 * (name in ("qwen2-moe", "latents")), "shared experts of the others' width take no launch"
    layer(x_TH)
    assert launched(launches) == [2, 2, 2], "of more tokens others are asked"


@interpreted
def test_a_text_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: kernels that nobody reaches from a round, or that are reached with rows and strides which only rounds have."""
    zoo, spec, prompts = MixtureZoo(tmp_path), SpecConfig(2, 1, 3), ragged_prompts(40, 5, seed=3)[:1]
    decoder = zoo.decoder("qwen2-moe", "eagle3", spec)
    launches = use_few_tokens(decoder.model, monkeypatch)
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=4))
    assert outputs[0].token_ids == zoo.greedy("qwen2-moe", prompts[0], 4)
    assert min(launched(launches)) >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXTURES)
@torch.inference_mode()
def test_a_layer_of_16_bits_on_a_gpu(name: str) -> None:
    """Keeps out: a launch that starts before what it reads is written, a norm that adds up other splits, and a graph that reads
    what its capture read.
    """
    config, generator = ModelConfig("llama", 256, 512, 1, 2, 1, 16, 40, 1e-5), torch.Generator().manual_seed(1)
    of_layer = replace(MIXTURES[name], intermediate_size=192)
    exact = MixtureOfExperts(config, of_layer).double()
    with making(torch.device("cuda"), torch.bfloat16):
        layer = MixtureOfExperts(config, of_layer)
    for one, other in zip((*exact.parameters(), *exact.buffers()), (*layer.parameters(), *layer.buffers()), strict=True):
        other.copy_((0.1 * torch.randn(one.shape, generator=generator)).bfloat16())
        one.copy_(other)
    use_numerics(layer, OfGpus())
    norm = torch.ones(256, dtype=torch.bfloat16)
    for T in (1, 7, 32, 48):
        x, norm_H = torch.empty(T, 256, device="cuda", dtype=torch.bfloat16), norm.cuda()
        add_rms_norm(x, layer(x.zero_(), partials=True), norm_H, 1e-5)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            _, got = add_rms_norm(x, layer(x, partials=True), norm_H, 1e-5)
        for seed in range(3):
            x.copy_(torch.randn(T, 256, generator=generator.manual_seed(seed)))
            graph.replay()
            wide = x.cpu().double()
            _, want = add_rms_norm(wide, exact(wide), norm.double(), 1e-5)
            assert (got.cpu().double() - want).norm() < 1e-2 * want.norm(), (T, seed)
