"""Files whose experts lie fused, or fused and apart: what can't be meant is an error, before a number is read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.checkpoints.mixtures import fuse, save_mixture
from torch import Tensor

from specdec.models.registry import check_chosen, choose_target

EXPERTS = "model.layers.0.mlp.experts"
GATE_UP, SCALES = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.gate_up_proj_scale_inv"
# What the file holds instead or besides (None: not any more), and what is said of it.
CASES: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "twice": ({f"{EXPERTS}.3.up_proj.weight": torch.ones(24, 32)}, r"experts\.3\.up_proj\.weight' is there too"),
    "odd": ({GATE_UP: torch.ones(8, 49, 32)}, "must hold as many rows of gates as of ups, got 49 rows"),
    "scales alone": ({GATE_UP: None, SCALES: torch.ones(8, 2, 1)}, r"needs '.*experts\.gate_up_proj' beside it, .* got none"),
    "no scales": ({SCALES: torch.ones(8, 0, 1)}, "has 0 blocks for 48 rows"),
    "one block": ({SCALES: torch.ones(8, 1, 1)}, "has 1 blocks for 48 rows, so one is for gates and ups together"),
    "seven": ({GATE_UP: torch.ones(7, 48, 32)}, r"experts\.7\.gate_proj\.weight' is missing; .* holds .*experts\.7\.down_proj"),
}


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fused")
    return fuse(save_mixture(root / "apart", "qwen3-moe"), root / "fused")


@pytest.mark.parametrize("case", CASES)
def test_what_contradicts_itself_is_an_error(fused: Path, tmp_path: Path, case: str) -> None:
    """Keeps out: one of two tensors for the same expert taken without a word, a last row dropped, a KeyError; a missing expert
    for which eight unrelated tensors are named."""
    changed, says = CASES[case]
    tensors = {name: each for name, each in (load_file(fused / "model.safetensors") | changed).items() if each is not None}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").symlink_to(fused / "config.json")
    with pytest.raises(ValueError, match=says):
        check_chosen(choose_target(tmp_path, "native"), tmp_path)
