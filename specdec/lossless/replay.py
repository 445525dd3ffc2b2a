"""Replay files: a finished text, with everything that decided its tokens, and what the reference found wrong with it.

A file is plain JSON.  It holds token ids and settings, and texts only where that was asked for.  This module knows no audit.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from specdec.checks import MAX_FILE, require_bool, require_ids, shown
from specdec.config import OF_DRAFTS, SamplingParams, SpecConfig
from specdec.engine.needs import RowChoice
from specdec.engine.request import Request
from specdec.files.whole import write_whole
from specdec.grammar.wait import Thought, Wait
from specdec.loading.resolve import EngineSettings
from specdec.lossless.choice import GeneratedText
from specdec.lossless.near_tie import first_divergence
from specdec.lossless.reference import ReferenceCheck, read_together
from specdec.options import AUDIT, EngineOptions
from specdec.session import Session
from specdec.steps import INTS

FORMAT = "specdec replay 1"


class FinishedText(NamedTuple):
    """What a request has written.  sampling: with the seed that it was drawn with.  origins: see Generation."""

    prompt_ids: list[int]
    token_ids: list[int]
    sampling: SamplingParams
    choice: RowChoice
    origins: list[int]
    speculate: bool

    @classmethod
    def of(cls, request: Request) -> FinishedText:
        seed = request.choice.options.ints[INTS.index("seed")]
        sampling = request.sampling if request.sampling.seed is not None else replace(request.sampling, seed=seed)
        ids = list(request.output.token_ids)
        return cls(list(request.prompt_ids), ids, sampling, request.choice, list(request.origins), request.speculate)


@dataclass(frozen=True)
class ReplayFile:
    """The fields of the file.

    settings: of the decoder, by option.  spec: the tree's shape; None: it had no drafter.  wrong: tokens that rounding does not
    explain, as fields of `Judged`.  bound: the median over the output's places.  texts: prompt and output, where asked for.
    wait: from where on the grammar of `sampling` holds, as fields of `Wait`; None: from the first token.
    """

    target: str
    draft: Any
    spec: dict[str, Any] | None
    settings: dict[str, Any]
    versions: dict[str, str]
    date: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    origins: list[int]
    speculate: bool
    sampling: dict[str, Any]
    wrong: list[dict[str, Any]]
    bound: float
    texts: dict[str, str] | None = None
    wait: dict[str, Any] | None = None
    format: str = FORMAT

    @classmethod
    def of(
        cls,
        finished: FinishedText,
        check: ReferenceCheck,
        settings: EngineSettings,
        names: Mapping[str, Any],
        texts: dict[str, str] | None,
    ) -> Self:
        """check: whose `off` are the tokens that rounding does not explain.  names: target, draft, versions."""
        sampling = {item.name: getattr(finished.sampling, item.name) for item in fields(SamplingParams)}
        if texts is None:
            sampling["prediction"] = None  # it is a text, and changes no token
        wait = finished.choice.grammar.wait if finished.choice.grammar is not None else None
        return cls(
            spec=None if settings.spec is None else asdict(settings.spec),
            settings={name: _plain(value) for name, value in settings.by_option().items()},
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            prompt_token_ids=finished.prompt_ids,
            token_ids=finished.token_ids,
            origins=finished.origins,
            speculate=finished.speculate,
            sampling={name: _plain(value) for name, value in sampling.items()},
            wait=None if wait is None else {**wait._asdict(), "thought": wait.thought and wait.thought._asdict()},
            wrong=[asdict(each) for each in check.off],
            bound=check.bound,
            texts=texts,
            **names,
        )

    def write(self, folder: Path) -> Path:
        """The new file, which only this user may read.  OSError if it can't be written; there is none then."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"replay-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}.json"
        lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in asdict(self).items())
        text = "{\n" + ",\n".join(lines) + "\n}\n"

        def write(part: Path) -> None:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(text)

        write_whole(path, write)
        return path

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """ValueError if it is no replay file."""
        expected = f"--replay must be a file that an audit has written ({FORMAT!r})"
        try:
            if Path(path).stat().st_size > MAX_FILE:
                raise ValueError("it is too large")
            held = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(held, dict) or held.get("format") != FORMAT:
                raise ValueError("it has another format")
            file = cls(**held)
            file._check()
            return file
        except RecursionError:
            raise ValueError(f"{expected}, got {str(path)!r}: it is nested too deeply") from None
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{expected}, got {str(path)!r}: {str(error)[:500]}") from None

    def _check(self) -> None:
        """ValueError or TypeError for fields that a damaged file has."""
        for name in ("settings", "sampling", "versions"):
            if not isinstance(getattr(self, name), dict):
                raise TypeError(f"{name} must be an object, got {shown(getattr(self, name))}")
        for name in ("prompt_token_ids", "token_ids", "origins"):
            require_ids(name, getattr(self, name))
        require_bool("speculate", self.speculate, True)
        if not isinstance(self.bound, int | float):
            raise TypeError(f"bound must be a number, got {shown(self.bound)}")
        if not isinstance(self.wrong, list) or not all(isinstance(each, dict) for each in self.wrong):
            raise TypeError(f"wrong must be a list of objects, got {shown(self.wrong)}")
        if not (self.spec is None or isinstance(self.spec, dict)) or not isinstance(
            self.sampling.get("logit_bias") or {}, dict
        ):
            raise TypeError("spec and sampling.logit_bias must be objects or null")
        _ = self.params, self.shape, self.options()  # which have checks of their own

    @property
    def params(self) -> SamplingParams:
        given = dict(self.sampling)
        if given.get("logit_bias") is not None:
            given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
        return SamplingParams(**given)

    @property
    def grammar_wait(self) -> Wait | None:
        if self.wait is None:
            return None
        thought = self.wait["thought"]
        return Wait(**{**self.wait, "thought": thought and Thought(**thought), "markers": tuple(self.wait["markers"])})

    @property
    def shape(self) -> SpecConfig | None:
        return None if self.spec is None else SpecConfig(**self.spec)

    def options(self, **changes: Any) -> EngineOptions:
        """The engine options of the decoder that wrote it, without its audit."""
        kept = {name: value for name, value in self.settings.items() if name not in ("audit", *AUDIT)}
        return EngineOptions(**{**kept, **changes})


class ReplayedText(NamedTuple):
    """One text of a replay: which it is, where it parts from the recorded one (None: nowhere), and what is wrong with it."""

    name: str
    parts_at: int | None
    check: ReferenceCheck

    @property
    def wrong(self) -> int:
        """How many of its tokens rounding does not explain."""
        return sum(not each.is_explained for each in self.check.off)

    def as_json(self) -> dict[str, Any]:
        off = [asdict(each) for each in self.check.off if not each.is_explained]
        return {"name": self.name, "parts_at": self.parts_at, "off_target": off, "bound": self.check.bound}


def replay(session: Session, file: ReplayFile) -> list[ReplayedText]:
    """The recorded text, and what the decoder writes now, plainly and with speculation, each against the reference.

    ValueError if the decoder can't run what the file asks for.
    """
    of_drafts: dict[str, Any] = dict.fromkeys(OF_DRAFTS)
    drafting = replace(file.params, logprobs=None, prompt_logprobs=None, n=1, speculate=True)
    plain = replace(drafting, **of_drafts)
    prompt, decoder, wait = file.prompt_token_ids, session.decoder, file.grammar_wait
    choice = decoder.new_request(prompt, plain, wait=wait).choice
    found: list[ReplayedText] = []

    def compare(name: str, ids: Sequence[int]) -> None:
        with session.turn():
            text = GeneratedText(prompt, ids, plain, choice, session.masks(choice, ids))
            found.append(ReplayedText(name, first_divergence(file.token_ids, ids), read_together(session, text)))

    def write(name: str, params: SamplingParams, speculate: bool) -> None:
        (generation,) = decoder.run([decoder.new_request(prompt, params, speculate=speculate, wait=wait)])
        compare(name, generation.token_ids)

    compare("recorded", file.token_ids)
    write("plain now", plain, speculate=False)
    if session.head is not None:
        write("speculative now", drafting, speculate=True)
    return found


def _plain(value: Any) -> Any:
    """A setting as JSON holds it and its door takes it again."""
    if isinstance(value, SpecConfig):
        return list(value.numbers)
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
