"""Targets in 8 and 4 bits, end to end: their texts, their drafters, and what is refused before any weight is read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.deepseek import save_deepseek
from toolkit.models import save_eagle3, save_target
from toolkit.oracles.quantised import SCHEMES, SIZES, save_quantised

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.cli.entry import main
from specdec.draft.formats.open import HowToRead, open_head
from specdec.loading.about.doctor import scheme_rows
from specdec.loading.plan import tensor_bytes
from specdec.models.checkpoints.frame import open_target
from specdec.models.linear import Linear
from specdec.models.registry import check_chosen, choose_target, load_chosen
from specdec.models.schemes.rules import Rule
from specdec.models.sharding import share_of
from specdec.ops.products.formats.quantised import dequantise
from specdec.parallel.shard import Shard

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


def outputs(target: Path, head: Path | None = None, **settings: Any) -> list[Any]:
    """Texts, and how many tokens each round accepted."""
    spec = SpecConfig(3, 2, 6) if head else None
    with SpecDecoder.from_pretrained(target, head, spec, smoke=False, device="cpu", max_seq_len=64, **settings) as decoder:
        made = decoder.generate(PROMPTS, SamplingParams(max_tokens=20))
    return [(one.token_ids, one.stats.rounds, one.stats.accepted) for one in made]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(
    "name", ["fp8 channel", "gptq4 in act order", "w4a16 g32 asym", "nvfp4", "deepseek fp8", "awq", "gptq4 v1", "mxfp4"]
)
def test_texts_and_acceptance_are_those_of_the_numbers(tmp_path: Path, name: str) -> None:
    """Keeps out: a draft that takes the target's scheme, whose acceptance then falls to nothing."""
    quantised, plain = save_quantised(tmp_path, SCHEMES[name], num_hidden_layers=3)
    head = save_eagle3(tmp_path / "head", plain)
    assert outputs(quantised, head) == outputs(plain, head)


@pytest.mark.slow_cases
@pytest.mark.parametrize("quantize", ["fp8", "int4"])
def test_ordinary_weights_are_rounded_at_load(tmp_path: Path, quantize: str) -> None:
    """All but the output layer and the drafter.  Keeps out: an option that is read and does nothing."""
    target = save_target(tmp_path / "target", "llama", **SIZES | dict(num_hidden_layers=3))
    head = save_eagle3(tmp_path / "head", target)
    settings: dict[str, Any] = dict(smoke=False, device="cpu", max_seq_len=64)
    with SpecDecoder.from_pretrained(target, head, SpecConfig(3, 2, 6), quantize=quantize, **settings) as decoder:
        rounded = {name for name, module in decoder.model.named_modules() if isinstance(module, Linear) and module.quantised}
        assert len(rounded) == 4 * 3 and "lm_head" not in rounded
        assert decoder.head is not None
        assert not any(module.quantised for module in decoder.head.modules() if isinstance(module, Linear))
        down = decoder.model.get_submodule("layers.1.mlp.down_proj")
        assert isinstance(down, Linear) and down.quantised is not None
        numbers, texts = (
            dequantise(down.quantised.weight, torch.float32),
            decoder.generate(PROMPTS, SamplingParams(max_tokens=20)),
        )
    tensors = load_file(target / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    assert 1e-3 < float((tensors[name] - numbers).norm() / numbers.norm()) < 0.15
    with SpecDecoder.from_pretrained(target, quantize=quantize, **settings) as decoder:
        assert [one.token_ids for one in decoder.generate(PROMPTS, SamplingParams(max_tokens=20))] == [
            one.token_ids for one in texts
        ]


def test_what_can_not_be_rounded_is_refused(tmp_path: Path) -> None:
    """Keeps out: weights rounded twice, and an option that transformers' code would pass over."""
    quantised, plain = save_quantised(tmp_path, SCHEMES["w4a16 g0"])
    with pytest.raises(
        ValueError, match="is stored as int4, a scale for each row .*nearest setting that works: quantize='none'"
    ):
        choose_target(quantised, quantize="fp8")
    with pytest.raises(
        ValueError, match="transformers' code computes this target .*nearest setting that works: quantize='none'"
    ):
        choose_target(plain, "transformers", "fp8")
    with pytest.raises(ValueError, match="quantize must be one of none, fp8, int4, got 'int8'|quantize must be"):
        outputs(plain, quantize="int8")


def test_users_are_told_how_weights_are_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a scheme that is read and that nobody can look up."""
    quantised, plain = save_quantised(tmp_path, SCHEMES["awq"], num_hidden_layers=3)
    head = save_eagle3(tmp_path / "head", plain)
    assert main(["inspect", str(head), "--target", str(quantised), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["target_weights"]
    assert said == "int4, a scale and a zero point for each 32 columns (awq)"
    named = dict(scheme_rows())
    assert {scheme.config["quant_method"] for scheme in SCHEMES.values()} == named.keys() - {"rounded at load", "mxfp4"}


def test_modelopts_older_file_is_read(tmp_path: Path) -> None:
    """Keeps out: fp8 numbers without their scales, because the scheme stands in hf_quant_config.json alone."""
    quantised, _ = save_quantised(tmp_path, SCHEMES["modelopt fp8"])
    raw = json.loads((quantised / "config.json").read_text())
    del raw["quantization_config"]
    (quantised / "config.json").write_text(json.dumps(raw))
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (quantised / "hf_quant_config.json").write_text(json.dumps(beside))
    assert str(choose_target(quantised).config.quantization) == "fp8, a scale for each matrix (modelopt)"


@pytest.mark.parametrize(("columns", "group"), [(256, 128), (128, 128), (192, 32), (96, 32), (64, 32), (32, 0), (172, 0)])
def test_columns_that_128_does_not_divide_have_smaller_groups(tmp_path: Path, columns: int, group: int) -> None:
    """Keeps out: one scale for each row of a wide matrix, where the notice says one for each 128 columns."""
    target = save_target(tmp_path, "llama", **SIZES | dict(intermediate_size=columns))
    chosen = choose_target(target, quantize="int4")
    assert chosen.config.quantization is not None
    assert "a scale for each 128 columns, or for 32 or all of a row where 128 does not" in str(chosen.config.quantization)
    model = load_chosen(chosen, target, 64, torch.device("cpu"), torch.bfloat16, False)
    down = model.get_submodule("layers.0.mlp.down_proj")
    assert isinstance(down, Linear) and down.quantised is not None
    assert (down.quantised.group_size, down.quantised.scales_NG.shape[1]) == (group, columns // (group or columns))
    foreseen = tensor_bytes(open_target(target, chosen.config), chosen.config, torch.bfloat16, set())
    assert foreseen == sum(weight.nbytes for weight in model.parameters())


def test_ranks_share_whole_groups_of_any_size(tmp_path: Path) -> None:
    """Keeps out: ranks that are started, and then cut a group, of a target or a head that is rounded, and advice that fails."""
    sizes = SIZES | dict(hidden_size=192, intermediate_size=384, num_hidden_layers=3)
    target = save_target(tmp_path / "target", "llama", **sizes, num_attention_heads=6, num_key_value_heads=6)
    config = choose_target(target, quantize="int4").config
    assert share_of(config, Shard(0, 3)).intermediate_size == 128
    says = "target's intermediate_size 384 in whole groups of 128 evenly, got 2; .*=1, or quantize='fp8', .*: by quantize "
    with pytest.raises(ValueError, match=says):
        share_of(config, Shard(0, 2))
    plain = choose_target(target).config
    path = save_eagle3(tmp_path / "head", target, intermediate_size=384)
    head, other = (open_head(path, plain, HowToRead(quantize=name)).parsed.spec.model for name in ("int4", "fp8"))
    with pytest.raises(ValueError, match="draft head's .* in whole groups of 128 evenly, got 2; .*draft_quantize='fp8'"):
        share_of(head, Shard(0, 2), "draft head")
    for model in (plain, other, replace(config, intermediate_size=192)):  # the last in groups of 32, which 64 would not be
        assert share_of(model, Shard(0, 2), "draft head").intermediate_size == model.intermediate_size // 2


def test_ranks_share_whole_groups(tmp_path: Path) -> None:
    """Keeps out: a cut inside of a group, whose scale then belongs to half of the columns."""
    quantised, _ = save_quantised(tmp_path, SCHEMES["w4a16 g128"])
    config = choose_target(quantised).config
    with pytest.raises(ValueError, match="attention outputs 128 in whole groups of 128 evenly, got 2"):
        share_of(config, Shard(0, 2))
    assert config.quantization is not None
    kept = replace(config.quantization, kept=(Rule("regex", r".*\.(o|down)_proj$"),))  # as gpt-oss keeps attention's
    assert share_of(replace(config, quantization=kept), Shard(0, 2)).num_heads == config.num_heads // 2
    half = replace(config.quantization, kept=(Rule("regex", r".*layers\.0\..*"),))  # other layers are as they were
    with pytest.raises(ValueError, match="attention outputs 128 in whole groups of 128 evenly, got 2"):
        share_of(replace(config, quantization=half), Shard(0, 2))


def test_ranks_share_whole_groups_of_experts(tmp_path: Path) -> None:
    """Keeps out: ranks that are started, and then find that they can't share the experts."""
    path = save_deepseek(tmp_path, "v3", moe_intermediate_size=256, intermediate_size=1024)
    config = choose_target(path, quantize="int4").config
    assert config.quantization is not None
    config = replace(config, quantization=replace(config.quantization, kept=(Rule("regex", r".*\.o_proj$"),)))
    assert share_of(config, Shard(0, 2)).intermediate_size == 512
    says = "target's moe_intermediate_size 256 in whole groups of 128 evenly, got 4; .* setting .*=2, or quantize='fp8'"
    with pytest.raises(ValueError, match=says):
        share_of(config, Shard(0, 4))


def change(folder: Path, tensors: dict[str, Any] | None = None, **quantization: Any) -> Path:
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] |= quantization
    (folder / "config.json").write_text(json.dumps(raw))
    if tensors:
        held = load_file(folder / "model.safetensors")
        for name, tensor in tensors.items():
            held[name] = tensor(held.get(name)) if callable(tensor) else tensor
        save_file({name: tensor for name, tensor in held.items() if tensor is not None}, folder / "model.safetensors")
    return folder


Q, K = (f"model.layers.0.self_attn.{letter}_proj" for letter in "qk")
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (
        "fp8 channel",
        {},
        {"ignore": ["lm_head", "re:.*q_proj"]},
        "parts of one matrix must be stored alike, but .*q_proj is unquantised",
    ),
    ("fp8 channel", {f"{Q}.weight_scale": lambda t: None}, {}, f"tensor '{Q}.weight_scale' is missing"),
    ("fp8 channel", {}, {"ignore": []}, "'lm_head.weight' is not quantised .F32., but .* or named in ignore$"),
    ("w4a16 g0", {}, {"ignore": []}, "'lm_head.weight' is not quantised .F32., but .* in int4, .* named in ignore$"),
    ("gptq4 v1", {}, {"lm_head": True}, "'lm_head.weight' is not quantised .*named in dynamic .*, or lm_head false$"),
    ("nvfp4", {f"{Q}.weight_global_scale": torch.zeros(1)}, {}, "weight_global_scale' divides all .* must be above 0, got 0"),
    ("fp8 channel", {f"{Q}.weight": lambda t: t.float()}, {}, f"tensor '{Q}.weight' must hold F8_E4M3, got F32"),
    ("fp8 channel", {f"{Q}.weight_scale": lambda t: t * torch.nan}, {}, "holds NaN or infinity"),
    ("fp8 channel", {f"{Q}.weight": lambda t: (t.float() * torch.nan).to(t.dtype)}, {}, f"'{Q}.weight' holds NaN or infinity"),
    ("fp8 channel", {"lm_head.weight": lambda t: t.to(torch.float8_e4m3fn)}, {}, "holds floats of 8 bits"),
    ("fp8 channel", {f"{Q}.odd": torch.ones(1)}, {}, "not part of this architecture: .*q_proj.odd"),
    ("fp8 channel", {}, {"transform_config": {"a": 1}}, "transform_config must be absent or empty"),
    ("fp8 channel", {}, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config must be absent, empty or of"),
    ("fp8 channel", {}, {"rotation": True}, "unknown keys rotation; they may change what the weights stand for"),
    ("fp8 channel", {}, {"quantization_status": "frozen"}, "quantization_status must be 'compressed', got 'frozen'"),
    ("deepseek fp8", {}, {"weight_block_size": [128, 48]}, "must be a power of two from 32 on, got 48"),
    ("w4a16 g0", {f"{Q}.weight_shape": torch.tensor([128, 64])}, {}, r"must be \[128, 128\], got \[128, 64\]"),
    (
        "w4a16 g32 asym",
        {f"{Q}.weight_g_idx": torch.zeros(128, dtype=torch.int32)},
        {},
        "groups 0 to 3 for 32 columns, got 1 ",
    ),
    (
        "w4a16 g32 asym",
        {f"{Q}.weight_g_idx": torch.arange(128).int() % 4},
        {},
        "config.json must say by actorder 'group'",
    ),
    ("w4a16 g32 asym in act order", {f"{Q}.weight_g_idx": lambda t: None}, {}, "weight_g_idx' is missing, .*(actorder)"),
    (
        "w4a16 g32 asym in act order",
        {f"{Q}.weight_g_idx": lambda t: t.flip(0)},
        {},
        "must be stored alike, got columns in another",
    ),
    (
        "w4a16 g32 asym in act order",
        {f"{Q}.weight_g_idx": torch.arange(128).int() // 32},
        {},
        "got columns in another order",
    ),
    (
        "w4a16 g32 asym in act order",
        {f"{K}.weight_g_idx": torch.arange(128).int() // 32},
        {},
        "got columns in another order",
    ),
    (
        "w4a16 g32 asym in act order",
        {f"{Q}.weight_g_idx": lambda t: t // 2},
        {},
        "got 2 groups, 0 to 1, of 64 to 64 columns",
    ),
    ("gptq4 v1", {f"{Q}.bias": torch.ones(128)}, {}, "bias' must hold zeros alone, or be left out: .*attention_bias"),
    ("awq", {f"{Q}.bias": torch.zeros(128)}, {}, "not part of this architecture: .*q_proj.bias"),
    ("gptq4 v1", {f"{Q}.g_idx": lambda t: t.flip(0)}, {}, "out of order .act order., .* must say by desc_act true"),
    ("gptq4 in act order", {}, {"static_groups": True}, "which config.json must say by desc_act true, static_groups false"),
    ("gptq4 in act order", {f"{Q}.g_idx": lambda t: t * 0}, {}, "must name each of the groups 0 to 1 for 64 columns"),
    ("gptq4 in act order", {f"{Q}.g_idx": lambda t: t - 1}, {}, "got 2 groups, -1 to 0, of 64"),
    ("gptq4 in act order", {f"{Q}.g_idx": lambda t: t[:-1]}, {}, "must have shape .128,., got .127,."),
    ("gptq4 in act order", {f"{Q}.g_idx": lambda t: t.flip(0)}, {}, "must be stored alike, got columns in"),
    ("gptq4 in act order", {f"{Q}.g_idx": lambda t: t.float()}, {}, "must hold I32 or I64, got F32"),
    ("gptq4 v1", {}, {"bits": 3}, "bits must be 4 or 8, got 3"),
    ("gptq4 v1", {}, {"dynamic": {"+:.*": {"bits": 8}}}, "may skip modules"),
    ("awq", {}, {"version": "gemv"}, "version must be 'gemm', got 'gemv'"),
    ("modelopt nvfp4", {f"{Q}.pre_quant_scale": torch.ones(128)}, {}, "scales activations"),
    ("modelopt fp8", {}, {"quant_algo": "W4A8"}, "quant_algo must be 'FP8' or"),
]


@pytest.mark.slow_cases(keep=8)
@pytest.mark.parametrize(("scheme", "tensors", "config", "says"), REFUSED, ids=[case[3] for case in REFUSED])
def test_broken_checkpoints_are_refused(
    tmp_path: Path, scheme: str, tensors: dict[str, Any], config: dict[str, Any], says: str
) -> None:
    """Keeps out: a scale that nobody reads, and a key that would change what quantised values stand for."""
    folder = change(save_quantised(tmp_path, SCHEMES[scheme])[0], tensors, **config)
    with pytest.raises(ValueError, match=says):
        outputs(folder)


def test_matrices_left_alone_are_unquantised(tmp_path: Path) -> None:
    """An unquantised attention in a target of 8 bits, named by an expression."""
    folder, plain = save_quantised(tmp_path, SCHEMES["fp8 channel"])
    kept = [f"model.layers.{layer}.self_attn.{letter}_proj" for layer in (0, 1) for letter in "qkvo"]
    numbers = load_file(plain / "model.safetensors")
    tensors: dict[str, Any] = {f"{name}.weight": numbers[f"{name}.weight"] for name in kept}
    tensors |= {f"{name}.weight_scale": lambda t: None for name in kept}
    change(folder, tensors, ignore=["lm_head", "re:.*self_attn.*"])
    assert outputs(folder) == outputs(plain)


def test_biases_of_zeros_and_dense_matrices_change_nothing(tmp_path: Path) -> None:
    """Keeps out: a refusal of AutoGPTQ's files, which hold a bias for every matrix; and these biases counted as memory."""
    folder, plain = save_quantised(tmp_path / "gptq", SCHEMES["gptq4 v1"])
    names = [name.removesuffix(".qweight") for name in load_file(folder / "model.safetensors") if name.endswith("qweight")]
    rows = {name: load_file(folder / "model.safetensors")[f"{name}.scales"].shape[1] for name in names}
    chosen = choose_target(folder)
    before = tensor_bytes(open_target(folder, chosen.config), chosen.config, torch.bfloat16, set())
    change(folder, {f"{name}.bias": torch.zeros(rows[name], dtype=torch.float16) for name in names})
    assert outputs(folder) == outputs(plain)
    assert tensor_bytes(open_target(folder, chosen.config), chosen.config, torch.bfloat16, set()) == before
    folder, _ = save_quantised(tmp_path / "fp8", SCHEMES["fp8 channel"])
    choose_target(change(folder, sparsity_config={"format": "dense", "global_sparsity": 0.1, "ignore": [], "targets": []}))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("awq", "'.*qweight' looks like a quantised weight \\(AWQ\\), but .* lacks quantization_config, .* quant_method 'awq'"),
        ("gptq4 v1", "'.*qweight' looks like a quantised weight \\(GPTQ\\), .* quant_method 'gptq'"),
        (
            "w4a16 g128",
            "'.*weight_packed' looks like a quantised weight \\(compressed-tensors\\), .* quant_method 'compressed-tensors'",
        ),
        (
            "nvfp4",
            "'.*weight_packed' looks like a quantised weight \\(compressed-tensors\\), .* quant_method 'compressed-tensors'",
        ),
        ("modelopt nvfp4", "'.*weight' looks like a quantised weight \\(ModelOpt\\), .* quant_method 'modelopt'"),
        (
            "deepseek fp8",
            "'.*weight' looks like a quantised weight \\(fp8 with a scale for each block or matrix\\), .* quant_method 'fp8'",
        ),
        (
            "fp8 channel",
            "'.*weight' looks like a quantised weight \\(fp8\\), .* quant_method 'compressed-tensors', 'modelopt' or 'fp8'",
        ),
    ],
)
def test_quantised_weights_of_which_the_config_is_silent_are_recognised(tmp_path: Path, name: str, says: str) -> None:
    """Keeps out: "the tensor is missing" and "not part of this architecture" where keys of the config are missing."""
    folder, _ = save_quantised(tmp_path, SCHEMES[name])
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    for quantize in ("none", "int4"):
        with pytest.raises(ValueError, match=f"{says}$") as info:
            check_chosen(choose_target(folder, quantize=quantize), folder)
        assert "the keys of the tool that wrote the weights" in str(info.value)
    (folder / "quantize_config.json").write_text("{}")
    with pytest.raises(ValueError, match="expected there the keys of quantize_config.json, which lies beside it, and"):
        check_chosen(choose_target(folder), folder)


def test_keys_of_autoawqs_own_file_can_be_copied(tmp_path: Path) -> None:
    """Keeps out: advice that leads to another refusal."""
    folder, _ = save_quantised(tmp_path, SCHEMES["awq"])
    raw, beside = json.loads((folder / "config.json").read_text()), folder / "quant_config.json"
    wanted = choose_target(folder).config.quantization
    del raw["quantization_config"]
    beside.write_text('{"zero_point": true, "q_group_size": 32, "w_bit": 4, "version": "GEMM", "modules_to_not_convert": null}')
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="expected there the keys of quant_config.json, .* and quant_method 'awq'"):
        check_chosen(choose_target(folder), folder)
    raw["quantization_config"] = {**json.loads(beside.read_text()), "quant_method": "awq"}
    (folder / "config.json").write_text(json.dumps(raw))
    chosen = choose_target(folder)
    check_chosen(chosen, folder)
    assert chosen.config.quantization == wanted


def test_what_lies_beside_a_head(tmp_path: Path) -> None:
    """Keeps out: files beside a head that say how it is read, and that nobody reads."""
    head = save_eagle3(tmp_path / "head", save_target(tmp_path / "target", "llama", num_hidden_layers=3))
    (head / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="adapter_config.json must be absent: adapters .*nearest .* merged into it$"):
        open_head(head, None)
    (head / "adapter_config.json").unlink()
    (head / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ValueError, match="hf_quant_config.json: quantization: quant_algo must be 'FP8' or"):
        open_head(head, None)
