"""The byte limit of hybrids against a count by hand, and the benchmark's published configs of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from toolkit.paths import ROOT

from specdec.bench.byte_limit import byte_limit
from specdec.config import SpecConfig
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.frame import empty
from specdec.models.checkpoints.loader import build
from specdec.models.kimi_linear.modules import KimiDeltaAttention
from specdec.models.mamba.mixer import Mamba2
from specdec.models.mixtures.counter import mixtures_of
from specdec.models.registry import family_of

BENCHMARKS = ROOT / "benchmarks"
V, H, F, S, E, CHOSEN = 50, 48, 24, 40, 8, 5  # vocabulary, hidden, an expert's width, shared ones', experts, chosen ones
HEADS, KV, D = 4, 2, 16
BATCH, CONTEXT = 2, 10
NEMOTRON: dict[str, Any] = dict(
    model_type="nemotron_h", vocab_size=V, hidden_size=H, hybrid_override_pattern="ME*M-E", num_attention_heads=HEADS,
    num_key_value_heads=KV, head_dim=D, mamba_num_heads=6, mamba_head_dim=16, ssm_state_size=32, n_groups=2, conv_kernel=4,
    n_routed_experts=E, num_experts_per_tok=2, moe_intermediate_size=F, moe_shared_expert_intermediate_size=S,
    intermediate_size=56,
)  # fmt: skip
KIMI: dict[str, Any] = dict(
    model_type="kimi_linear", vocab_size=V, hidden_size=H, intermediate_size=56, num_hidden_layers=4, num_attention_heads=HEADS,
    num_key_value_heads=HEADS, kv_lora_rank=20, qk_nope_head_dim=14, qk_rope_head_dim=6, v_head_dim=12, num_experts=E,
    num_experts_per_token=2, num_shared_experts=1, moe_intermediate_size=F, mla_use_nope=True, tie_word_embeddings=False,
    linear_attn_config=dict(
        head_dim=16, num_heads=3, short_conv_kernel_size=4, full_attn_layers=[3], kda_layers=[1, 2, 4]
    ),
)  # fmt: skip


@pytest.fixture()
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a benchmark's module, which is forgotten after the test with all that it imported of the rooms."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def made(raw: dict[str, Any]) -> CausalLM:
    family = family_of(raw["model_type"])
    assert family is not None
    config = family.parse(raw, "here")
    model = build(lambda: CausalLM(config, 64, family.layer), torch.device("cpu"), torch.bfloat16)
    for part in model.modules():
        for name, buffer in part.named_buffers(recurse=False) if isinstance(part, Mamba2 | KimiDeltaAttention) else ():
            part.register_buffer(name, buffer.float())  # as their loaders do
    return model


def hold(model: CausalLM, weights: int, floats: int, states: int, node: int, token: int) -> None:
    """weights, floats: numbers of a pass in 16 and in 32 bits, of all but embeddings and the output layer.

    states, node, token: bytes of all layers, of a sequence's states, of what a node leaves, of a token's keys and values.
    """
    chosen = dict.fromkeys(mixtures_of(model), CHOSEN)
    for spec, nodes in ((None, 1), (SpecConfig(3, 2, 6), 6)):
        limit = byte_limit(model, None, spec, BATCH, CONTEXT, chosen=chosen)
        assert limit.target == 2 * (weights + V * H + BATCH * nodes * H) + 4 * floats
        assert limit.target_kv == BATCH * (CONTEXT * token + 2 * states + nodes * node)


@pytest.mark.parametrize("latent", [None, 20])
def test_the_bytes_of_nemotron(latent: int | None) -> None:
    """Keeps out: experts counted with a gate, or as wide as the model where they read latents; weights of decays left out;
    groups counted as heads, or heads as groups, in what a node leaves."""
    N, G, heads, Y, X = 32, 2, 6, 6 * 16, latent or H
    C = Y + 2 * G * N
    mamba = H * (Y + C + heads) + 5 * C + Y + Y * H  # with taps and a bias of each channel, and the gated norm
    attention = H * (HEADS + 2 * KV) * D + HEADS * D * H
    mixture = E * H + CHOSEN * 2 * F * X + 2 * S * H + (2 * X * H if latent else 0)
    weights = 2 * mamba + attention + 2 * mixture + 2 * 56 * H + 7 * H
    state, node = 4 * Y * N + 2 * 3 * C, 4 * (G * N + Y + heads) + 2 * C
    model = made(NEMOTRON | {"moe_latent_size": latent})
    hold(model, weights, 2 * 3 * heads, 2 * state, 2 * node, 2 * 2 * KV * D)


def test_the_bytes_of_kimi() -> None:
    """Keeps out: latents counted as keys and values of all heads; a decay a head where each channel has one; a dense layer
    counted as a mixture."""
    heads, W, rank, nope, turned, value = 3, 16, 20, 14, 6, 12
    C = heads * W
    delta = H * (3 * C + 2 * W + heads) + 2 * W * C + C * H + 4 * 3 * C + W
    latents = H * HEADS * (nope + turned) + H * (rank + turned) + rank + rank * HEADS * (nope + value) + HEADS * value * H
    mixture = E * H + (CHOSEN + 1) * 3 * F * H
    weights = 3 * delta + latents + 3 * mixture + 3 * 56 * H + 9 * H
    state, node = 4 * C * W + 2 * 3 * 3 * C, 4 * 3 * C + 2 * 3 * C
    hold(made(KIMI), weights, 3 * (heads + C), 3 * state, 3 * node, 2 * (rank + turned))


@pytest.mark.parametrize(
    ("name", "billions", "layers", "few"),
    [
        ("Qwen3.5-27B", 26.9, 48, 6),
        ("Qwen3.5-35B-A3B", 34.7, 30, 6),
        ("Nemotron-3-Nano-30B-A3B", 31.6, 23, 4),
        ("Kimi-Linear-48B-A3B-Instruct", 49.1, 20, 6),
    ],
)
def test_the_benchmark_makes_the_published_hybrids(
    load: Callable[[str], ModuleType], name: str, billions: float, layers: int, few: int
) -> None:
    """Keeps out: a round measured of a model of another size than its name says, or of which the first layers can't be made."""
    script = load("rounds.round_hybrid")
    config = script.config_of(name, None)
    weights = sum(x.numel() for x in empty(script.family_by(script.MODELS[name]["model_type"]), config).parameters())
    assert weights / 1e9 == pytest.approx(billions, rel=0.01) and len(config.recurrent_layers) == layers
    cut = script.config_of(name, 8)
    assert cut.num_layers == 8 and len(cut.recurrent_layers) == few and cut.layer_kinds == config.layer_kinds[:8]


def test_the_limits_of_layers_alone(load: Callable[[str], ModuleType]) -> None:
    """One node, and a chain of six, of which three are pending.  Keeps out: the widths of one rule taken for another's; decays
    by channel counted by head."""
    script = load("layers.recurrent")
    by_hand = {  # numbers of: a state, the convolution's channels, what a node leaves in float32, gates, outputs
        "gated": (48 * 128 * 128, 10240, 16 * 128 + 48 * 128 + 48, 2 * 48, 48 * 128),
        "kimi": (32 * 128 * 128, 12288, 3 * 32 * 128, 32 * 128 + 32, 32 * 128),
        "mamba": (64 * 128 * 64, 6144, 8 * 128 + 64 * 64 + 64, 64, 64 * 64),
    }
    for name, (state, channels, left, gates, outputs) in by_hand.items():
        rule, kept = script.RULES[name], 2 * (4 * state + 2 * 3 * channels)
        node, leaves = 2 * (channels + gates + 2 * outputs), 4 * left + 2 * channels
        for nodes, pending in ((1, 1), (6, 3)):
            moved = 2 * (kept + nodes * (node + leaves) + pending * leaves)
            assert script.limit_us(rule, 2, nodes) == pytest.approx(1e6 * moved / script.BANDWIDTH)
        assert script.prompt_limit_us(rule, 100) == pytest.approx(1e6 * (kept + 100 * node) / script.BANDWIDTH)
    assert {*by_hand} == {*script.RULES}


def test_no_measured_tree_is_deeper_than_it_says(load: Callable[[str], ModuleType]) -> None:
    """Keeps out: a tree whose deepest nodes a kernel cuts off from their root, so that less is measured than is named."""
    script = load("layers.recurrent")
    for nodes, (_, depth, places) in script.SHAPES.items():
        steps, depths = script.tree_of(2, nodes, torch.device("cpu")), [0]
        for parent in steps.parents_BN[1].tolist()[1:]:
            depths.append(depths[parent] + 1)
        assert max(depths) == depth == steps.max_depth < places and len(depths) == nodes


def test_products_in_front_of_a_norm_that_adds_are_measured_so(load: Callable[[str], ModuleType]) -> None:
    """Keeps out: splits of an attention's or an MLP's last product timed with a sum of their own, which no layer has."""
    script = load("products.dense_tiles")
    for shapes in script.SHAPES.values():
        hidden = shapes["qkv"][1]
        assert {name for name, (N, _) in shapes.items() if N == hidden} == {name for name in shapes if name in script.ADDED}


def test_a_verify_is_compared_with_a_step_of_as_many_rows(load: Callable[[str], ModuleType]) -> None:
    """Keeps out: a verify beside the step of other rows, or beside what was not traced."""
    ratio = load("rounds.round_hybrid").verify_ratio
    rows = [{"spec": "plain", "batch": batch, "gpu_ms": ms} for batch, ms in ((1, 2.0), (8, 5.0))]
    rows += [{"spec": "plain", "batch": 32}, {"spec": "5,1,6", "batch": 1, "gpu_ms": 9.0, "phases_ms": {"verify": 3.0}}]
    tree = {"spec": "5,8,32", "phases_ms": {"verify": 4.0, "draft": 1.0}}
    assert [ratio(tree | {"batch": batch}, rows) for batch in (1, 8, 32)] == [2.0, 0.8, None]
    assert ratio({"spec": "5,8,32", "batch": 1}, rows) is None
