"""The keys of quantization_configs as today's tools write them: those that change nothing are taken, all others are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from toolkit.models import save_target
from toolkit.oracles.quantised import compressed
from transformers.utils.quantization_config import AwqConfig, FineGrainedFP8Config, GPTQConfig, Mxfp4Config

from specdec.models.described import target_json
from specdec.models.gpt_oss.config import _quantization as of_gpt_oss
from specdec.models.registry import choose_target
from specdec.models.schemes import rules
from specdec.models.schemes.config import parse_quantization, quantization_of
from specdec.models.schemes.formats import Fp8
from specdec.models.schemes.integers import Awq, Gptq

GPTQMODEL = {"bits": 4, "group_size": 128, "desc_act": False, "lm_head": False, "pack_dtype": "int32", "meta": {"damp": 0.1}}
AUTOROUND = {"iters": 200, "autoround_version": "0.16", "data_type": "int", "packing_format": "auto_gptq", "lr": 0.005}
AUTOROUND_5 = {  # of 0.5
    "amp": True, "act_bits": 16, "act_data_type": None, "act_dynamic": True, "act_group_size": None, "act_sym": None,
    "autoround_version": "0.5.1", "backend": "auto_round:gptq:exllamav2", "batch_size": 8, "block_name_to_quantize": None,
    "data_type": "int", "enable_minmax_tuning": True, "enable_norm_bias_tuning": False, "enable_quanted_input": True,
    "gradient_accumulate_steps": 1, "iters": 200, "low_gpu_mem_usage": False, "lr": 0.005, "minmax_lr": 0.005, "nsamples": 128,
    "scale_dtype": "torch.float16", "seqlen": 2048, "group_size": 128, "desc_act": False, "true_sequential": False,
    "damp_percent": 0.01, "lm_head": False,
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WRITTEN: dict[str, tuple[dict[str, Any], Any]] = {
    "transformers fp8": (FineGrainedFP8Config().to_dict(), Fp8("weight_scale_inv", "block")),
    "transformers gptq": (GPTQConfig(bits=4, group_size=64).to_dict(), Gptq(4, 64, True, 1)),
    "transformers awq": (AwqConfig(group_size=64).to_dict(), Awq(64)),
    "gptqmodel gptq": ({**GPTQMODEL, **GPTQ, "method": "gptq", "format": "gptq_v2"}, Gptq(4, 128, True, 0)),
    "AutoAWQ's own file": (
        {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM", "quant_method": "awq"},
        Awq(64),
    ),
    "gptqmodel awq": ({**GPTQMODEL, **AWQ, "method": "awq", "format": "gemm", "checkpoint_format": "gemm"}, Awq(128)),
    "AutoRound 0.5": ({**GPTQ, **AUTOROUND_5}, Gptq(4, 128, True, 1)),
    "AutoRound": ({**GPTQ, **AUTOROUND}, Gptq(4, 128, True, 1)),
    "desc_act": ({**GPTQ, "desc_act": True}, Gptq(4, 128, True, 1, True)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_configs_of_todays_tools_are_taken(name: str) -> None:
    """Keeps out: a refusal of published files over keys that say how they were made."""
    raw, format = WRITTEN[name]
    assert parse_quantization(json.loads(json.dumps(raw)), "here").format_of("model.layers.0.q", lambda _: True) == format


def test_modules_that_a_list_names_are_quantised_alone() -> None:
    """Keeps out: dense matrices of a block read as quantised, and a list of optimum's that is refused."""
    scheme = parse_quantization({**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}, "here")
    found = {name: scheme.format_of(f"model.layers.0.{name}", lambda _: True) for name in ("mlp.up_proj", "mlp.down_proj")}
    assert found == {"mlp.up_proj": Gptq(4, 128, True, 1), "mlp.down_proj": None}


def test_gpt_oss_keys() -> None:
    """Keeps out: a refusal of gpt-oss files that say "dequantize": false, and experts that were said to be dense."""
    raw = {"quantization_config": {**Mxfp4Config().to_dict(), "dequantize": False}}
    assert of_gpt_oss(raw, 4, "here").method == "mxfp4"
    raw["quantization_config"]["dequantize"] = True
    with pytest.raises(ValueError, match="quantization_config: dequantize must be False, got True"):
        of_gpt_oss(raw, 4, "here")


CT = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
GROUP = CT["config_groups"]["group_0"]
OTHER = {**GROUP["weights"], "strategy": "tensor"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**FP8, "dequantize": True}, "dequantize must be False, got True"),
    ({**FP8, "expert_dtype": "fp4"}, "expert_dtype must be 'fp8', got 'fp4'"),
    ({**FP8, "modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert must be .*embed_tokens"),
    ({**GPTQ, "method": "awq"}, "method must be 'gptq', got 'awq'"),
    ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype must be 'int32', got 'int16'"),
    ({**GPTQ, "is_marlin_format": True}, "is_marlin_format must be False, got True"),
    ({**GPTQ, "act_bits": 8}, "act_bits must be 16, got 8"),
    ({**GPTQ, "bits": True}, "bits must be 4 or 8, got True"),
    ({**GPTQ, "data_type": "mx_fp"}, "data_type must be 'int', got 'mx_fp'"),
    (
        {**GPTQ, "format": "gptq", "checkpoint_format": "gptq_v2"},
        "checkpoint_format and format must be equal, got 'gptq_v2'",
    ),
    ({**GPTQ, "modules_in_block_to_quantize": ["q_proj"]}, "modules_in_block_to_quantize must be null or a list of lists"),
    ({**GPTQ, "rotation": True}, "unknown keys rotation"),
    ({**AWQ, "desc_act": True}, "desc_act must be False, got True"),
    ({**AWQ, "zero_point": False}, "zero_point must be True, got False"),
    ({**AWQ, "w_bit": 8}, "bits and w_bit must be equal where both are there, got 4 and 8"),
    ({**AWQ, "group_size": 64, "q_group_size": 128}, "group_size and q_group_size must be equal .*, got 64 and 128"),
    ({**AWQ, "format": "gemv"}, "format must be 'gemm', got 'gemv'"),
    ({**AWQ, "backend": "llm-awq"}, "backend must be another than 'llm-awq'"),
    ({**GPTQ, "dynamic": {"-:(.*": {}}}, r"dynamic must hold regular expressions, got '\(\.\*': missing \)"),
    ({**CT, "ignore": ["re:(.*"]}, r"here: ignore must hold regular expressions, got '\(\.\*': missing \)"),
    (
        {**CT, "config_groups": {"a": {**GROUP, "targets": ["re:(.*"]}}},
        r"config_groups.a: targets must hold regular",
    ),
    (
        {**CT, "config_groups": {"a": GROUP, "b": {**GROUP, "weights": OTHER}}},
        "config_groups.b: targets .* 'Linear' too",
    ),
    ({"quant_method": "modelopt"}, "quant_algo must be 'FP8' or 'NVFP4' or 'W4A16_NVFP4', got None"),
    ({**NVFP4, "quant_algo": "NVFP4_AWQ"}, "or 'W4A16_NVFP4', got 'NVFP4_AWQ', which scales activations"),
    ({**NVFP4, "group_size": 32}, "here: group_size must be 16 or left out with quant_algo 'NVFP4', got 32"),
    ({**NVFP4, "config_groups": {"a": {"weights": {"num_bits": 8, "type": "float"}}}}, "config_groups.a must say 4 bits"),
    (
        {**NVFP4, "config_groups": {"a": {"weights": {"num_bits": 4, "rotate": 1}}}},
        "a.weights: unknown keys rotate",
    ),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["re:["]}, "ignore must hold regular expressions, got '\\['"),
    ({**CT, "ignore": ["re:a{99999999999999999999}"]}, "ignore must hold regular expressions, got 'a"),
    ({**CT, "ignore": [f"re:{'(' * 3000}{')' * 3000}"]}, "ignore must hold regular expressions, got '\\("),
    ({**CT, "ignore": 0}, "ignore must be null or a list of names, got 0"),
    ({**CT, "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "kv_cache_scheme: num_bits must be 8, got 4"),
    ({**CT, "config_groups": {"a": {**GROUP, "weights": 0}}}, "config_groups.a: weights must be"),
    ({**CT, "config_groups": {"a": {**GROUP, "input_activations": 5}}}, "config_groups.a: input_activations must be"),
    ({**FP8, "weight_block_size": [True, 128]}, "weight_block_size must be .rows, columns., got .True, 128."),
    ({**FP8, "weight_block_size": [10**30, 128]}, "weight_block_size must be .rows, columns., got"),
    ({**FP8, "weight_block_size": [128, 48]}, "the columns of weight_block_size must be a power of two from 32 on, got 48"),
    ({**GPTQ, "group_size": 48}, "here: group_size must be a power of two from 32 on, got 48"),
    ({**NVFP4, "kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo must be None or 'FP8', got 'INT8'"),
    (compressed("pack-quantized", num_bits=4, type="int", strategy="channel", group_size=64), "group_size must be None or -1"),
    (
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="channel", group_size=16),
        "got 4 bits of float, by channel",
    ),
]


@pytest.mark.parametrize(("raw", "says"), REFUSED, ids=[case[1] for case in REFUSED])
def test_other_values_are_refused_by_name(raw: dict[str, Any], says: str) -> None:
    """Keeps out: values that change what weights stand for, keys that contradict each other, and a traceback of re's."""
    with pytest.raises(ValueError, match=says):
        parse_quantization(raw, "here")


def test_an_expression_without_end_is_refused() -> None:
    """Keeps out: a config whose regular expression backtracks for years, while `inspect` or a server seems to hang."""
    rule = rules.rule_of(r"re:(\w|\w\w)+$", "ignore", "here")
    assert rule.fits("lm_head") and not rule.fits("model.layers")
    with pytest.raises(ValueError, match=r"the regular expression .* was not done with 'a_name_of.*after 0.1 s"):
        rule.fits("a_name_of_as_many_characters_as_a_module_may_have.weight", patience=0.1)


KV = {"num_bits": 8, "type": "float"}
OF_CACHES: list[dict[str, Any]] = [
    {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": KV},
    {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
]


@pytest.mark.parametrize("scheme", OF_CACHES, ids=lambda scheme: scheme["quant_method"])
def test_a_scheme_of_keys_and_values_is_read_as_strictly(scheme: dict[str, Any]) -> None:
    """Keeps out: a rotation, or a key that nobody knows, beside scales of the cache, passed over in silence."""
    assert quantization_of({"quantization_config": scheme}, "here") is None
    for key, value in (
        ("transform_config", {"a": 1}),
        ("sparsity_config", {"format": "sparse-24-bitmask"}),
        ("rotation", True),
    ):
        with pytest.raises(ValueError, match=f"here: quantization_config: .*{key}"):
            quantization_of({"quantization_config": {**scheme, key: value}}, "here")


def test_two_places_that_say_how_weights_are_stored_must_agree(tmp_path: Path) -> None:
    """Keeps out: the scheme of one place taken, and that of the other passed over in silence."""
    with pytest.raises(ValueError, match="quantization_config and compression_config must be equal where both are there"):
        quantization_of({"quantization_config": CT, "compression_config": {**CT, "ignore": []}}, "here")
    assert str(quantization_of({"quantization_config": CT, "compression_config": CT}, "here")).startswith("fp8")

    def read(beside: Any, scheme: dict[str, Any] | None) -> Any:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
        (tmp_path / "config.json").write_text(json.dumps({} if scheme is None else {"quantization_config": scheme}))
        return target_json(tmp_path).get("quantization_config")

    assert read({"quant_algo": "NVFP4", "group_size": 16}, None) == {**NVFP4, "group_size": 16}
    assert read({"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}, NVFP4) == NVFP4
    grouped = {**NVFP4, "ignore": ["b*", "a"], "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}}}
    assert read({"quant_algo": "NVFP4", "exclude_modules": ["a", "b*", "lm_head"]}, grouped) == grouped
    for beside, scheme, says in (
        (
            {"quant_algo": "FP8"},
            NVFP4,
            "hf_quant_config.json: quantization says .* fp8, .* but .*quantization_config says .* nvfp4",
        ),
        ({"quant_algo": "FP8"}, CT, r"quantization says .* \(modelopt\), but .* says .* \(compressed-tensors\); expected"),
        ({"kv_cache_quant_algo": "FP8"}, NVFP4, "says that weights are unquantised, but .* says .* nvfp4"),
        (
            {"quant_algo": "NVFP4", "exclude_modules": ["a"]},
            NVFP4,
            "that a stay unquantised, but .* no matrices stay unquantised; expected",
        ),
        ({"quant_algo": "NVFP4", "rotation": 1}, NVFP4, "hf_quant_config.json: quantization: unknown keys rotation"),
        ({"quant_algo": "INT4"}, None, "hf_quant_config.json: quantization: quant_algo must be 'FP8' or"),
        (None, None, "hf_quant_config.json: quantization: quant_algo must be 'FP8' or"),
    ):
        with pytest.raises(ValueError, match=says):
            read(beside, scheme)


def test_transformers_code_does_not_pass_a_scheme_over(tmp_path: Path) -> None:
    """Keeps out: quantised values read as dense by transformers' code, as their scheme has an older name or its own file."""
    path = save_target(tmp_path / "target", "llama")
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "compression_config": CT}))
    with pytest.raises(ValueError, match="compression_config must be absent: specdec's own .*nearest: backend='auto'"):
        choose_target(path, "transformers")
    (path / "config.json").write_text(json.dumps(raw))
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(ValueError, match="hf_quant_config.json must be absent: .* nearest: backend='auto'"):
        choose_target(path, "transformers")


def test_act_order_is_of_groups_of_integers() -> None:
    """Keeps out: an order of columns that a format passes over, and a word of config.json that is taken for another."""
    keys = dict(num_bits=4, type="int", strategy="group", group_size=32)
    for order in (None, False, "weight", "static", "group", "dynamic", True):
        quantization = parse_quantization(compressed("pack-quantized", **keys, actorder=order), "here")
        assert quantization.in_act_order(["m"]) == (order in ("group", "dynamic", True))
    for order in ("GROUP", 1, 0, [], {"a": 1}):
        with pytest.raises(ValueError, match="actorder must be None or False or 'weight' or 'static' or 'group' or"):
            parse_quantization(compressed("pack-quantized", **keys, actorder=order), "here")
    others = (
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, actorder="group"),
        compressed("float-quantized", num_bits=8, type="float", strategy="channel", actorder="group"),
        compressed("pack-quantized", num_bits=4, type="int", strategy="channel", actorder=True),
    )
    for scheme in others:
        with pytest.raises(
            ValueError, match="actorder must be None or False or 'weight' or 'static' for .* since act order is"
        ):
            parse_quantization(scheme, "here")
    assert not parse_quantization({**GPTQ, "desc_act": True, "group_size": -1}, "here").in_act_order(["m"])
