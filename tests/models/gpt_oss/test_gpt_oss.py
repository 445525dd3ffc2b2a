"""gpt-oss targets in their own mxfp4 checkpoints: every number, texts, and what is refused by name."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.checkpoints.gpt_oss import SCHEME, save_gpt_oss
from toolkit.checkpoints.load import load_target
from toolkit.checkpoints.plans import plan_memory
from toolkit.families import assert_greedy, eager
from toolkit.models import save_eagle3
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.eager.dense import DenseAttention
from specdec.cli.entry import main
from specdec.models.causal_lm import CausalLM
from specdec.models.gpt_oss.config import parse_gpt_oss
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.models.registry import choose_target
from specdec.models.schemes.config import parse_quantization
from specdec.models.sharding import share_of
from specdec.models.yarn import YarnRope
from specdec.options import EngineOptions
from specdec.parallel.shard import WHOLE, Shard

CPU = torch.device("cpu")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [9, 2, 6]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_gpt_oss(tmp_path_factory.mktemp("gpt_oss"))


def load(folder: Path, shard: Shard = WHOLE) -> CausalLM:
    return load_target(folder, choose_target(folder).config, 64, CPU, torch.float32, shard)


def outputs(folder: Path, head: Path | None = None, **settings: Any) -> list[Any]:
    spec = SpecConfig(3, 2, 6) if head else None
    settings = dict(device="cpu", dtype="float32", max_seq_len=64, smoke=False) | settings
    with SpecDecoder.from_pretrained(folder, head, spec, **settings) as decoder:
        return decoder.generate(PROMPTS, SamplingParams(max_tokens=24))


def test_every_number_is_transformers_own(folders: tuple[Path, Path]) -> None:
    """Keeps out: nibbles exchanged, a scale of another block, gates taken for ups, an expert's rows under another's."""
    stored, model = load_file(folders[0] / "model.safetensors"), load(folders[0])
    for index, layer in enumerate(model.layers):
        experts, prefix = layer.get_submodule("mlp"), f"model.layers.{index}.mlp.experts"
        assert isinstance(experts, MixtureOfExperts)
        both = {
            name: convert_moe_packed_tensors(
                stored[f"{prefix}.{name}_blocks"], stored[f"{prefix}.{name}_scales"], dtype=torch.float32
            ).transpose(1, 2)
            for name in ("gate_up_proj", "down_proj")
        }
        gates, ups = both["gate_up_proj"][:, 0::2], both["gate_up_proj"][:, 1::2]
        assert torch.equal(experts.gate_up_proj.dense(torch.float32), torch.cat((gates, ups), dim=1))
        assert torch.equal(experts.down_proj.dense(torch.float32), both["down_proj"])
        assert experts.gate_up_proj.quantised is not None and experts.gate_up_proj.quantised.has_powers


def test_texts_are_those_of_the_numbers(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Against transformers' model of the same numbers, and against these numbers unquantised, also through transformers' code.

    Keeps out: biases and limits of experts, sinks, windows and YaRN that are left out; a drafter that takes the scheme.
    """
    quantised, plain = folders
    assert choose_target(quantised).backend == choose_target(plain).backend == "native"
    hf, head = eager(plain), save_eagle3(tmp_path / "head", plain)
    found = outputs(quantised, head)
    for out in found:
        assert_greedy(hf, out)
    others = (outputs(plain, head, backend=backend) for backend in ("native", "transformers"))
    counted = [[(out.token_ids, out.stats.rounds, out.stats.accepted) for out in made] for made in (found, *others)]
    assert counted[0] == counted[1] == counted[2]
    assert [out.token_ids for out in outputs(quantised)] == [out.token_ids for out in found]


def test_a_gate_s_numbers_are_the_config_s(tmp_path: Path) -> None:
    """Keeps out: a limit or a slope of the gate that is a constant, and ups that are held from one side alone."""
    quantised, plain = save_gpt_oss(tmp_path, num_hidden_layers=1, swiglu_alpha=0.6, swiglu_limit=0.4, rms_norm_eps=0.5)
    ids, hf = torch.arange(9), eager(plain)
    assert (hf.config.swiglu_alpha, hf.config.swiglu_limit) == (0.6, 0.4)
    model = load(quantised)
    with torch.inference_mode():
        hidden_TH = model(ids, ids, DenseAttention(model.config.layer_kinds)).hidden_TH
        torch.testing.assert_close(model.logits(hidden_TH), hf(ids[None]).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stored", ["mxfp4", "plain"])
def test_ranks_hold_shares(tmp_path: Path, stored: str) -> None:
    """The shares of two ranks together are the whole model's.  Keeps out: a bias that is added by every rank."""
    save_gpt_oss(tmp_path, intermediate_size=128, num_hidden_layers=1)
    folder = tmp_path / stored
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    whole, *shares = (load(folder, shard).layers[0].get_submodule("mlp") for shard in (Shard(), Shard(0, 2), Shard(1, 2)))
    with torch.inference_mode():
        torch.testing.assert_close(sum(share(x) for share in shares), whole(x), atol=1e-5, rtol=1e-5)
    sinks = [load(folder, Shard(rank, 2)).layers[0].get_submodule("self_attn").get_buffer("sinks_Q") for rank in range(2)]
    assert torch.equal(torch.cat(sinks), load_file(folder / "model.safetensors")["model.layers.0.self_attn.sinks"])
    with pytest.raises(ValueError, match="in whole groups of 32"):
        share_of(choose_target(save_gpt_oss(tmp_path / "narrow", num_hidden_layers=1)[0]).config, Shard(0, 2))


def test_unquantised_experts_can_be_rounded(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Keeps out: rows of gate and up that are rounded under each other's scales; a plan that counts them as they lie."""
    model = load_target(folders[1], choose_target(folders[1], quantize="fp8").config, 64, CPU, torch.float32)
    dense = load(folders[1])
    for name in ("gate_up_proj", "down_proj"):
        rounded, exact = (each.layers[1].get_submodule(f"mlp.{name}").dense(torch.float32) for each in (model, dense))
        assert 0 < (rounded - exact).norm() < 0.05 * exact.norm()
    for quantize, held in (("none", dense), ("fp8", model)):
        plan = plan_memory(folders[1], None, None, EngineOptions(dtype="float32", quantize=quantize), 10**10)
        bytes_ = sum(x.nbytes for x in (*held.parameters(), *held.buffers())) - held.rotary.table.nbytes
        assert plan.parts["weights of the target"] == bytes_, quantize


def test_users_are_told(folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a scheme that nobody can look up, and a plan that counts quantised values as numbers."""
    head = save_eagle3(tmp_path / "head", folders[1])
    capsys.readouterr()
    assert main(["inspect", str(head), "--target", str(folders[0]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target_weights"] == "experts in mxfp4, weights alone (mxfp4)"
    plan = plan_memory(folders[0], None, None, EngineOptions(dtype="float32"), 10**10)
    model = load(folders[0])
    held = sum(x.nbytes for x in (*model.parameters(), *model.buffers())) - model.rotary.table.nbytes
    assert plan.parts["weights of the target"] == held


X = "model.layers.1.mlp.experts"
CHANGES: list[tuple[str, Callable[[Tensor], Tensor | None], str]] = [
    (f"{X}.down_proj_scales", lambda t: None, f"tensor '{X}.down_proj_scales' is missing"),
    (f"{X}.gate_up_proj_blocks", lambda t: None, f"tensor '{X}.gate_up_proj_blocks' is missing"),
    (f"{X}.gate_up_proj_blocks", lambda t: t[..., :8].contiguous(), r"must have shape \(4, 192, 2, 16\), got \(4, 192, 2, 8\)"),
    (f"{X}.gate_up_proj_blocks", lambda t: t.flatten(2), r"must have shape \(4, 192, 2, 16\), got \(4, 192, 32\)"),
    (f"{X}.down_proj_scales", lambda t: t[:, :, :1].contiguous(), r"must have shape \(4, 64, 3\), got \(4, 64, 1\)"),
    (f"{X}.down_proj_blocks", lambda t: t.int(), "must hold U8, got I32"),
    (f"{X}.down_proj_blocks", lambda t: t.float(), "must hold U8, got F32"),
    (f"{X}.down_proj_scales", lambda t: t.clone().fill_(255), "holds NaN or infinity"),
    (f"{X}.down_proj_bias", lambda t: None, f"tensor '{X}.down_proj_bias' is missing"),
    (f"{X}.gate_up_proj_bias", lambda t: t * torch.nan, "holds NaN or infinity"),
    ("model.layers.1.self_attn.sinks", lambda t: t[:2].clone(), r"must have shape \(4,\), got \(2,\)"),
    ("model.layers.0.mlp.router.bias", lambda t: None, "router.bias' is missing"),
    (f"{X}.odd", lambda t: torch.ones(1), f"not part of this architecture: {X}.odd"),
]


@pytest.mark.parametrize(("name", "change", "says"), CHANGES, ids=[f"{case[0][15:]}: {case[2][-24:]}" for case in CHANGES])
def test_broken_tensors_are_refused(
    folders: tuple[Path, Path], tmp_path: Path, name: str, change: Callable[[Tensor], Tensor | None], says: str
) -> None:
    """Keeps out: a scale that nobody reads, or quantised values that are read in another order."""
    tensors = load_file(folders[0] / "model.safetensors")
    changed = change(tensors.pop(name, torch.zeros(1)))
    if changed is not None:
        tensors[name] = changed
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folders[0] / "config.json").read_text())
    with pytest.raises(ValueError, match=says):
        load(tmp_path)


KEYS: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": {"quant_method": "awq"}}, "quant_method must be 'mxfp4' for gpt-oss"),
    ({"quantization_config": {"quant_method": "mxfp4", "dequantize": True}}, "dequantize must be False, got True"),
    (
        {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.0.mlp.experts"]}},
        "without experts",
    ),
    ({"num_local_experts": 8}, r"must have shape \(8, 64\), got \(4, 64\)"),
    ({"intermediate_size": 128}, r"must have shape \(4, 256\), got \(4, 192\)"),
    ({"intermediate_size": 100}, "intermediate_size must be a multiple of 32"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok must be at most num_local_experts 4, got 5"),
    ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
    ({"sliding_window": None}, "no sliding_window is switched on"),
    ({"num_experts": 6}, "num_experts is another name of num_local_experts, .* got 6 and 4"),
    ({"layer_types": ["full_attention"]}, "layer_types must be 4 of"),
    ({"swiglu_limit": 0}, "swiglu_limit must be a finite number above 0"),
    ({"rope_parameters": None}, "lacks rope_theta, or rope_parameters"),
    ({"routing": "sinkhorn"}, "unknown config keys routing"),
]


@pytest.mark.parametrize(("keys", "says"), KEYS, ids=[case[1][:30] for case in KEYS])
def test_broken_configs_are_refused(folders: tuple[Path, Path], tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    """Keeps out: a key that changes the model and that nobody reads."""
    raw = json.loads((folders[0] / "config.json").read_text()) | keys
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(folders[0] / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        load(tmp_path)


def test_quantised_experts_without_scheme_are_told(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By loading and by `plan`.  Keeps out: "8 tensors are missing", for experts that lie there under other names."""
    raw = json.loads((folders[0] / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(folders[0] / "model.safetensors")
    says = "8 tensors hold experts in mxfp4 (model.layers.0.mlp.experts.down_proj_blocks, ...), but config.json does not say so"
    with pytest.raises(ValueError) as info:
        outputs(tmp_path)
    assert says in str(info.value) and '"quantization_config": {"quant_method": "mxfp4"} in config.json' in str(info.value)
    assert main(["plan", "--target", str(tmp_path), "--gpu-memory", "1GB"]) == 2
    assert says in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "mxfp4"}}))
    load(tmp_path)


def test_what_does_not_fit_the_scheme_is_refused(folders: tuple[Path, Path]) -> None:
    """Keeps out: quantised weights through transformers' code, which would dequantise them, and weights quantised twice."""
    with pytest.raises(ValueError, match="quantization_config must be absent: specdec's own modules read"):
        choose_target(folders[0], "transformers")
    with pytest.raises(ValueError, match="is stored as experts in mxfp4.*quantize='none'"):
        choose_target(folders[0], quantize="int4")
    with pytest.raises(ValueError, match="'mxfp4' is that of gpt-oss's own checkpoints.*got it for another model"):
        parse_quantization(SCHEME, "config.json")


def test_the_published_config_is_understood() -> None:
    """The keys of gpt-oss-20b's config.json.  Keeps out: a strict reader that refuses what it was written for."""
    raw = {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
        "pad_token_id": 199999, "quantization_config": SCHEME, "rms_norm_eps": 1e-05, "rope_theta": 150000,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                         "rope_type": "yarn", "truncate": False},
        "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
    }  # fmt: skip
    config = parse_gpt_oss(raw, "config.json")
    experts = config.experts
    assert experts is not None and (experts.count, experts.router.top_k, tuple(experts.activation)) == (32, 4, (1.702, 7.0))
    assert [kind.window for kind in config.layer_kinds] == [128, None] * 12 and config.has_sinks
    rope = config.rope
    assert isinstance(rope, YarnRope) and rope.theta == 150000 and not rope.truncate
    assert rope.amplitude == pytest.approx(0.1 * math.log(32) + 1)
    share = share_of(config, Shard(1, 2)).experts
    assert share is not None and share.intermediate_size == 1440
