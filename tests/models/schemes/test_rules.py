"""Which matrices a quantization_config means, and what it means by leaving a key out.  No weights are read."""

from typing import Any

import pytest
from toolkit.oracles.quantised import compressed

from specdec.models.schemes.config import parse_quantization
from specdec.models.schemes.formats import Fp8
from specdec.models.schemes.integers import Awq, Gptq, PackedInts
from specdec.models.schemes.rules import Quantization


def found(scheme: Quantization, name: str) -> Any:
    return scheme.format_of(name, lambda _: True)


def test_exact_names_come_before_expressions_and_those_before_classes() -> None:
    """Keeps out: a matrix in the format of another group, an expression found in the middle of a name, one not kept."""
    raw = compressed(
        "pack-quantized", ("lm_head", "re:.*gate_proj", "re:model.layers.0"), num_bits=8, type="int", strategy="channel"
    )
    group = raw["config_groups"]["group_0"]

    def other(size: int, target: str) -> dict[str, Any]:
        return {
            **group,
            "targets": [target],
            "weights": {**group["weights"], "strategy": "group", "num_bits": 4, "group_size": size},
        }

    raw["config_groups"] |= {"group_1": other(32, "re:.*down_proj"), "group_2": other(128, "model.layers.1.mlp.down_proj")}
    scheme = parse_quantization(raw, "here")
    assert found(scheme, "model.layers.2.self_attn.q_proj") == PackedInts(8, 0, True)
    assert found(scheme, "model.layers.2.mlp.down_proj") == PackedInts(4, 32, True)
    assert found(scheme, "model.layers.1.mlp.down_proj") == PackedInts(4, 128, True)
    assert found(scheme, "other.model.layers.0.self_attn.q_proj") == PackedInts(8, 0, True)
    kept = ("lm_head", "model.layers.3.mlp.gate_proj", "model.layers.0.self_attn.q_proj")
    assert [found(scheme, name) for name in kept] == [None] * 3


GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False}
LEFT_OUT = [
    (GPTQ, Gptq(4, 128, True, 1)),
    ({**GPTQ, "group_size": -1, "sym": False}, Gptq(4, 0, False, 1)),
    ({**GPTQ, "checkpoint_format": "gptq_v2", "group_size": 32}, Gptq(4, 32, True, 0)),
    ({"quant_method": "awq", "bits": 4, "zero_point": True}, Awq(128)),
    ({"quant_method": "fp8"}, Fp8("weight_scale", "tensor", or_scale="weight_scale_inv")),
]


@pytest.mark.parametrize(("raw", "format"), LEFT_OUT, ids=str)
def test_keys_that_are_left_out(raw: dict[str, Any], format: Any) -> None:
    """Keeps out: zero points that are off by one, or read where there are none, scales for groups where each row has one."""
    scheme = parse_quantization(raw, "here")
    assert found(scheme, "model.layers.0.mlp.down_proj") == format
    assert scheme.format_of("lm_head", lambda _: False) is None, "a head that no tensor says is quantised is not"


def test_names_that_other_methods_leave_alone() -> None:
    """Keeps out: a part of a name taken for the whole, and a folder of modules of which the first alone is left."""
    awq = parse_quantization({**LEFT_OUT[3][0], "modules_to_not_convert": ["visual"]}, "here")
    assert found(awq, "model.visual.0.proj") is None and found(awq, "model.layers.0.mlp.up_proj") == Awq(128)
    fp8 = parse_quantization({"quant_method": "fp8", "ignored_layers": ["model.layers.1", "*.gate_proj"]}, "here")
    for name, is_kept in (("model.layers.1.mlp.up_proj", True), ("model.layers.10.mlp.up_proj", False), ("a.gate_proj", True)):
        assert (found(fp8, name) is None) == is_kept, name
    gptq = parse_quantization({**GPTQ, "dynamic": {"-:.*layers.1\\.": {}}}, "here")
    assert found(gptq, "model.layers.1.mlp.up_proj") is None and found(gptq, "model.layers.2.mlp.up_proj") is not None
