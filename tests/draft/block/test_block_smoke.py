"""A look at a text when a head of one pass is loaded: quiet about a sound head; of a misread one it names the misreading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toolkit.heads.block_zoo  # noqa: F401 (the zoo has its heads by name)
import torch
from toolkit.checkpoints.load import load_target, read_target_config
from toolkit.heads.block_parts import BlockOptions, BlockParts
from toolkit.heads.block_writers import speculators
from toolkit.heads.parts import shipped_parts
from toolkit.heads.writers import save
from toolkit.models import Zoo

from specdec import shipped
from specdec.draft.block.dflash import DFlashHead
from specdec.draft.block.smoke import BlockLook
from specdec.draft.load import load_head
from specdec.draft.smoke import MIN_RATIO, TargetPass, respecified, variant
from specdec.loading.about.drafters import TEXT
from specdec.prompts.tokenizer import Tokenizer

CPU = torch.device("cpu")


def test_a_trained_head_and_its_misreading(tmp_path: Path) -> None:
    """P-EAGLE's first token is EAGLE-3's, so the shipped head is one.  Keeps out: a look that is blind, or never content."""
    parts = shipped_parts()
    o, generator = parts.options, torch.Generator().manual_seed(0)
    options = BlockOptions(
        "p-eagle", o.aux, 1, o.hidden, o.heads, o.kv_heads, o.head_dim, o.mlp, o.target_hidden, o.vocab, o.draft_vocab, o.eps,
        o.rope["rope_theta"], o.max_position, size=1, skips=False, qk_norm=False, before_residual=o.before_residual,
    )  # fmt: skip
    assert o.rope["rope_type"] == "default"
    unknown = torch.randn(o.target_hidden * len(o.aux), generator=generator, dtype=torch.float64)
    sound = BlockParts(options, {**parts.tensors, "mask_hidden": unknown}, parts.draft_ids)
    target = load_target(shipped.target_folder(), read_target_config(shipped.target_folder()), 512, CPU, torch.float32)
    ids_T = torch.tensor(Tokenizer(shipped.target_folder()).encode(TEXT)[:256])
    table = torch.randn(o.vocab, o.hidden, generator=generator, dtype=torch.float64) * 0.06
    broken = replace(sound, tensors={**sound.tensors, "embed_tokens.weight": table})
    for each, said in ((sound, ""), (broken, "embed_tokens")):
        folder = save(tmp_path / f"{said}head", speculators(each))
        problem = load_head(folder, target, 512, CPU, torch.float32).smoke(target, ids_T).complaint
        assert said in problem and bool(problem) == bool(said)


class OneDraft(BlockLook):
    """What the target chooses depends on the text alone, so it can only be made to choose one draft of all blocks."""

    def drafts(self, head: Any) -> int:
        return 1


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["dspark", "dflash2", "dflash-causal"])
def test_misreadings_of_blocks_are_named(zoo: Zoo, name: str) -> None:
    """The target is taken to choose what the head drafts when it is read right; so each misreading must be seen as one."""
    folder = zoo.target("llama")
    target = load_target(folder, read_target_config(folder), 256, CPU, torch.float32)
    head: Any = load_head(zoo.head("llama", name), target, 256, CPU, torch.float32)
    assert isinstance(head, DFlashHead)
    ids_T = torch.randint(40, (120,), generator=torch.Generator().manual_seed(1))
    seen = TargetPass(head, target, ids_T)
    with torch.inference_mode():
        anchors_A = torch.arange(1, 119)
        (hidden_ASH,) = head.drafts(seen.features(head.config.aux_layers)[None], ids_T[None], anchors_A[None], 1)
        ids_A = head.walk(hidden_ASH, ids_T[anchors_A][:, None]).argmax(-1)[:, 0]
        seen.chosen_P[: len(ids_A)] = ids_A if head.d2t_V is None else ids_A + head.d2t_V[ids_A]
    found = OneDraft().find(head, target, ids_T, seen)
    assert found is not None and found.accepted > 0.98 and found.better is None
    sound, block = found.accepted, head.block
    misread = {
        "sample_from_anchor": respecified(head, block=replace(block, skips_anchor=not block.skips_anchor)),
        "hidden_norm and norm": variant(head, hidden_norm=head.norm, norm=head.hidden_norm),
    }
    for said, other in misread.items():
        found = OneDraft().find(other, target, ids_T, seen)
        assert found is not None and found.accepted < 0.7
        is_clear = found.accepted * MIN_RATIO <= sound
        assert found.better is not None and said in found.better[0] if is_clear else found.better is None, found
        assert is_clear or (name != "dspark" and said == "hidden_norm and norm")  # where a third of the drafts is lost
