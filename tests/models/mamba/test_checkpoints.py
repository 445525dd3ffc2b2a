"""How targets with Mamba-2 layers are loaded: schemes of weights, ranks, and what is refused."""

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
from toolkit.recurrent.mamba_targets import tiny_mamba

from specdec import SamplingParams, SpecDecoder
from specdec.loading.about.inspect_target import target_facts
from specdec.loading.load import check_pair
from specdec.models.checkpoints.frame import load_family
from specdec.models.checkpoints.kv_scales import kv_scales
from specdec.options import EngineOptions
from specdec.parallel.shard import Shard

GRANITE: dict[str, Any] = dict(
    hidden_size=64, mamba_d_head=32, shared_intermediate_size=64, num_hidden_layers=2, layer_types=["mamba", "attention"]
)
NEMOTRON: dict[str, Any] = dict(
    hidden_size=64, mamba_head_dim=16, head_dim=16, intermediate_size=64, moe_latent_size=32, moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=32,
)  # fmt: skip
FALCON: dict[str, Any] = dict(hidden_size=64, mamba_d_ssm=64, mamba_d_head=16, head_dim=16, intermediate_size=64)
CASES = [
    ("falcon_h1", "deepseek fp8", FALCON),
    ("bamba", "awq", dict(hidden_size=64, mamba_n_heads=32, mamba_d_head=4, mamba_n_groups=4, intermediate_size=64)),
    ("granite dense", "w4a16 g32 asym", GRANITE),
    ("granite dense", "fp8 channel", GRANITE),
    ("nemotron_h", "modelopt fp8", NEMOTRON),
    ("nemotron_h", "nvfp4", NEMOTRON),
]


@pytest.mark.parametrize(
    ("family", "prefix"), [("nemotron_h", "backbone.layers.{}.mixer"), ("falcon_h1", "model.layers.{}.self_attn")]
)
def test_scales_of_keys_and_values_are_their_layer_s(tmp_path: Path, family: str, prefix: str) -> None:
    """Keeps out: scales counted by modules of attention and states, where a layer has both of them or neither; scales of
    multiplied keys for Falcon's, which caches hold before they are multiplied.
    """
    folder = tiny_mamba(tmp_path, family)
    path, layers = folder / "model.safetensors", {"nemotron_h": [2], "falcon_h1": [0, 1, 2]}[family]
    own = {f"{prefix.format(layer)}.{letter}_scale": torch.tensor(1.0 + layer) for layer in layers for letter in "kv"}
    save_file(load_file(path) | own, path, metadata={"format": "pt"})
    model = load(folder)
    times = 0.7 if family == "falcon_h1" else 1.0
    for layer, scale_2K in enumerate(kv_scales(model, model.config.layer_kinds)):
        assert (scale_2K is not None) == (layer in layers)
        if scale_2K is not None:
            torch.testing.assert_close(scale_2K[:, 0], torch.tensor([(1.0 + layer) / times, 1.0 + layer]))


MODULES = {"nemotron_h": "mixer", "falcon_h1": "mamba", "granite dense": "self_attn", "bamba": "self_attn"}


@pytest.mark.parametrize(("family", "scheme", "sizes"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_scheme_s_numbers_and_bytes(tmp_path: Path, family: str, scheme: str, sizes: dict[str, Any]) -> None:
    """Keeps out: rows in the file's order under scales in ours, rules that fit no name of ours, bytes counted twice."""
    plain = tiny_mamba(tmp_path / "plain", family, **sizes)
    quantised = as_quantised(plain, tmp_path / "quantised", SCHEMES[scheme])
    few, want = load(quantised), logits(load(plain))
    assert few.layers[0].get_submodule(MODULES[family]).in_proj.is_quantised
    torch.testing.assert_close(logits(few), want, atol=1e-5 * float(want.abs().max()), rtol=1e-5)
    options = EngineOptions(dtype="float32", max_seq_len=64)
    assert plan_memory(quantised, None, None, options, 10**10).parts["weights of the target"] == held(few)


@pytest.mark.parametrize(("family", "sizes"), [("granite dense", GRANITE), ("nemotron_h", NEMOTRON), ("falcon_h1", FALCON)])
def test_weights_rounded_at_load(tmp_path: Path, family: str, sizes: dict[str, Any]) -> None:
    """Keeps out: a plan that counts other matrices than are rounded."""
    folder = tiny_mamba(tmp_path, family, **sizes)
    model, dense = load(folder, "fp8"), load(folder)
    assert float((logits(model) - logits(dense)).std() / logits(dense).std()) < 0.4
    options = EngineOptions(dtype="float32", max_seq_len=64, quantize="fp8")
    assert plan_memory(folder, None, None, options, 10**10).parts["weights of the target"] == held(model)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("family", "sharing"),
    [("granitemoehybrid", "tensor"), ("falcon_h1", "auto"), ("nemotron_h", "experts"), ("nemotron_h", "tensor")],
)
def test_two_ranks_write_what_one_writes(tmp_path: Path, family: str, sharing: str) -> None:
    """Keeps out: a rank with another one's channels, groups or states; latents that are added twice; a plan of the whole."""
    folder = tiny_mamba(tmp_path, family)

    def use(decoder: SpecDecoder) -> list[list[int]]:
        prompts = [[1, 2, 3, 4, 5, 6, 7], [9]]
        return [out.token_ids for out in decoder.generate(prompts, SamplingParams(max_tokens=10))]

    more: Any = {"max_batch_size": 2, "smoke": False, "expert_parallel": sharing}
    with SpecDecoder.from_pretrained(folder, device="cpu", dtype="float32", max_seq_len=80, max_batch_size=2) as one:
        assert with_ranks(folder, None, None, 2, use, dtype=torch.float32, **more) == use(one)
    options = EngineOptions(dtype="bfloat16", max_seq_len=64, tensor_parallel_size=2, expert_parallel=sharing)
    plan = plan_memory(folder, None, None, options, 10**10)
    pair = check_pair(folder, None, None, replace(options, device="cpu"))
    assert pair.chosen.native is not None
    first = load_family(pair.chosen.native, pair.checkpoint, pair.chosen.config, 64, CPU, torch.bfloat16, Shard(0, 2))
    assert plan.parts["weights of the target"] == held(first)


def test_inspect_says_what_layers_are(tmp_path: Path) -> None:
    """Keeps out: layers that keep nothing counted as attention, and a rope that no layer has."""
    facts = target_facts(tiny_mamba(tmp_path, "nemotron_h"))["target"]
    assert facts["layers read"] == "2 x recurrent, 2 x without a memory, 1 x full"
    assert facts["rope"] == "none: layers know no positions" and facts["layers that store keys"] == 1
    assert facts["experts"]["dense"] == "layer 3" and facts["experts"]["over latents of"] == 16


# A target, keys of its config.json, and what is said of them.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("granitemoehybrid", {"mamba_n_groups": 3}, "mamba_n_heads must be a multiple of mamba_n_groups, got 4, 3"),
    ("granitemoehybrid", {"mamba_n_heads": 8}, r"must be mamba_expand x hidden_size, 64, got 8 x 16; nearest"),
    ("granitemoehybrid", {"mamba_d_state": 16}, r"in_proj.* must have shape \(196, 32\), got \(164, 32\).*mamba_\* sizes"),
    ("granitemoehybrid", {"mamba_d_conv": 3}, r"conv1d.*\(96, 1, 3\), got \(96, 1, 4\)"),
    ("granitemoehybrid", {"time_step_limit": [0.001, 0.1]}, "time_step_limit must be 0 and infinity.*never cut; nearest"),
    ("granitemoehybrid", {"time_step_limit": 3}, "time_step_limit must be null or a list of two numbers"),
    ("granitemoehybrid", {"layer_types": None}, "some layers must be of attention, by layer_types"),
    ("granitemoehybrid", {"layer_types": ["mamba", "sliding_attention"] * 2}, "layer_types must be 4 of full_attention or "),
    ("granitemoehybrid", {"layer_types": ["attention", "mamba"] * 2}, "layer 0 is of attention by .*but of mamba"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type must be 'rope', 'nope' or null"),
    ("granitemoehybrid", {"normalization_function": "layernorm"}, "normalization_function must be 'rmsnorm' or absent"),
    ("granitemoehybrid", {"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
    ("granitemoehybrid", {"mamba_extra": 1}, "unknown config keys mamba_extra"),
    ("granitemoehybrid", {"num_experts_per_tok": 7}, "num_experts_per_tok must be at most num_local_experts 6, got 7"),
    ("granitemoehybrid", {"shared_intermediate_size": 8}, "shared_mlp.input_linear.*shared_intermediate_size and hidden_size"),
    ("bamba", {"attn_layer_indices": None}, "some layers must be of attention, by attn_layer_indices"),
    ("bamba", {"attn_layer_indices": [0]}, "layer 0 is of attention by attn_layer_indices, but of Mamba-2 by its tensors"),
    ("bamba", {"attn_layer_indices": [3]}, "attn_layer_indices must hold numbers of layers from 0 to 2"),
    ("bamba", {"partial_rotary_factor": 1.0}, "partial_rotary_factor must be 0.5, got 1.0"),
    ("falcon_h1", {"mamba_use_mlp": False}, "mamba_use_mlp must be True, got False"),
    ("falcon_h1", {"attn_layer_indices": [1]}, "attn_layer_indices must be None, got"),
    ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers must be null or a list of 5 numbers"),
    ("falcon_h1", {"mlp_multipliers": [1.0, 0.0]}, "mlp_multipliers must be a finite number above 0"),
    ("falcon_h1", {"mamba_d_ssm": 64}, "must be mamba_d_ssm, 64, got 4 x 12"),
    ("falcon_h1", {"mamba_rms_norm": True}, "'model.layers.0.mamba.norm.weight' is missing"),
    ("falcon_h1", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters and rope_scaling must"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act must be 'relu2', got 'silu'"),
    ("nemotron_h", {"attention_bias": 0}, "attention_bias must be False, got 0"),
    ("bamba", {"num_attention_heads": 32}, "hidden_size / num_attention_heads must be an even number .* got 32 / 32"),
    ("nemotron_h", {"attention_bias": True}, "attention_bias must be False, got True"),
    ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings must be False, got True"),
    ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts must be 1, got 2"),
    ("nemotron_h", {"sliding_window": 8}, "sliding_window must be None, got 8"),
    ("nemotron_h", {"time_step_limit": None, "mamba_dt_limit": [0.0, 0.5]}, "time_step_limit must be 0 and infinity"),
    ("nemotron_h", {"num_hidden_layers": 6}, "num_hidden_layers must be as many as layers_block_type .* 5, .* got 6"),
    ("nemotron_h", {"hybrid_override_pattern": "ME*-E"}, "layers_block_type and hybrid_override_pattern must say the same"),
    ("nemotron_h", {"mamba_ssm_cache_dtype": "half"}, "mamba_ssm_cache_dtype must be null or one of float32, .*got 'half'"),
    ("nemotron_h", {"layers_block_type": []}, r"layers_block_type must name a block or more, or be absent, got \[\]"),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": ""}, "hybrid_override_pattern must name a block"),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "ME|*-M"}, r"_pattern must be of the letters .*'\|'"),
    ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"]}, "layer 3 is of moe by .*of mlp by"),
    ("nemotron_h", {"layers_block_type": ["mamba", "moe", "lstm"]}, "layers_block_type must be a list of .*got 'lstm'"),
    ("nemotron_h", {"layers_block_type": ["mamba", "moe"]}, "must have layers of full_attention and of linear_attention"),
    ("nemotron_h", {"norm_eps": 1e-6}, "layer_norm_epsilon 1e-05 is the epsilon of all norms"),
    ("nemotron_h", {"moe_latent_size": None}, r"experts.0.up_proj.*must have shape \(16, 32\), .*moe_latent_size"),
    ("nemotron_h", {"n_group": 4}, "n_group must divide n_routed_experts 6, .*got 4, 1"),
    ("nemotron_h", {"n_group": 6}, "n_group 6 must leave two experts in each group"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("refused")
    return {family: tiny_mamba(root / family, family) for family in {family for family, _, _ in REFUSED}}


@pytest.mark.parametrize(("family", "keys", "said"), REFUSED, ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")
def test_what_is_not_computed_is_refused(
    folders: dict[str, Path], tmp_path: Path, family: str, keys: dict[str, Any], said: str
) -> None:
    expect_refused(folders[family], tmp_path, keys, said)


def test_tensors_are_strict_and_ranks_that_do_not_fit_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    """Keeps out: tensors that nobody reads, one that is there under two names, MTP that no config counts, groups cut in two."""
    tensors = load_file(folders["nemotron_h"] / "model.safetensors")
    (tmp_path / "config.json").write_text((folders["nemotron_h"] / "config.json").read_text())

    def refuse(said: str, **more: torch.Tensor) -> None:
        save_file(tensors | {name.replace("_", "."): x for name, x in more.items()}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=said):
            load(tmp_path)

    refuse("not part of this architecture: model.layers.0.mixer.extra", backbone_layers_0_mixer_extra=torch.zeros(2))
    refuse("'backbone.embeddings.weight' and 'model.embeddings.weight' are one", model_embeddings_weight=torch.zeros(2))
    refuse("num_nextn_predict_layers 1$", mtp_layers_0_norm_weight=torch.zeros(2))
    name = "backbone.layers.0.mixer.A_log"
    save_file(tensors | {name: torch.tensor([0.0, 60.0, 1.0, 2.0])}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="must hold logarithms .* at most 50, got 60; "):
        load(tmp_path)
    options = EngineOptions(device="cpu", max_seq_len=64, tensor_parallel_size=4)
    with pytest.raises(ValueError, match=r"2 key heads of recurrent layers .* got 4; nearest setting .*tensor_parallel_size=2"):
        check_pair(folders["nemotron_h"], None, None, options)


def test_mtp_layers_are_passed_over(folders: dict[str, Path], tmp_path: Path) -> None:
    """Keeps out: a target refused for layers that nobody asked for."""
    raw = json.loads((folders["nemotron_h"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_nextn_predict_layers": 1}))
    tensors = load_file(folders["nemotron_h"] / "model.safetensors")
    save_file(tensors | {"mtp.layers.0.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    assert torch.equal(logits(load(tmp_path)), logits(load(folders["nemotron_h"])))
