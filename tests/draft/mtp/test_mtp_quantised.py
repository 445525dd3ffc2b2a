"""MTP layers of quantised checkpoints: read as the checkpoint stores them, and refused by name where a tensor is broken."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.checkpoints.plans import plan_memory
from toolkit.mtp_layers.targets import MtpZoo, save_mtp_target
from toolkit.oracles.quantised import SCHEMES, as_quantised
from torch import Tensor

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.cli.entry import main
from specdec.draft.mtp.load import OpenMtp
from specdec.models.linear import Linear
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.models.registry import choose_target, load_chosen
from specdec.models.target import Target
from specdec.options import EngineOptions

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]
JOINS = ("eh_proj", "input_proj", "indexer.weights_proj")


def decoder(folder: Path, spec: SpecConfig, **settings: Any) -> SpecDecoder:
    return SpecDecoder.from_pretrained(
        folder, "mtp", spec, device="cpu", dtype="float32", max_seq_len=96, smoke=False, **settings
    )


def with_dense(folder: Path, plain: Path, which: Callable[[str], bool]) -> Path:
    """Stores those of the checkpoint's matrices unquantised, and says nothing of it in the config."""
    quantised, numbers = load_file(folder / "model.safetensors"), load_file(plain / "model.safetensors")
    matrices = (key for key in numbers if re.search(r"(_proj(_with_mqa)?|indexer\.w(q_b|k))\.weight$", key))
    names = {key.removesuffix(".weight") for key in matrices if which(key)}
    kept = {key: x for key, x in quantised.items() if key.rpartition(".")[0] not in names}
    save_file(
        kept | {f"{name}.weight": numbers[f"{name}.weight"] for name in names}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def save_both(root: Path, name: str, scheme: str, left: str) -> tuple[Path, Path]:
    """(a quantised target, the same target unquantised).

    left: which matrices of the layers are not quantised; with the join, those of indexers' heads, in all layers.
    """
    grouped = {"intermediate_size": 48} if "nvfp4" in scheme else {}  # whole groups of 16 columns
    plain = save_mtp_target(root / "plain", name, **grouped)
    quantised = as_quantised(plain, root / "quantised", SCHEMES[scheme])
    if left == "join":
        with_dense(quantised, plain, lambda key: any(f"{join}." in key for join in JOINS))
    elif left == "all":
        with_dense(quantised, plain, lambda key: "layers.3." in key)
    return quantised, plain


CASES = [
    ("v3", "deepseek fp8", "join", SpecConfig(3, 2, 6)),  # as DeepSeek V3 and R1 are published
    ("v3", "deepseek fp8", "all", SpecConfig(3, 1, 4)),
    ("v32", "deepseek fp8", "join", SpecConfig(3, 2, 6)),  # as DeepSeek V3.2 is published
    ("v32", "deepseek fp8", "none", SpecConfig(3, 1, 4)),
    ("glm-dsa", "deepseek fp8", "join", SpecConfig(3, 1, 4)),
    ("v3-two", "fp8 channel", "none", SpecConfig(3, 1, 4)),
    ("mimo", "fp8 block", "none", SpecConfig(3, 2, 6)),
    ("mimo-v2-three", "fp8 block", "none", SpecConfig(3, 2, 6)),
    ("hy3", "fp8 channel", "all", SpecConfig(3, 1, 4)),
    ("hy3", "fp8 channel", "none", SpecConfig(3, 2, 6)),
    ("ernie", "fp8 channel", "none", SpecConfig(3, 1, 4)),
    ("mimo", "modelopt nvfp4", "none", SpecConfig(3, 2, 6)),  # whose packed values have the name of the matrix
]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("name", "scheme", "left", "spec"), CASES, ids=[f"{case[0]}-{case[1]}-{case[2]}" for case in CASES])
def test_texts_and_drafts_are_those_of_the_numbers(tmp_path: Path, name: str, scheme: str, left: str, spec: SpecConfig) -> None:
    """Keeps out: layers under other scales than their own, or read by the target's scheme where they are unquantised."""
    made = []
    for folder in save_both(tmp_path, name, scheme, left):
        with decoder(folder, spec) as one:
            outputs = one.generate([[3, 1, 4, 1, 5], [9, 2, 6]], SamplingParams(max_tokens=16))
            made.append([(out.token_ids, out.stats.rounds, out.stats.accepted) for out in outputs])
            assert one.head is not None
            matrices = [module for module in one.head.layers.modules() if isinstance(module, Linear)]
            experts = [module for module in one.head.layers.modules() if isinstance(module, MixtureOfExperts)]
            kept = [bool(matrix.quantised) for matrix in matrices] + [bool(one.gate_up_proj.quantised) for one in experts]
            assert any(kept) == (folder.name == "quantised" and left != "all")
    assert made[0] == made[1]


def changes(tensors: Tensors, own: list[str]) -> list[tuple[str, Tensors]]:
    made = []
    for name in own:
        tensor, rest = tensors[name], {other: x for other, x in tensors.items() if other != name}
        broken = tensor.float()
        broken.view(-1)[0] = torch.nan
        made += [
            (f"{name} dropped", rest),
            (f"{name} renamed", {**rest, f"{name}s": tensor}),
            (f"{name} of integers", {**rest, name: tensor.float().int()}),
            (f"{name} with NaN", {**rest, name: broken.to(tensor.dtype)}),
            (f"{name} of another shape", {**rest, name: torch.cat((tensor.float(), tensor.float())).to(tensor.dtype)}),
        ]
        if name.endswith(".weight") and tensor.dtype == torch.float8_e4m3fn:
            made.append((f"{name} widened", {**rest, name: tensor.float()}))
        if name.endswith("_scale_inv"):
            made.append(
                (f"{name} of a matrix that has none", {**tensors, name.replace("q_a_proj", "q_a_layernorm"): tensor.clone()})
            )
    return [case for case in made if "none" not in case[0] or "q_a_proj" in case[0]]


PARTS = ("q_a_proj.", "kv_b_proj.", "kv_a_proj_with_mqa.", "eh_proj.", "experts.3.down_proj.", "shared_experts.up_proj.")


@pytest.mark.slow_cases
@pytest.mark.parametrize(("name", "tensors_of"), [("v3", 11), ("v32", 16)])
def test_no_broken_layer_loads(tmp_path: Path, name: str, tensors_of: int) -> None:
    """Keeps out: a scale that nobody reads, or quantised values that are read without their scales."""
    sound, _ = save_both(tmp_path, name, "deepseek fp8", "join")
    chosen = choose_target(sound)
    target: Target = load_chosen(chosen, sound, 64, CPU, torch.float32, False)
    OpenMtp(sound, target.config).load(target, 64, CPU, torch.float32)
    tensors = load_file(sound / "model.safetensors")
    own = [key for key in tensors if "layers.3." in key and any(part in key for part in (*PARTS, "indexer.w"))]
    assert len(own) == tensors_of
    (broken := tmp_path / "broken").mkdir()
    (broken / "config.json").write_text((sound / "config.json").read_text())
    quiet = []
    for what, changed in changes(tensors, own):
        save_file({key: x.contiguous() for key, x in changed.items()}, broken / "model.safetensors", {"format": "pt"})
        try:
            OpenMtp(broken, target.config).load(target, 64, CPU, torch.float32)
            quiet.append(what)
        except ValueError as error:
            assert len(str(error)) > 20
    assert not quiet


@pytest.mark.slow_cases
@pytest.mark.parametrize("left", ["join", "none"])
def test_no_target_with_a_broken_indexer_loads(tmp_path: Path, left: str) -> None:
    """Keeps out: weights of an indexer's heads read as dense although they are quantised, whose scales are lost."""
    sound, _ = save_both(tmp_path, "v32", "deepseek fp8", left)
    chosen, tensors = choose_target(sound), load_file(sound / "model.safetensors")
    load_chosen(chosen, sound, 64, CPU, torch.float32, False)
    own = [key for key in tensors if "layers.1." in key and "indexer.w" in key]
    assert len(own) == {"join": 5, "none": 6}[left]
    quiet = []
    for what, changed in changes(tensors, own):
        save_file({key: x.contiguous() for key, x in changed.items()}, sound / "model.safetensors", {"format": "pt"})
        try:
            load_chosen(chosen, sound, 64, CPU, torch.float32, False)
            quiet.append(what)
        except ValueError as error:
            assert len(str(error)) > 20
    assert not quiet


def test_users_are_told(tmp_path: Path, mtp_zoo: MtpZoo, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a plan that counts quantised values as dense ones, and a table that leaves out scales."""
    quantised, _ = save_both(tmp_path, "v3", "deepseek fp8", "join")
    capsys.readouterr()
    assert main(["inspect", "mtp", "--target", str(quantised), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["head"]["weights"] == "float32, fp8, a scale for each 128 x 128 block"
    own = {key for key in load_file(quantised / "model.safetensors") if "layers.3." in key}
    assert set(facts["tensors"]) | set(facts["beside"]) == own
    planned = plan_memory(quantised, "mtp", SpecConfig(3, 1, 4), EngineOptions(dtype="float32"), 10**10).parts
    with decoder(quantised, SpecConfig(3, 1, 4)) as one:
        assert one.head is not None
        held = sum(x.nbytes for x in (*one.head.layers.parameters(), *one.head.layers.buffers()))
    assert planned["weights of the draft head"] == pytest.approx(held, rel=1e-3)
    rounded = OpenMtp(mtp_zoo.target("v3"), choose_target(mtp_zoo.target("v3"), quantize="fp8").config)
    assert rounded.checkpoint.quantization is None  # what is rounded as the target is loaded, its layers are not
