"""Runs prompts with and without speculation on one decoder, and compares every token of both with the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specdec.config import SamplingParams
from specdec.generation import Generation, Stats
from specdec.loading.threads import using_threads
from specdec.lossless.near_tie import difference, parting, rounds, text_of
from specdec.lossless.reference import read_together
from specdec.lossless.verification import OffTarget, PromptVerdict, Verification
from specdec.screen.progress import Progress
from specdec.session import Session


def check_session(session: Session) -> None:
    """ValueError if there is nothing to compare, or no reference to compare it with."""
    config = session.model.config
    if session.head is None:
        raise ValueError(
            "verify compares speculative with plain decoding, but this decoder has no draft head; nearest thing that works: "
            "name a draft head"
        )
    if config.encoder is not None:
        raise ValueError(
            f"verify is for decoder-only targets, got a {config.family} model: the reference reads one model's text, not what "
            "an encoder read besides; nearest thing that works: a decoder-only target"
        )


def check_sampling(sampling: Sequence[SamplingParams]) -> None:
    """ValueError unless both sides draw the same, and a round of speculation can run."""
    for params in sampling:
        if params.temperature > 0 and params.seed is None:
            raise ValueError("verify needs a seed to sample: both sides must draw the same; nearest setting that works: seed=0")
        if params.n != 1:
            raise ValueError(f"verify compares one text a prompt, got n={params.n}; nearest setting that works: n=1")
        if params.logprobs is not None:
            raise ValueError(
                f"verify compares tokens and gives no log-probabilities, got logprobs={params.logprobs}; nearest setting that "
                "works: logprobs=None"
            )
        if params.max_tokens < 2:
            raise ValueError(
                f"verify needs max_tokens >= 2, since the first token comes from the prompt's pass, got {params.max_tokens}; "
                "nearest setting that works: max_tokens=2"
            )


@using_threads(None)
def verify(
    session: Session, prompts: Sequence[Any], sampling: Sequence[SamplingParams], on_progress: Progress = lambda *_: None
) -> Verification:
    """The comparison of all prompts.  sampling: one for each."""
    check_session(session)
    check_sampling(sampling)
    on_progress("plain decoding", 0, len(prompts))
    plain = session.generate(prompts, sampling, speculate=False)
    on_progress("speculative decoding", 0, len(prompts))
    fast = session.generate(prompts, sampling, speculate=True)
    verdicts = []
    for number, (a, b, params) in enumerate(zip(plain, fast, sampling, strict=True)):
        on_progress("reference", number, len(prompts))
        with session.turn():  # no other request may run while the model's weights are wide
            verdicts.append(_compare(session, number, a, b, params))
    total = Stats.total([output.stats for output in fast])
    return Verification(verdicts, total.accept_length if total.rounds else 0.0, total.accepted, _settings(session, sampling))


def _compare(session: Session, number: int, a: Generation, b: Generation, sampling: SamplingParams) -> PromptVerdict:
    """One prompt's plain output a and speculative output b."""
    asked = parting(a.token_ids, b.token_ids)
    check = read_together(session, text_of(session, a.prompt_token_ids, a.token_ids, sampling), asked or [])
    part = None if asked is None else difference(number, a.token_ids, b.token_ids, check.asked, rounds(session))
    readings = {"both" if part is None else "baseline": check}
    if part is not None:
        readings["speculative"] = read_together(session, text_of(session, b.prompt_token_ids, b.token_ids, sampling))
    off = [
        OffTarget(each.index, each.token, each.best, each.margin, each.bound, side)  # type: ignore[arg-type]
        for side, found in readings.items()
        for each in found.off
        if not each.is_explained
    ]
    tokens = len(a.token_ids) + (0 if part is None else len(b.token_ids))
    unsure = sum(each.unsure for each in readings.values())
    seed = sampling.seed if sampling.temperature > 0 else None
    return PromptVerdict(number, tokens, b.stats.rounds, part, off, check.bound, unsure, seed)


def _settings(session: Session, sampling: Sequence[SamplingParams]) -> dict[str, Any]:
    """What ran, as plain data.  Prompts that differ in their seeds alone have one sampling."""
    spec = session.settings.spec
    assert spec is not None
    kinds: list[SamplingParams] = []
    for params in sampling:
        if (shared := replace(params, seed=None)) not in kinds:
            kinds.append(shared)
    shown = [{name: getattr(each, name) for name in each.__dataclass_fields__} for each in kinds]
    return {**session.settings.by_option(), "spec": spec.label, "sampling": shown}
