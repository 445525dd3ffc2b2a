"""What the load benchmark publishes of its clients' records: rates, percentiles, failures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from statistics import median
from typing import Any

from serving.clients import Record


def rates(start: float, records: Sequence[Record]) -> dict[str, Any]:
    """Output tokens and requests a second from the start to the end of the last stream, and what failed."""
    seconds = max(record.ended for record in records) - start
    answered = [record for record in records if record.error is None]
    tokens = sum(record.tokens for record in answered)
    return {
        "seconds": seconds, "requests": len(records), "tokens": tokens, "tok_s": tokens / seconds,
        "requests_s": len(answered) / seconds, "failures": len(records) - len(answered),
        "errors": sorted({record.error for record in records if record.error}),
    }  # fmt: skip


def latencies(records: Iterable[Record]) -> dict[str, Any]:
    """Percentiles in milliseconds, over answered streams.

    first_token: from sending to the first text.  wait: from when a request was due to sending it.
    between_tokens: a piece of text with m tokens that came t after the one before counts as m times t / m.  `all` is over
    all tokens of all streams; `stream_p50` and `stream_p99` are the middle one of the streams' own percentiles.
    counted_share: tokens that were counted in the text, of those that the server says it wrote.
    """
    answered = [record for record in records if record.error is None and record.chunks]
    gaps = [between_tokens(record) for record in answered]
    own = [each for each in gaps if each]
    counted = sum(tokens for record in answered for _, tokens in record.chunks)
    return {
        "streams": len(answered),
        "first_token_ms": percentiles(record.chunks[0][0] - record.sent for record in answered),
        "wait_ms": percentiles(record.sent - record.arrived for record in answered),
        "between_tokens_ms": {
            "all": percentiles(gap for each in gaps for gap in each),
            "stream_p50": 1e3 * median(percentile(each, 50) for each in own) if own else None,
            "stream_p99": 1e3 * median(percentile(each, 99) for each in own) if own else None,
        },
        "longest_pause_ms": 1e3 * max((pause for record in answered for pause in pauses(record)), default=0.0),
        "counted_share": counted / max(1, sum(record.tokens for record in answered)),
    }  # fmt: skip


def pauses(record: Record) -> list[float]:
    """Seconds between each two pieces of text."""
    times = [when for when, _ in record.chunks]
    return [after - before for before, after in zip(times, times[1:], strict=False)]


def between_tokens(record: Record) -> list[float]:
    """Seconds between tokens: one number for each token after the first piece of text."""
    pairs = zip(pauses(record), record.chunks[1:], strict=True)
    return [pause / max(1, tokens) for pause, (_, tokens) in pairs for _ in range(max(1, tokens))]


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """p50, p99 in milliseconds; None without values."""
    listed = list(values)
    return {"p50": 1e3 * percentile(listed, 50), "p99": 1e3 * percentile(listed, 99)} if listed else None


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least this share of the values does not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, ceil(len(ordered) * percent / 100) - 1)]
