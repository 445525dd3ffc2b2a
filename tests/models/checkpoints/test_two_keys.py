"""Two keys of a config.json that say one thing mean what transformers makes of them, or are an error: never one in silence."""

import itertools
from typing import Any

import pytest
import transformers

from specdec.models.deepseek.config import parse_deepseek
from specdec.models.diffllama.config import parse_diffllama
from specdec.models.gpt_oss.config import parse_gpt_oss
from specdec.models.llama.config import parse_llama

FAMILIES = {
    "LlamaConfig": parse_llama, "MistralConfig": parse_llama, "Qwen2Config": parse_llama, "Qwen3Config": parse_llama,
    "DiffLlamaConfig": parse_diffllama, "DeepseekV3Config": parse_deepseek, "GptOssConfig": parse_gpt_oss,
}  # fmt: skip
LINEAR, DEFAULT = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "default"}
SAID: list[dict[str, Any] | None] = [
    None, {}, DEFAULT | {"rope_theta": 5000.0}, LINEAR, LINEAR | {"rope_theta": 7000.0}, {"type": "linear", "factor": 2.0},
    LINEAR | {"rope_theta": 5000.0},
]  # fmt: skip
OUTSIDE = [None, 5000.0, 9000.0]


@pytest.mark.parametrize("name", FAMILIES)
def test_rope_is_what_transformers_reads(name: str) -> None:
    """Keeps out: rope_scaling passed over beside rope_parameters, as every model card's "add this to config.json" met it in
    folders that transformers 5 had saved; and a theta of the one with the type of the other.
    """
    made = getattr(transformers, name)
    base = {key: value for key, value in made().to_diff_dict().items() if not key.startswith("rope")}
    base |= {"quantization_config": {"quant_method": "mxfp4"}} if name == "GptOssConfig" else {}
    read = 0
    for parameters, scaling, theta in itertools.product(SAID, SAID, OUTSIDE):
        keys = {"rope_parameters": parameters, "rope_scaling": scaling, "rope_theta": theta}
        given = {key: dict(value) if isinstance(value, dict) else value for key, value in keys.items() if value is not None}
        if not given.get("rope_parameters") and not given.get("rope_scaling") and theta is None:
            continue  # what a class takes then is held by test_config_defaults.py
        try:
            found = FAMILIES[name]({**base, **given}, "here").rope
        except ValueError as error:
            assert "rope" in str(error), (keys, error)
            continue
        theirs = made(
            **{key: dict(value) if isinstance(value, dict) else value for key, value in given.items()}
        ).rope_parameters
        assert found.theta == theirs["rope_theta"], keys
        assert found.kind == theirs["rope_type"], keys
        assert found.kind == "default" or found.factor == theirs["factor"], keys
        read += 1
    assert read > 40, "most of them were refused"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_scaling_beside_other_parameters_is_an_error(name: str) -> None:
    """Keeps out: "add YaRN to config.json", which did nothing, while `verify` said EXACT."""
    raw = getattr(transformers, name)().to_diff_dict()
    raw |= {"quantization_config": {"quant_method": "mxfp4"}} if name == "GptOssConfig" else {}
    raw |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": LINEAR}
    with pytest.raises(ValueError, match="rope_parameters and rope_scaling must say the same .*, and no rope_scaling"):
        FAMILIES[name](raw, "here")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_dtype_is_what_transformers_reads(name: str) -> None:
    """Keeps out: weights in the older key's dtype where both are there."""
    made = getattr(transformers, name)
    base = made().to_diff_dict()
    base |= {"quantization_config": {"quant_method": "mxfp4"}} if name == "GptOssConfig" else {}
    for dtype, older in itertools.product((None, "float16", "float32"), (None, "float16", "bfloat16")):
        keys = {"dtype": dtype, "torch_dtype": older}
        theirs = made(**keys).dtype
        assert FAMILIES[name]({**base, **keys}, "here").dtype == (None if theirs is None else str(theirs).split(".")[1])
        assert FAMILIES[name]({**base, "torch_dtype": older}, "here").dtype == older


@pytest.mark.parametrize("name", ["LlamaConfig", "MistralConfig", "Qwen3Config", "DiffLlamaConfig"])
def test_a_width_that_is_left_out_is_transformers_own(name: str) -> None:
    """Keeps out: hidden_size / num_attention_heads in a Qwen3, whose class has 128 whatever these are."""
    sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    raw = {key: value for key, value in getattr(transformers, name)(**sizes).to_diff_dict().items() if key != "head_dim"}
    assert FAMILIES[name]({**raw, **sizes}, "here").head_dim == getattr(transformers, name)(**sizes).head_dim
