"""`specdec inspect`: what it says of a head in each layout, and how it refuses what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toolkit.heads.block_parts import BlockOptions, random_block_parts
from toolkit.heads.block_writers import BLOCK_WRITERS
from toolkit.heads.parts import Options, random_parts
from toolkit.heads.writers import WRITERS, save
from toolkit.models import Zoo

from specdec import shipped
from specdec.cli.entry import main
from specdec.loading.about.doctor import drafter_rows


@pytest.mark.parametrize("name", WRITERS)
def test_every_layout(name: str, zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a table that says less than the reader knows, and facts that differ with the output's form."""
    files = WRITERS[name](random_parts(Options(own_embeddings=True)))
    folder = save(tmp_path / name, files)
    assert main(["inspect", str(folder), "--target", str(zoo.target("llama")), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["format"], facts["format_named"], facts["head"]["features"]) == (name, False, [0, 1, 2])
    assert set(facts["tensors"]) | set(facts["beside"]) == set(files[1])
    assert {"eagle_aux_hidden_state_layer_ids"} < set(facts["meanings"])
    assert main(["inspect", str(folder), "--draft-format", name]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"layout {name} (named)" in said and "features 0, 1, 2" in said and "draft_vocab_size 26" in said


@pytest.mark.parametrize("name", BLOCK_WRITERS)
def test_every_layout_of_heads_of_one_pass(name: str, zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a block whose meaning is not told."""
    copies = name == "deepspec"
    options = BlockOptions("dspark", skips=False, rank=6, markov="gated", own_embeddings=copies, own_lm_head=copies)
    if name == "z-lab":
        options = BlockOptions()
    files = BLOCK_WRITERS[name](random_block_parts(options))
    folder = save(tmp_path / name, files)
    assert main(["inspect", str(folder), "--target", str(zoo.target("llama")), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    head = facts["head"]
    assert (facts["format"], head["features"], head["rows of a block"], head["mask token"]) == (name, [0, 1, 2], 4, 7)
    assert head["causal blocks"] == [False, False] and "recycled" not in head
    assert head["markov head"] == ("none" if name == "z-lab" else "gated of rank 6")
    assert set(facts["tensors"]) | set(facts["beside"]) == set(files[1])
    assert {"rows of the block", "read of the block"} < set(facts["meanings"])
    assert main(["inspect", str(folder), "--draft-format", name]) == 0
    assert "a row drafts the token of" in " ".join(capsys.readouterr().out.split())


def test_what_is_no_head(zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, tensors = WRITERS["safeailab"](random_parts(Options()))
    folder = save(tmp_path / "a", ({**config, "mystery": 1}, tensors))
    for arguments, said in (
        ([str(shipped.target_folder()), "--draft-format", "safeailab"], "expected a draft head, got a whole model's weights"),
        ([str(folder)], "unknown config keys mystery"),
        ([str(shipped.draft_folder()), "--target", str(zoo.target("llama"))], "vocab_size must be the target's 40, got 2048"),
        ([str(shipped.draft_folder()), "--draft-format", "specforge"], "lacks rope_theta (or rope_parameters)"),
    ):
        assert main(["inspect", *arguments]) == 2
        assert said in capsys.readouterr().err, arguments


def test_other_kinds_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a head of another kind that is taken for an EAGLE head with tensors too many."""
    config, tensors = WRITERS["specforge"](random_parts(Options()))
    for number, (name, kind) in enumerate((("lilicorr_x", "LiLiCorr"), ("prefix_gru.x", "Domino"))):
        save(tmp_path / str(number), (config, {**tensors, name: tensors["norm.weight"].clone()}))
        assert main(["inspect", str(tmp_path / str(number))]) == 2
        assert f"is that of a {kind} head, which can't be run yet" in capsys.readouterr().err


LAYOUTS = ["safeailab", "specforge", "speculators", "modelopt", "torchspec", "z-lab", "deepspec"]


def test_doctor_names_every_layout_and_kind() -> None:
    assert {*WRITERS, *BLOCK_WRITERS, "torchspec"} == {*LAYOUTS}
    assert [name for name, _ in drafter_rows()] == [*LAYOUTS, "assistant", "model", "mtp", "ngram"]
    assert "P-EAGLE, DFlash, DFlash2, DSpark" in dict(drafter_rows())["speculators"]
    assert "EAGLE-3.1" in dict(drafter_rows())["specforge"]
