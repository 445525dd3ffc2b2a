"""What adding a kind of drafter takes: what it says of itself, and one line of the list of kinds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts

from specdec import SamplingParams, SpecConfig
from specdec.batch.tree import DraftTree
from specdec.cli.entry import build_parser
from specdec.draft.drafter import Drafter, DraftModel, DraftNeeds
from specdec.draft.find import head_folder
from specdec.draft.kind import DrafterKind, OpenDrafter
from specdec.draft.kinds import KINDS
from specdec.draft.ngram.drafter import NgramDrafter
from specdec.loading.about.doctor import drafter_rows
from specdec.loading.about.inspect_target import target_facts


class EchoModel(DraftModel):
    """Drafts what the prompt began with, again and again: right where a text repeats its beginning."""

    @property
    def needs(self) -> DraftNeeds:
        return DraftNeeds(features=None, slot_bytes=4)

    @property
    def description(self) -> str:
        return "an echo"

    def check(self, spec: SpecConfig) -> None:
        if spec.topk > 1:
            raise ValueError(f"an echo drafts chains, got {spec.label}; nearest setting that works: topk=1")

    def worker(self, context: Any) -> Drafter:
        return EchoDrafter(context)


class EchoDrafter(NgramDrafter):
    """Keeps the text as n-grams do."""

    def draft(self, state: Any, spec: SpecConfig, needs: Any) -> DraftTree:
        rows, S = state.rows, spec.max_steps
        first_BS = self.finder.store.tokens_N[state.pages.slots_at(torch.arange(S).expand(rows, S))].long()
        return DraftTree.chain(torch.cat((state.bonus_B[:, None], first_BS), dim=1))


class Echo(DrafterKind):
    name, help, instead, meaning = "echo", "echo (the prompt again)", "which needs nothing", "the text's beginning again"

    def open(self, target_folder: Path, target: Any) -> OpenDrafter:
        return OpenDrafter(EchoModel())


KIND = Echo()


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "echo", __name__)


def accepted(prompt: list[int], ids: list[int], steps: int) -> list[int]:
    """How many tokens of the chain each round accepts, by hand.  The text without its first token is what was kept."""
    text, found, at = [*prompt, *ids], list[int](), len(prompt)
    drafted = text[1 : 1 + steps]
    while at < len(text) - 1:
        after = text[at + 1 : at + 1 + steps]
        right = next((i for i, (a, b) in enumerate(zip(drafted, after, strict=False)) if a != b), len(after))
        found.append(right)
        at += right + 1
    return found


def test_a_kind_is_its_declaration_and_a_line(line: None, zoo: Zoo, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a kind whose name, help, loading or rounds somebody knows who is not the kind."""
    decoder = zoo.decoder("llama", "echo", SpecConfig(3, 1, 4), max_batch_size=3, page_size=4)
    driver, drafted = Driver(decoder), 0
    for prompt in ragged_prompts(40, 6)[2:]:
        (out,) = decoder.generate([prompt], SamplingParams(max_tokens=24))
        assert out.token_ids == zoo.greedy("llama", prompt, 24)
        want = accepted(prompt, out.token_ids, 3)
        assert out.stats.accepted_per_round[:-1] == want[:-1]
        drafted += sum(want)
    assert drafted
    driver.assert_nothing_leaked()
    with pytest.raises(ValueError, match=r"an echo drafts chains, got .*; nearest setting that works: topk=1"):
        zoo.decoder("llama", "echo", SpecConfig(2, 2, 5))
    with pytest.raises(ValueError, match="nearest setting that works: draft='echo'"):
        head_folder("ecko")
    assert ("echo", "the text's beginning again") in drafter_rows()
    assert target_facts(zoo.target("llama"))["drafters"]["echo"] == "yes"
    with pytest.raises(SystemExit):
        build_parser().parse_args(["generate", "--help"])
    assert "or ngram or echo (the prompt again)" in " ".join(capsys.readouterr().out.split())


def test_a_name_and_its_declaration_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a line that names another kind's module, by which that kind would have two names."""
    monkeypatch.setitem(KINDS, "echoes", __name__)
    with pytest.raises(AssertionError):
        drafter_rows()
