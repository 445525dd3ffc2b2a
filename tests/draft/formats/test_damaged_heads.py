"""What the look at a head says of trained heads, damaged in 60 ways: the cause if a reading undoes it, and no other one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.heads.looks import CPU, POSITIONS, looks, target_and_text
from toolkit.paths import PAIR
from torch import Tensor
from torch.nn.functional import normalize

from specdec.draft.broken import replaced_parts
from specdec.draft.formats.open import open_head
from specdec.draft.load import build_head
from specdec.draft.smoke import DOUBTFUL, MIN_ACCEPTED, MIN_GAIN, MIN_RATIO, Finding, HeadLook, Misreading, TargetPass

STORIES = "stories260K"


def check_all(target_folder: Path, head: Path, tokens: int, damages: int) -> None:
    target, ids_T = target_and_text(target_folder, tokens)
    sound, named = 0.0, 0
    for damage, refused, _, found, said in looks(target, head, ids_T):
        if refused:
            continue
        assert found is not None
        sound, damages = (sound or found.accepted), damages - 1
        about = f"{damage.name}: {found}: {said}"
        if damage.name in ("none", "rounded to bfloat16", "rounded to float8", "trained to 90 %"):
            assert not said, about
        if found.broken.startswith("nothing but zeros"):  # certain, so no reading is tried
            assert " of zeros" in damage.name and "nothing but zeros" in said, about
            named += 1
        elif found.better is not None:
            assert damage.cause and damage.cause in found.better[0], about  # never a cause that is not one
            assert f"{found.better[1]:.1%}" in said and found.better[0] in said, about
            named += 1
        elif damage.cause:  # too little harm, or it would have been named
            assert sound < max(MIN_RATIO * found.accepted, found.accepted + MIN_GAIN), about
        elif found.accepted < MIN_ACCEPTED:
            assert f"{found.accepted:.1%}" in said and ("undertrained" in said) != (" of zeros" in damage.name), about
        elif found.accepted < DOUBTFUL and damage.name.endswith("_proj of zeros"):
            assert "nothing but zeros" in said, about
        else:
            assert not said, about
    assert damages <= 0 and named >= 13


def test_of_each_damage_the_cause_is_named_or_none(shared: Path) -> None:
    """Keeps out: a reading that is recommended though it is no better or not the cause; random or empty embeddings, a d2t of
    zeros and a wrong rope that are never named; a warning of a sound head.
    """
    check_all(shared / "models" / STORIES, shared / "models" / f"{STORIES}-eagle3", 160, 58)


@pytest.mark.slow_cases(keep=0)
def test_the_same_of_the_shipped_head() -> None:
    check_all(PAIR / "target", PAIR / "draft", 256, 60)


def test_heads_that_read_the_final_state(shared: Path) -> None:
    """Keeps out: a warning of an EAGLE-1 head that drafts; silence about one that does not."""
    target, ids_T = target_and_text(shared / "models" / STORIES)
    looked = looks(target, shared / "models" / f"{STORIES}-eagle2", ids_T)
    said = {each.damage.name: each.said for each in looked if not each.refused}
    assert len(said) > 35
    for name in ("none", "rounded to float8", "noise of a tenth", "trained to 90 %", "rope_theta 500000"):
        assert not said[name]
    for name in ("noise as large as the numbers", "trained to 20 %", "trained for another target", "fc random"):
        assert "undertrained, or trained for another target" in said[name]
    assert "nothing but zeros stands in fc" in said["fc of zeros"]


class Told(HeadLook):
    """A look at readings whose chains are given: each is a row of (name, the drafts that are accepted of each chain)."""

    def __init__(self, as_read: list[int], others: dict[str, list[int]]) -> None:
        self.chains, self.others = {"": as_read, **others}, others
        self.passes = dict.fromkeys(self.chains, 0)

    def rights(self, seen: TargetPass, head: Any, layers: tuple[int, ...]) -> Iterator[Tensor]:
        name = head if isinstance(head, str) else ""
        for step in range(self.drafts(head)):
            self.passes[name] += 1
            yield torch.tensor(self.chains[name]) > step

    def misreadings(self, head: Any, target: Any) -> Iterator[Misreading]:
        yield from ((name, name, ()) for name in self.others)


class FinalStateHead:
    """A head that reads the final hidden state."""

    class needs:
        features = ()

    description = "a head"


def test_the_number_that_is_printed_ranks() -> None:
    """Keeps out: readings ranked by another number than the printed one, and one named that is not clearly better; passes for
    readings that can't be.
    """
    ids_T, head, seen = torch.zeros(40, dtype=torch.int64), FinalStateHead(), object()

    def find(as_read: list[int], **others: list[int]) -> Finding:
        found = Told(as_read, others).find(head, None, ids_T, seen)  # type: ignore[arg-type]
        assert found is not None
        return found

    low = [1] * 4 + [0] * 16  # 4 of 100 drafts
    assert find(low) == Finding(0.04, first=0.2)
    assert find(low, a=[1] * 8 + [0] * 12) == Finding(0.04, first=0.2)  # twice, but by 4 points
    assert find(low, a=[5, 4] + [0] * 18) == Finding(0.04, ("a", 0.09), first=0.2)
    assert find(low, a=[3] * 5 + [0] * 15, b=[2] * 10 + [0] * 10, c=[3] * 6 + [0] * 14) == Finding(0.04, ("b", 0.2), first=0.2)
    assert find([1] * 10 + [0] * 10, a=[1] * 19 + [0]) == Finding(0.1, first=0.5)  # by 9 points, but not twice
    look = Told([3] * 20, {"a": [5] * 20})
    assert look.find(head, None, ids_T, seen) == Finding(0.6, first=1.0) and look.passes["a"] == 0  # type: ignore[arg-type]
    look = Told([1] * 20, {"a": [5] * 7 + [0] * 13})
    assert look.find(head, None, ids_T, seen) == Finding(0.2, first=1.0) and look.passes["a"] == 1  # type: ignore[arg-type]
    said = Told(low, {"a": [5, 4] + [0] * 18}).describe(head, Finding(0.04, ("a", 0.09)))  # type: ignore[arg-type]
    assert "accept 4.0% of what" in said and "with a it would be 9.0%" in said and "too few" not in said


def test_a_map_made_anew_takes_the_likest_token() -> None:
    """Keeps out: of two tokens that are most like one draft id's row, the one that is less like it, or that comes later."""
    target, _ = target_and_text(PAIR / "target", 40)
    head = build_head(open_head(PAIR / "draft", target.config), target, POSITIONS, CPU, torch.float32)
    ids_R = torch.arange(target.config.vocab_size)
    (other,) = (other for name, other, _ in replaced_parts(head, target, ids_R) if name.startswith("d2t"))
    places_V = torch.arange(head.config.draft_vocab_size)
    own_VH, rows_RH = (normalize(x.double(), dim=-1) for x in (head.lm_head.rows(places_V), target.lm_head.rows(ids_R)))
    likeness_RV = rows_RH @ own_VH.T
    at_R, shared = likeness_RV.argmax(-1), 0
    for place, token in enumerate((other.d2t_V + places_V).tolist()):
        rivals = (at_R == place).nonzero().flatten()
        assert token == (int(rivals[likeness_RV[rivals, place].argmax()]) if len(rivals) else -1)
        shared += len(rivals) > 1
    assert shared > 100
