"""Makes traces: runs prompts with their trees, and the first of them once more, phase by phase.

A clock between two phases would break a round's graph, so times come from a second run, in which each phase is a graph of its
own and is waited for.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from specdec.checks import require_bool
from specdec.config import SamplingParams, changed_options
from specdec.generation import Generation
from specdec.loaded import LoadedDecoder, per_prompt
from specdec.loading.about.drafters import drafter_line
from specdec.loading.about.machine import versions
from specdec.prompts.encode import as_prompt_list
from specdec.session import Session
from specdec.trace.pieces import pieces_of
from specdec.trace.trace import RoundTime, Trace, TracedText

MAX_TIMED = 512  # rounds of the second run


def record(
    decoder: LoadedDecoder, prompts: Any, sampling: SamplingParams | Sequence[SamplingParams] | None = None, *,
    speculate: bool = True, times: bool = True,
) -> Trace:  # fmt: skip
    """Generates for prompts, as `SpecDecoder.generate` does, and keeps what every round did.

    times: whether the first prompt runs twice more, alone: first to capture each phase, then to measure it.
    """
    require_bool("times", times, True)
    listed = as_prompt_list(prompts)
    params = [_seeded(each) for each in per_prompt(sampling, len(listed))]
    if any(each.n != 1 for each in params):
        raise ValueError(
            "n must be 1 in a trace, which shows a text a prompt; nearest thing that works: the prompt several times"
        )
    done = decoder.generate(listed, params, speculate=speculate, trees=True)
    trace = trace_of(decoder, listed, params, done)
    if times and trace.texts:
        seconds, accepted = timed_rounds(Session(decoder), done[0].prompt_token_ids, params[0], speculate)
        trace.texts[0] = replace(trace.texts[0], times=seconds)
        if said := differs(accepted, done[0].stats.accepted_per_round[:MAX_TIMED]):
            trace.about["times"] = said
    return trace


def trace_of(
    decoder: LoadedDecoder, prompts: Sequence[Any], sampling: Sequence[SamplingParams], done: Sequence[Generation]
) -> Trace:
    """The trace of texts that were generated with their trees."""
    tokenizer, texts, seen = decoder.tokenizer, [], set[int]()
    for prompt, each in zip(prompts, done, strict=True):
        assert each.rounds is not None, "texts without trees"
        shown = prompt if isinstance(prompt, str) else tokenizer.decode(each.prompt_token_ids)
        pieces = pieces_of(each, tokenizer.decode) if tokenizer.is_present else [tokenizer.piece(t) for t in each.token_ids]
        count = len(each.prompt_token_ids)
        told = each.token_ids, pieces, each.origins, each.finish_reason, each.rounds
        texts.append(TracedText(shown, count, *told, sources=each.sources))
        for made in each.rounds:
            seen.update(made.tree.tokens, made.tree.chosen)
    return Trace(_about(decoder, sampling), {token: tokenizer.piece(token) for token in seen if token >= 0}, texts)


def differs(timed: list[int], traced: list[int]) -> str:
    """What to say where the rounds that were timed are not those of the trace; empty where they are.

    Matches of earlier answers, and estimates of what is accepted, learn from each text, the same text's first run included.
    timed, traced: accepted draft tokens of each round.
    """
    if timed == traced:
        return ""
    both = f"{len(timed)} with {sum(timed)} accepted drafts, in place of {len(traced)} with {sum(traced)}"
    return f"of other rounds than these: {both}, because what drafts has learnt from the first run"


def timed_rounds(
    session: Session, prompt: list[int], sampling: SamplingParams, speculate: bool
) -> tuple[list[RoundTime], list[int]]:
    """What the rounds of one prompt take, alone and phase by phase, and how many draft tokens each of them accepted."""
    with session.timed_phases() as phases:
        for _ in range(2):  # the first run compiles and captures
            found: list[RoundTime] = []
            (request,) = session.submit([prompt], [sampling], speculate=speculate)
            try:
                while not request.is_done and len(found) < MAX_TIMED:
                    phases.clear()
                    wall = session.timed_step().wall
                    of_round = {name: 1e3 * took for name, took in phases.seconds.items() if name != "prefill"}
                    if of_round:
                        found.append(RoundTime(of_round, 1e3 * wall))
            finally:
                session.cancel()
    if request.error is not None:
        request.result()  # raises it
    return found, request.stats.accepted_per_round[: len(found)]


def _seeded(sampling: SamplingParams) -> SamplingParams:
    """With the seed that the second run needs too."""
    if sampling.temperature > 0 and sampling.seed is None:
        return replace(sampling, seed=secrets.randbits(31))
    return sampling


def _about(decoder: LoadedDecoder, sampling: Sequence[SamplingParams]) -> dict[str, str]:
    settings, model = decoder.settings, decoder.model
    shape = settings.spec.label if settings.spec is not None and decoder.head is not None else ""
    options = sorted({f"{name}={getattr(each, name)}" for each in sampling for name in changed_options(each)})
    about = {
        "architecture": model.config.family,
        "what drafts": drafter_line(decoder.head, settings) if decoder.head is not None else "nothing: plain decoding",
        "shape of a tree": shape,
        "sampling": ", ".join(options) or "greedy",
        "device": str(settings.device),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return {name: value for name, value in about.items() if value}
