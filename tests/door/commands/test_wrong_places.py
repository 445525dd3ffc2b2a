"""What is wrong with the names that from_pretrained is given, with hints that can help: each is about what stands there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from toolkit.models import Zoo
from toolkit.mtp_layers.targets import save_mtp_target

from specdec import SpecDecoder, cli, shipped

TARGET, DRAFT = Path(shipped.target_folder()), Path(shipped.draft_folder())
ARE_GONE = ("swapped",)  # a hint that can't help, since the target was found to be one before its draft was looked at


def files(**held: str) -> Callable[[Path], Path]:
    """A folder that holds so many files."""

    def make(folder: Path) -> Path:
        for name, text in held.items():
            path = folder / name.replace("__", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder

    return make


def copied(*without: str, **changed: str) -> Callable[[Path], Path]:
    """The shipped target, without some files, and with the texts of others."""

    def make(folder: Path) -> Path:
        shutil.copytree(TARGET, folder, dirs_exist_ok=True)
        for name in without:
            (folder / name).unlink()
        return files(**changed)(folder)

    return make


def hub_cache(folder: Path) -> Path:
    (folder / "refs").mkdir()
    copied()(folder / "snapshots" / "abc")
    return folder


def above(folder: Path) -> Path:
    copied()(folder / "llama-1b")
    return folder


FOLDERS: list[tuple[Callable[[Path], Path], str]] = [
    (files(), "the folder is empty: was its download cut off"),
    (files(tokenizer__json="{}", tokenizer_config__json="{}"), "the folder holds a tokenizer alone"),
    (copied("config.json"), "the folder holds a tokenizer and weights, but no config"),
    (files(model__safetensors="x"), r"holds weights \(model.safetensors\), but nothing says of what: copy the config"),
    (files(adapter_config__json="{}", adapter_model__safetensors="x"), r"is an adapter \(LoRA\); .* merge it into its model"),
    (files(params__json="{}"), "a layout of its publisher's own; .* the same model in Hugging Face layout"),
    (files(model_index__json="{}"), "is a pipeline of diffusers"),
    (hub_cache, "is the hub's cache of a model; nearest thing that works: .*snapshots/abc"),
    (above, "nearest thing that works: .*/llama-1b"),
    (copied("model.safetensors", tf_model__h5="x"), "holds no weights: .* it holds tf_model.h5, which is not read"),
    (copied(config__json="<html>"), "is not valid JSON: .*; it is a web page"),
    (copied(config__json=""), "is not valid JSON: .*; it is empty"),
    (
        copied(model__safetensors="version https://git-lfs.github.com/spec/v1\n"),
        "no whole safetensors file .* git lfs pull",
    ),
    (copied(model__safetensors="x"), "no whole safetensors file .* was its download cut off"),
]


@pytest.mark.parametrize(("make", "said"), FOLDERS, ids=[said[:40] for _, said in FOLDERS])
def test_a_folder_of_another_kind_is_named(make: Callable[[Path], Path], said: str, tmp_path: Path) -> None:
    """Keeps out: "config.json does not exist" alone, of a LoRA, a hub's cache, a folder of folders or a download cut off."""
    folder = make(tmp_path)
    with pytest.raises(ValueError, match=said):
        SpecDecoder.from_pretrained(folder, device="cpu")
    with pytest.raises(ValueError, match=said):
        SpecDecoder.from_pretrained(TARGET, folder, device="cpu")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{root}/LLAMA-1b", "got '.*/LLAMA-1b'; nearest: '{root}/llama-1B'"),
        ("{root}/llama-1B ", "nearest thing that works: '{root}/llama-1B'"),
        ("'{root}/llama-1B'", "nearest thing that works: '{root}/llama-1B'"),
        ("{root}/lama.gguf", "nearest: '{root}/llama.gguf'"),
        ("https://huggingface.co/org/name/tree/main", "nearest thing that works: the hub id 'org/name'"),
        ("org/name@main", "no hub id either.* nearest thing that works: 'org/name'"),
        (" org/name", "no hub id either.* nearest thing that works: 'org/name'"),
        ("{root}/link", "got '.*/link'; it is a link to nowhere, where nothing is"),
        ("$PLACE/llama-1B", "nearest thing that works: '{root}/llama-1B'"),
        ("{root}/llama.gguf/config.json", "expected an existing model folder or a hub id like 'org/name', got '[^;]*$"),
        ("{root}/notes.txt", r"got the file '[^']*notes.txt'$"),
        ("{root}/llama-1B/model.safetensors", "got the file .*; nearest: '{root}/llama-1B'"),
    ],
)
def test_a_name_with_a_slip_brings_the_one_that_was_meant(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps out: a name in other letters, with a space or quotes, or as a link, that says only that nothing is there; and the
    folder of any file at all as the nearest thing."""
    monkeypatch.setenv("PLACE", str(tmp_path))
    copied()(tmp_path / "llama-1B")
    files(llama__gguf="GGUF", notes__txt="x")(tmp_path)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ValueError, match=said.replace("{root}", str(tmp_path))):
        SpecDecoder.from_pretrained(name.replace("{root}", str(tmp_path)), device="cpu")


def test_a_target_is_no_draft_for_itself(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: "are target and draft swapped?" where both are one folder, by whatever name, or where the draft is a model of
    other tokens: no order of the two would work."""
    (tmp_path / "link").symlink_to(TARGET)
    for same in (TARGET, f"{TARGET}/", tmp_path / "link"):
        with pytest.raises(ValueError, match="is the target itself, .* works: draft='ngram'") as error:
            SpecDecoder.from_pretrained(TARGET, same, device="cpu")
        assert not any(word in str(error.value) for word in ARE_GONE)
    with pytest.raises(ValueError, match="has 40 ids, and the target 2048, and .* holds no tokenizer .*draft='ngram'"):
        SpecDecoder.from_pretrained(TARGET, zoo.target("llama"), device="cpu")


def test_a_target_with_mtp_layers_is_told_of_them(tmp_path: Path) -> None:
    """Keeps out: a hint at n-grams where the folder itself holds a drafter."""
    folder = save_mtp_target(tmp_path / "t", "v3")
    with pytest.raises(ValueError, match="draft='mtp', its own MTP layers"):
        SpecDecoder.from_pretrained(folder, folder, device="cpu")


@pytest.mark.parametrize("draft", [True, False])
def test_a_switch_is_no_draft(draft: bool) -> None:
    """Keeps out: "must be a folder" for draft=False, of which None is meant."""
    with pytest.raises(TypeError, match="got (True|False); nearest setting: draft=None"):
        SpecDecoder.from_pretrained(TARGET, draft, device="cpu")  # type: ignore[arg-type]


def test_a_head_alone_says_where_its_target_goes() -> None:
    """Keeps out: "are target and draft swapped?" where there is no draft."""
    with pytest.raises(ValueError, match="got a draft head's config .* the model that this head drafts for as target"):
        SpecDecoder.from_pretrained(DRAFT, device="cpu")


def test_a_path_may_be_the_slip(tmp_path: Path) -> None:
    """Keeps out: Path("mtp"), for which a folder was asked without a word of the kind of that name."""
    with pytest.raises(ValueError, match="nearest setting that works: draft='mtp'"):
        SpecDecoder.from_pretrained(TARGET, Path("mtp"), device="cpu")


@pytest.mark.parametrize(
    "flags", [["generate", "hi", "--json-schema"], ["generate", "hi", "--grammar"], ["verify", "--prompts"]]
)
def test_a_file_without_an_end_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a command that reads /dev/zero until there is no memory left."""
    try:
        assert cli.main([*flags, "/dev/zero"]) == 2
    except SystemExit as end:  # argparse ends so
        assert end.code == 2
    assert "/dev/zero holds more than 256 MiB" in " ".join(capsys.readouterr().err.split())


def test_weights_that_are_a_pipe_are_refused(tmp_path: Path) -> None:
    """Keeps out: a load that waits for whoever may write into a pipe."""
    (tmp_path / "config.json").write_bytes((shipped.target_folder() / "config.json").read_bytes())
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="expected a safetensors file, got a pipe or a device"):
        SpecDecoder.from_pretrained(tmp_path, device="cpu")


def test_a_family_in_other_letters_is_named(tmp_path: Path) -> None:
    """Keeps out: "a newer transformers" as the one thing that works for model_type "Llama"."""
    config = json.loads((TARGET / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "Llama"}))
    with pytest.raises(ValueError, match="got 'Llama': it is unknown; nearest: 'llama', or a newer transformers"):
        SpecDecoder.from_pretrained(tmp_path, device="cpu")
