"""How Qwen's hybrids are loaded: norms in 16 bits, schemes of weights, ranks, wrappers, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.checkpoints.mixtures import fuse
from toolkit.checkpoints.plans import plan_memory
from toolkit.oracles.quantised import SCHEMES, as_quantised
from toolkit.parallel.decoders import with_ranks
from toolkit.recurrent.checks import CPU, expect_refused, held, load, logits
from toolkit.recurrent.targets import COMMON, DENSE, tiny_hybrid
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from specdec import SamplingParams, SpecDecoder
from specdec.loading.about.inspect_target import target_facts
from specdec.loading.load import check_pair
from specdec.models.checkpoints.frame import load_family
from specdec.models.layers import SelfAttention
from specdec.models.registry import check_chosen, choose_target
from specdec.ops.rope import HeadPrep
from specdec.options import EngineOptions
from specdec.parallel.shard import Shard


@torch.inference_mode()
def test_norms_round_once_in_16_bits(tmp_path: Path) -> None:
    """Keeps out: 1 + w, or what is normed, rounded to 16 bits before their product; heads' norms too."""
    folder = tiny_hybrid(tmp_path, "qwen3_5_text", rms_norm_eps=1e-5)
    model, tensors = load(folder, dtype=torch.bfloat16), load_file(folder / "model.safetensors")
    attention = model.layers[2].self_attn
    assert isinstance(attention, SelfAttention) and attention.qk_norm is not None

    def oracle(name: str, x: torch.Tensor) -> torch.Tensor:
        norm = Qwen3NextRMSNorm(x.shape[-1], eps=1e-5)
        norm.weight.data = tensors[name]
        return norm(x)

    x = torch.randn(400, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    ours, want = [model.norm(x), model.norm.add(x, x)[1]], [oracle("model.norm.weight", each) for each in (x, x + x)]
    heads = x.view(100, 8, 16).clone()  # 4 query heads, 2 key heads, 2 value heads
    q = attention.qk_norm
    queries, keys_values = HeadPrep(None, 2, q.weight, q.eps).apply_(heads.clone())
    order = [*range(4), *range(8, 12), *range(4, 8), *range(12, 16)]  # half of a head is turned; that goes to the front
    for name, rows, got in (("q", heads[:, :4], queries), ("k", heads[:, 4:6], keys_values[:, 0])):
        ours.append(got)
        want.append(
            oracle(f"model.layers.2.self_attn.{name}_norm.weight", rows[..., torch.tensor(order).argsort()])[..., order]
        )
    for one, other in zip(ours, want, strict=True):
        assert one.dtype == torch.bfloat16 and float((one == other).float().mean()) > 0.999


LEFT = r"in_proj_[ab]\.weight|visual"
WIDE: dict[str, Any] = dict(
    hidden_size=64, linear_key_head_dim=16, linear_value_head_dim=16, num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
EXPERTS = dict(moe_intermediate_size=32, shared_expert_intermediate_size=32)
CASES = [
    ("qwen3_next", "w4a16 g32 asym", {"intermediate_size": 64}, "^$"),
    ("qwen3_5_text", "awq", {"linear_num_value_heads": 8, "intermediate_size": 64}, "^$"),
    ("qwen3_5_moe", "deepseek fp8", {}, LEFT),
    ("qwen3_5", "nvfp4", {"intermediate_size": 64}, LEFT),
]


@pytest.mark.parametrize(("family", "scheme", "sizes", "left"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_scheme_s_numbers_and_bytes(tmp_path: Path, family: str, scheme: str, sizes: dict[str, Any], left: str) -> None:
    """Keeps out: rows in the file's order under scales in ours, names of a wrapper that no rule fits, bytes counted twice."""
    changes = {**WIDE, **({} if family.startswith("qwen3_5") and "moe" not in family else EXPERTS), **sizes}
    plain = tiny_hybrid(tmp_path / "plain", family, **changes)
    own = SCHEMES[scheme]
    if left == LEFT:
        key = "ignore" if "ignore" in own.config else "modules_to_not_convert"
        alone = [f"model.language_model.layers.0.linear_attn.in_proj_{each}" for each in "ab"]
        own = own._replace(config=own.config | {key: ["lm_head", "model.visual", *alone]})
    quantised = as_quantised(plain, tmp_path / "quantised", own, left)
    few, want = load(quantised), logits(load(plain))
    torch.testing.assert_close(logits(few), want, atol=1e-5 * float(want.abs().max()), rtol=1e-5)
    options = EngineOptions(dtype="float32", max_seq_len=64)
    assert plan_memory(quantised, None, None, options, 10**10).parts["weights of the target"] == held(few)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_weights_rounded_at_load(tmp_path: Path, family: str) -> None:
    """Keeps out: gates of the rule in few bits; a plan that counts other matrices than are rounded."""
    folder = tiny_hybrid(tmp_path, family, hidden_size=64, **({} if family == "qwen3_next" else {"intermediate_size": 64}))
    model, dense = load(folder, "fp8"), load(folder)
    net = model.layers[0].self_attn
    assert net.in_proj.is_quantised and not net.gates_proj.is_quantised  # type: ignore[union-attr]
    assert dense.layers[0].self_attn.gates_proj is None
    assert float((logits(model) - logits(dense)).std() / logits(dense).std()) < 0.4
    options = EngineOptions(dtype="float32", max_seq_len=64, quantize="fp8")
    assert plan_memory(folder, None, None, options, 10**10).parts["weights of the target"] == held(model)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("family", "sharing", "value_heads", "apart"), [("qwen3_next", "experts", 8, False), ("qwen3_5_moe", "tensor", 4, True)]
)
def test_two_ranks_write_what_one_writes(tmp_path: Path, family: str, sharing: str, value_heads: int, apart: bool) -> None:
    """Keeps out: a rank with another one's channels, gates or states; a plan of a rank that counts the whole.

    apart: whether a rank's gates are a matrix of their own, which they are for too odd a number of rows.
    """
    folder = tiny_hybrid(tmp_path, family, linear_num_value_heads=value_heads)

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
    assert (first.layers[0].self_attn.gates_proj is not None) == apart


def test_a_wrapper_s_images_are_passed_over_and_counted(tmp_path: Path) -> None:
    """Keeps out: vision tensors that are an error, or that vanish without a word."""
    folder = tiny_hybrid(tmp_path / "m", "qwen3_5")
    names = [name for name in load_file(folder / "model.safetensors") if "visual" in name]
    with pytest.warns(UserWarning, match=rf"texts alone are read: {len(names)} tensors of [\d,]+ bytes are passed over"):
        model = load(folder)
    facts = target_facts(folder)
    assert facts["weights"]["passed over, of images"].startswith(f"{len(names)} tensors, ")
    assert facts["target"]["layers read"] == "3 x recurrent, 1 x full"
    sizes = model.config.recurrent
    assert sizes is not None and facts["target"]["bytes of a text's state"] == 3 * sizes.state_bytes(torch.float32)


def test_fused_experts_are_the_same_model(tmp_path: Path) -> None:
    """As published mixtures of the family are stored.  Keeps out: ups taken for gates."""
    folder = tiny_hybrid(tmp_path / "apart", "qwen3_5_moe")
    fused = load(fuse(folder, tmp_path / "fused"))
    for (own, a), (_, b) in zip(load(folder).state_dict().items(), fused.state_dict().items(), strict=True):
        assert torch.equal(a, b), own


# A family, keys of its config.json (None: without it), and what is said of them.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_next", {"linear_num_value_heads": 3}, "must be a multiple of linear_num_key_heads, got 3, 2"),
    (
        "qwen3_next",
        {"linear_num_key_heads": 4},
        r"in_proj_qkvz.* must have shape \(160, 32\), got \(128, 32\).*linear_\* sizes",
    ),
    ("qwen3_next", {"linear_conv_kernel_dim": 3}, r"conv1d.*\(80, 1, 3\), got \(80, 1, 4\).*linear_conv_kernel_dim"),
    (
        "qwen3_next",
        {"layer_types": None},
        "layer 2 is of linear_attention by layer_types .*but of full_attention by its tensors",
    ),
    ("qwen3_next", {"layer_types": ["linear_attention"] * 4}, "layers must be of both kinds"),
    ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "layer_types must be 4 of full_attention or linear_attention"),
    ("qwen3_next", {"num_hidden_layers": 3}, "layer_types must be 3 of .*, by num_hidden_layers, got 4 of them; nearest thing"),
    ("qwen3_next", {"attention_bias": True}, "attention_bias is true, but tensor 'model.layers.2.*bias' is missing; nearest"),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate must be True, got False"),
    ("qwen3_5_text", {"output_gate_type": "sigmoid"}, "output_gate_type must be 'swish' or 'silu', .*got 'sigmoid'"),
    ("qwen3_5_text", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype must be 'float32'"),
    ("qwen3_5_text", {"num_experts": 4}, "unknown config keys num_experts"),
    ("qwen3_5_text", {"rope_parameters": {"rope_type": "longrope"}}, "rope type must be default, linear or llama3"),
    ("qwen3_5", {"deepstack": True}, "unknown config keys deepstack"),
    ("qwen3_5", {"text_config": None}, "lacks text_config"),
    (
        "qwen3_5",
        {"text_config": {**COMMON, **DENSE, "model_type": "qwen3_5_text", "quantization_config": float("nan")}},
        "quantization_config must be an object",
    ),
    ("qwen3_5", {"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
    ("qwen3_5_moe", {"model_type": "qwen3_5"}, "model_type must be 'qwen3_5_text', got 'qwen3_5_moe_text'"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("refused")
    return {family: tiny_hybrid(root / family, family) for family in {family for family, _, _ in REFUSED}}


@pytest.mark.parametrize(("family", "keys", "said"), REFUSED, ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")
def test_what_is_not_computed_is_refused(
    folders: dict[str, Path], tmp_path: Path, family: str, keys: dict[str, Any], said: str
) -> None:
    expect_refused(folders[family], tmp_path, keys, said)


def test_tensors_are_strict_and_ranks_that_do_not_fit_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(folders["qwen3_5"] / "model.safetensors")
    (tmp_path / "config.json").write_text((folders["qwen3_5"] / "config.json").read_text())
    save_file(tensors | {"model.language_model.layers.0.linear_attn.extra": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not part of this architecture: model.layers.0.linear_attn.extra"):
        check_chosen(choose_target(tmp_path), tmp_path)
    save_file(tensors | {"model.norm.weight": torch.zeros(32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape("'model.language_model.norm.weight' and 'model.norm.weight' are one")):
        check_chosen(choose_target(tmp_path), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, **DENSE, "model_type": "qwen3_5_text"}))
    with pytest.raises(
        ValueError, match=r"must be 'qwen3_5', since .*'model\.language_model\..*got 'qwen3_5_text'; nearest thing"
    ):
        check_chosen(choose_target(tmp_path), tmp_path)
    tensors = load_file(folders["qwen3_5_text"] / "model.safetensors")
    save_file(tensors | {"mtp.layers.0.x": torch.zeros(2), "mtp.y": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"got 0 .* 2 tensors like 'mtp\.layers\.0\.x'; .* mtp_num_hidden_layers 1$"):
        check_chosen(choose_target(tmp_path), tmp_path)
    name = "model.layers.0.linear_attn.A_log"
    save_file(tensors | {name: torch.tensor([0.0, 60.0, 1.0, 2.0])}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"'{re.escape(name)}' must hold logarithms .* at most 50, got 60; "):
        load(tmp_path)
    options = EngineOptions(device="cpu", max_seq_len=64, tensor_parallel_size=4)
    with pytest.raises(ValueError, match=r"2 key heads of recurrent layers .* got 4; nearest setting .*tensor_parallel_size=2"):
        check_pair(folders["qwen3_5_text"], None, None, options)
