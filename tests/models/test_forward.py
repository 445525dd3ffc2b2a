"""Targets compute what transformers computes: logits, final states and captured aux states, for every family.

Keeps out: a bias, norm, head or rope switch of a family left out; an aux layer counted from the wrong end.
"""

import json
from pathlib import Path

import pytest
import torch
from toolkit.attention.segments import ragged_causal_segment
from toolkit.checkpoints.load import load_target, read_target_config
from toolkit.models import LLAMA3_ROPE, Zoo
from toolkit.oracles.reference import ReferenceBackend
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.kinds import FULL, LayerKind
from specdec.attention.pages import PageTable
from specdec.attention.segment import AttentionPlan
from specdec.models.causal_lm import CausalLM, TargetOutput
from specdec.models.keys.rope import parse_rope
from specdec.models.layers import Rotary

LENGTHS = [50, 1, 17]  # beyond the 32 positions that the llama3 scaling calls its original ones


def load(folder: Path) -> CausalLM:
    return load_target(folder, read_target_config(folder), 128, torch.device("cpu"), torch.float32)


def prompts(vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (n,), generator=generator) for n in LENGTHS]


@torch.no_grad()
def ours(model: CausalLM, ids: list[Tensor], aux_layers: tuple[int, ...]) -> TargetOutput:
    """All prompts as one ragged batch, one page each, through the reference attention."""
    config, page = model.config, max(LENGTHS)
    cache = KVCache(HeadsLayout(config.num_kv_heads, config.head_dim, torch.float32), config.layer_kinds, len(ids) * page)
    table = torch.arange(len(ids), dtype=torch.int32)[:, None]
    positions = torch.cat([torch.arange(len(x)) for x in ids])
    plan = AttentionPlan(
        (ragged_causal_segment(PageTable(table, page), [len(x) for x in ids], [len(x) for x in ids]),), positions
    )
    slots = torch.cat([row * page + torch.arange(len(x)) for row, x in enumerate(ids)])
    return model(torch.cat(ids), positions, PagedAttention(ReferenceBackend(), cache, PassTables(plan, slots)), aux_layers)


@torch.no_grad()
def theirs(model: PreTrainedModel, ids: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Logits, and all hidden_states: the embeddings, then every layer's output, the last one normed."""
    outs = [model(x[None], output_hidden_states=True) for x in ids]
    states = zip(*(out.hidden_states for out in outs), strict=True)
    return torch.cat([out.logits[0] for out in outs]), [torch.cat([s[0] for s in layer]) for layer in states]


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.slow_cases
def test_forward_equals_transformers(zoo: Zoo, any_target: str) -> None:
    """aux id i is the residual output of layer i: hidden_states[i + 1], except after the last layer, which comes normed."""
    model, hf = load(zoo.target(any_target)), zoo.hf(any_target)
    N, H = model.config.num_layers, model.config.hidden_size
    ids = prompts(model.config.vocab_size)
    out = ours(model, ids, tuple(range(N)))
    logits, states = theirs(hf, ids)
    close(model.logits(out.hidden_TH), logits)
    close(out.hidden_TH, states[N])
    assert out.aux_TA is not None and out.aux_TA.shape[1] == N * H
    for layer in range(N - 1):
        close(out.aux_TA[:, layer * H : (layer + 1) * H], states[layer + 1])
    last = out.aux_TA[:, (N - 1) * H :]
    close(hf.model.norm(last), states[N])
    assert (last - states[N]).abs().max() > 0.1  # the norm does something: taking its output would show


def test_aux_layers_are_captured_ascending(zoo: Zoo) -> None:
    """Keeps out: states in the order of a list instead of the order of layers, and capture when nobody asked."""
    model = load(zoo.target("llama"))
    ids, H = prompts(40), model.config.hidden_size
    every = ours(model, ids, (0, 1, 2, 3)).aux_TA
    some = ours(model, ids, (0, 3)).aux_TA
    assert every is not None and some is not None
    assert torch.equal(some, torch.cat((every[:, :H], every[:, 3 * H :]), dim=1))
    assert ours(model, ids, ()).aux_TA is None


def test_a_sharded_folder_is_the_same_model(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: shards of an index left unread; also tied and bfloat16 checkpoints survive."""
    hf = AutoModelForCausalLM.from_pretrained(zoo.target("llama3-tied-dim8"), dtype=torch.float32)
    hf.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    sharded, whole = load(tmp_path), load(zoo.target("llama3-tied-dim8"))
    for (name, a), (_, b) in zip(sharded.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert sharded.lm_head.weight is sharded.embed_tokens.weight


def test_pickled_weights_are_the_same_model(zoo: Zoo, tmp_path: Path) -> None:
    """Older heads and targets come as pytorch_model.bin."""
    hf = zoo.hf("qwen2")
    hf.config.save_pretrained(tmp_path)
    state = {name: tensor for name, tensor in hf.state_dict().items() if name != "lm_head.weight"}
    torch.save(state, tmp_path / "pytorch_model.bin")
    for (name, a), (_, b) in zip(load(tmp_path).named_parameters(), load(zoo.target("qwen2")).named_parameters(), strict=True):
        assert torch.equal(a, b), name


ROPES = [
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    LLAMA3_ROPE,
    {**LLAMA3_ROPE, "rope_theta": 500000.0, "factor": 32.0, "original_max_position_embeddings": 8192},
]


@pytest.mark.parametrize("head_dim", [8, 80, 128])
@pytest.mark.parametrize("parameters", ROPES, ids=lambda p: f"{p['rope_type']}-{p.get('factor', 1)}")
def test_rope_tables_equal_transformers(parameters: dict[str, float | str], head_dim: int) -> None:
    """Keeps out: llama3's scaling with its bands swapped or its original length ignored."""
    config = LlamaConfig(hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, rope_parameters=parameters)
    positions = torch.tensor([[0, 1, 31, 32, 33, 4095, 9000]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    got_cos, got_sin = Rotary(parse_rope({"rope_parameters": parameters}), head_dim, 9001).at(positions[0]).cos_sin
    sign = torch.cat((-torch.ones(head_dim // 2), torch.ones(head_dim // 2)))
    torch.testing.assert_close(got_cos[:, 0], cos[0], atol=2e-3, rtol=0)  # 9000 rad in float32 is good to 1e-3
    torch.testing.assert_close(got_sin[:, 0] * sign, sin[0], atol=2e-3, rtol=0)
    torch.testing.assert_close(got_cos[:4, 0], cos[0, :4], atol=1e-5, rtol=0)


def test_old_and_new_configs_mean_the_same_rope() -> None:
    """Keeps out: a theta or scaling lost in transformers 4's spelling."""
    old = {"rope_theta": 10000.0, "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}}
    older = {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert parse_rope(old) == parse_rope({"rope_parameters": LLAMA3_ROPE})
    assert parse_rope(older).factor == 2.0 and parse_rope(older).kind == "linear"
    assert parse_rope({}).theta == 10000.0 and parse_rope({"rope_theta": 5e5}).theta == 5e5


def test_the_zoo_is_what_it_says(zoo: Zoo) -> None:
    """Keeps out: a matrix whose cases have become equal: GQA, head dims 8 and 80, biases, q/k norms, tied and untied."""
    configs = {name: read_target_config(zoo.target(name)) for name in ("llama-dim80-biases", "qwen2", "qwen3", "mistral")}
    wide, qwen2, qwen3, mistral = configs.values()
    assert wide.head_dim == 80 and wide.qkv_bias and wide.o_bias and wide.mlp_bias and wide.num_kv_heads == 1
    assert qwen2.qkv_bias and not qwen2.o_bias and qwen2.tie_embeddings
    assert qwen3.qk_norm and qwen3.head_dim == 24 and not qwen3.tie_embeddings
    assert mistral.layer_kinds == (LayerKind(window=11),) * 4 and mistral.num_heads // mistral.num_kv_heads == 4
    assert qwen2.layer_kinds == (FULL, FULL, LayerKind(window=6), LayerKind(window=6))
    assert read_target_config(zoo.target("llama3-tied-dim8")).rope.kind == "llama3"
    assert AutoConfig.from_pretrained(zoo.target("mistral")).model_type == "mistral"
