"""How hybrids of other families than Qwen's are loaded: schemes of weights, ranks, what is planned, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.checkpoints.plans import plan_memory
from toolkit.oracles.quantised import SCHEMES, as_quantised
from toolkit.parallel.decoders import with_ranks
from toolkit.recurrent.checks import CPU, expect_refused, held, load, logits
from toolkit.recurrent.more_targets import MORE, save_more

from specdec import SamplingParams, SpecDecoder
from specdec.loading.about.inspect_target import target_facts
from specdec.loading.load import check_pair
from specdec.models.checkpoints.frame import load_family
from specdec.models.linear import Linear
from specdec.models.registry import check_chosen, choose_target
from specdec.options import EngineOptions
from specdec.parallel.shard import Shard

SIZES: dict[str, dict[str, Any]] = {  # widths of whole groups, in two layers
    "lfm2": dict(hidden_size=64, block_ff_dim=64, block_auto_adjust_ff_dim=False, num_hidden_layers=2),
    "lfm2_moe": dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2),
    "olmo_hybrid": dict(
        hidden_size=64, intermediate_size=64, linear_value_head_dim=16, linear_num_value_heads=8, linear_num_key_heads=4,
        linear_key_head_dim=16, num_hidden_layers=2,
    ),
    "kimi_linear": dict(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=32, v_head_dim=8, kv_lora_rank=32, num_hidden_layers=2,
        linear_attn_config={"head_dim": 32, "num_heads": 2, "short_conv_kernel_size": 4}, mlp_layer_types=["dense", "sparse"],
    ),
}  # fmt: skip
SHORT = {"lfm2": ["conv", "full_attention"], "lfm2_moe": ["conv", "full_attention"]}
SHORT["olmo_hybrid"] = ["linear_attention", "full_attention"]
SHORT["kimi_linear"] = SHORT["olmo_hybrid"]
CASES = [
    ("kimi_linear", "w4a16 g32 asym", "kv_b_proj"),  # which is dequantised, and which a plan counts as it is stored
    ("olmo_hybrid", "w4a16 g32 asym", "^$"),
    ("lfm2", "w4a16 g32 asym", "^$"),
    ("lfm2", "awq", "^$"),
    ("lfm2_moe", "w4a16 g32 asym", r"^$"),
]


@pytest.mark.parametrize(("family", "scheme", "left"), CASES)
def test_a_scheme_s_numbers_and_bytes(tmp_path: Path, family: str, scheme: str, left: str) -> None:
    """Keeps out: rows in the file's order under scales in ours, and bytes that a plan counts otherwise."""
    plain = save_more(tmp_path / "plain", family, **SIZES[family], layer_types=SHORT[family])
    own = SCHEMES[scheme]
    own = own if left == "^$" else own._replace(config=own.config | {"ignore": ["lm_head", f"re:.*{left}"]})
    few = load(quantised := as_quantised(plain, tmp_path / "quantised", own, left))
    want = logits(load(plain))
    torch.testing.assert_close(logits(few), want, atol=1e-5 * float(want.abs().max()), rtol=1e-5)
    options = EngineOptions(dtype="float32", max_seq_len=64)
    assert plan_memory(quantised, None, None, options, 10**10).parts["weights of the target"] == held(few)


@pytest.mark.parametrize("family", MORE)
def test_weights_rounded_at_load(tmp_path: Path, family: str) -> None:
    """Keeps out: gates of a rule in few bits; a plan that counts other matrices than are rounded."""
    folder = save_more(tmp_path, family, **SIZES[family], layer_types=SHORT[family])
    model, dense = load(folder, "fp8"), load(folder)
    mixer = model.layers[0].self_attn
    matrices = {name: each.is_quantised for name, each in mixer.named_children() if isinstance(each, Linear)}
    assert matrices.pop("in_proj") and not (matrices.pop("gates_proj", False) or matrices.pop("f_b_proj", False))
    assert all(matrices.values())
    assert float((logits(model) - logits(dense)).std() / logits(dense).std()) < 0.4
    options = EngineOptions(dtype="float32", max_seq_len=64, quantize="fp8")
    assert plan_memory(folder, None, None, options, 10**10).parts["weights of the target"] == held(model)


# Biases of convolutions, and pieces of convolutions that are of equal size, as published ones are of whole heads.
TO_SHARE: dict[str, dict[str, Any]] = {"lfm2": {"conv_bias": True}, "olmo_hybrid": {"linear_value_head_dim": 4}}


@pytest.mark.slow_cases
@pytest.mark.parametrize("family", MORE)
def test_two_ranks_write_what_one_writes(tmp_path: Path, family: str) -> None:
    """Keeps out: a rank with another one's channels, gates or states; a plan of a rank that counts the whole."""
    folder = save_more(tmp_path, family, **TO_SHARE.get(family, {}))

    def use(decoder: SpecDecoder) -> list[list[int]]:
        prompts = [[1, 2, 3, 4, 5, 6, 7], [9]]
        return [out.token_ids for out in decoder.generate(prompts, SamplingParams(max_tokens=8))]

    more: Any = {"max_batch_size": 2, "smoke": False}
    with SpecDecoder.from_pretrained(folder, device="cpu", dtype="float32", max_seq_len=80, max_batch_size=2) as one:
        assert with_ranks(folder, None, None, 2, use, dtype=torch.float32, **more) == use(one)
    options = EngineOptions(dtype="bfloat16", max_seq_len=64, tensor_parallel_size=2)
    plan = plan_memory(folder, None, None, options, 10**10)
    pair = check_pair(folder, None, None, replace(options, device="cpu"))
    assert pair.chosen.native is not None
    first = load_family(pair.chosen.native, pair.checkpoint, pair.chosen.config, 64, CPU, torch.bfloat16, Shard(0, 2))
    assert plan.parts["weights of the target"] == held(first)


def test_convolutions_in_pieces_as_published_are_the_same(tmp_path: Path) -> None:
    """transformers saves three pieces of one size, of whatever kinds.  Keeps out: values' channels taken for keys'."""
    folder = save_more(tmp_path / "thirds", "olmo_hybrid")
    tensors = load_file(folder / "model.safetensors")
    names = [f"model.layers.0.linear_attn.{letter}_conv1d.weight" for letter in "qkv"]
    assert [len(tensors[name]) for name in names] == [27, 27, 26]
    pieces = torch.cat([tensors[name] for name in names]).split((16, 16, 48))
    (tmp_path / "kinds").mkdir()
    (tmp_path / "kinds" / "config.json").write_text((folder / "config.json").read_text())
    kinds = {name: piece.clone() for name, piece in zip(names, pieces, strict=True)}
    save_file(tensors | kinds, tmp_path / "kinds" / "model.safetensors")
    assert torch.equal(logits(load(tmp_path / "kinds")), logits(load(folder)))


def test_no_rope_where_a_file_names_none(tmp_path: Path) -> None:
    """Keeps out: heads turned by transformers' theta, which no released checkpoint was trained with."""
    folder = save_more(tmp_path, "olmo_hybrid")
    raw, found = json.loads((folder / "config.json").read_text()), []
    for rope in (raw["rope_parameters"], None, {}, {"rope_type": "default"}):
        (folder / "config.json").write_text(json.dumps({**raw, "rope_parameters": rope}))
        found.append(target_facts(folder)["target"]["rope"])
    assert found == ["none: layers know no positions"] * 4


@pytest.mark.parametrize("family", MORE)
def test_inspect_says_what_layers_keep(tmp_path: Path, family: str) -> None:
    folder = save_more(tmp_path, family)
    facts = target_facts(folder)["target"]
    assert facts["layers read"] == "3 x recurrent, 1 x full"
    sizes = load(folder).config.recurrent
    assert sizes is not None and facts["bytes of a text's state"] == 3 * sizes.state_bytes(torch.float32)


def test_inspect_says_that_a_width_is_adjusted(tmp_path: Path) -> None:
    """Keeps out: an `intermediate_size` that is not the file's, without a word."""
    facts = target_facts(save_more(tmp_path, "lfm2"))
    assert facts["target"]["intermediate_size"] == 32
    assert facts["meanings"]["intermediate_size"] == "48, but with the file's other keys MLPs are 32 wide"


# A family, keys of its config.json, and what is said of them.
KDA = {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope must be True, got False"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func must be 'sigmoid'"),
    ("kimi_linear", {"moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
    ("kimi_linear", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers must be 0, got 1"),
    ("kimi_linear", {"attention_bias": True}, "attention_bias must be False"),
    ("kimi_linear", {"gate_lower_bound": -5.0}, "unknown config keys gate_lower_bound"),
    ("kimi_linear", {"linear_attn_config": {**KDA, "gate": 1}}, "linear_attn_config: unknown config keys gate"),
    (
        "kimi_linear",
        {"linear_attn_config": {**KDA, "head_dim": 16}},
        "linear_head_dim must be what linear_attn_config says, 16",
    ),
    ("kimi_linear", {"layer_types": None, "linear_attn_config": KDA}, "lacks layer_types, and in linear_attn_config"),
    (
        "kimi_linear",
        {"linear_attn_config": {**KDA, "full_attn_layers": [4], "kda_layers": [1, 2, 3]}},
        "layer_types must say what the lists of linear_attn_config say",
    ),
    ("kimi_linear", {"linear_attn_config": {**KDA, "full_attn_layers": [0], "kda_layers": [1, 2, 3]}}, "each number from 1"),
    ("kimi_linear", {"first_k_dense_replace": 2}, "first_k_dense_replace must say what mlp_layer_types says"),
    ("kimi_linear", {"mlp_layer_types": ["sparse"] * 4}, "layer 0 is a mixture by first_k_dense_replace"),
    ("kimi_linear", {"mlp_layer_types": ["dense"] * 3}, "for each layer, 4 by num_hidden_layers, got"),
    ("kimi_linear", {"moe_renormalize": None}, r"norm_topk_prob must be true or false, got None \(.* is moe_renormalize there"),
    ("kimi_linear", {"num_experts_per_token": 7}, r"got 7 \(n_routed_experts is num_experts there, num_experts_per_tok is "),
    ("kimi_linear", {"model_max_length": "x"}, r"got 'x' \(max_position_embeddings is model_max_length there\)"),
    ("kimi_linear", {"num_key_value_heads": 1}, "num_key_value_heads must be num_attention_heads, 4, or absent, got 1"),
    ("olmo_hybrid", {"layer_types": ["linear_attention"] * 4}, "layers must be of both kinds"),
    ("olmo_hybrid", {"layer_types": ["full_attention"] + ["linear_attention"] * 3}, "layer 0 is of full_attention by layer"),
    ("olmo_hybrid", {"linear_num_value_heads": 3}, "linear_num_value_heads must be a multiple of linear_num_key_heads"),
    ("olmo_hybrid", {"linear_value_head_dim": 16}, "v_proj.weight' must have shape .*linear_value_head_dim"),
    ("olmo_hybrid", {"linear_conv_kernel_dim": 3}, "must have 3 taps by linear_conv_kernel_dim, got 4"),
    ("olmo_hybrid", {"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
    ("olmo_hybrid", {"linear_use_gate": True}, "unknown config keys linear_use_gate"),
    ("olmo_hybrid", {"rope_parameters": {"rope_type": "longrope", "rope_theta": None}}, "rope_theta must be a finite|longrope"),
    ("lfm2", {"layer_types": ["conv"] * 4}, "layers must be of both kinds"),
    ("lfm2", {"layer_types": ["conv", "mamba", "full_attention", "conv"]}, "layer_types must be 4 of full_attention or conv"),
    ("lfm2", {"layer_types": ["full_attention", "conv", "conv", "conv"]}, "layer 0 is of full_attention by layer_types"),
    ("lfm2", {"rms_norm_eps": 1e-5}, "unknown config keys rms_norm_eps"),
    ("lfm2", {"conv_dim": 64}, "conv_dim must be hidden_size, 32, or absent, got 64"),
    ("lfm2", {"block_use_swiglu": False}, "block_use_swiglu must be True, got False"),
    ("lfm2", {"use_pos_enc": False}, "use_pos_enc must be True, got False"),
    ("lfm2", {"conv_L_cache": 4}, "conv.conv.weight' must have shape .*32, 1, 4.*conv_L_cache"),
    ("lfm2", {"conv_bias": True}, "in_proj.bias' is missing"),
    ("lfm2", {"num_experts": 4}, "unknown config keys num_experts"),
    ("lfm2_moe", {"layer_types": None}, "lacks layer_types"),
    ("lfm2_moe", {"num_dense_layers": 2}, "layer 1 is dense by num_dense_layers, but not by its tensors"),
    ("lfm2_moe", {"num_experts": 8}, "feed_forward.gate.weight' must have shape .*num_experts"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("refused")
    return {family: save_more(root / family, family) for family in MORE}


@pytest.mark.parametrize(("family", "keys", "said"), REFUSED, ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")
def test_what_is_not_computed_is_refused(
    folders: dict[str, Path], tmp_path: Path, family: str, keys: dict[str, Any], said: str
) -> None:
    expect_refused(folders[family], tmp_path, keys, said)


@pytest.mark.parametrize("family", MORE)
def test_tensors_are_strict_and_ranks_that_do_not_fit_are_named(folders: dict[str, Path], tmp_path: Path, family: str) -> None:
    tensors = load_file(folders[family] / "model.safetensors")
    (tmp_path / "config.json").write_text((folders[family] / "config.json").read_text())
    save_file(tensors | {"model.layers.0.conv.extra": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not part of this architecture: model.layers.0.conv.extra"):
        check_chosen(choose_target(tmp_path), tmp_path)
    options = EngineOptions(device="cpu", max_seq_len=64, tensor_parallel_size=3)
    with pytest.raises(ValueError, match=r"tensor_parallel_size must be .* got 3; nearest setting"):
        check_pair(folders[family], None, None, options)
