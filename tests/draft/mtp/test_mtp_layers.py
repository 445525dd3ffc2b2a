"""MTP layers compute what their definition says, and what transformers' own MTP path computes.

Keeps out: a join read the other way round, a norm in another's place, a feature before the target's final norm, a part of a
head that is turned wrongly, an expert chosen for another token.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.mtp_layers.oracle import DenseMtp
from toolkit.mtp_layers.targets import TARGETS, MtpZoo
from torch import Tensor
from transformers import Glm4MoeConfig, PreTrainedModel

from specdec.attention.eager.dense import DenseAttention
from specdec.draft.mtp.head import MtpHead
from specdec.draft.mtp.layouts import read_mtp
from specdec.draft.mtp.load import OpenMtp
from specdec.models.registry import choose_target, load_chosen

IDS = [3, 17, 8, 39, 0, 21, 21, 5, 30, 11, 2, 9]
CPU = torch.device("cpu")


def load(zoo: MtpZoo, name: str, dtype: torch.dtype = torch.float64) -> MtpHead:
    folder = zoo.target(name)
    target = load_chosen(choose_target(folder), folder, 64, CPU, dtype, False)
    return OpenMtp(folder, target.config).load(target, 64, CPU, dtype)


def in_double(zoo: MtpZoo, name: str) -> PreTrainedModel:
    return copy.deepcopy(zoo.hf(name)).double()


@torch.no_grad()
def by_definition(dense: DenseMtp) -> Tensor:
    """[T, H]: the first layer's outputs over a text's pairs."""
    return dense.hidden(torch.tensor(IDS[1:]), dense.features(dense.target, IDS[:-1]))


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in ("v32", "glm-dsa")])
def test_the_first_layer_equals_its_definition(mtp_zoo: MtpZoo, name: str) -> None:
    """Over the target's true states, without a cache."""
    dense = DenseMtp(mtp_zoo.target(name), in_double(mtp_zoo, name))
    head = load(mtp_zoo, name)
    ids = torch.tensor(IDS)
    with torch.no_grad():
        fused = dense.features(dense.target, IDS[:-1])
        attn = DenseAttention(head.needs.models[0].layer_kinds)
        ours = head.begin(ids[1:], fused, torch.arange(len(IDS) - 1), attn, torch.arange(len(IDS) - 1))
        want = by_definition(dense)
        logits = head.logits(ours)
    torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, want @ dense.lm_head.T.detach(), rtol=1e-5, atol=1e-5)


def test_what_glm4_s_config_leaves_out_is_transformers_default(mtp_zoo: MtpZoo, tmp_path: Path) -> None:
    """Keeps out: another epsilon, or whole heads turned, in layers that transformers' code of the target does not compute."""
    folder, default = mtp_zoo.target("glm4"), Glm4MoeConfig()
    raw = json.loads((folder / "config.json").read_text())
    for part in (raw, raw["rope_parameters"]):
        for key in ("rms_norm_eps", "partial_rotary_factor"):
            part.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = read_mtp(tmp_path, choose_target(folder).config).model
    assert model.rms_norm_eps == default.rms_norm_eps
    assert model.rope.rotated == model.head_dim * default.rope_parameters["partial_rotary_factor"]


@pytest.mark.parametrize("name", ["v3", "v3-two", "v3-plain-queries", "glm4", "glm4-three-normed"])
def test_the_definition_is_transformers_own(mtp_zoo: MtpZoo, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Keeps out: an oracle that shares our misunderstanding.  All layers, each over the pairs of the layer before."""
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    hf = mtp_zoo.hf(name)
    pattern = rf"model\.layers\.({'|'.join(str(hf.config.num_hidden_layers + k) for k in range(3))})\..*"
    monkeypatch.setattr(hf, "_keys_to_ignore_on_load_unexpected", [pattern], raising=False)
    mtp = MtpModel.from_pretrained(hf).eval()
    mtp.config._experts_implementation = "eager"
    dense = DenseMtp(mtp_zoo.target(name), in_double(mtp_zoo, name))
    state: Any = dense.features(hf, IDS[:-1])
    want = dense.features(dense.target, IDS[:-1])
    cache = MtpCache(config=mtp.config)
    with torch.no_grad():
        for layer in range(dense.layers):
            ids = torch.tensor(IDS[1 + layer :])
            positions = torch.arange(1 + layer, len(IDS))[None]
            state = mtp.forward_layer(layer, state[: len(ids)][None], positions, cache, input_ids=ids[None])[0]
            want = dense.hidden(ids, want[: len(ids)], layer)
            torch.testing.assert_close(state.double(), want, rtol=1e-4, atol=1e-4)
