"""Tiny random targets of the Llama family whose layers share keys and values, and the oracle for them.

transformers has no such Llama.  The oracle is a transformers model whose sharing layers have, in place of their projections to
keys and values, modules that return what the source layer's projections returned in the same pass.  Rotary positions are the
same in all layers, so the sharing layers then attend to the source's keys and values.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from toolkit.models import COMMON, FAMILIES, SEEDS, Zoo, randomise, save_target

# name: (the family of toolkit.models, each layer's source, what else differs)
SHARING: dict[str, tuple[str, list[int], dict[str, Any]]] = {
    "half": ("llama", [0, 1, 1, 1], {}),
    "pairs": ("llama", [0, 0, 2, 2], {}),
    "middle": ("llama-dim80-biases", [0, 0, 2, 3], {}),
    "windows": ("qwen2", [0, 1, 2, 2], {}),
    "crossed": ("qwen3", [0, 1, 0, 1, 0, 1], dict(num_hidden_layers=6)),
}


class Recall(nn.Module):
    """In place of a projection: returns what another projection returned last."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.last: Tensor | None = None
        source.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.last = out

    def forward(self, x: Tensor) -> Tensor:
        assert self.last is not None
        return self.last


def share(model: PreTrainedModel, sources: list[int]) -> PreTrainedModel:
    """The model with layers that share as the list says."""
    layers = model.model.layers
    for layer, source in enumerate(sources):
        if layer != source:
            mine, theirs = layers[layer].self_attn, layers[source].self_attn
            mine.k_proj, mine.v_proj = Recall(theirs.k_proj), Recall(theirs.v_proj)
            if hasattr(mine, "k_norm"):
                mine.k_norm = theirs.k_norm
    return model


def save_sharing(folder: Path, name: str) -> Path:
    """A random target with a kv_source, without weights for the keys and values of sharing layers."""
    family, sources, changes = SHARING[name]
    save_target(folder, family, **changes)
    return write_sources(folder, sources)


def write_sources(folder: Path, sources: list[int]) -> Path:
    """Gives the folder's config.json that kv_source, and drops the tensors that sharing layers lack."""
    path, weights = folder / "config.json", folder / "model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kv_source": sources}))
    gone = {
        f"model.layers.{layer}.self_attn.{part}."
        for layer, source in enumerate(sources)
        if layer != source
        for part in ("k_proj", "v_proj", "k_norm")
    }
    kept = {n: t for n, t in load_file(weights).items() if not any(n.startswith(prefix) for prefix in gone)}
    save_file(kept, weights, metadata={"format": "pt"})
    return folder


class SharingZoo(Zoo):
    """The Zoo with these targets."""

    def target(self, name: str) -> Path:
        folder = self.root / name
        return folder if folder.is_dir() else save_sharing(folder, name)

    def hf(self, name: str) -> PreTrainedModel:
        """The oracle, in float32."""
        if name not in self._models:
            family, sources, changes = SHARING[name]
            config_class, model_class, own = FAMILIES[family]
            model = model_class(config_class(**{**COMMON, **own, **changes}))
            randomise(model, SEEDS.get(family, list(FAMILIES).index(family)))
            self._models[name] = share(model.eval(), sources)
        return self._models[name]
