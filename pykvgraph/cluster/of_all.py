"""What several workers tell of themselves by their metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pykvgraph.server.metrics import PREFIX

# of what counts_of() tells: counters, and gauges of which each group of cells has one
_COUNTS = "prompt_tokens", "prompt_tokens_cached", "tier_loaded_tokens", "tokens_predicted"
_SUMS = "cells_used", "cells_total"


def labelled(texts: Mapping[int, str]) -> bytes:
    """Metrics in Prometheus's format, of each worker: one text, where each sample has its worker's number."""
    registry = CollectorRegistry()
    registry.register(_Labelled(texts))
    return generate_latest(registry)


class _Labelled:
    def __init__(self, texts: Mapping[int, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client asks."""
        families: dict[str, Metric] = {}
        for number, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                kept = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {"worker": str(number), **sample.labels}
                    kept.add_sample(sample.name, labels, sample.value)
        yield from families.values()


def counts_of(text: str) -> dict[str, int]:
    """What a worker has done, of its metrics in Prometheus's format: tokens, and cells of all groups."""
    found: dict[str, int] = {}
    wanted = {f"{PREFIX}{name}_total": name for name in _COUNTS} | {f"{PREFIX}{name}": name for name in _SUMS}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in wanted:
                name = wanted[sample.name]
                found[name] = found.get(name, 0) + int(sample.value)
    return found
