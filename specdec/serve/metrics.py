"""What /metrics shows: the engine's totals in the form of Prometheus.  Every metric stands in one of the tables here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.engine.totals import Histogram, Totals
from specdec.serve.process.output import lines_dropped
from specdec.serve.state import Counts

GAUGES: dict[str, str] = {  # field of Totals: meaning; the metric's name is specdec_ and the field
    "running": "Requests that hold a row of the batch",
    "waiting": "Requests that wait for a row or for pages",
    "pages_used": "Pages of keys and values that requests own or read; of layers that read all keys, if others have own pages",
    "pages_total": "These pages altogether",
    "local_pages_used": "Pages of windowed and chunked layers that requests own; 0 if these layers have no pages of their own",
    "local_pages_total": "These pages altogether",
    "states_used": "States of recurrent layers that are kept for later prompts; 0 for targets without such layers",
    "states_total": "How many such states can be kept",
    "drafting_stopped": "1 while nothing is drafted, because an audit or somebody has stopped it",
}
COUNTERS: dict[str, str] = {  # likewise; the names end in _total
    "prompt_tokens": "Prompt tokens of requests that have entered the batch",
    "cached_tokens": "Prompt tokens that the prefix cache held",
    "output_tokens": "Tokens that requests have generated",
    "rounds": "Rounds, passes that verify or decode the whole batch",
    "chunks": "Passes over parts of prompts",
    "stepped_back": "Requests that gave row and pages to older ones, to go on later",
    "recomputed_tokens": "Tokens that were read once more for it",
    "drafted": "Draft tokens proposed",
    "accepted": "Draft tokens accepted",
    "audit_texts": "Finished answers that the audit has compared with the target",
    "audit_tokens": "Tokens of these answers",
    "audit_mismatch": "Tokens of these that the target would not write, and that rounding does not explain",
    "audit_interrupted": "Passes of the audit that made way for requests, to begin anew later",
}
DEPTHS: dict[str, str] = {  # likewise, with the label depth, from 1
    "reached_by_depth": "Rounds of a request that accepted all levels of the draft tree before this one",
    "accepted_by_depth": "Rounds of a request that accepted this level of the draft tree too",
}
HISTOGRAMS: dict[str, str] = {  # likewise; the names end in _seconds
    "first_token": "Seconds from a request's arrival to its first token",
    "between_tokens": "Seconds between tokens of a request after its first",
}
REQUESTS = ("specdec_requests", "Requests that have ended, by how: eos, stop, length, error or cancelled", "reason")
SKIPPED = ("specdec_audit_skipped", "Answers that the audit chose and did not compare, by why: long, queue or failed", "why")
RESPONSES = ("specdec_http_responses", "HTTP responses, by status; 499: the client had gone", "status")
CONNECTIONS = ("specdec_http_connections", "HTTP connections that are open")
CUT = ("specdec_http_connections_cut", "HTTP connections refused or closed, by why: full, idle, slow or unread", "why")
FULL, IDLE, SLOW, UNREAD = CUTS = "full", "idle", "slow", "unread"  # each has its number from the start
LINES_DROPPED = ("specdec_log_lines_dropped", "Lines of the log that were lost, because nobody read it or the disk was full")


class TotalsCollector(Collector):
    """Reads the totals whenever somebody asks for the metrics.

    counts: what the server counts.
    """

    def __init__(self, totals: Callable[[], Totals], counts: Counts) -> None:
        self._totals, self._counts = totals, counts

    def describe(self) -> list[Metric]:
        """Nothing: the registry would otherwise collect once when it is made, before there is anything to read."""
        return []

    def collect(self) -> Iterator[Metric]:
        totals = self._totals()
        for name, meaning in GAUGES.items():
            yield GaugeMetricFamily(f"specdec_{name}", meaning, value=getattr(totals, name))
        for name, meaning in COUNTERS.items():
            yield CounterMetricFamily(f"specdec_{name}", meaning, value=getattr(totals, name))
        for name, meaning in DEPTHS.items():
            counts = {str(i + 1): count for i, count in enumerate(getattr(totals, name))}
            yield _labelled((f"specdec_{name}", meaning, "depth"), counts)
        yield _labelled(REQUESTS, dict(totals.requests.copy()))
        yield _labelled(SKIPPED, dict(totals.audit_skipped.copy()))
        yield _labelled(RESPONSES, {str(status): count for status, count in sorted(self._counts.responses.items())})
        yield GaugeMetricFamily(*CONNECTIONS, value=self._counts.connections)
        yield _labelled(CUT, {why: self._counts.cut_connections[why] for why in CUTS})
        yield CounterMetricFamily(*LINES_DROPPED, value=lines_dropped())
        for name, meaning in HISTOGRAMS.items():
            yield _histogram(f"specdec_{name}_seconds", meaning, getattr(totals, name))


def registry_of(totals: Callable[[], Totals], counts: Counts) -> CollectorRegistry:
    """A registry of these metrics alone."""
    registry = CollectorRegistry()
    registry.register(TotalsCollector(totals, counts))
    return registry


def _labelled(metric: tuple[str, str, str], counts: dict[str, int]) -> Metric:
    name, meaning, label = metric
    family = CounterMetricFamily(name, meaning, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _histogram(name: str, meaning: str, histogram: Histogram) -> Metric:
    counts = list(histogram.counts)  # copied once: the engine counts on
    bounds = [*(repr(bound) for bound in histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(counts), strict=True))
    return HistogramMetricFamily(name, meaning, buckets=buckets, sum_value=histogram.total)
