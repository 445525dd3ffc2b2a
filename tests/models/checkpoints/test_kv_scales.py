"""Scales of fp8 keys and values, by each exporter's names: which is the keys', and whose heads they are."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.kv_scales import take_kv_scale

PAIRS = [
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_keys_come_first_and_a_rank_has_its_heads(tmp_path: Path, pair: tuple[str, str]) -> None:
    """Keeps out: values read by the scale of keys, one scale for heads that have several, and scales of queries left over."""
    tensors = {f"a.{pair[0]}": torch.tensor([1.0, 2, 3, 4]), f"a.{pair[1]}": torch.tensor(5.0), "a.q_scale": torch.tensor(9.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint(tmp_path)
    found_2K = take_kv_scale(checkpoint, "a", 4, slice(2, 4))
    assert found_2K is not None and found_2K.tolist() == [[3.0, 4.0], [5.0, 5.0]]
    checkpoint.finish()
    assert take_kv_scale(Checkpoint(tmp_path), "b", 4) is None


def test_one_scale_may_serve_both(tmp_path: Path) -> None:
    """Keeps out: half of a pair, or a scale of 0, taken for a checkpoint without scales."""
    save_file(
        {"a.kv_scale": torch.tensor(3.0), "b.k_scale": torch.tensor(1.0), "c.kv_scale": torch.zeros(())},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text("{}")
    found_2K = take_kv_scale(Checkpoint(tmp_path), "a", 2)
    assert found_2K is not None and found_2K.tolist() == [[3.0, 3.0]] * 2
    with pytest.raises(ValueError, match="b.v_scale"):
        take_kv_scale(Checkpoint(tmp_path), "b", 2)
    with pytest.raises(ValueError, match="c.kv_scale must be one positive number"):
        take_kv_scale(Checkpoint(tmp_path), "c", 2)
