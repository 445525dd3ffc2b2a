"""BLOOM, MPT and Falcon: logits and layer outputs are transformers', and what its code does not compute is refused by key.

Keeps out: a slope of another head, another head count's rule, or a sign; parts of fused projections that change places; a scale
that biases miss; a norm, a bias or a clip that is left out; keys that the code ignores.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.attention.segments import ragged_causal_segment
from toolkit.models import ragged_prompts
from toolkit.oracles.reference import ReferenceBackend
from toolkit.own_attention.targets import FAMILIES, oracle, save
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.kinds import LayerKind
from specdec.attention.pages import PageTable
from specdec.attention.segment import AttentionPlan
from specdec.loading.about.inspect_target import target_facts
from specdec.models.keys.slopes import slopes_of_bloom, slopes_of_falcon, slopes_of_mpt
from specdec.models.registry import choose_target, load_chosen
from specdec.models.target import Target, TargetOutput

IDS = [torch.tensor(prompt) for prompt in ragged_prompts(40, 4, seed=3)]


def loaded(folder: Path) -> Target:
    return load_chosen(choose_target(folder), folder, 128, torch.device("cpu"), torch.float32, cuda_graphs=False)


@torch.no_grad()
def ours(target: Target, aux_layers: tuple[int, ...] = ()) -> TargetOutput:
    """All prompts in one pass, one page each, through the definition of attention."""
    config, lens, page = target.config, [len(ids) for ids in IDS], max(map(len, IDS))
    layout = HeadsLayout(config.num_kv_heads, config.head_dim, torch.float32)
    cache = KVCache(layout, config.layer_kinds, len(IDS) * page)
    at_T = torch.cat([torch.arange(n) for n in lens])
    table = PageTable(torch.arange(len(IDS), dtype=torch.int32)[:, None], page)
    slots_T = torch.cat([row * page + torch.arange(n) for row, n in enumerate(lens)])
    plan = AttentionPlan((ragged_causal_segment(table, lens, lens),), at_T)
    return target(torch.cat(IDS), at_T, PagedAttention(ReferenceBackend(), cache, PassTables(plan, slots_T)), aux_layers)


def differences(folder: Path, exchanged: int = 0) -> list[float]:
    """The greatest of logits, and of the outputs of all layers but the last.  exchanged: see `oracle`."""
    target, hf = loaded(folder), oracle(folder, exchanged)
    N = target.config.num_layers
    out = ours(target, tuple(range(N)))
    with torch.no_grad():
        theirs = [hf(x[None], attention_mask=torch.ones_like(x)[None], output_hidden_states=True, use_cache=False) for x in IDS]
        logits_TV = torch.cat([each.logits[0] for each in theirs])
        assert out.aux_TA is not None
        wanted = [torch.cat([each.hidden_states[layer + 1][0] for each in theirs]) for layer in range(N - 1)]
        pairs = [(target.logits(out.hidden_TH), logits_TV), *zip(out.aux_TA.chunk(N, dim=1), wanted, strict=False)]
    return [float((got - want).abs().max()) for got, want in pairs]


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "falcon-rw-odd"])
def test_forward_equals_transformers(tmp_path: Path, name: str) -> None:
    assert max(differences(save(tmp_path, name))) < 1e-4


def test_falcons_rounded_biases(tmp_path: Path) -> None:
    """With 8 heads all slopes are powers of two, and transformers' code rounds nothing; with 12 heads it does, by little."""
    assert 1e-4 < max(differences(save(tmp_path, "falcon-rw-odd"))) < 0.05


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_a_wrong_slope_is_seen(tmp_path: Path, name: str) -> None:
    """Heads that exchange their slopes, planted in transformers' model, move everything by far more than the bound above."""
    assert min(differences(save(tmp_path, name), exchanged=1)) > 1e-2


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7, 8, 12, 16, 25, 32, 40, 71, 112])
def test_slopes_are_those_of_each_family(heads: int) -> None:
    cpu = torch.device("cpu")
    torch.testing.assert_close(torch.tensor(slopes_of_bloom(heads)), modeling_bloom._get_alibi_slopes(heads, cpu))
    for most in (8, 16):
        theirs_HX = modeling_mpt.build_mpt_alibi_tensor(heads, 3, most)[:, 0]
        torch.testing.assert_close(torch.tensor(slopes_of_mpt(heads, most)), theirs_HX[:, 2] - theirs_HX[:, 1])
    theirs_H = modeling_falcon.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32).view(heads, 2)[:, 1]
    torch.testing.assert_close(torch.tensor(slopes_of_falcon(heads, 0.125)), theirs_H / 8)


def rewritten(folder: Path, changes: dict[str, Any]) -> Path:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    own = changes.pop("attn_config", {})
    path.write_text(json.dumps(raw | changes | ({"attn_config": raw["attn_config"] | own} if own else {})))
    return folder


def attention(**keys: Any) -> dict[str, Any]:
    return {"attn_config": keys}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bloom", dict(slow_but_exact=True), "slow_but_exact must be False"),
    ("bloom", dict(n_inner=7), "n_inner must be null or 4 times"),
    ("bloom", dict(seq_length=0), "seq_length must be a whole number"),
    ("bloom", dict(n_embed=-1), "n_embed must be a whole number"),
    ("bloom", dict(alibi_max=9), "unknown config keys alibi_max"),
    ("bloom", dict(n_head=7), "hidden_size must be a multiple of n_head 7, got 80"),
    ("bloom", dict(num_hidden_layers=None), "num_hidden_layers must not be null"),
    ("bloom", dict(layer_norm_epsilon=-1e-5), "layer_norm_epsilon must be a finite number of at least 0"),
    ("bloom", dict(hidden_dropout=7), "hidden_dropout must be from 0 to 1, got 7"),
    ("bloom", dict(num_attention_heads=10), "n_head and num_attention_heads must be equal, got 5 and 10"),
    ("bloom", dict(n_embed=40), "n_embed and hidden_size must be equal, got 40 and 80"),
    ("mpt", dict(num_attention_heads=12), "n_heads and num_attention_heads must be equal, got 6 and 12"),
    ("bloom", dict(sliding_window=8, rope_theta=1e4), "keys rope_theta, sliding_window must be absent"),
    ("mpt", dict(num_key_value_heads=2), "keys num_key_value_heads must be absent"),
    ("falcon-7b", dict(head_dim=8), "keys head_dim must be absent"),
    ("mpt", dict(expansion_ratio=2), "expansion_ratio must be 4"),
    ("mpt", dict(logit_scale="inv_sqrt_d_model"), "logit_scale must be None"),
    ("mpt", dict(no_bias=False), "no_bias must be True"),
    ("mpt", dict(norm_type="rmsnorm"), "norm_type must be 'low_precision_layernorm' or 'layernorm'"),
    ("mpt", dict(max_seq_len=0), "max_seq_len must be a whole number"),
    ("mpt", dict(fc_type="torch"), "unknown config keys fc_type"),
    ("mpt", attention(alibi=False), "attn_config: alibi must be True"),
    ("mpt", attention(attn_type="multiquery_attention"), "attn_type must be 'multihead_attention'"),
    ("mpt", attention(attn_uses_sequence_id=True), "attn_uses_sequence_id must be False"),
    ("mpt", attention(prefix_lm=True), "prefix_lm must be False"),
    ("mpt", attention(qk_ln=True), "qk_ln must be False"),
    ("mpt", attention(qk_gn=False), "attn_config: unknown keys qk_gn"),
    ("mpt", dict(n_heads=7), "d_model must be a multiple of n_heads 7, got 96"),
    ("mpt", attention(attn_pdrop=7), "attn_pdrop must be from 0 to 1, got 7"),
    ("mpt", attention(alibi_bias_max=0), "alibi_bias_max must be a finite number above 0"),
    ("mpt", attention(clip_qkv=-1.0), "clip_qkv must be a finite number above 0"),
    ("mpt", attention(softmax_scale=0), "softmax_scale must be a finite number above 0"),
    (
        "falcon-rw",
        dict(apply_residual_connection_post_layernorm=True),
        "post_layernorm must be False",
    ),
    ("falcon-rw", dict(num_kv_heads=2), "num_kv_heads must be num_attention_heads 8 where multi_query is false"),
    ("falcon-40b", dict(num_kv_heads=4), "num_attention_heads 6 must be a multiple of num_kv_heads"),
    ("falcon-rw", dict(num_attention_heads=None), "num_attention_heads"),
    ("falcon-rw", dict(num_attention_heads=[8]), r"num_attention_heads must be a whole number of at least 1, got \[8\]"),
    ("falcon-rw", dict(activation="gelu_wide"), "activation must be an activation that transformers knows"),
    ("falcon-rw", dict(layer_norm_epsilon=None), "layer_norm_epsilon must not be null"),
    (
        "falcon-rw",
        dict(new_decoder_architecture=True),
        "parallel_attn must be absent or true where new_decoder_architecture is",
    ),
    ("falcon-40b", dict(num_ln_in_parallel_attn=3), "num_ln_in_parallel_attn must be at most 2, got 3"),
    ("falcon-7b", dict(num_ln_in_parallel_attn=2), "num_ln_in_parallel_attn must be null or 1 unless"),
    ("falcon-rw", dict(ffn_size=8), "unknown config keys ffn_size"),
]


def test_keys_that_nobody_computes_are_refused(tmp_path: Path) -> None:
    made: dict[str, str] = {}
    for number, (name, changes, match) in enumerate(REFUSED):
        if name not in made:
            made[name] = (save(tmp_path / name, name, layers=2) / "config.json").read_text()
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(made[name])
        with pytest.raises(ValueError, match=match):
            choose_target(rewritten(folder, dict(changes)))


HARMLESS: dict[str, dict[str, Any]] = {  # of published configs
    "bloom": dict(
        attention_softmax_in_fp32=True, bias_dropout_fusion=True, masked_softmax_fusion=True, n_inner=None, offset_alibi=100,
        seq_length=64, skip_bias_add=True, skip_bias_add_qkv=False, pretraining_tp=4, unk_token_id=0, n_embed=80,
    ),
    "mpt": dict(
        init_config={"name": "kaiming_normal_"}, tokenizer_name="EleutherAI/gpt-neox-20b", verbose=0, max_seq_len=64,
        learned_pos_emb=True, embedding_fraction=1.0, init_device="cpu", attn_config=dict(attn_impl="triton", clip_qkv=None),
    ),
    "falcon-rw": dict(apply_residual_connection_post_layernorm=False, max_position_embeddings=64),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_published_configs_are_read(tmp_path: Path, name: str) -> None:
    config = choose_target(rewritten(save(tmp_path, name), dict(HARMLESS[name]))).config
    assert config.layer_kinds == (LayerKind(alibi=True),) * 3
    assert config.max_position == 64
    assert config.num_heads == FAMILIES[name][1]


def test_whole_numbers_stand_for_floats(tmp_path: Path) -> None:
    """Keeps out: MPT-7B-StoryWriter, whose config.json says clip_qkv 6; transformers' class accepts 6.0 alone."""
    folder = save(tmp_path, "mpt", attn_config=dict(clip_qkv=1.0, softmax_scale=1.0))
    before = ours(loaded(folder)).hidden_TH
    changed = rewritten(folder, attention(clip_qkv=1, softmax_scale=1))
    assert '"clip_qkv": 1,' in (folder / "config.json").read_text()
    assert torch.equal(ours(loaded(changed)).hidden_TH, before)


def test_inspect_says_alibi(tmp_path: Path) -> None:
    sizes = target_facts(save(tmp_path, "bloom"))["target"]
    assert sizes["layers read"] == "3 x full with alibi"
    assert sizes["rope"] == "none: ALiBi"
