"""DFlash2 heads against their definition: what makes one a DFlash head, and trees by brute force, with the target's noise too.

Shapes: B sequences, S levels, H hidden, C candidates, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import toolkit.heads.block_zoo  # noqa: F401 (the zoo has its heads by name)
import torch
from toolkit.checkpoints.load import load_target, read_target_config
from toolkit.heads.block_parts import BlockOptions, BlockParts, random_block_parts
from toolkit.heads.block_writers import zlab
from toolkit.heads.writers import save
from toolkit.models import Zoo
from torch import Tensor

from specdec.config import SpecConfig
from specdec.draft.block.dflash import DFlashHead
from specdec.draft.block.dflash2.head import DFlash2Head
from specdec.draft.load import load_head
from specdec.ops.noise.gumbel import Noise, gumbel_noise

CPU, F64, V = torch.device("cpu"), torch.float64, 40
LOGIT_WEIGHT, NOISE_WEIGHT = 1.5, 1.2


def loaded(zoo: Zoo, folder: Path) -> Any:
    where = zoo.target("llama")
    target = load_target(where, read_target_config(where), 64, CPU, F64)
    return load_head(folder, target, 64, CPU, F64)


@pytest.mark.parametrize("candidates", [6, V])
def test_without_its_new_parts_it_is_a_dflash_head(zoo: Zoo, tmp_path: Path, candidates: int) -> None:
    """As z-lab begins its training.  Keeps out: a convolution that stands elsewhere, or that moves rows or context."""
    parts = random_block_parts(BlockOptions(kind="dflash2", size=6, rank=5, candidates=candidates), seed=3)
    for name, tensor in parts.tensors.items():
        if name.endswith(("_conv.base", "_conv.projection.weight")) or name == "selector.successor":
            tensor.zero_()
        if name.endswith("_conv.base"):
            tensor[:, 0] = 1.0
    plain = {name: each for name, each in parts.tensors.items() if "conv" not in name and "selector" not in name}
    head = loaded(zoo, save(tmp_path / "two", zlab(parts)))
    dflash = loaded(zoo, save(tmp_path / "one", zlab(BlockParts(BlockOptions(size=6), plain, None))))
    assert isinstance(head, DFlash2Head) and type(dflash) is DFlashHead
    generator = torch.Generator().manual_seed(1)
    ids, features = torch.randint(V, (1, 15), generator=generator), torch.randn(1, 15, 96, dtype=F64, generator=generator)
    anchors = torch.tensor([[2, 9, 14]])
    hidden_BSH, same = (each.drafts(features, ids, anchors, 5)[0] for each in (head, dflash))
    torch.testing.assert_close(hidden_BSH, same, rtol=1e-7, atol=1e-8)
    for spec in (SpecConfig(5, 1, 6), SpecConfig(5, 4, 24)) if candidates == V else (SpecConfig(5, 1, 6),):
        tree, want = (each.tree(hidden_BSH, ids[0, anchors[0]], spec) for each in (head, dflash))
        assert torch.equal(tree.tokens_BN, want.tokens_BN) and torch.equal(tree.parents_BN, want.parents_BN)


@pytest.mark.parametrize("shape", [(5, 6, 16), (5, 3, 32), (4, 6, 60), (3, 1, 4)], ids=str)
@pytest.mark.parametrize("noisy", [False, True])
def test_trees_by_brute_force(zoo: Zoo, shape: tuple[int, int, int], noisy: bool) -> None:
    """Keeps out: a child scored after another token, level or row; noise of another place, or none; a greedy row with noise;
    two siblings with one token; a better path left out.
    """
    head, spec, generator = (
        loaded(zoo, zoo.head("llama", "dflash2")),
        SpecConfig(*shape),
        torch.Generator().manual_seed(sum(shape)),
    )
    hidden_BSH = torch.randn(3, spec.num_steps, 32, dtype=F64, generator=generator)
    bonus_B = torch.randint(V, (3,), generator=generator)
    noise = Noise(
        torch.tensor([0.0, 0.7, 1.3]), torch.tensor([5, 6, 7]), torch.tensor([9, 3, 20], dtype=torch.int32), 1, LOGIT_WEIGHT,
        NOISE_WEIGHT,
    )  # fmt: skip
    tree = head.tree(hidden_BSH, bonus_B, spec, noise if noisy else None)
    assert tree.is_chain == (spec.topk == 1) and tree.tokens_BN.shape == (3, spec.num_draft_tokens)
    for b in range(3):
        found: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens_BN[b, 1:].tolist(), tree.parents_BN[b, 1:].tolist(), strict=True):
            found.append((*found[parent], token))
        assert len(set(found)) == len(found), "siblings differ"
        scores = all_scores(head, hidden_BSH[b], int(bonus_B[b]), spec, noise if noisy else None, b)
        best = sorted(scores.values(), reverse=True)[: spec.num_draft_tokens - 1]
        got = sorted((scores[path] for path in found[1:]), reverse=True)
        assert got == pytest.approx(best, abs=2e-5)


def all_scores(
    head: Any, hidden_SH: Tensor, bonus: int, spec: SpecConfig, noise: Noise | None, b: int
) -> dict[tuple[int, ...], float]:
    """Each path's sum of log-probabilities, by the definition; `topk` children of a node."""
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    placed, selector = [()], head.selector
    for level, h in enumerate(hidden_SH):
        logits_V = head.lm_head(h[None])[0]
        weight, added_V = 1.0, torch.zeros(V, dtype=F64)
        if noise is not None and (temperature := float(noise.temperature_B[b])):
            at = noise.lens_B[b].long() + 1 + level
            weight, noise_V = LOGIT_WEIGHT, gumbel_noise(noise.seed_B[b : b + 1], at[None], V)[0].double()
            added_V = NOISE_WEIGHT * temperature * noise_V
        kept_C = (weight * logits_V + added_V).topk(head.candidates).indices
        gate, children = selector.projection(h[None])[0], list[tuple[int, ...]]()
        for path in placed:
            before = selector.predecessor.weight[path[-1] if path else bonus] * gate
            pair_C = (before * selector.successor.weight[kept_C]).sum(-1)
            logp_C = (weight * (logits_V[kept_C] + pair_C) + added_V[kept_C]).log_softmax(-1)
            for value, place in zip(*(each.tolist() for each in logp_C.topk(spec.topk)), strict=True):
                child = (*path, int(kept_C[place]))
                scores[child] = scores[path] + value
                children.append(child)
        placed = sorted(children, key=lambda path: -scores[path])[: spec.num_draft_tokens]
    del scores[()]
    return scores


def test_more_branches_than_candidates_are_refused(zoo: Zoo) -> None:
    head = loaded(zoo, zoo.head("llama", "dflash2"))
    head.check(SpecConfig(5, 6, 20))
    with pytest.raises(ValueError, match="topk must be at most 6, the candidates .* got 7; nearest .* topk=6"):
        head.check(SpecConfig(5, 7, 20))
    head.candidates = 2
    assert head.default_shape().topk == 2 and head.default_shape().num_steps == 5
