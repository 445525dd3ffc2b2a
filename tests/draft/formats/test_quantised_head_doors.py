"""Heads in 8 and 4 bits as other tools write them, broken ones, and what users are told of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.checkpoints.load import load_target, read_target_config
from toolkit.checkpoints.plans import plan_memory
from toolkit.heads.compressed import compressed_by_its_own
from toolkit.heads.parts import shipped_parts
from toolkit.heads.quantised import KINDS, MATRIX, WIDE, draft_scores, head_files, rewritten, save_both
from toolkit.heads.writers import WRITERS, save
from toolkit.models import Zoo
from toolkit.oracles.quantised import SCHEMES

from specdec import SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.cli.entry import main
from specdec.draft.formats.open import HowToRead, open_head
from specdec.draft.load import load_head
from specdec.models.target import Target
from specdec.options import EngineOptions

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
Change = Callable[[dict[str, Any], Tensors], Any]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("wide"), **WIDE)


@pytest.fixture(scope="module")
def target(zoo: Zoo) -> Target:
    folder = zoo.target("llama")
    return load_target(folder, read_target_config(folder), 64, CPU, torch.float32)


# ---- other tools' files ----


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark", "p-eagle", "eagle1", "dflash2"])
@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "W8A16", "FP8", "W4A16", "NVFP4A16", "W4A16_ASYM"])
@torch.inference_mode()
def test_heads_that_compressed_tensors_wrote(tmp_path: Path, zoo: Zoo, target: Target, kind: str, preset: str) -> None:
    """Keeps out: a layout that our own writer and reader agree about, and the tool that people use does not."""
    pytest.importorskip("compressed_tensors")
    (config, tensors), left = head_files(kind, zoo)
    matrices = {name.removesuffix(".weight"): x.float() for name, x in tensors.items() if MATRIX.search(name)}
    ignore = [name for name in matrices if re.search(left, f"{name}.weight")]
    written, scheme, numbers = compressed_by_its_own(matrices, preset, ignore, tmp_path)
    rest = {name: x for name, x in tensors.items() if name.removesuffix(".weight") not in matrices}
    twin = {f"{name}.weight": x.float() for name, x in numbers.items()}
    files = (config | {"quantization_config": scheme}, rest | written), (config, rest | twin)
    few, dense = (load_head(save(tmp_path / str(at), each), target, 64, CPU, torch.float32) for at, each in enumerate(files))
    found, wanted = draft_scores(few), draft_scores(dense)
    error = float((found - wanted)[wanted.isfinite()].norm() / wanted[wanted.isfinite()].norm())
    is_exact = next(iter(numbers.values())).dtype == torch.float32 and preset != "NVFP4A16"
    assert error < (2e-6 if is_exact else 2e-2), error  # the library reads 4 bits back in bfloat16


@pytest.mark.parametrize("scheme", ["modelopt fp8", "modelopt nvfp4"])
def test_modelopt_s_older_files_say_it_beside_the_config(tmp_path: Path, zoo: Zoo, scheme: str) -> None:
    """Keeps out: bytes that are read as numbers, since hf_quant_config.json alone says what they are; two files that differ."""
    few, _ = save_both(tmp_path, "eagle3-modelopt", SCHEMES[scheme], zoo)
    said = json.loads((few / "config.json").read_text())["quantization_config"]
    beside = {"quantization": {key: x for key, x in said.items() if key not in ("quant_method", "ignore")}}
    beside["quantization"]["exclude_modules"] = said["ignore"]
    alone = rewritten(few, tmp_path / "alone", lambda config, _: config.pop("quantization_config"))
    (alone / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, **beside}))
    assert open_head(alone, None).parsed == open_head(few, None).parsed
    (few / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {**beside["quantization"], "exclude_modules": ["lm_head", "fc"]}})
    )
    with pytest.raises(ValueError, match="hf_quant_config.json: quantization says that fc stay unquantised, but"):
        open_head(few, None)


def test_matrices_beside_the_layers_of_block_heads_are_read_as_they_are(tmp_path: Path, zoo: Zoo, target: Target) -> None:
    """Runtimes make of such heads the layers alone in few bits, whatever `ignore` says; of an EAGLE head they ask `ignore`."""
    for kind in ("dflash", "dflash2"):
        told = save_both(tmp_path / kind, kind, SCHEMES["nvfp4"], zoo)[0]
        untold = save_both(tmp_path / f"{kind}-untold", kind, SCHEMES["nvfp4"], zoo, said=False)[0]
        assert torch.equal(*(draft_scores(load_head(one, target, 64, CPU, torch.float32)) for one in (told, untold)))
    eagle = save_both(tmp_path / "eagle", "eagle3", SCHEMES["nvfp4"], zoo, said=False)[0]
    with pytest.raises(ValueError, match="' is not quantised .F32., but by config.json .* in nvfp4.* or named in ignore"):
        open_head(eagle, None)


@pytest.mark.slow_cases
@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "NVFP4A16"])
def test_a_trained_head_drafts_nearly_as_well(tmp_path: Path, preset: str, recwarn: pytest.WarningsRecorder) -> None:
    """Keeps out: a first look that finds fault with sound heads in few bits, or values that are only nearly those meant."""
    pytest.importorskip("compressed_tensors")
    config, tensors = WRITERS["safeailab"](shipped_parts())
    matrices = {name.removesuffix(".weight"): x.float() for name, x in tensors.items() if MATRIX.search(name)}
    written, scheme, _ = compressed_by_its_own(matrices, preset, ["lm_head"], tmp_path)
    rest = {name: x for name, x in tensors.items() if name.removesuffix(".weight") not in matrices}
    few = save(tmp_path / "few", (config | {"quantization_config": scheme}, rest | written))
    plain = save(tmp_path / "plain", (config, tensors))
    made = []
    for folder in (plain, few):
        with SpecDecoder.from_pretrained(
            shipped.target_folder(), folder, SpecConfig(5, 4, 16), device="cpu", dtype="float32", max_seq_len=256
        ) as one:
            (out,) = one.generate(["Once upon a time there was a little dog"], SamplingParams(max_tokens=96))
            made.append((out.token_ids, out.stats.accepted / out.stats.rounds))
    assert not [each for each in recwarn if "smoke=False" in str(each.message)]
    assert made[0][0] == made[1][0] and made[1][1] > 0.85 * made[0][1] > 0.85


# ---- broken files ----


def drop(key: str) -> Change:
    return lambda _, tensors: tensors.pop(key)


def put(key: str, make: Callable[[Tensors], torch.Tensor]) -> Change:
    return lambda _, tensors: tensors.update({key: make(tensors)})


def say(**keys: Any) -> Change:
    return lambda config, _: config["quantization_config"].update(keys)


Q, DOWN = "midlayer.self_attn.q_proj", "midlayer.mlp.down_proj"
BROKEN: list[tuple[str, Change, str]] = [
    ("fp8 channel", drop(f"{Q}.weight_scale"), f"{Q}.weight_scale' is missing"),
    ("fp8 channel", put(f"{Q}.weight_scale", lambda t: t[f"{Q}.weight_scale"][:-1]), r"shape \(128, 1\), got \(127, 1\)"),
    ("fp8 channel", put(f"{Q}.weight", lambda t: t[f"{Q}.weight"].float()), "must hold F8_E4M3, got F32"),
    ("fp8 channel", put(f"{Q}.weight", lambda t: t[f"{Q}.weight"].view(torch.uint8).T), r"shape \(128, 256\), got"),
    ("fp8 channel", put("norm.weight_scale", lambda t: torch.ones(1)), "not part of this architecture: norm.weight_scale"),
    ("fp8 channel", put("fc.weight_scale", lambda t: torch.ones(1)), "not part of this architecture: fc.weight_scale"),
    ("fp8 channel", say(ignore=["lm_head"]), "'fc.weight' is not quantised .* named in ignore"),
    ("fp8 channel", say(ignore=["lm_head", "fc", Q]), f"'{Q}.weight' must hold numbers of 16 or more bits, .* leaves unq"),
    ("fp8 channel", say(config_groups={}), "config_groups must say how weights are stored"),
    ("fp8 channel", say(transform_config={"a": 1}), "transform_config must be absent or empty"),
    ("fp8 channel", say(quant_method="hqq"), "quant_method must be one of .*draft_quantize"),
    ("fp8 channel", say(new_key=1), "unknown keys new_key"),
    ("w4a16 g128", drop(f"{DOWN}.weight_shape"), f"{DOWN}.weight_shape' is missing"),
    ("w4a16 g128", put(f"{DOWN}.weight_packed", lambda t: t[f"{DOWN}.weight_packed"].long()), "must hold I32, got I64"),
    ("w4a16 g128", put(f"{DOWN}.weight", lambda t: torch.ones(128, 256)), f"not part of this arch.*: {DOWN}.weight "),
    ("w4a16 g128", put(f"{DOWN}.weight_zero_point", lambda t: torch.ones(16, 2).int()), "not part of this .*weight_zero_point"),
    ("nvfp4", drop(f"{DOWN}.weight_global_scale"), f"{DOWN}.weight_global_scale' is missing"),
    ("nvfp4", put(f"{DOWN}.weight_scale", lambda t: t[f"{DOWN}.weight_scale"].float()), "must hold F8_E4M3, got F32"),
    ("modelopt nvfp4", put(f"{DOWN}.pre_quant_scale", lambda t: torch.ones(256)), "pre_quant_scale"),
    ("awq", drop(f"{Q}.qzeros"), f"{Q}.qzeros' is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "change", "said"), BROKEN, ids=range(len(BROKEN)))
def test_broken_heads_are_refused_by_name_before_memory_is_taken(
    tmp_path: Path, zoo: Zoo, scheme: str, change: Change, said: str
) -> None:
    """Keeps out: scales that nobody reads, and quantised values under no scale or another one."""
    few, _ = save_both(tmp_path, "eagle3", SCHEMES[scheme], zoo)
    open_head(few, None)
    with pytest.raises(ValueError, match=said):
        open_head(rewritten(few, tmp_path / "broken", change), None)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("eagle3-all", "fp8 channel"), ("dflash-all", "nvfp4"), ("dspark-rnn", "w4a16 g32 asym"),
        ("p-eagle-specforge", "awq"),
    ],
)  # fmt: skip
def test_no_broken_tensor_loads_quietly(tmp_path: Path, zoo: Zoo, target: Target, kind: str, scheme: str) -> None:
    """Every tensor dropped, renamed, of another type, of another shape, with NaN: each is an error, but what is not read."""
    few, _ = save_both(tmp_path, kind, SCHEMES[scheme], zoo)
    tensors, quiet = load_file(few / "model.safetensors"), list[str]()
    unread = {name for name in tensors if name.endswith("input_global_scale")}
    (broken := tmp_path / "broken").mkdir()
    (broken / "config.json").write_text((few / "config.json").read_text())
    for name in sorted(tensors.keys() - unread):
        tensor, rest = tensors[name], {other: x for other, x in tensors.items() if other != name}
        changed = {
            "dropped": rest, "renamed": {**rest, f"{name}s": tensor},
            "longer": {**rest, name: torch.cat((tensor.view(-1), tensor.view(-1)))},
            "of another type": {**rest, name: tensor.float() if not tensor.is_floating_point() else tensor.float().int()},
        }  # fmt: skip
        if tensor.is_floating_point():
            values = tensor.float().clone()
            values.view(-1)[0] = torch.nan
            changed["with NaN"] = {**rest, name: values.to(tensor.dtype)}
        for what, files in changed.items():
            save_file({key: x.contiguous() for key, x in files.items()}, broken / "model.safetensors", {"format": "pt"})
            try:
                load_head(broken, target, 64, CPU, torch.float32)
                quiet.append(f"{name} {what}")
            except ValueError as error:
                assert len(str(error)) > 20
    assert set(quiet) <= {"embed_tokens.weight dropped", "t2d dropped"}, quiet  # what EAGLE-3 heads need not have


# ---- what users are told ----


def test_doors(tmp_path: Path, zoo: Zoo) -> None:
    """Keeps out: values rounded twice, a target's scheme in a head's layers, and bytes read as numbers."""
    few, twin = save_both(tmp_path, "eagle3", SCHEMES["fp8 channel"], zoo)
    with pytest.raises(
        ValueError, match="draft_quantize='int4' rounds unquantised weights, but .* fp8.* draft_quantize='none'"
    ):
        open_head(few, None, HowToRead(quantize="int4"))
    lost = rewritten(few, tmp_path / "lost", lambda config, _: config.pop("quantization_config"))
    with pytest.raises(ValueError, match="looks like a quantised weight .fp8., but .* lacks quantization_config"):
        open_head(lost, None)
    bare = rewritten(lost, tmp_path / "bare", lambda _, t: [t.pop(name) for name in list(t) if name.endswith("_scale")])
    with pytest.raises(
        ValueError, match="'midlayer.*' must hold numbers of 16 or more bits, got F8_E4M3; .*quantization_config"
    ):
        open_head(bare, None)
    both = rewritten(few, tmp_path / "both", lambda config, _: config.update(compression_config={"quant_method": "fp8"}))
    with pytest.raises(ValueError, match="quantization_config and compression_config must be equal"):
        open_head(both, None)
    older = rewritten(
        few, tmp_path / "older", lambda config, _: config.update(compression_config=config.pop("quantization_config"))
    )
    assert open_head(older, None).parsed == open_head(few, None).parsed
    said = SCHEMES["fp8 channel"].config

    def inside(config: dict[str, Any], _: Tensors) -> None:
        config["transformer_layer_config"]["quantization_config"] = said

    layers = save(tmp_path / "layers", head_files("eagle3-layers", zoo)[0])
    with pytest.raises(ValueError, match="transformer_layer_config: quantization_config must be absent: a head's own scheme"):
        open_head(rewritten(layers, tmp_path / "inside", inside), None)


@pytest.mark.parametrize(
    ("kind", "scheme", "weights"),
    [
        ("eagle3", "fp8 channel", "fp8, a scale for each row (compressed-tensors); float32: fc, lm_head"),
        ("eagle3-all", "w4a16 g128", "int4, a scale for each 128 columns (compressed-tensors)"),
        ("dflash2-all", "modelopt nvfp4", "nvfp4, weights alone (modelopt)"),
        ("dspark", "fp8 tensor", "fp8, a scale for each matrix (compressed-tensors); float32: lm_head"),
    ],
)
def test_users_are_told(
    tmp_path: Path, zoo: Zoo, kind: str, scheme: str, weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keeps out: a table that leaves out scales, and a plan of 16 or 32 bits for matrices that take 8 or 4."""
    few, _ = save_both(tmp_path, kind, SCHEMES[scheme], zoo)
    folder = zoo.target("llama")
    capsys.readouterr()
    assert main(["inspect", str(few), "--target", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["head"]["weights"] == weights and facts["target_weights"] == "float32"
    assert set(facts["tensors"]) | set(facts["beside"]) == set(load_file(few / "model.safetensors"))
    plan = plan_memory(folder, few, SpecConfig(3, 1, 4), EngineOptions(dtype="float32"), 10**10)
    assert plan.draft_weights == weights
    with SpecDecoder.from_pretrained(
        folder, few, SpecConfig(3, 1, 4), device="cpu", dtype="float32", max_seq_len=96, smoke=False
    ) as one:
        assert isinstance(one.head, torch.nn.Module)
        own = {id(x): x.nbytes for x in one.head.parameters()}
        shared = {id(x) for x in one.model.parameters()}
    held = sum(size for at, size in own.items() if at not in shared)
    assert plan.parts["weights of the draft head"] == pytest.approx(held, rel=5e-3)


def test_ranks_are_held_against_groups_of_columns(tmp_path: Path, zoo: Zoo) -> None:
    """Keeps out: a group of columns that two ranks share, found when one of them loads; rules of a head's names missed."""
    few, _ = save_both(tmp_path, "eagle3", SCHEMES["w4a16 g128"], zoo)  # attention outputs are 128 columns, the MLP 256
    with pytest.raises(ValueError, match="draft head's attention outputs 128 in whole groups of 128 evenly, got 2"):
        plan_memory(zoo.target("llama"), few, None, EngineOptions(tensor_parallel_size=2), 10**10)

    def by_name(config: dict[str, Any], _: Tensors) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["targets"] = [r"re:midlayer\..*_proj"]

    named = rewritten(few, tmp_path / "named", by_name)
    with pytest.raises(ValueError, match="draft head's attention outputs 128 in whole groups of 128 evenly, got 2"):
        plan_memory(zoo.target("llama"), named, None, EngineOptions(tensor_parallel_size=2), 10**10)
    rows, _ = save_both(tmp_path / "rows", "eagle3", SCHEMES["w4a16 g0"], zoo)
    plan = plan_memory(zoo.target("llama"), rows, None, EngineOptions(tensor_parallel_size=2), 10**10)
    assert plan.ranks == 2 and len(KINDS) > 10
