"""/metrics: what was done so far, as Prometheus reads it. llama-server's metrics have its names, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from pykvgraph.engine import Engine
from pykvgraph.engine.types import TierStats
from pykvgraph.openai.sample import Sample
from pykvgraph.server.slots import Slots

PREFIX = "kvgraph:"
LLAMA_PREFIX = "llamacpp:"
_LLAMA_NAMES = frozenset(
    (
        *("prompt_tokens", "prompt_tokens_cached", "prompt_seconds", "prompt_tokens_seconds"),
        *("tokens_predicted", "tokens_predicted_seconds", "predicted_tokens_seconds", "n_tokens_max"),
        *("n_decode", "n_busy_slots_per_decode", "requests_processing", "requests_deferred"),
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    )
)
_LLAMA_COUNTERS = frozenset(("n_tokens_max",))  # which are gauges here


class Metrics:
    """Counts samples as they end, and asks the engine for the rest when somebody reads.

    Rates are of the samples that have ended since somebody read last. engine: None until it is there.
    """

    def __init__(self, slots: Slots, engine: Callable[[], Engine | None]) -> None:
        self._slots = slots
        self._engine = engine
        self._prompt_tokens = self._cached_tokens = self._predicted_tokens = self._longest = 0
        self._prompt_seconds = self._predicted_seconds = 0.0
        self._prompts, self._answers = _Rate(), _Rate()

    def add(self, sample: Sample) -> None:
        """A sample has ended."""
        n_decoded, n_steps = len(sample.prompt) - sample.n_cached, max(sample.n_said - 1, 0)
        self._prompt_tokens += n_decoded
        self._cached_tokens += sample.n_cached
        self._predicted_tokens += sample.n_said
        self._prompt_seconds += sample.first - sample.begun
        self._predicted_seconds += sample.last - sample.first
        self._prompts.add(n_decoded, sample.first - sample.begun)
        self._answers.add(n_steps, sample.last - sample.first)  # the first token came with the prompt
        self._longest = max(self._longest, len(sample.prompt) + sample.n_said)

    def text(self) -> bytes:
        """In Prometheus's text format."""
        engine = self._engine()
        families = [] if engine is None else [*self._of_answers(), *self._of_engine(engine)]
        registry = CollectorRegistry()
        registry.register(_Told(families))
        return generate_latest(registry) + "".join(map(_as_llama_server, families)).encode()

    def _of_answers(self) -> Iterator[Metric]:
        yield _counter("prompt_tokens", "Prompt tokens that were decoded", self._prompt_tokens)
        yield _counter("prompt_tokens_cached", "Prompt tokens that were in the cache", self._cached_tokens)
        yield _counter("prompt_seconds", "Seconds from a request to its first token", self._prompt_seconds)
        yield _counter("tokens_predicted", "Tokens that were generated", self._predicted_tokens)
        yield _counter(
            "tokens_predicted_seconds", "Seconds from first to last token", self._predicted_seconds
        )
        yield _gauge("n_tokens_max", "Tokens of the longest text", self._longest)
        yield _gauge("prompt_tokens_seconds", "Prompt tokens a second", self._prompts.take())
        yield _gauge(
            "predicted_tokens_seconds", "Generated tokens a second, of one answer", self._answers.take()
        )

    def _of_engine(self, engine: Engine) -> Iterator[Metric]:
        slots, stats = self._slots, engine.stats()
        yield _gauge("requests_processing", "Texts that are answered", slots.n_processing)
        yield _gauge("requests_deferred", "Texts that wait for a slot", slots.n_deferred)
        yield _counter("n_decode", "Steps of the engine", stats.steps)
        busy = stats.decoded_tokens / stats.steps if stats.steps else 0.0
        yield _gauge("n_tokens_per_decode", "Tokens that a step decodes", busy)
        busy = stats.stepped_texts / stats.steps if stats.steps else 0.0
        yield _gauge("n_busy_slots_per_decode", "Texts of a step", busy)
        yield _counter(
            "decoded_tokens", "Tokens that were decoded, of prompts and answers", stats.decoded_tokens
        )
        yield _counter("prefix_hit_tokens", "Prompt tokens shared with other texts", stats.prefix_hit_tokens)
        yield _counter("edited_tokens", "Of these, approximate ones of edited texts", stats.edited_tokens)
        yield _counter("prefix_asked_tokens", "Prompt tokens of all texts that began", stats.prompt_tokens)
        yield _counter(
            "decoded_again", "Prompt tokens decoded though the cache had them", stats.decoded_again
        )
        yield _counter("spec_decode_num_drafts", "Drafts that were decoded", stats.drafts)
        yield _counter("spec_decode_num_draft_tokens", "Tokens of drafts", stats.drafted)
        yield _counter("spec_decode_num_accepted_tokens", "Tokens of drafts that were said", stats.accepted)
        yield _by_reason("spec_decode_refused", "Steps with fewer drafts, or none", stats.drafts_refused)
        yield _counter("preempted", "Texts whose cells were taken away for a while", stats.n_preempted)
        yield _gauge("running", "Texts in the engine", stats.n_running)
        yield _gauge("waiting", "Texts that wait to enter the engine", stats.n_waiting)
        yield _gauge("prefix_blocks", "Blocks of the index of prefixes", stats.n_blocks)
        yield _gauge("resume_points", "Resume points of the index of prefixes", stats.n_resume_points)
        yield _gauge("compressed_prefixes", "Prefixes in fewer cells", stats.n_compressed)
        yield _gauge("prefixes_to_compress", "Prefixes that wait to be compressed", stats.n_to_compress)
        if stats.tiers is not None:
            yield from _of_tiers(stats.tiers)
        used = _family("cells_used", "Cells that are in use, by group")
        total = _family("cells_total", "Cells, by group")
        for i, group in enumerate(engine.context.kv.groups):
            used.add_metric([str(i), group.kind], group.n_used)
            total.add_metric([str(i), group.kind], group.n_cells)
        yield used
        yield total


def _of_tiers(tiers: TierStats) -> Iterator[Metric]:
    yield _counter("tier_loaded_tokens", "Prompt tokens that came back from tiers", tiers.loaded_tokens)
    yield _counter("tier_saved", "Parts of texts that went to memory", tiers.saved)
    yield _counter("tier_written", "Parts of texts that went to the disk", tiers.written)
    yield _counter("tier_dropped", "Parts of texts that were not kept", tiers.dropped)
    yield _counter("tier_unwritten", "Parts of texts that the disk refused", tiers.unwritten)
    held = GaugeMetricFamily(PREFIX + "tier_bytes", "Bytes in tiers", labels=["tier"])
    held.add_metric(["ram"], tiers.ram_bytes)
    held.add_metric(["disk"], tiers.disk_bytes)
    yield held
    yield _by_reason("tier_misses", "Loads that failed", tiers.misses)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _by_reason(name: str, text: str, counts: Mapping[str, int]) -> Metric:
    found = CounterMetricFamily(PREFIX + name, text, labels=["reason"])
    for reason, n in counts.items():
        found.add_metric([reason], n)
    return found


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _family(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=["group", "kind"])


def _as_llama_server(family: Metric) -> str:
    """A metric under llama-server's name; "" for one that it doesn't have."""
    name = family.name.removeprefix(PREFIX)
    if name not in _LLAMA_NAMES:
        return ""
    kind = "counter" if name in _LLAMA_COUNTERS else family.type
    (sample,) = family.samples
    name = LLAMA_PREFIX + sample.name.removeprefix(PREFIX)
    return f"# HELP {name} {family.documentation}\n# TYPE {name} {kind}\n{name} {sample.value}\n"


class _Told:
    """Metrics for prometheus_client."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        yield from self._families


class _Rate:
    """Of things a second, since it was taken last."""

    def __init__(self) -> None:
        self._n, self._seconds = 0, 0.0

    def add(self, n: int, seconds: float) -> None:
        """So many things more, which took so long."""
        self._n += n
        self._seconds += seconds

    def take(self) -> float:
        """0.0 where nothing was added."""
        n, seconds, self._n, self._seconds = self._n, self._seconds, 0, 0.0
        return n / seconds if seconds > 0 else 0.0
