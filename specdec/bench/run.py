"""Measures a pair against its own autoregressive decoding: every batch size with every tree shape, in one process.

Checks what was asked for, loads both models once, and fills a Measurement.  How one cell is measured is cell's business.
Prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from specdec import __version__
from specdec.bench.byte_limit import read_bandwidth
from specdec.bench.cell import Explained, measure_cell, measure_plain
from specdec.bench.encode import encode_prompts, prompt_facts, with_seeds
from specdec.bench.measurement import Failure, Measurement
from specdec.bench.profile import profile_work, rounds_in
from specdec.bench.prompt_file import FilePrompt
from specdec.bench.warm_up import Laps
from specdec.checks import require_float, require_int
from specdec.config import SamplingParams, SpecConfig
from specdec.decoder import SpecDecoder
from specdec.draft.drafter import DraftModel
from specdec.draft.kind import Draft, spelled
from specdec.loading.about.drafters import drafter_line, smoke_check
from specdec.loading.about.machine import machine_facts, steal_and_total, versions
from specdec.loading.build import free_memory
from specdec.loading.pair import WantedPair
from specdec.loading.ranks import Ranks, start_ranks
from specdec.loading.resolve import EngineSettings, experts_line
from specdec.loading.threads import using_threads
from specdec.models.checkpoints.checkpoint import resolve_target
from specdec.models.config import ModelConfig
from specdec.models.target import Target
from specdec.options import EngineOptions
from specdec.prompts.tokenizer import Tokenizer
from specdec.screen.progress import Progress
from specdec.session import Session

MAX_SEED = 2**63 - 1
USUAL_PROMPTS = 8  # taken where nobody says how many, unless a batch needs more


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.  prompts: all that there are.  sampling: for every prompt; when it samples, prompt i gets seed + i.

    draft: None measures plain decoding alone; specs is empty then.  chat: apply the chat template.  engine: its
    max_batch_size is replaced by each of batch_sizes, and its max_seq_len, if it is None, by what the longest prompt and
    max_tokens need.  profile: measure budgets too.  synthetic_acceptance: the conditional probability of each level to force;
    EOS is then ignored, and greedy requests get seeds for the draws.  num_prompts: how many of the prompts to take, from the
    first on; None takes USUAL_PROMPTS, or as many as the largest batch needs to be full, or all where there are fewer than
    USUAL_PROMPTS.
    """

    target: str | Path
    draft: Draft
    prompts: Sequence[FilePrompt]
    prompts_source: str
    specs: Sequence[SpecConfig]
    batch_sizes: Sequence[int]
    sampling: SamplingParams
    repeats: int = 3
    chat: bool = False
    engine: EngineOptions = field(default_factory=EngineOptions)
    profile: bool = False
    synthetic_acceptance: Sequence[float] | None = None
    num_prompts: int | None = None

    def __post_init__(self) -> None:
        require_int("repeats", self.repeats, 1)
        for size in self.batch_sizes:
            require_int("batch_sizes", size, 1)
        if self.draft is not None:
            _check_once("spec", [spec.label for spec in self.specs])
        elif self.specs or self.synthetic_acceptance is not None:
            raise ValueError(
                "specs and synthetic_acceptance say how to draft, but draft is None; leave them out, or give a draft"
            )
        _check_once("batch_sizes", list(map(str, self.batch_sizes)))
        self._check_count()
        if self.sampling.max_tokens < 2:
            raise ValueError(
                f"max_tokens must be >= 2, since the first token comes from the prefill and no round would run, got "
                f"{self.sampling.max_tokens}; nearest setting that works: --max-tokens 2"
            )
        if self.sampling.temperature > 0 and self.sampling.seed is None:
            raise ValueError("sampling needs a seed: both sides must draw the same; nearest setting that works: seed=0")
        highest = MAX_SEED - len(self.taken) + 1
        if self.sampling.seed is not None and self.sampling.seed > highest:
            raise ValueError(
                f"seed must be at most {highest}, since prompt i of {len(self.taken)} gets seed + i, got "
                f"{self.sampling.seed}; nearest setting that works: --seed {highest}"
            )
        if self.synthetic_acceptance is not None:
            check_probabilities(self.synthetic_acceptance, self.specs)
            if self.joins:
                raise ValueError(
                    "synthetic_acceptance forces one drafter's best path, which trees of several sources don't have, got draft="
                    f"{spelled(self.draft)}; nearest thing that works: one drafter"
                )
            if self.sampling.stop_strings or self.sampling.stop_token_ids:
                raise ValueError(
                    "stop and stop_token_ids say where the target's own text ends, and synthetic_acceptance forces another "
                    "text; nearest thing that works: leave them out"
                )
        if self.profile:
            for spec in self.specs:
                check_profile(self.sampling.max_tokens, self.resolved(spec))

    def _check_count(self) -> None:
        """ValueError unless there are as many prompts as were asked for, and enough for the largest batch."""
        there, largest = len(self.prompts), max(self.batch_sizes)
        if self.num_prompts is not None and require_int("--num-prompts", self.num_prompts, 1) > there:
            fault = f"{self.prompts_source} holds {there} prompts, {self.num_prompts} were asked for"
            raise ValueError(f"{fault}; nearest: --num-prompts {there}")
        if largest <= len(self.taken):
            return
        got = f"got --num-prompts {self.num_prompts}"
        if largest <= there:
            nearest = f"--num-prompts {largest}, or --batch-sizes {len(self.taken)}"
        elif self.num_prompts is not None:
            nearest = f"--batch-sizes {self.num_prompts}, or a larger --num-prompts"
        else:
            got = f"but {self.prompts_source} holds {there}"
            nearest = f"--batch-sizes {there}, or --prompts with a file that holds more"
        needs = f"a batch of {largest} needs at least {largest} prompts to be full"
        raise ValueError(f"{needs}, {got}; nearest settings: {nearest}")

    @property
    def sides(self) -> int:
        """1 for plain decoding alone, 2 where a draft is compared with it."""
        return 1 if self.draft is None else 2

    @property
    def joins(self) -> bool:
        """Whether trees have several sources."""
        return (isinstance(self.draft, list | tuple) and len(self.draft) > 1) or self.engine.corpus is not None

    def resolved(self, spec: SpecConfig) -> SpecConfig:
        """The shape that rounds have: where matches join a drafter, with all the levels that these may reach."""
        return spec.joined if self.joins else spec

    @property
    def work(self) -> list[tuple[int, SpecConfig | None]]:
        """Batch size and tree shape of every cell."""
        return [(size, spec) for size in self.batch_sizes for spec in self.specs or (None,)]

    @property
    def taken(self) -> Sequence[FilePrompt]:
        """The prompts that are measured."""
        count = max(USUAL_PROMPTS, *self.batch_sizes) if self.num_prompts is None else self.num_prompts
        return self.prompts[:count]

    @property
    def effective_sampling(self) -> SamplingParams:
        """The sampling of each prompt, except for its own seed.  Forced acceptance draws by seed, and may force EOS tokens."""
        if self.synthetic_acceptance is None:
            return self.sampling
        return replace(self.sampling, ignore_eos=True, seed=self.sampling.seed or 0)


def _check_once(name: str, values: Sequence[str]) -> None:
    """ValueError unless there is a value, and none twice."""
    if not values:
        raise ValueError(f"{name} must name at least one value, got none")
    if twice := [value for value in dict.fromkeys(values) if values.count(value) > 1]:
        raise ValueError(f"{name} must name each value once, got {' and '.join(values)}; more than once: {' and '.join(twice)}")


def check_probabilities(probs: Sequence[float], specs: Sequence[SpecConfig]) -> None:
    """ValueError unless there is one probability for each level of every tree."""
    for i, value in enumerate(probs):
        require_float(f"synthetic_acceptance[{i}]", value, 0.0, 1.0)
    for spec in specs:
        if len(probs) != spec.max_steps:
            raise ValueError(
                f"synthetic_acceptance must hold one probability a level, {spec.max_steps} for the shape {spec.label}; got "
                f"{len(probs)}; nearest setting that works: a --spec of {len(probs)} levels, or {spec.max_steps} numbers"
            )


def check_profile(max_tokens: int, spec: SpecConfig) -> None:
    """ValueError unless all rounds of the shape cost the same, and outputs are long enough to measure one."""
    if spec.is_auto:
        raise ValueError(f"a profile needs a number of levels, got num_steps={spec.num_steps!r}; nearest setting: num_steps=5")
    if rounds_in(max_tokens, spec) < 1:
        enough = next(n for n in count(max_tokens) if rounds_in(n, spec) >= 1)
        raise ValueError(
            f"a profile needs max_tokens of at least {enough} with num_steps={spec.num_steps}, so that a round can be measured "
            f"after the first ones; got {max_tokens}; nearest setting that works: --max-tokens {enough}"
        )


@using_threads(None)
def run_bench(options: BenchOptions, on_progress: Progress = lambda *_: None) -> Measurement:
    """Every batch size with every tree shape."""
    laps = Laps()
    on_progress("loading", 0, 1)
    tokenizer = Tokenizer(resolve_target(options.target, "target"), options.engine.chat_template)
    asked, sampling = (options.taken, options.prompts_source, options.target), options.effective_sampling
    prompts = encode_prompts(*asked, tokenizer, sampling, options.engine, chat=options.chat)
    with start_ranks(options.engine) as ranks, closing(ranks):
        return _run_cells(options, tokenizer, prompts, ranks, on_progress, laps)


def _run_cells(
    options: BenchOptions, tokenizer: Tokenizer, prompts: list[list[int]], ranks: Ranks, on_progress: Progress, laps: Laps
) -> Measurement:
    """All cells, on one pair.  laps: of the whole benchmark."""
    model, head, settings = _load(options, max(map(len, prompts)), ranks)
    settings = replace(settings, first_accepted=smoke_check(model, head, tokenizer, settings))
    laps.lap("loading")
    forced, rehearsed, explained = options.synthetic_acceptance, set[Any](), Explained()
    result = Measurement(
        machine_facts(settings.device, settings.threads),
        versions() | {"specdec": __version__},  # what runs, which need not be what is installed, if anything is
        _settings(options, settings, model.config) | {"drafter": drafter_line(head, settings) if head else None},
        prompt_facts(prompts, options.prompts, options.prompts_source, chat=options.chat),
        synthetic_acceptance=None if forced is None else list(map(float, forced)),
        bench_seconds=laps.seconds,
    )
    steal, total_cpu = steal_and_total()
    for number, (size, spec) in enumerate(options.work):
        of_cell = Laps()
        _free_memory(settings.device)  # of the last decoder, whose pool would shrink this one's
        chosen = replace(settings.with_options(max_batch_size=size), spec=spec)
        session = Session(SpecDecoder(model, head, chosen, tokenizer, ranks), rehearsed)
        of_cell.lap("decoder")
        if forced is not None:
            session.force_acceptance(forced)
        try:
            on_pass = partial(_report_pass, options, on_progress, number)
            _measure(options, session, prompts, result, on_pass, of_cell, explained)
        except RuntimeError as error:  # a request failed, or memory was short: the other cells may be fine
            shape = spec.numbers if spec else None
            result.failures.append(Failure(size, shape, f"{type(error).__name__}: {error}"))
        del session
    steal, total_cpu = (now - before for now, before in zip(steal_and_total(), (steal, total_cpu)))
    result.machine["cpu_steal"] = steal / total_cpu if total_cpu else 0.0
    if options.profile:
        on_progress("read bandwidth", 0, 1)
        _free_memory(settings.device)
        rate = result.machine["read_bandwidth"] = read_bandwidth(settings.device)  # last: its tensor is no cell's memory
        result.budgets[:] = [replace(budget, bandwidth=rate) for budget in result.budgets]
    laps.lap("cells")
    return result


def _measure(
    options: BenchOptions,
    session: Session,
    prompts: list[list[int]],
    result: Measurement,
    on_pass: Callable[[str, int], None],
    laps: Laps,
    explained: Explained,
) -> None:
    """One batch size with one tree shape: its cell, and if asked for its budgets.  Plain decoding has one a batch size."""
    sampling, size = options.effective_sampling, session.settings.options.max_batch_size
    if session.head is None:
        result.plain_cells.append(measure_plain(session, prompts, sampling, options.repeats, on_pass, laps))
    else:
        result.cells.append(measure_cell(session, prompts, sampling, options.repeats, on_pass, laps, explained))
    if not options.profile:
        return
    done = any(budget.spec is None and budget.batch_size == size for budget in result.budgets)
    params = with_seeds(sampling, size)
    kinds = (False,) if session.head is None else (True,) if done else (False, True)
    for speculate in kinds:
        on_pass("profile (speculative)" if speculate else "profile (plain)", options.sides * (options.repeats + 2) + speculate)
        result.budgets.append(profile_work(session, prompts[:size], params, speculate, bandwidth=math.nan))  # known later
    laps.lap("profile")


def _report_pass(options: BenchOptions, on_progress: Progress, number: int, what: str, index: int) -> None:
    """Reports a pass of one cell by its number among the passes of all cells."""
    passes = options.sides * (options.repeats + 2 + options.profile)
    size, spec = options.work[number]
    name = spec.label if spec else "plain decoding"
    on_progress(f"batch {size}, {name}: {what}", number * passes + index, len(options.work) * passes)


def _load(options: BenchOptions, longest_prompt: int, ranks: Ranks) -> tuple[Target, DraftModel | None, EngineSettings]:
    """Both models, once for all cells, with room in their position tables for the widest look-ahead."""
    # Without a draft it is not looked at.
    widest = max(options.specs, key=lambda spec: options.resolved(spec).lookahead, default=SpecConfig())
    length = options.engine.max_seq_len or longest_prompt + options.sampling.max_tokens
    engine = replace(options.engine, max_batch_size=max(options.batch_sizes), max_seq_len=length)
    model, head, settings, _ = ranks.load(WantedPair(options.target, options.draft, widest, engine))
    for spec in options.specs:
        assert head is not None
        head.shapes(head.resolved(spec), warns=spec != widest)  # loading has warned of the widest
        if options.synthetic_acceptance is not None and spec.topk >= model.config.vocab_size:
            raise ValueError(
                f"synthetic_acceptance needs a token that no branch holds: topk must be below the vocabulary "
                f"{model.config.vocab_size}, got {spec.topk}; nearest setting that works: topk={model.config.vocab_size - 1}"
            )
    return model, head, settings


def _settings(options: BenchOptions, settings: EngineSettings, config: ModelConfig) -> dict[str, Any]:
    """config: the target's."""
    sampling = options.effective_sampling
    return {
        "target": str(options.target),
        "draft": spelled(options.draft),
        **settings.by_option(),
        "attention_reason": settings.attention_backend.reason,
        "backend_reason": settings.target_backend_reason,
        "experts": experts_line(config, settings),
        "mixture_of_experts": config.has_experts,
        "repeats": options.repeats,
        "sampling": {name: getattr(sampling, name) for name in sampling.__dataclass_fields__},
    }


def _free_memory(device: torch.device) -> None:
    free_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
