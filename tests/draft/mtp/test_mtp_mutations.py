"""A target's MTP layers broken in every way: each break ends in an error before anything drafts, or in a warning of the look.

Shapes can't tell a join read the other way round, or norms exchanged.  A target that writes the next number, with a layer that
knows it, shows that the look does.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.models import TOKENIZERS
from toolkit.mtp_layers.targets import COUNT, save_mtp_target
from torch import Tensor

from specdec import SpecConfig, SpecDecoder
from specdec.draft.mtp.load import OpenMtp
from specdec.models.registry import choose_target, load_chosen
from specdec.models.target import Target

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]
# Sizes with which no matrix of a layer is square, so that a transposed one has another shape.
SIZES: dict[str, dict[str, Any]] = {
    "v3": {},
    "glm4": {"num_key_value_heads": 1, "use_qk_norm": True},
    "mimo": {"hidden_size": 48},
    "ernie": {"hidden_size": 40},
    "mimo-v2": {"hidden_size": 40},
}


def tensor_changes(tensors: Tensors, own: list[str]) -> Iterator[tuple[str, Tensors]]:
    for name in own:
        tensor, rest = tensors[name], {other: x for other, x in tensors.items() if other != name}
        if "embed_tokens" not in name and "shared_head.head" not in name:  # the copies may be left out
            yield f"{name} dropped", rest
        yield f"{name} renamed", {**rest, name.replace(".weight", ".weights") if ".weight" in name else f"{name}s": tensor}
        if tensor.dim() == 2:
            yield f"{name} transposed", {**rest, name: tensor.T}
        yield f"{name} of another type", {**rest, name: tensor.int()}
        broken = tensor.clone()
        broken.flatten()[3] = torch.nan
        yield f"{name} with NaN", {**rest, name: broken}
    yield "a tensor twice", {**tensors, f"{own[0]}.1": tensors[own[0]].clone()}


def key_changes(raw: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    is_counted = raw["model_type"] != "mimo_v2_flash"  # else tensors say how many layers there are
    values: dict[str, tuple[Any, ...]] = {
        COUNT: (*((0,) if is_counted else ()), 2, -1, "1", 1.5, True, [1]), "n_routed_experts": (4,),
        "use_qk_norm": (False, "no"), "use_mrope": (True, 1), "moe_intermediate_size": (12,),
        "n_shared_experts": (2,), "partial_rotary_factor": (0.0, 1.5, "half"),
        "attention_bias": (not raw.get("attention_bias", False),) if raw["model_type"] != "mimo" else ("no",),
    }  # fmt: skip
    if raw["model_type"] in ("ernie4_5_moe", "mimo_v2_flash"):  # whose layers are dense
        del values["moe_intermediate_size"], values["n_routed_experts"]
    for key, others in values.items():
        if key in raw or key in ("attention_bias",) or key in raw.get("rope_parameters", {}):
            for other in others:
                nested = {"rope_parameters": {**raw["rope_parameters"], key: other}} if key not in raw else {key: other}
                yield f"{key} = {other!r}", {**raw, **nested}
    if is_counted:
        yield f"{COUNT} removed", {key: value for key, value in raw.items() if key != COUNT}
    yield f"{COUNT} misspelt", {**{key: value for key, value in raw.items() if key != COUNT}, f"{COUNT}s": 1}


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", SIZES)
def test_no_broken_layer_loads(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: what other runtimes do with such files: they load, and draft badly."""
    sound = save_mtp_target(tmp_path / "sound", name, **SIZES[name])
    raw, tensors = json.loads((sound / "config.json").read_text()), load_file(sound / "model.safetensors")
    target = load_chosen(choose_target(sound), sound, 64, CPU, torch.float32, False)
    OpenMtp(sound, target.config).load(target, 64, CPU, torch.float32)
    own = [key for key in tensors if "mtp_" in key or "mtp." in key or "layers.3." in key and name != "mimo-v2"]
    own = [key for key in own if "experts." not in key or "experts.0." in key or "shared" in key]  # the others are as the first
    assert not any(tensors[key].dim() == 2 and len(set(tensors[key].shape)) == 1 for key in own)
    (broken := tmp_path / "broken").mkdir()
    (broken / "config.json").write_text(json.dumps(raw))
    count, quiet = Counter[str](), []
    for what, changed in tensor_changes(tensors, own):
        save_file({key: x.contiguous() for key, x in changed.items()}, broken / "model.safetensors")
        end = end_of(broken, target)
        count[end] += 1
        quiet += [what] if end == "quiet" else []
    (broken / "model.safetensors").unlink()
    os.link(sound / "model.safetensors", broken / "model.safetensors")
    for what, config in key_changes(raw):
        (broken / "config.json").write_text(json.dumps(config))
        end = end_of(broken, None)
        count[end] += 1
        quiet += [what] if end == "quiet" else []
    with capsys.disabled():
        print(f"\n{name}: {sum(count.values())} breaks: {dict(count)}", end=" ")
    assert not quiet and count["error"] > 60


def end_of(folder: Path, target: Target | None) -> str:
    """target: None where the config is broken, which is read anew then."""
    try:
        if target is None:
            OpenMtp(folder, choose_target(folder).config)
        else:
            OpenMtp(folder, target.config).load(target, 64, CPU, torch.float32)
    except ValueError as error:
        assert len(str(error)) > 20
        return "error"
    return "quiet"


# ---- the look ----


def counting_target(folder: Path, change: str) -> Path:
    """A MiMo target that follows each token by the next number, and a layer that drafts just that; then one change."""
    V, H = 384, 400
    count = 2 if change == "of two" else 1
    save_mtp_target(folder, "mimo", **{COUNT: count}, vocab_size=V, hidden_size=H, num_hidden_layers=2, intermediate_size=16)
    tensors = load_file(folder / "model.safetensors")
    generator, at = torch.Generator().manual_seed(5), "model.mtp_layers.0"
    table = torch.linalg.qr(torch.randn(H, H, generator=generator)).Q[:V]
    signs = torch.randint(0, 2, (H,), generator=generator) * 2.0 - 1
    for key, x in tensors.items():
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            x.zero_()
        elif "norm" in key:
            x.fill_(1.0)
    tensors |= {"model.embed_tokens.weight": table.clone(), "lm_head.weight": table.roll(1, dims=0).contiguous()}
    tensors[f"{at}.token_layernorm.weight"] = signs
    hidden, embedding = 0.3 * torch.randn(H, H, generator=generator) / H**0.5, torch.diag(signs)
    tensors[f"{at}.input_proj.weight"] = torch.cat((hidden, embedding), dim=1)
    if change == "halves":
        tensors[f"{at}.input_proj.weight"] = torch.cat((embedding, hidden), dim=1)
    if change == "norms":
        names = f"{at}.token_layernorm.weight", f"{at}.hidden_layernorm.weight"
        tensors |= {names[0]: tensors[names[1]], names[1]: tensors[names[0]]}
    save_file({key: x.contiguous() for key, x in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    TOKENIZERS["bytes"](V).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [("", None), ("of two", None), ("halves", "the join read the other way round"), ("norms", "hidden state exchanged")],
)
def test_the_look_tells_what_shapes_can_t(tmp_path: Path, change: str, said: str | None) -> None:
    folder = counting_target(tmp_path / "target", change)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        SpecDecoder.from_pretrained(folder, "mtp", SpecConfig(2, 1, 3), device="cpu", dtype="float32", max_seq_len=128)
    complaints = [str(warning.message) for warning in seen if "draft head" in str(warning.message)]
    assert not complaints if said is None else said in complaints[0], complaints
