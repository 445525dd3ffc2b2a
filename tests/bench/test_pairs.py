"""`python benchmarks pairs.run`: its requests know no evaluation prompt, and its steps run through, once, to the table."""

from __future__ import annotations

import json
import lzma
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toolkit.paths import ROOT

ASKED = "A baker sells twelve loaves of dark bread each morning and nine in the afternoon. How many loaves is that in a week?"
CODE = '''# file: sums/total.py
def total(values: list[int]) -> int:
    """Return the sum of all the numbers in a list of values."""
    amount = 0
    for value in values:
        amount += value
        if amount > 10**9:
            raise OverflowError(amount)
    return amount


# file: broken.py
def broken(:
'''


@pytest.fixture(scope="module")
def pairs() -> Iterator[Any]:
    """The room's modules, by attribute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        before = set(sys.modules)
        import pairs
        from pairs import card, edits, packing, plan, requests, run, table

        assert all((card, edits, packing, plan, requests, run, table))
        yield pairs
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("pairs", "texts"):
                del sys.modules[name]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders text/ and prompts/ with a little of what ../shared holds, an evaluation prompt among the training questions."""
    folder = tmp_path_factory.mktemp("sources")
    draw = random.Random(0)

    def words(count: int) -> str:  # no two texts open alike
        return " ".join("".join(draw.choices("aeilnorst", k=draw.randrange(3, 8))) for _ in range(count))

    questions = [f"Tom has {n} red apples, {words(14)}. How many has he got?" for n in range(12)]
    questions += [ASKED, f"In May {ASKED[2:90].upper()} or maybe more than that?", "Is this short?"]
    texts = {
        "gsm8k_train.jsonl": "\n".join(json.dumps({"question": each}) for each in questions),
        "thealgorithms_python.txt": CODE,
        "tinystories_cased_0.8MB.txt": "\n\n".join(f"Once upon {words(20)}." for _ in range(8)),
        "classic_books_en.txt": "\n\n".join(f"The old {words(45)}." for _ in range(8)),
    }
    for name in ("text", "prompts"):
        (folder / name).mkdir()
    for name, text in texts.items():
        (folder / "text" / f"{name}.xz").write_bytes(lzma.compress(text.encode()))
    for name, turns in {
        "mt_bench": ["Tell me of Rome.", "And of Carthage?"],
        "gsm8k": [ASKED],
        "humaneval": ["def f(x):"],
    }.items():
        lines = [json.dumps({"turns": turns, "reference": ["None is needed."]})] * 2
        (folder / "prompts" / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def test_no_evaluation_prompt_is_a_request(pairs: Any, sources: Path) -> None:
    """Keeps out: an accept length on prompts that the head was trained on, also where words around them or case differ."""
    known = pairs.requests.known_runs(sorted((sources / "prompts").glob("*.jsonl")))
    with_all, asks = (pairs.requests.requests_of(sources / "text", 100, 0, runs) for runs in (set(), known))
    assert sorted(set(with_all) - set(asks)) == sorted([ASKED, f"In May {ASKED[2:90].upper()} or maybe more than that?"])
    assert sum("red apples" in ask for ask in asks) == 12 and sum("total(" in ask or "sum of all" in ask for ask in asks) == 3
    assert (
        asks
        == pairs.requests.requests_of(sources / "text", 100, 0, known)
        != pairs.requests.requests_of(sources / "text", 100, 1, known)
    )


@pytest.mark.slow
def test_requests_of_the_real_texts_share_no_words_with_the_real_prompts(pairs: Any, shared: Path) -> None:
    """Keeps out: runs of words that are cut in another way than the texts' own, in which a twin would hide."""
    files = sorted((shared / "prompts").glob("*.jsonl"))
    asks = pairs.requests.requests_of(shared / "text", 300, 0, pairs.requests.known_runs(files))
    texts = [turn for file in files for line in file.read_text().splitlines() for turn in json.loads(line)["turns"]]

    def words(text: str) -> list[str]:
        return "".join(letter if letter.isalnum() or letter == "_" else " " for letter in text.lower()).split()

    asked = " | ".join(" ".join(words(ask)) for ask in asks)
    runs = {" ".join(told[i : i + 8]) for told in map(words, texts) for i in range(len(told) - 7)}
    assert len(asks) > 600 and len(runs) > 5000 and [run for run in runs if f" {run} " in asked] == []


def test_kinds_of_texts(pairs: Any, tmp_path: Path) -> None:
    """Keeps out: a second answer that is asked as the first one was, an edit that the target did not make, a prediction that
    equals the answer, a kind that nobody knows and that is found out after the loading."""
    from texts import sources

    chats = {text: [{"role": "user", "content": text}] for text in ("Fix this: a b c", "Fix this: d e f")}
    edits = [{"kind": "corrected", "messages": chats[text], "prediction": text[10:]} for text in chats]
    for name, lines in (("edits", edits), ("asked", [{"prompt": "Where is Rome?"}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    class Plain:
        def generate(self, prompts: list[Any], *_: Any, **__: Any) -> list[SimpleNamespace]:
            return [SimpleNamespace(text="a b c" if "Fix" in str(prompt) else "There is no map of Rome") for prompt in prompts]

    made, plain, base = sources.Texts(SimpleNamespace(texts=tmp_path, chat=True, alike=0.6)), Plain(), None
    made.check(["asked", "after:corrected", "renamed:asked", "cut:own"])
    assert made.of("asked", 2, plain, base) == [([{"role": "user", "content": "Where is Rome?"}], None, None)] * 2
    (edit,) = made.of("corrected", 1, plain, base)
    assert edit == (chats["Fix this: a b c"], "a b c", None)
    (second,) = made.of("after:corrected", 1, plain, base)
    assert second.before == edit.prompt and second.prompt[0]["content"] == "The end. Fix this: a b c"
    assert made.of("renamed:asked", 1, plain, base)[0].prediction == "There is no map of Bartholomew"
    for wrong, told in (("missing", "missing.jsonl"), ("worse:asked", "before the colon")):
        with pytest.raises(ValueError, match=told):
            made.check([wrong])
    with pytest.raises(ValueError, match="--texts: expected a folder, got .*missing"):  # also where no kind reads it
        sources.Texts(SimpleNamespace(texts=tmp_path / "missing", chat=False, alike=0.0))


def test_edits_hold_their_document(pairs: Any, sources: Path) -> None:
    """Keeps out: a prediction that is not what the prompt shows, and edits that change from run to run."""
    made = list(pairs.edits.edits_of(sources / "text", 3, 0))
    assert made == list(pairs.edits.edits_of(sources / "text", 3, 0))
    kinds = [edit["kind"] for edit in made]
    assert [kinds.count(kind) for kind in pairs.edits.EDITS] == [1, 3, 3]
    for edit in made:
        assert edit["messages"][0]["content"].endswith(f"\n\n{edit['prediction']}")
    assert "variable amount" in made[0]["messages"][0]["content"] and json.loads(made[1]["prediction"])["places"]


def run_step(pairs: Any, *arguments: str) -> None:
    assert pairs.run.run_step(pairs.run.parse(arguments)) == 0


@pytest.mark.slow_cases(keep=0)
@pytest.mark.parametrize("kinds", [["eagle3"], ["p-eagle", "dflash"], ["dflash2", "dspark"]], ids="+".join)
def test_a_tiny_comparison_runs_through_and_goes_on(
    kinds: list[str], pairs: Any, sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keeps out: a step that only a GPU session would find broken; parts that are measured again, or lost on the way home."""
    folder, texts, prompts = tmp_path / "run", str(sources / "text"), str(sources / "prompts")
    small = ["--set=temperatures=0", "--set=batches=2", "--set=asks=2", "--set=width=36", "--set=steps=1"]
    run_step(pairs, "prompts", "--tiny", "--folder", str(folder), "--text", texts, "--evaluation", prompts, *small)
    run_step(pairs, "train", *kinds, "--folder", str(folder), "--seconds", "0")
    assert f"no time for train-{kinds[0]}" in capsys.readouterr().out
    for step in ("texts", "train", "eval", "verify", "bench", "table"):
        run_step(pairs, step, *kinds, "--folder", str(folder))
    page = capsys.readouterr().out.rpartition("Accept lengths")[2]
    assert all(page.count(f"| {kind} |") == 4 for kind in kinds) and "passed" in page and "FAILED" not in page

    kept = {file: file.read_bytes() for file in (folder / "parts").iterdir()}
    run_step(pairs, "pack", "--folder", str(folder), "--out", str(tmp_path / "packed"))
    run_step(pairs, "unpack", "--folder", str(tmp_path / "home"), "--out", str(tmp_path / "packed"))
    for step in ("texts", "train", "eval", "verify", "bench"):
        run_step(pairs, step, *kinds, "--folder", str(tmp_path / "home"))
    assert {tmp_path / "home" / file.relative_to(folder): held for file, held in kept.items()} == {
        file: file.read_bytes() for file in (tmp_path / "home" / "parts").iterdir()
    }
    assert {file.name for file in (tmp_path / "home" / "heads" / kinds[0]).iterdir()} >= {"config.json", "model.safetensors"}

    run_step(pairs, "card", kinds[0], "--folder", str(folder), "--out", str(tmp_path / "heads"))
    (head,) = (tmp_path / "heads").iterdir()
    page = (head / "README.md").read_text()
    assert str(folder) not in page and "It drafts for `target` and" in page  # no place of the machine that trained it
    assert f"draft head ({kinds[0]}) for" in page and f"--draft {head.name} " in page and f"| {kinds[0]} | (2,2,4) |" in page


def test_what_does_not_fit_is_left_out_and_named(pairs: Any, tmp_path: Path) -> None:
    """Keeps out: a head that pushes the results out of what a machine hands back, and files that are cut."""
    folder = tmp_path / "run"
    (folder / "parts").mkdir(parents=True)
    (folder / "heads" / "eagle3").mkdir(parents=True)
    (folder / "parts" / "eval-eagle3.json").write_text("{}")
    noise = random.Random(0).randbytes(10_000)  # which nothing makes smaller
    (folder / "heads" / "eagle3" / "model.safetensors").write_bytes(noise)
    (folder / "heads" / "eagle3" / "config.json").write_text('{"kind": "eagle3"}')
    (folder / "heads" / "eagle3" / "checkpoint.pt").write_bytes(random.Random(1).randbytes(40_000))
    left = pairs.packing.pack(folder, tmp_path / "out", volume=8192, volumes=6)
    assert left == ["heads/eagle3/checkpoint.pt"] and len(list((tmp_path / "out").iterdir())) > 1
    pairs.packing.unpack(tmp_path / "again", tmp_path / "out")
    assert (tmp_path / "again" / "heads" / "eagle3" / "model.safetensors").read_bytes() == noise
    with pytest.raises(ValueError, match="expected a folder with pairs-0.bin"):
        pairs.packing.unpack(tmp_path / "again", tmp_path)


def test_wrong_settings_and_heads_are_refused(pairs: Any, tmp_path: Path) -> None:
    """Keeps out: a plan that changes under its parts, a head that is too large for a repository, and one nobody measured."""
    folder, plan = pairs.plan.PartsFolder(tmp_path), pairs.plan.PairsPlan("model.gguf")
    with pytest.raises(ValueError, match="expected a folder with plan.json"):
        assert folder.plan
    folder.begin(plan)
    assert folder.plan == plan.changed([]) and plan.changed(["batches=1;4", "lr=0.5"]).batches == (1, 4)
    with pytest.raises(ValueError, match="holds a comparison with other settings"):
        folder.begin(plan.changed(["steps=7"]))
    with pytest.raises(ValueError, match="expected a plan with long_seconds"):
        run_step(pairs, "train", "eagle3-long", "--folder", str(tmp_path))
    for wrong in ("stepz=7", "steps", "steps=many"):
        with pytest.raises(ValueError, match="--set"):
            plan.changed([wrong])
    with pytest.raises(ValueError, match="expected a head that was trained and measured"):
        pairs.card.write_head(folder, "eagle3", tmp_path / "out")
    folder.keep("train-eagle3", {"seconds": 1})
    folder.keep("eval-eagle3-long-5,1,6", {"kind": "eagle3-long", "rows": []})
    with pytest.raises(ValueError, match="expected a head that was trained and measured"):
        pairs.card.write_head(folder, "eagle3", tmp_path / "out")
    folder.keep("eval-eagle3-5,1,6", {"kind": "eagle3", "rows": []})
    folder.head("eagle3").mkdir(parents=True)
    for name in pairs.card.FILES:
        with (folder.head("eagle3") / name).open("wb") as file:
            file.truncate(pairs.card.LARGEST // 2 + 1)  # a hole, which takes no space
    with pytest.raises(ValueError, match="at most 16 MB, got 16.0"):
        pairs.card.write_head(folder, "eagle3", tmp_path / "out")


def test_what_is_no_folder_or_lacks_files_is_named(pairs: Any, sources: Path, tmp_path: Path) -> None:
    """Keeps out: "File exists" and other words of the system alone, after work that was for nothing; a plan for a target that
    is a file of text."""
    file, there = tmp_path / "file", tmp_path / "there"
    file.write_text("")
    read = ["--text", str(sources / "text"), "--evaluation", str(sources / "prompts")]
    for step in ("prompts --tiny", "texts", "train", "eval", "table", "card", "pack", "unpack"):
        more = ["--out", str(tmp_path / "out")] if step in ("card", "pack", "unpack") else read if "prompts" in step else []
        for wrong in (file, file / "below"):
            with pytest.raises(ValueError, match=f"^--folder: expected a folder, or none yet, got {wrong}$"):
                run_step(pairs, *step.split(), "--folder", str(wrong), *more)
            if "--out" in more:
                with pytest.raises(ValueError, match=f"^--out: expected a folder, or none yet, got {wrong}$"):
                    run_step(pairs, step, "--folder", str(there), "--out", str(wrong))
    for flag in read[::2]:
        for wrong in (file, tmp_path / "none"):
            with pytest.raises(ValueError, match=f"^{flag}: expected a folder, got {wrong}$"):
                run_step(pairs, "prompts", "--tiny", "--folder", str(there), *read, flag, str(wrong))
        other = read[3 - read.index(flag)]  # a folder, of other files
        with pytest.raises(ValueError, match=f"^{flag}: expected a folder with [a-z0-9_]+[.].*, got {other}$"):
            run_step(pairs, "prompts", "--tiny", "--folder", str(there), *read, flag, other)
    with pytest.raises(ValueError, match=f"^--target: expected a folder or a GGUF file, got {file}$"):
        run_step(pairs, "prompts", "--tiny", "--folder", str(there), *read, "--target", str(file))
    assert not there.exists() and not (tmp_path / "out").exists()


def test_a_budget_ends_before_its_seconds(pairs: Any, tmp_path: Path) -> None:
    """Keeps out: a machine that is taken away in the middle of a part, all of which is lost."""
    now, folder = [0.0], pairs.plan.PartsFolder(tmp_path)
    budget = pairs.plan.TimeBudget(100.0, "a GPU", lambda: now[0])

    def work() -> dict[str, int]:
        now[0] += 40.0
        return {"rows": 1}

    assert [budget.run(folder, name, work) for name in ("a", "b", "a", "c")] == [True, True, True, False]
    assert now == [80.0] and folder.part("c") is None and folder.part("b")["part_seconds"] == 40.0
    for wrong in (float("nan"), -1.0):  # nan is never spent
        with pytest.raises(ValueError, match="--seconds: expected at least 0, got"):
            pairs.plan.TimeBudget(wrong, "a GPU")


def test_a_table_names_the_machine_of_each_step(pairs: Any, tmp_path: Path) -> None:
    """Keeps out: speeds of a GPU under the name of the machine that wrote the table; a long run told as one of few steps."""
    folder = pairs.plan.PartsFolder(tmp_path)
    folder.begin(pairs.plan.PairsPlan("model.gguf", long_seconds=1200))
    for where, step in {"a GPU, 1 May": "bench", "a CPU, 2 May": "eval", "a GPU, 2 May": "verify"}.items():
        budget = pairs.plan.TimeBudget(100.0, where, lambda: 0.0)
        for kind in ("eagle3", "dspark"):
            budget.run(folder, f"{step}-{kind}", dict)
    about = pairs.table.markdown(pairs.table.table_of(folder)).partition("\n")[0]
    assert about.startswith(
        "eval: a CPU, 2 May; verify: a GPU, 2 May; bench: a GPU, 1 May. Training: 12,288 rows of 384 tokens"
    )
    assert "heads named -long: 1,200 seconds" in about
