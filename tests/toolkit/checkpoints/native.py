"""A tiny random target of every native family, whose config.json tests may change, and transformers' own forward of it."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.attention.eager.dense import DenseAttention
from specdec.models.registry import choose_target, load_chosen
from toolkit.checkpoints.gpt_oss import save_gpt_oss
from toolkit.checkpoints.mixtures import MIXTURES, save_mixture
from toolkit.deepseek import DEEPSEEKS, SPARSES, save_deepseek, save_sparse
from toolkit.families import eager
from toolkit.models import save_target
from toolkit.recurrent.mamba_targets import FAMILIES as MAMBAS
from toolkit.recurrent.mamba_targets import tiny_mamba
from toolkit.recurrent.more_targets import MORE, save_more
from toolkit.recurrent.targets import FAMILIES as HYBRIDS
from toolkit.recurrent.targets import tiny_hybrid
from toolkit.unlike.targets import save_unlike

NAMES = {
    "deepseek_v2": "v2",
    "deepseek_v3": "v3",
    "deepseek_v32": "v32",
    "glm_moe_dsa": "glm",
    "glm4_moe_lite": "glm4-lite",
    "mimo": "qwen2",
    "qwen2_moe": "qwen2-moe-normed",
    "qwen3_moe": "qwen3-moe",
    "mixtral": "mixtral",
    "glm4_moe": "glm4-moe",
    "dots1": "dots1",
    "ernie4_5_moe": "ernie",
    "hy_v3": "hy3",
    "minimax_m2": "minimax",
    "olmoe": "olmoe",
}  # of other zoos
UNLIKE = {"mimo_v2_flash": "mimo", "gemma4_text": "gemma-mixture"}  # whose kinds of layers have heads of their own
ABSENT = "absent"  # a change that takes the key away
IDS = torch.randint(40, (24,), generator=torch.Generator().manual_seed(5))  # three windows of 8 tokens
LAYERS = 2
SHORT: dict[str, dict[str, Any]] = {  # so many layers of hybrids
    **{name: {"num_hidden_layers": LAYERS, "layer_types": ["conv", "full_attention"]} for name in ("lfm2", "lfm2_moe")},
    "granitemoehybrid": {
        "num_hidden_layers": LAYERS,
        "layer_types": ["linear_attention", "full_attention"],
        "position_embedding_type": "rope",
    },
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "moe"]},
    "falcon_h1": {"num_hidden_layers": LAYERS},
    "bamba": {"num_hidden_layers": LAYERS},
}
SHORT["olmo_hybrid"] = {  # with pieces of convolutions as published files have them, because they are of equal size
    "num_hidden_layers": LAYERS, "layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
SHORT["kimi_linear"] = {  # no dense layer, whose tensors have two names
    "num_hidden_layers": LAYERS, "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["sparse"] * LAYERS,
    "linear_attn_config": {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4},
}  # fmt: skip


class NativeZoo:
    """Two folders by model type, made once: as our modules read the model, and as transformers does.

    These differ for MiMo, which transformers lacks and whose layers are Qwen2's, and for gpt-oss's quantised experts.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def _saved(self, family: str) -> tuple[Path, Path]:
        ours, name = self.root / family, NAMES.get(family, family)
        if family == "gpt_oss":
            folders = ours / "mxfp4", ours / "plain"
            return folders if ours.is_dir() else save_gpt_oss(ours, num_hidden_layers=LAYERS)
        if family in HYBRIDS and not ours.is_dir():
            kinds = ["linear_attention", "full_attention"]
            own = {"mlp_only_layers": []} if family == "qwen3_next" else {}
            tiny_hybrid(ours, family, num_hidden_layers=LAYERS, layer_types=kinds, **own)
        if family in MORE and not ours.is_dir():
            save_more(ours, family, **SHORT[family])
        if family in UNLIKE and not ours.is_dir():
            kinds = ["sliding_attention", "full_attention"]
            save_unlike(ours, UNLIKE[family], num_hidden_layers=LAYERS, layer_types=kinds)
        if family in MAMBAS and not ours.is_dir():
            tiny_mamba(ours, family, **SHORT[family])
        if not ours.is_dir():
            zoos = ((SPARSES, save_sparse), (DEEPSEEKS, save_deepseek), (MIXTURES, save_mixture))
            save = next((save for names, save in zoos if name in names), save_target)
            save(ours, name, num_hidden_layers=LAYERS)
        return ours, ours

    def config(self, family: str) -> dict[str, Any]:
        """As our modules read it."""
        raw: dict[str, Any] = json.loads((self._saved(family)[0] / "config.json").read_text())
        return raw | ({"model_type": family} if family == "mimo" else {})

    def changed(self, family: str, changes: dict[str, Any], at: Path) -> tuple[Path, Path]:
        """Folders with the same weights and a changed config.json: for us, and for transformers."""
        for name, folder in zip(("ours", "theirs"), self._saved(family), strict=True):
            shutil.copytree(folder, at / name)
            path = at / name / "config.json"
            own = {"model_type": family} if (family, name) == ("mimo", "ours") else {}
            raw = {**json.loads(path.read_text()), **own, **changes}
            path.write_text(json.dumps({key: value for key, value in raw.items() if value != ABSENT}))
        return at / "ours", at / "theirs"


@torch.inference_mode()
def our_logits(folder: Path) -> Tensor:
    """[24, V] float32.  ValueError if our modules refuse the folder."""
    model = load_chosen(choose_target(folder, "native"), folder, 64, torch.device("cpu"), torch.float32, False)
    out = model(IDS, torch.arange(len(IDS)), DenseAttention(model.config.layer_kinds))
    return model.logits(out.hidden_TH)


@torch.inference_mode()
def their_logits(folder: Path) -> tuple[Tensor, Tensor]:
    """[24, V] float32 by one pass, and [V] of the last token alone, after all others went into transformers' own cache."""
    model = eager(folder)
    cache = model(IDS[None, :-1], use_cache=True).past_key_values
    at = torch.tensor([[len(IDS) - 1]])  # Bamba counts from 0 where nobody says it
    last = model(IDS[None, -1:], past_key_values=cache, position_ids=at, use_cache=True).logits[0, 0]
    return model(IDS[None], use_cache=False).logits[0], last
