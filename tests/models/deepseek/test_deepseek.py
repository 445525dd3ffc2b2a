"""DeepSeek V2 and V3 targets against transformers, in float32: logits, and text through the whole runtime.

Keeps out: rotary pairs in the wrong layout, a forgotten yarn temperature, a router that chooses or weighs otherwise, weights
that nobody reads.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.checkpoints.load import load_target
from toolkit.deepseek import DEEPSEEKS, YARN, DeepseekZoo, save_deepseek, use_limits
from toolkit.driver import Driver
from toolkit.models import ragged_prompts
from toolkit.oracles.texts import hold_captured_text, hold_text, hold_text_after_shared_prefixes
from toolkit.prompts import dense_logits, paged_logits

from specdec import SpecConfig
from specdec.attention.caches.mla_cache import LatentLayout
from specdec.attention.latent.limits import Limits
from specdec.models.causal_lm import CausalLM
from specdec.models.config import read_json
from specdec.models.deepseek.config import parse_deepseek
from specdec.models.yarn import YarnRope

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> DeepseekZoo:
    return DeepseekZoo(tmp_path_factory.mktemp("deepseek"))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_target(folder, parse_deepseek(read_json(folder / "config.json"), str(folder)), 256, CPU, dtype)


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", DEEPSEEKS)
def test_logits_are_those_of_transformers(zoo: DeepseekZoo, name: str) -> None:
    """Absorbed, expanded, in chunks of a prompt, and without a cache."""
    prompts = ragged_prompts(40, 5, seed=3)
    hf = zoo.hf(name)
    with torch.inference_mode():
        want = torch.cat([hf(torch.tensor([prompt])).logits[0] for prompt in prompts])
        model = load(zoo.target(name))
        close = dict(atol=1e-5 * float(want.abs().max()), rtol=1e-5)
        torch.testing.assert_close(paged_logits(model, prompts), want, **close)
        use_limits(model, Limits(expand_above=4, expanded_tokens=8))
        torch.testing.assert_close(paged_logits(model, prompts), want, **close)
        torch.testing.assert_close(paged_logits(model, prompts, chunk=9), want, **close)
        torch.testing.assert_close(dense_logits(model, prompts[-1]), want[-len(prompts[-1]) :], **close)


@pytest.mark.parametrize("name", ["v2", "v3"])
def test_float64_leaves_only_what_transformers_rounds(zoo: DeepseekZoo, name: str) -> None:
    """Absorbed and expanded differ by rounding alone.  Keeps out: a float32 in between that hides a wrong factor."""
    model, prompts = load(zoo.target(name), torch.float64), ragged_prompts(40, 3, seed=4)
    with torch.inference_mode():
        absorbed = paged_logits(model, prompts)
        use_limits(model, Limits(expand_above=0))
        torch.testing.assert_close(paged_logits(model, prompts), absorbed, atol=1e-9, rtol=1e-9)


# ---- text ----

CASES = [
    ("v2-lite", "eagle3", (4, 1, 5), 1),
    ("v2", "eagle1", (3, 4, 12), 5),
    ("v3", "eagle3", (4, 4, 16), 16),
    ("v3-no-q-lora", "eagle1", (3, 1, 4), 16),
    ("v3-dense-tied", "eagle3", (3, 8, 24), 1),
    ("v2-dense-biases", "eagle3-full", (5, 2, 9), 5),
    ("glm4-lite", "eagle3", (4, 2, 9), 5),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("name", "head", "shape", "page_size"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_text_is_that_of_transformers(
    zoo: DeepseekZoo, name: str, head: str, shape: tuple[int, int, int], page_size: int
) -> None:
    """Chains and trees at any page size, prompts longer than a chunk, rows that change owners."""
    decoder = zoo.decoder(name, head, SpecConfig(*shape), page_size=page_size, max_batch_size=3)
    use_limits(decoder.model, Limits(expand_above=6, expanded_tokens=12))
    assert isinstance(Driver(decoder).cache("target").layout, LatentLayout)
    hold_text(zoo, name, decoder)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "shape", "page_size"), [("v3", (4, 4, 16), 16), ("v2-lite", (3, 1, 4), 5)])
def test_captured_rounds_write_the_same(zoo: DeepseekZoo, name: str, shape: tuple[int, int, int], page_size: int) -> None:
    """Keeps out: experts or chunks whose number the host read while capturing."""
    hold_captured_text(zoo, name, shape, page_size)


@pytest.mark.slow_cases
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 4, 16), (4, 1, 5)], ids=["tree", "chain"])
def test_shared_prefixes_are_read_as_latents(zoo: DeepseekZoo, shape: tuple[int, int, int]) -> None:
    """Cached pages of another's prompt.  Keeps out: a prefix that is expanded from where the prompt began, not the row."""
    few = Limits(expand_above=6, expanded_tokens=12)
    hold_text_after_shared_prefixes(zoo, "v3", shape, lambda model: use_limits(model, few))


def test_latents_have_no_quantised_cache(zoo: DeepseekZoo) -> None:
    """Keeps out: a setting that is ignored."""
    with pytest.raises(ValueError, match="latent.*kv_cache_dtype='auto'"):
        zoo.decoder("v2-lite", kv_cache_dtype="int8")


# ---- strictness ----


def rewritten(folder: Path, to: Path, **config: Any) -> Path:
    to.mkdir()
    raw = {**json.loads((folder / "config.json").read_text()), **config}
    (to / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value != "drop"}))
    save_file(load_file(folder / "model.safetensors"), to / "model.safetensors")
    return to


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("v3", dict(scoring_func="softmax"), "scoring_func must be 'sigmoid', got 'softmax'"),
        ("v2", dict(topk_method="noaux_tc"), "topk_method must be 'greedy' or 'group_limited_greedy', got 'noaux_tc'"),
        ("v2", dict(norm_topk_prob=True), "norm_topk_prob must be False, got True"),
        ("v3", dict(moe_layer_freq=2), "moe_layer_freq must be 1, got 2"),
        ("v3", dict(n_group=3), "n_routed_experts must be a multiple of n_group"),
        ("v3", dict(topk_group="drop"), "lacks topk_group"),
        ("v3", dict(q_lora_rank="drop"), "lacks q_lora_rank"),
        ("v3", dict(v_head_dim=64), "v_head_dim must be at most qk_nope_head_dim"),
        ("v3", dict(index_topk=4), "unknown config keys index_topk"),
        ("v3", dict(quantization_config={"quant_method": "hqq"}), "quant_method must be one of"),
        ("v3", dict(rope_parameters={**YARN, "factor": None}), "needs factor"),
        ("v3", dict(rope_parameters={**YARN, "beta": 1}), "unknown rope keys beta"),
        ("v3", dict(kv_lora_rank=24), "must have shape"),
        ("v3", dict(num_hidden_layers=4), "num_hidden_layers is 4, but the checkpoint holds 3 layers"),
        ("v3-dense-tied", dict(num_hidden_layers=2), "tensors are not part of this architecture: model.layers.2"),
        ("v3", dict(q_lora_rank=None), "q_proj.weight' is missing"),
    ],
)  # fmt: skip
def test_what_would_change_the_model_is_an_error(
    zoo: DeepseekZoo, tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    """Keeps out: a config of a newer relative (sparse attention, other gates) that loads and writes nonsense."""
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        load(rewritten(zoo.target(name), tmp_path / "changed", **change))


def test_the_layers_of_multi_token_prediction_are_left_out(zoo: DeepseekZoo, tmp_path: Path) -> None:
    """DeepSeek-V3 ships one after its last layer.  Keeps out: refusing the original, or passing over more than that."""
    folder = rewritten(zoo.target("v3"), tmp_path / "mtp")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.zeros(2)}, folder / "model.safetensors")
    load(folder)
    save_file({**tensors, "model.layers.4.eh_proj.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="not part of this architecture: model.layers.4.eh_proj.weight"):
        load(folder)


def test_hub_configs_are_read() -> None:
    """DeepSeek-V3's and V2-Lite's own config.json.  Keeps out: rope_scaling of transformers 4, keys of their own code."""
    yarn = dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096)
    common = dict(
        architectures=["X"], attention_bias=False, attention_dropout=0.0, auto_map={}, hidden_act="silu", moe_layer_freq=1,
        rope_scaling={**yarn, "type": "yarn"}, rope_theta=10000, seq_aux=True, tie_word_embeddings=False, use_cache=True,
        torch_dtype="bfloat16", vocab_size=129280, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        max_position_embeddings=163840, num_key_value_heads=128, initializer_range=0.02, rms_norm_eps=1e-6, ep_size=1,
        bos_token_id=0, eos_token_id=1, aux_loss_alpha=0.001, pretraining_tp=1, transformers_version="4.33.1",
    )  # fmt: skip
    v3 = parse_deepseek(
        dict(
            common, model_type="deepseek_v3", first_k_dense_replace=3, hidden_size=7168, intermediate_size=18432,
            moe_intermediate_size=2048, n_group=8, n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True,
            num_attention_heads=128, num_experts_per_tok=8, num_hidden_layers=61, num_nextn_predict_layers=1, q_lora_rank=1536,
            routed_scaling_factor=2.5, scoring_func="sigmoid", topk_group=4, topk_method="noaux_tc",
        ),
        "V3",
    )  # fmt: skip
    assert isinstance(v3.rope, YarnRope) and v3.rope.amplitude == 1 and v3.scale == pytest.approx(0.1352337747812271)
    lite = parse_deepseek(
        common
        | dict(
            model_type="deepseek_v2", first_k_dense_replace=1, hidden_size=2048, intermediate_size=10944,
            moe_intermediate_size=1408, n_group=1, n_routed_experts=64, n_shared_experts=2, norm_topk_prob=False,
            num_attention_heads=16, num_key_value_heads=16, num_experts_per_tok=6, num_hidden_layers=27, q_lora_rank=None,
            routed_scaling_factor=1.0, scoring_func="softmax", topk_group=1, topk_method="greedy",
        ),
        "V2-Lite",
    )  # fmt: skip
    assert lite.q_rank is None and lite.experts is not None and lite.experts.router.groups is None and lite.interleaved


def test_a_bf16_target_keeps_its_routers_correction(tmp_path: Path) -> None:
    """Keeps out: choosing experts by a rounded bias."""
    folder = save_deepseek(tmp_path / "v3", "v3")
    wanted = load_file(folder / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
    gate = load(folder, torch.bfloat16).layers[1].mlp.router
    assert gate.correction_E.dtype == torch.float32 and gate.correction_E.equal(wanted)
    assert gate.weight.dtype == torch.bfloat16
