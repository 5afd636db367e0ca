"""What several workers tell of themselves, as one text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families


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
