"""What a comparison of heads measures, and the folder in which its results lie.

The first step writes the plan, and every later one reads it: so all kinds have the same data, steps and prompts.  A result is a
part, a JSON file of its own; a part that is there is not measured again.  This file knows no model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

LONG = "-long"  # the name of a head that is trained for long: KIND-long
KINDS = ("eagle3", "p-eagle", "dflash", "dflash2", "dspark")
FILES = ("mt_bench", "gsm8k", "humaneval")


@dataclass(frozen=True)
class PairsPlan:
    """Settings that all kinds share.

    target: a folder or a GGUF file.  chat: whether prompts get its chat template.  asks: prompts that the target writes itself.
    requests: at most so many prompts of each kind of text.  texts to intermediate_size: as `specdec train` has them;
    long_seconds: those of a head that is trained for long.  shapes, files: what is measured, the most important first.
    eval_prompts, eval_tokens: prompts of a file for accept lengths, and tokens of each.  characters: where prompts to measure
    with are cut; 0: nowhere.  bench_prompts: of a file for speeds, more where a batch is larger.  seed: of all that is drawn.
    """

    target: str
    chat: bool = True
    asks: int = 8000
    requests: int = 4000
    texts: int = 12288
    width: int = 384
    longest_prompt: int = 48
    greedy_share: float = 0.6
    held_out: float = 0.02
    steps: int = 1800
    long_seconds: int = 0
    batch: int = 32
    lr: float = 0.0
    warmup: int = 200
    num_steps: int = 7
    draft_vocab_size: int = 4096
    intermediate_size: int = 1024
    shapes: tuple[str, ...] = ("5,4,16", "5,1,6", "7,8,32")
    files: tuple[str, ...] = ("humaneval", "mt_bench", "gsm8k")
    temperatures: tuple[float, ...] = (0.0, 1.0)
    eval_prompts: int = 40
    eval_tokens: int = 128
    eval_batch: int = 32
    characters: int = 0
    bench_prompts: int = 8
    bench_tokens: int = 64
    batches: tuple[int, ...] = (1, 8, 32)
    repeats: int = 3
    verify_prompts: int = 8
    device: str = "auto"
    threads: int = 0
    seed: int = 0

    @classmethod
    def tiny(cls, target: str) -> PairsPlan:
        """All steps in a minute or two on a CPU, over a small story model; its numbers mean nothing."""
        return cls(
            target, chat=False, asks=4, requests=16, texts=16, width=48, longest_prompt=12, held_out=0.3, steps=2, batch=2,
            draft_vocab_size=300, intermediate_size=64, warmup=1, shapes=("2,2,4",), files=("humaneval",),
            eval_prompts=2, eval_tokens=16, eval_batch=2, characters=60, bench_prompts=2, bench_tokens=8, batches=(1, 2),
            repeats=2, verify_prompts=1, device="cpu", threads=1,
        )  # fmt: skip

    def changed(self, settings: Iterable[str]) -> PairsPlan:
        """With values as NAME=VALUE; those of lists are separated by semicolons.  ValueError for an unknown name."""
        known, given = {field.name: getattr(self, field.name) for field in fields(self)}, dict[str, Any]()
        for setting in settings:
            name, is_said, value = setting.partition("=")
            if name not in known or not is_said:
                raise ValueError(f"--set: expected NAME=VALUE with a name of {', '.join(known)}, got {setting!r}")
            given[name] = _read(name, value, known[name])
        return replace(self, **given)


def _read(name: str, value: str, like: Any) -> Any:
    try:
        if isinstance(like, tuple):
            return tuple(_read(name, each, like[0]) for each in value.split(";"))
        if isinstance(like, bool):
            return {"true": True, "false": False}[value.lower()]
        return type(like)(value)
    except (ValueError, KeyError):
        raise ValueError(f"--set {name}: expected a value like {like!r}, got {value!r}") from None


class PartsFolder:
    """The folder of one comparison: plan.json, prompts, texts, a folder for each head, and the parts."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def plan(self) -> PairsPlan:
        """ValueError where no plan was written."""
        file = self.path / "plan.json"
        if not file.is_file():
            raise ValueError(f"--folder: expected a folder with plan.json, got {self.path}; the step `prompts` writes it")
        told = json.loads(file.read_text())
        return PairsPlan(**{name: tuple(value) if isinstance(value, list) else value for name, value in told.items()})

    def begin(self, plan: PairsPlan) -> None:
        """Writes the plan.  ValueError where the folder has another one: its parts would not fit."""
        file = self.path / "plan.json"
        if file.is_file() and self.plan != plan:
            raise ValueError(f"--folder: {self.path} holds a comparison with other settings; name another folder")
        self.path.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(plan), indent=1) + "\n")

    def head(self, kind: str) -> Path:
        return self.path / "heads" / kind

    @property
    def self_text(self) -> Path:
        """What the target wrote."""
        return self.path / "texts" / "self_text.pt"

    def prompts(self, file: str) -> Path:
        """The prompts of an evaluation file, as they are asked."""
        return self.path / f"{file}.jsonl"

    def part(self, name: str) -> Any:
        """What a part holds; None where it was not measured yet."""
        file = self.path / "parts" / f"{name}.json"
        return json.loads(file.read_text()) if file.is_file() else None

    def parts(self, step: str) -> dict[str, Any]:
        """All parts of a step, by their names without it."""
        found = sorted((self.path / "parts").glob(f"{step}-*.json"))
        return {file.stem.removeprefix(f"{step}-"): json.loads(file.read_text()) for file in found}

    def keep(self, name: str, part: Any) -> None:
        """Writes a part whole or not at all."""
        file = self.path / "parts" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".part").write_text(json.dumps(part, indent=1) + "\n")
        file.with_suffix(".part").replace(file)


class TimeBudget:
    """Seconds that a call may take.  Work begins only while what was the longest yet would end in time.

    where: the machine and the day, which each part of this call gets: other calls may run on other machines.
    """

    def __init__(self, seconds: float, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        if not seconds >= 0:  # nan too, with which a call never ends
            raise ValueError(f"--seconds: expected at least 0, got {seconds:g}; nearest thing that works: 600")
        self.seconds, self.longest, self.where, self._clock, self._begun = seconds, 0.0, where, clock, clock()

    @property
    def left(self) -> float:
        return self.seconds - (self._clock() - self._begun)

    def run(self, folder: PartsFolder, name: str, measure: Callable[[], dict[str, Any] | None]) -> bool:
        """Measures a part and keeps it, unless it is there.  False: there was no time for it, or not for all of it."""
        if folder.part(name) is not None:
            return True
        if self.left <= self.longest:
            return False
        begun = self._clock()
        part = measure()
        took = self._clock() - begun
        if part is None:
            return False
        folder.keep(name, {**part, "where": self.where, "part_seconds": round(took, 2)})
        self.longest = max(self.longest, took)
        print(f"{name}: {took:.1f} s, {self.left:.0f} s left", flush=True)
        return True
