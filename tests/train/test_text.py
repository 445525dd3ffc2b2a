"""Text for training: what a file holds, what is held out, and what a run must not overwrite or go on with."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdec.cli import main as run_specdec
from specdec.models.config import RopeConfig
from specdec.models.keys.rope import parse_rope
from specdec.train.__main__ import SPLITS, main
from specdec.train.folder import begin_run, check_same, fingerprint, prepare_out
from specdec.train.heads.safeailab import rope_keys
from specdec.train.lesson.objective import rows_of_step
from specdec.train.selftext import SelfText, coverage, read_rows_file, save_rows_file
from specdec.train.settings import HeadRun, TargetRun
from specdec.train.text import documents
from specdec.train.text.documents import Document, read_documents
from specdec.train.text.heldout import drop_alike, load_corpus, set_aside


def words(seed: int, count: int = 80) -> str:
    picks = torch.randint(10_000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(f"w{pick}" for pick in picks)


@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("a.txt", "one\n\ntwo<|endoftext|>three\n", ["one\n\ntwo", "three"]),
        ("a.txt", "one\nstill\n\n\ntwo\n\nalso\n \n\nthree", ["one\nstill", "two\n\nalso", "three"]),
        ("a.txt", "“one”\n\ntwo — 2\n", ["“one”", "two — 2"]),
        ("a.jsonl", '{"text": "one"}\n\n{"prompt": "two\\n\\n"}', ["one", "two\n\n"]),
    ],
)
def test_documents_of_a_file(tmp_path: Path, name: str, text: str, expected: list[str]) -> None:
    """Keeps out: a splitter made for one corpus, which merges others' documents and rewrites their signs."""
    packers = {"": lambda path, data: path.write_bytes(data), ".gz": lambda path, data: path.write_bytes(gzip.compress(data)),
               ".xz": lambda path, data: path.write_bytes(lzma.compress(data))}  # fmt: skip
    for suffix, pack in packers.items():
        path = tmp_path / (name + suffix)
        pack(path, text.encode())
        found, note = read_documents(path)
        assert [document.text for document in found] == expected and f"{len(expected)} documents" in note


def test_other_splits(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\nthree")
    counts = {name: len(read_documents(path, name)[0]) for name in SPLITS}
    assert counts == {"auto": 2, "gaps": 1, "paragraphs": 2, "lines": 3, "stories": 1, "file": 1}
    assert tuple(documents.SPLITS) == SPLITS, "the command line names the splits without importing them"


def test_chats(tmp_path: Path) -> None:
    """Keeps out: chat data read as plain text, and a role lost on the way."""
    path = tmp_path / "a.jsonl"
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    wanted = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path.write_text("\n".join([json.dumps({"conversations": turns}), json.dumps({"messages": wanted})]))
    assert read_documents(path)[0] == [Document("hi\nhello", wanted)] * 2


NO_DOCUMENTS = ['{"txt": "a"}', "[1]", "{", '{"messages": [{"role": "user"}]}', '{"conversations": [1]}', "[" * 100_000]


@pytest.mark.parametrize("line", [*NO_DOCUMENTS, r'{"text": "\ud800"}'], ids=lambda line: line[:20])
def test_lines_that_are_no_documents(tmp_path: Path, line: str) -> None:
    """Keeps out: errors of a parser or a tokenizer that name neither the file nor the line."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + line)
    with pytest.raises(ValueError, match=r"text: .*line 2"):
        read_documents(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Keeps out: a traceback for a folder, a missing file, or an archive that is cut or none."""
    cut, fake = tmp_path / "cut.xz", tmp_path / "fake.gz"
    cut.write_bytes(lzma.compress(words(0, 4000).encode())[:-20])
    fake.write_bytes(b"no archive")
    for path in (tmp_path, tmp_path / "none.txt", cut, fake):
        with pytest.raises(ValueError, match="text: expected"):
            read_documents(path)


def test_nothing_held_out_is_nearly_trained_on(tmp_path: Path) -> None:
    """Keeps out: a held-out document whose twin the head has learnt by heart, which doubles the accept length reported."""
    twin = words(0).replace("w", "W", 3) + " another end"
    train, held = [Document(words(i)) for i in range(8)], [Document(twin), Document(words(50)), Document(words(50) + " twice")]
    assert drop_alike(held, train) == [held[1]]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": document.text}) for document in [*train, held[0]]))
    with pytest.raises(ValueError, match="--eval-text"):
        load_corpus([path], 0.05)
    other = tmp_path / "b.jsonl"
    other.write_text(json.dumps({"text": words(60)}))
    corpus = load_corpus([path], 0.05, eval_paths=[other])
    assert corpus.train == train and corpus.held == []
    assert {name: [each.text for each in held] for name, held in corpus.others.items()} == {"b": [words(60)]}


def test_the_best_weights_are_chosen_on_other_documents(tmp_path: Path) -> None:
    """Keeps out: a held-out loss of texts that open like the texts of the training, which falls while a head overfits."""
    documents = [Document(words(i)) for i in range(41)]
    documents[19] = Document(words(7) + " another end")
    train, checked = set_aside(documents, 0.05)
    assert checked == [documents[39]] and len(train) == 39 and not {each.text for each in checked} & {d.text for d in train}
    assert set_aside(documents[:1], 0.05) == (documents[:1], [])
    assert [len(part) for part in set_aside(documents[:2], 0.05)] == [1, 1]


def test_rows_are_shared_by_runs_of_the_same_text(tmp_path: Path) -> None:
    """Keeps out: rows of another target or text taken for this one's, ids that 16 bits do not hold, and ends that move."""
    rows, path = torch.full((3, 5), -1), tmp_path / "more" / "rows.pt"
    rows[0, :4], rows[1, :5] = torch.tensor([7, 1 << 15, 0, 3]), torch.tensor([65_535, 1, 1, 1, 2])
    for more in (0, 1 << 20):
        rows[0, 0] += more
        save_rows_file(path, {"target": "a"}, rows)
        read = torch.full_like(rows, -1)
        read_rows_file(path, {"target": "a"}, read)
        assert torch.equal(read, rows)
    with pytest.raises(ValueError, match="self_text: .*target=a, this run has target=b; name another file by --self-text"):
        read_rows_file(path, {"target": "b"}, read)
    path.write_bytes(b"none")
    with pytest.raises(ValueError, match="self_text: expected rows"):
        read_rows_file(path, {"target": "a"}, read)


def test_the_draft_vocabulary_is_that_of_what_the_target_wrote() -> None:
    """Keeps out: prompts counted as if they were drafted, a share of the text that was learnt from, and sizes too small."""
    rows = torch.full((40, 104), 5)
    rows[:, 4:] = torch.arange(100)
    rows[-2:, 4:] = torch.arange(100) % 50
    text = SelfText(rows, torch.full((40,), 4))
    assert text.checked == 2 and not (text.goals()[:, :4] >= 0).any()
    assert coverage(text, 50, 512).startswith("draft vocabulary: 50 of 512 tokens, 100.00%")
    assert coverage(text, 49, 512).endswith("98.00% of the text that is kept out of training")
    line = coverage(text, 24, 512)
    assert ", 48.00% of" in line and "98.0% with 64, 99.0% with 64" in line


def test_an_epoch_of_steps_has_each_row_once() -> None:
    """Keeps out: rows that some steps read twice while others are never read, and another order after a resume."""
    seen = torch.cat([rows_of_step(step, 4, 10, seed=1) for step in range(5)]).view(2, 10)
    assert (seen.sort(1).values == torch.arange(10)).all() and not torch.equal(seen[0], seen[1])
    assert torch.equal(rows_of_step(2, 4, 10, seed=1), seen.flatten()[8:12])


def test_what_a_run_must_not_overwrite(tmp_path: Path) -> None:
    """Keeps out: a finished head, or the target itself, replaced without a question; folders that a refused run leaves."""
    target, out = tmp_path / "target", tmp_path / "new" / "out"
    target.mkdir()
    (target / "config.json").write_text("{}")
    for flags in ((False, False), (True, False), (False, True)):
        with pytest.raises(ValueError, match="holds the target"):
            prepare_out(target, *flags, keep=[target])
    assert prepare_out(out, False, False, keep=[target]) == out and not out.parent.exists()
    begin_run(out, overwrite=False)
    (out / "checkpoint.pt").write_text("")
    with pytest.raises(ValueError, match="--resume"):
        prepare_out(out, False, False)
    prepare_out(out, True, False)
    assert (out / "checkpoint.pt").exists()
    prepare_out(out, False, True)
    assert (out / "checkpoint.pt").exists(), "text that can't be used ends the run only after this"
    begin_run(out, overwrite=True)
    assert not (out / "checkpoint.pt").exists()
    with pytest.raises(ValueError, match="--out ."):
        prepare_out("", False, False)
    with pytest.raises(ValueError, match="got the file"):
        prepare_out(target / "config.json", False, False)


def test_a_run_goes_on_as_it_began() -> None:
    """Keeps out: a resumed run with other layers, another target or another learning rate."""
    saved = {**vars(HeadRun()), "target": fingerprint([torch.ones(3)]), "aux_layers": (1, 2, 3)}
    check_same(Path("c"), saved, {**saved, "steps": 9, "eval_every": 1})
    for change in ({"lr": 0.5}, {"target": fingerprint([torch.zeros(3)])}, {"aux_layers": (0, 2, 3)}):
        with pytest.raises(ValueError, match=f"resume: .*{next(iter(change))}="):
            check_same(Path("c"), saved, {**saved, **change})


@pytest.mark.parametrize(
    "rope", [RopeConfig(5e5), RopeConfig(1e4, "linear", 4.0), RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)]
)
def test_a_head_s_config_names_its_rotary_positions(rope: RopeConfig) -> None:
    """Keeps out: a head that another reader turns by 10,000 where it was trained with the target's theta."""
    assert parse_rope(rope_keys(rope)) == rope


@pytest.mark.parametrize(
    "run, field, value",
    [
        (HeadRun, "lr", -0.1),
        (TargetRun, "lr", 0.0),
        (HeadRun, "seconds", -1),
        (HeadRun, "keep_states", -2),
        (HeadRun, "precision", "float16"),
        (HeadRun, "save_dtype", "int4"),
        (HeadRun, "held_out", 1.0),
        (HeadRun, "warmup", -1),
        (HeadRun, "intermediate_size", -4),
        (HeadRun, "decay", 0.0),
        (TargetRun, "num_attention_heads", 0),
        (TargetRun, "num_key_value_heads", 0),
        (TargetRun, "head_dim", 3),
        (TargetRun, "context", 1),
    ],
)
def test_settings_that_cannot_work(run: type, field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        run(**{field: value})


@pytest.mark.parametrize(
    "flags", [["--target", "/none"], ["--text", "/none"], ["--aux-layers", "1,1"], ["--aux-layers", "99,1,2"]]
)
def test_wrong_input_is_named(tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a traceback, or an error that comes only after all text was written."""
    from specdec.shipped import target_folder

    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": words(i)}) for i in range(4)))
    given = {"--target": str(target_folder()), "--text": str(path), "--out": str(tmp_path / "out"), "--device": "cpu"}
    given |= dict(zip(flags[::2], flags[1::2], strict=True))
    assert main(["head", *(part for pair in given.items() for part in pair)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("train_head: ") and "Traceback" not in err and flags[0].strip("-").replace("-", "_") in err
    assert not (tmp_path / "out" / "self_text.pt").exists()


@pytest.mark.parametrize(("width", "longest"), [(256, 48), (71, 48), (64, 41), (27, 4)])
def test_a_width_alone_is_enough(width: int, longest: int) -> None:
    """Keeps out: `--width 64` refused for the longest prompt, which nobody named."""
    assert HeadRun(width=width).longest_prompt == longest
    with pytest.raises(ValueError, match="longest_prompt: expected 4 .. 41 for width 64, got 42"):
        HeadRun(width=64, longest_prompt=42)


@pytest.mark.parametrize(("door", "command"), [(main, "head"), (run_specdec, "train")])
def test_text_under_the_name_of_its_rows(door: Callable[..., int], command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: `--texts FILE`, a slip for --text, refused without a word of the flag that was meant."""
    flags = ["--target", "T", "--texts", "stories.txt", "--out", "O"]
    with pytest.raises(SystemExit) as ended:
        door([command, *flags])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and "got 'stories.txt'; files of text are named by --text" in err
