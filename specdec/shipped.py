"""The paths of the target, the draft head and the prompts that ship inside the package.  This file does not read them."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "pair"


def target_folder() -> Path:
    """The folder of the small target model.  ValueError if this installation lacks it, as of the functions below."""
    return _present(FOLDER / "target", "config.json", "--target DIR")


def draft_folder() -> Path:
    """The folder of the EAGLE head of the small target."""
    return _present(FOLDER / "draft", "config.json", "--draft DIR")


def prompts_file() -> Path:
    """The file of held-out prompts for the small target, one JSON object {"prompt": text} a line."""
    return _present(FOLDER / "prompts.jsonl", "", "--prompts FILE")


def is_complete() -> bool:
    """Whether this installation holds the target, the head and the prompts."""
    return all((FOLDER / name).is_file() for name in ("target/config.json", "draft/config.json", "prompts.jsonl"))


def _present(path: Path, inside: str, instead: str) -> Path:
    if not (path / inside if inside else path).is_file():
        raise ValueError(f"the shipped {path.name} is not in this installation: expected {path}; give your own with {instead}")
    return path
