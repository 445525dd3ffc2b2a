"""The metrics of several replicas as one page: each sample gets a label `replica`.  Knows no Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

Families = list[Metric]
REPLICAS = ("specdec_replicas", "Replicas that have told their numbers")


@dataclass
class MergedMetrics(Collector):
    """by_replica: what each replica's own collector gives."""

    by_replica: Mapping[str, Families]

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(*REPLICAS, value=len(self.by_replica))
        merged: dict[str, Metric] = {}
        for replica, families in sorted(self.by_replica.items()):
            for family in families:
                into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    into.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
        yield from merged.values()


def exposition(by_replica: Mapping[str, Families]) -> bytes:
    """The page in Prometheus' text format."""
    return generate_latest(MergedMetrics(by_replica))
