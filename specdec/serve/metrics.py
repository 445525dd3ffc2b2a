"""What /metrics shows: the engine's totals in the form of Prometheus.  Every metric stands in one of the tables here.

Every series is there from the start, with 0: a rate over a series that began with its first event misses that event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from specdec.engine.totals import Histogram, Totals
from specdec.serve.options import ServeOptions
from specdec.serve.process.output import lines_dropped
from specdec.serve.state import Counts

GAUGES: dict[str, tuple[str, str]] = {  # name behind specdec_: field of Totals, meaning
    "running": ("running", "Requests that hold a row of the batch"),
    "waiting": ("waiting", "Requests that wait for a row or for pages"),
    "pages_used": (
        "pages_used",
        "Pages of keys and values that requests own or read; of layers that read all keys, if others have own pages",
    ),
    "pages": ("pages_total", "These pages altogether"),
    "local_pages_used": (
        "local_pages_used",
        "Pages of windowed and chunked layers that requests own; 0 if these layers have no pages of their own",
    ),
    "local_pages": ("local_pages_total", "These pages altogether"),
    "states_used": (
        "states_used",
        "States of recurrent layers that are kept for later prompts; 0 for targets without such layers",
    ),
    "states": ("states_total", "How many such states can be kept"),
    "audit_waiting": ("audit_waiting", "Finished answers that the audit is to compare; 64 at most"),
    "drafting_stopped": ("drafting_stopped", "1 while nothing is drafted, because an audit or somebody has stopped it"),
}
AUDIT_AGE = ("specdec_audit_oldest_seconds", "Seconds for which the first of these has waited; 0 without one")
COUNTERS: dict[str, str] = {  # field of Totals: meaning; the metric's name is specdec_, the field and _total
    "prompt_tokens": "Prompt tokens of requests that have entered the batch",
    "cached_tokens": "Prompt tokens that the prefix cache held",
    "output_tokens": "Tokens that requests have generated",
    "rounds": "Rounds, passes that verify or decode the whole batch",
    "chunks": "Passes over parts of prompts",
    "stepped_back": "Requests that gave row and pages to older ones, to go on later",
    "recomputed_tokens": "Tokens that were read once more for it",
    "drafted": "Draft tokens proposed",
    "accepted": "Draft tokens accepted",
    "speculated": "Rounds of a request that verified a draft",
    "audit_texts": "Finished answers that the audit has compared with the target",
    "audit_tokens": "Tokens of these answers",
    "audit_mismatch": "Tokens of these that the target would not write, and that rounding does not explain",
    "audit_interrupted": "Times that the audit made way for requests, to go on later",
}
DEPTHS: dict[str, str] = {  # likewise, with the label depth, from 1
    "reached_by_depth": "Rounds of a request that accepted all levels of the draft tree before this one",
    "accepted_by_depth": "Rounds of a request that accepted this level of the draft tree too",
}
HISTOGRAMS: dict[str, str] = {  # likewise; the names end in _seconds
    "first_token": "Seconds from a request's arrival to its first token",
    "between_tokens": "Seconds between tokens of a request after its first",
    "queue": "Seconds from a request's arrival to its first row and pages",
    "request": "Seconds from a request's arrival to its end, however it ended",
}
REQUESTS = ("specdec_requests", "Requests that have ended, by how: eos, stop, length, error or cancelled", ("reason",))
SKIPPED = ("specdec_audit_skipped", "Answers that the audit chose and did not compare, by why: long, queue or failed", ("why",))
RESPONSES = ("specdec_http_responses", "HTTP responses, by status; 499: the client had gone", ("status",))
HTTP_REQUESTS = (
    "specdec_http_requests",
    "HTTP requests that have ended, by path and by how: done, refused, failed or gone",
    ("path", "end"),
)
CONNECTIONS = ("specdec_http_connections", "HTTP connections that are open", ())
CUT = ("specdec_http_connections_cut", "HTTP connections refused or closed, by why: full, idle, slow or unread", ("why",))
FULL, IDLE, SLOW, UNREAD = CUTS = "full", "idle", "slow", "unread"  # each has its number from the start
LINES_DROPPED = (
    "specdec_log_lines_dropped",
    "Lines of the log that were lost, because nobody read it or the disk was full",
    (),
)
STATUSES = (200, 204, 400, 401, 404, 405, 408, 413, 415, 421, 429, 499, 500, 503)  # that the server answers with; likewise
Counted = Mapping[tuple[str, ...], float]  # values of a metric's labels -> number


class TotalsCollector(Collector):
    """Reads the totals whenever somebody asks for the metrics.

    counts: what the server counts.  options: of the server; their model's name is a label of every metric that starts with
    specdec_, and they say which aliases there are.
    """

    def __init__(self, totals: Callable[[], Totals], counts: Counts, options: ServeOptions) -> None:
        self._totals, self._counts, self._options = totals, counts, options
        self._process = ProcessCollector(registry=None)

    def describe(self) -> list[Metric]:
        """Nothing: the registry would otherwise collect once when it is made, before there is anything to read."""
        return []

    def collect(self) -> Iterator[Metric]:
        totals = self._totals()
        for family in (*_of_engine(totals), *_of_server(self._counts)):
            yield _with_label(family, "model", self._options.name)
        for alias in self._options.aliases:
            yield from ALIASES[alias](totals, self._options.name)
        yield from self._process.collect()


def registry_of(totals: Callable[[], Totals], counts: Counts, options: ServeOptions) -> CollectorRegistry:
    """A registry of these metrics alone."""
    registry = CollectorRegistry()
    registry.register(TotalsCollector(totals, counts, options))
    return registry


def _of_engine(totals: Totals) -> Iterator[Metric]:
    for name, (field, meaning) in GAUGES.items():
        yield GaugeMetricFamily(f"specdec_{name}", meaning, value=getattr(totals, field))
    since = totals.audit_waits_since
    yield GaugeMetricFamily(*AUDIT_AGE, value=0.0 if since is None else time.monotonic() - since)
    for name, meaning in COUNTERS.items():
        yield CounterMetricFamily(f"specdec_{name}", meaning, value=getattr(totals, name))
    for name, meaning in DEPTHS.items():
        yield _labelled((f"specdec_{name}", meaning, ("depth",)), _by_place(getattr(totals, name), first=1))
    yield _labelled(REQUESTS, {(how,): count for how, count in totals.requests.copy().items()})
    yield _labelled(SKIPPED, {(why,): count for why, count in totals.audit_skipped.copy().items()})
    for name, meaning in HISTOGRAMS.items():
        yield _histogram(f"specdec_{name}_seconds", meaning, getattr(totals, name))


def _of_server(counts: Counts) -> Iterator[Metric]:
    statuses = sorted({*STATUSES, *counts.responses})
    yield _labelled(RESPONSES, {(str(status),): counts.responses[status] for status in statuses})
    yield _labelled(HTTP_REQUESTS, counts.requests.copy())
    yield GaugeMetricFamily(*CONNECTIONS[:2], value=counts.connections)
    yield _labelled(CUT, {(why,): counts.cut_connections[why] for why in CUTS})
    yield CounterMetricFamily(*LINES_DROPPED[:2], value=lines_dropped())


# ---- the names of other servers, for dashboards that read them ----


def _of_vllm(totals: Totals, model: str) -> Iterator[Metric]:
    """The counters of speculation.  A draft there is a round of a request that verified one here; position 0 is depth 1."""
    names = ("model_name", "engine")
    counters = {
        "drafts": ("Rounds of a request that verified a draft", totals.speculated),
        "draft_tokens": ("Draft tokens proposed", totals.drafted),
        "accepted_tokens": ("Draft tokens accepted", totals.accepted),
    }
    for name, (meaning, number) in counters.items():
        yield _labelled((f"vllm:spec_decode_num_{name}", meaning, names), {(model, "0"): number})
    by_position = {(model, "0", *place): count for place, count in _by_place(totals.accepted_by_depth, first=0).items()}
    meaning = "Draft tokens accepted, by their depth less 1"
    yield _labelled(("vllm:spec_decode_num_accepted_tokens_per_pos", meaning, (*names, "position")), by_position)


def _of_sglang(totals: Totals, model: str) -> Iterator[Metric]:
    """Its gauges are of the last moments, these of all rounds since the start.  Before the first round both are 0."""
    rounds = totals.speculated
    gauges = {
        "length": (
            "Tokens that a round with a draft emitted, the target's own included",
            (totals.accepted + rounds) / max(1, rounds),
        ),
        "rate": ("Share of the draft tokens that were accepted", totals.accepted / max(1, totals.drafted)),
    }
    for name, (meaning, number) in gauges.items():
        family = GaugeMetricFamily(f"sglang:spec_accept_{name}", meaning, labels=["model_name"])
        family.add_metric([model], number)
        yield family


ALIASES: dict[str, Callable[[Totals, str], Iterator[Metric]]] = {"vllm": _of_vllm, "sglang": _of_sglang}


# ---- families ----


def _by_place(counts: list[int], first: int) -> dict[tuple[str, ...], float]:
    return {(str(first + i),): count for i, count in enumerate(counts)}


def _labelled(metric: tuple[str, str, tuple[str, ...]], counts: Counted) -> Metric:
    name, meaning, labels = metric
    family = CounterMetricFamily(name, meaning, labels=labels)
    for values, count in counts.items():
        family.add_metric(values, count)
    return family


def _with_label(family: Metric, label: str, value: str) -> Metric:
    """The same family, whose samples have one more label."""
    made = Metric(family.name, family.documentation, family.type)
    for sample in family.samples:
        made.add_sample(sample.name, {**sample.labels, label: value}, sample.value)
    return made


def _histogram(name: str, meaning: str, histogram: Histogram) -> Metric:
    counts = list(histogram.counts)  # copied once: the engine counts on
    bounds = [*(repr(bound) for bound in histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(counts), strict=True))
    return HistogramMetricFamily(name, meaning, buckets=buckets, sum_value=histogram.total)
