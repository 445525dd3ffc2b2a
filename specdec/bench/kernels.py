"""Where the GPU's time goes: a profiler's trace of a few rounds, split by kind of kernel and by phase, and the gaps between.

Kernels are recognised by name.  This file knows no engine: the caller hands over a function that runs one round.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from specdec.bench.budget import (
    ATTENTION,
    COPY,
    EXCHANGE,
    GEMM,
    KINDS,
    NORM,
    OTHER,
    RECURRENT,
    TRACED_PHASES,
    TREE,
    KernelSplit,
)

PATTERNS = (  # the first pattern that occurs in a kernel's short name says its kind
    (EXCHANGE, r"nccl|^(flat|few_rows|many_rows|all_to_all_states)_kernel"),
    (COPY, r"memcpy|memset"),
    (
        RECURRENT,
        r"_rule|convolution|gated_norm|^ssd_|^(tree_nodes|chunk_prepare|chunk_scan|state_numbers|commit_states|kimi_\w+)_kernel",
    ),
    (NORM, r"norm|rope|rotate|^activation_kernel|output_gate|convolve"),
    (
        ATTENTION,
        r"attention|paged|latent|suffix|store|flash|fmha|sinks|subtract|upconvert|_scores|kv_blocks|_queries|first_keys|local_"
        r"|^(filter|select|rows_hopper|wide_hopper|wide_many_hopper|merge_rows|path)_kernel",
    ),
    (
        GEMM,
        r"gemm|gemv|nvjet|cutlass|splitk|cublas|linear|quantis|expert|router|few_|held_|one_row|_pairs|spread|weighted_sum|take_columns",
    ),
    (TREE, r"(?<!s)top|sort|radix|scan|merge|level|expand|fork|grow|best|narrow|cutoff|tables|tokens|accept|move|rows"),
    (
        TREE,
        r"gather|scatter|index|search|softmax|reduce|noise|perturb|arrange|logits|chain|round|last_positions|match_keys|prepend|^pack_"
        r"|^(rates|match_paths|write_text|continuations|predicted_paths|follow|join|learn|halve_counts|tree_numbers|halt)_kernel|^soft_entropy",
    ),
    (NORM, r"elementwise|copy|cat|fill|arange|roll"),
)
# Kernels that begin a part of a round.  Which part it is follows from the marks before and after it.
FIRST_LEVEL, BEST_NODES, NEXT_TOKENS, ACCEPT = "first_level_kernel", "best_nodes_kernel", "next_tokens_kernel", "accept_kernel"
MARKS = {FIRST_LEVEL, BEST_NODES, "path_tables_kernel", NEXT_TOKENS, ACCEPT}
MAX_NAMED = 8


class Span(NamedTuple):
    """One kernel on the GPU.  Microseconds."""

    name: str
    start: float
    end: float


def trace(step: Callable[[], object], rounds: int, device: torch.device, named: int = MAX_NAMED) -> KernelSplit:
    """Traces `rounds` calls of step(), which must run one round each, on a GPU.  Warm up before.

    named: of how many kernels the split tells names, the longest ones first.
    """
    assert device.type == "cuda" and rounds > 0
    torch.cuda.synchronize(device)
    activities = [torch.profiler.ProfilerActivity.CUDA]  # the host's operators left out: recording them would slow it
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(rounds):
            step()
        torch.cuda.synchronize(device)
    events = [event for event in profiler.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    return split((Span(event.name, event.time_range.start, event.time_range.end) for event in events), rounds, named)


def split(spans: Iterable[Span], rounds: int, named: int = MAX_NAMED) -> KernelSplit:
    """Splits a trace of so many rounds.  named: as of `trace`.

    A chained kernel starts before its predecessor ends, and waits for it.  So an instant belongs to the kernel that started
    first, and waiting is not counted as work.
    """
    ordered = sorted((Span(short_name(name), start, end) for name, start, end in spans), key=lambda span: span[1:])
    phases = phases_of([span.name for span in ordered])
    by_kind, by_phase = dict.fromkeys(KINDS, 0.0), dict.fromkeys(phases, 0.0)
    by_name: dict[str, tuple[float, int]] = {}
    idle, now = 0.0, ordered[0].start if ordered else 0.0
    for (name, start, end), phase in zip(ordered, phases, strict=True):
        idle += max(0.0, start - now)
        own = max(0.0, end - max(start, now))
        now = max(now, end)
        by_kind[kind_of(name)] += own
        by_phase[phase] += own
        spent, launches = by_name.get(name, (0.0, 0))
        by_name[name] = spent + own, launches + 1
    longest = sorted(by_name.items(), key=lambda item: -item[1][0])[:named]
    return KernelSplit(
        rounds,
        {kind: spent / 1e3 / rounds for kind, spent in by_kind.items() if spent},
        {phase: by_phase[phase] / 1e3 / rounds for phase in TRACED_PHASES if phase in by_phase},
        idle / 1e3 / rounds,
        sum(kind_of(span.name) != COPY for span in ordered) / rounds,
        [(name, spent / 1e3 / rounds, launches / rounds) for name, (spent, launches) in longest],
    )


def phases_of(names: Sequence[str]) -> list[str]:
    """The phase that each kernel of whole rounds works for, found by the kernels that begin a phase; "" where none did.

    The part that ends in an accept is the verify, the part after the accept is the extend, and the others are the next draft.
    """
    marks: list[int] = []
    for i, name in enumerate(names):  # with two groups of layers there are two tables, made one right after the other
        if name in MARKS and not (marks and marks[-1] == i - 1 and names[i - 1] == name):
            marks.append(i)
    if not any(names[i] == ACCEPT for i in marks):
        return [""] * len(names)
    phases = []
    for number, i in enumerate(marks):
        before, after = (names[marks[j]] if 0 <= j < len(marks) else "" for j in (number - 1, number + 1))
        if names[i] == ACCEPT:
            phase = "accept, commit"
        elif after == ACCEPT:
            phase = "verify"
        elif before == ACCEPT:
            phase = "extend"
        else:
            phase = "build" if names[i] == BEST_NODES else "draft"
        phases.append(phase)
    if "extend" not in phases:
        phases = [phase.replace("verify", "decode") for phase in phases]
    ends = [0, *marks[1:], len(names)]  # the few operations before the first mark belong to it
    return [phase for phase, start, end in zip(phases, ends, ends[1:]) for _ in range(start, end)]


def short_name(name: str) -> str:
    """A kernel's name without return type, namespaces and template arguments, since these may contain any word."""
    if "cutlass" in name or "cublas" in name.lower():
        return ("flash: " if re.search("flash|fmha", name) else "") + ("cutlass" if "cutlass" in name else "cublas")
    bare = re.split(r"[<(]", name.replace("(anonymous namespace)::", ""), maxsplit=1)[0]
    return bare.split("::")[-1].removeprefix("void ").strip() or name


def kind_of(short: str) -> str:
    """The kind of the kernel that has this short name."""
    lowered = short.lower()
    return next((kind for kind, pattern in PATTERNS if re.search(pattern, lowered)), OTHER)
