"""The keys of quantization_configs as today's tools write them: those that change nothing are taken, all others are refused."""

import json
from typing import Any

import pytest
from toolkit.oracles.quantised import compressed
from transformers.utils.quantization_config import AwqConfig, FineGrainedFP8Config, GPTQConfig, Mxfp4Config

from specdec.models.gpt_oss.config import _quantization as of_gpt_oss
from specdec.models.schemes.config import parse_quantization
from specdec.models.schemes.formats import Fp8
from specdec.models.schemes.integers import Awq, Gptq

GPTQMODEL = {"bits": 4, "group_size": 128, "desc_act": False, "lm_head": False, "pack_dtype": "int32", "meta": {"damp": 0.1}}
AUTOROUND = {"iters": 200, "autoround_version": "0.16", "data_type": "int", "packing_format": "auto_gptq", "lr": 0.005}
GPTQ = {"quant_method": "gptq", "bits": 4, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WRITTEN: dict[str, tuple[dict[str, Any], Any]] = {
    "transformers fp8": (FineGrainedFP8Config().to_dict(), Fp8("weight_scale_inv", "block")),
    "transformers gptq": (GPTQConfig(bits=4, group_size=64).to_dict(), Gptq(4, 64, True, 1)),
    "transformers awq": (AwqConfig(group_size=64).to_dict(), Awq(64)),
    "gptqmodel gptq": ({**GPTQMODEL, **GPTQ, "method": "gptq", "format": "gptq_v2"}, Gptq(4, 128, True, 0)),
    "gptqmodel awq": ({**GPTQMODEL, **AWQ, "method": "awq", "format": "gemm", "checkpoint_format": "gemm"}, Awq(128)),
    "AutoRound": ({**GPTQ, **AUTOROUND}, Gptq(4, 128, True, 1)),
    "desc_act": ({**GPTQ, "desc_act": True}, Gptq(4, 128, True, 1, True)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_configs_of_todays_tools_are_taken(name: str) -> None:
    """Keeps out: a refusal of published files over keys that say how they were made."""
    raw, format = WRITTEN[name]
    assert parse_quantization(json.loads(json.dumps(raw)), "here").format_of("model.layers.0.q", lambda _: True) == format


def test_modules_that_a_list_names_are_quantised_alone() -> None:
    """Keeps out: ordinary matrices of a block read as codes, and a list of optimum's that is refused."""
    scheme = parse_quantization({**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}, "here")
    found = {name: scheme.format_of(f"model.layers.0.{name}", lambda _: True) for name in ("mlp.up_proj", "mlp.down_proj")}
    assert found == {"mlp.up_proj": Gptq(4, 128, True, 1), "mlp.down_proj": None}


def test_gpt_oss_keys() -> None:
    """Keeps out: a refusal of gpt-oss files that say "dequantize": false, and experts that were said to be numbers."""
    raw = {"quantization_config": {**Mxfp4Config().to_dict(), "dequantize": False}}
    assert of_gpt_oss(raw, 4, "here").method == "mxfp4"
    raw["quantization_config"]["dequantize"] = True
    with pytest.raises(ValueError, match="quantization_config: dequantize must be False, got True"):
        of_gpt_oss(raw, 4, "here")


CT = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
GROUP = CT["config_groups"]["group_0"]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**FP8, "dequantize": True}, "dequantize must be False, got True"),
    ({**FP8, "expert_dtype": "fp4"}, "expert_dtype must be 'fp8', got 'fp4'"),
    ({**FP8, "modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert must be .*embed_tokens"),
    ({**GPTQ, "method": "awq"}, "method must be 'gptq', got 'awq'"),
    ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype must be 'int32', got 'int16'"),
    ({**GPTQ, "is_marlin_format": True}, "is_marlin_format must be False, got True"),
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
    ({**AWQ, "format": "gemv"}, "format must be 'gemm', got 'gemv'"),
    ({**AWQ, "backend": "llm-awq"}, "backend must be another than 'llm-awq'"),
    ({**GPTQ, "dynamic": {"-:(.*": {}}}, r"dynamic must hold regular expressions, got '\(\.\*': missing \)"),
    ({**CT, "ignore": ["re:(.*"]}, r"here: ignore must hold regular expressions, got '\(\.\*': missing \)"),
    (
        {**CT, "config_groups": {"a": {**GROUP, "targets": ["re:(.*"]}}},
        r"config_groups.a: targets must hold regular",
    ),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["re:["]}, "ignore must hold regular expressions, got '\\['"),
]


@pytest.mark.parametrize(("raw", "says"), REFUSED, ids=[case[1] for case in REFUSED])
def test_other_values_are_refused_by_name(raw: dict[str, Any], says: str) -> None:
    """Keeps out: values that change what codes stand for, keys that contradict each other, and a traceback of re's."""
    with pytest.raises(ValueError, match=says):
        parse_quantization(raw, "here")
