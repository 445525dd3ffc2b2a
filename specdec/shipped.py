"""Where the pair that ships inside the package lies.  Knows paths only; what the files hold is the loader's business."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "pair"


def target_folder() -> Path:
    """The small target model."""
    return _present(FOLDER / "target", "config.json", "--target DIR")


def draft_folder() -> Path:
    """Its EAGLE head."""
    return _present(FOLDER / "draft", "config.json", "--draft DIR")


def prompts_file() -> Path:
    """Held-out prompts for it, one JSON object a line."""
    return _present(FOLDER / "prompts.jsonl", "", "--prompts FILE")


def is_complete() -> bool:
    """Whether all three are here."""
    return all((FOLDER / name).is_file() for name in ("target/config.json", "draft/config.json", "prompts.jsonl"))


def _present(path: Path, inside: str, instead: str) -> Path:
    if not (path / inside if inside else path).is_file():
        raise ValueError(f"the shipped {path.name} is not in this installation: expected {path}; give your own with {instead}")
    return path
