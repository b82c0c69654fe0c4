"""Metrics for Prometheus (`/metrics`)."""

from __future__ import annotations

from collections.abc import Iterator

from hf_diffkv.extras import install

try:
    from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(f"a server needs prometheus-client, which is not installed: {install('serve')}.") from error

from ..batching.manager import DiffKVBatchingManager
from ..batching.records import RequestRecord
from .health import Health

# upper bounds in seconds
FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
PER_TOKEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
# paths that are counted by name
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models")


class Metrics:
    """Counts and times of one server.

    Args:
        engine: engine whose records are counted from now on.
    """

    def __init__(self, engine: DiffKVBatchingManager, health: Health) -> None:
        # their creation times would double the output
        disable_created_metrics()
        registry = self._registry = CollectorRegistry()
        self._first = Histogram(
            "hf_diffkv_time_to_first_token_seconds",
            "From a request's arrival at the engine to its first token.",
            buckets=FIRST_TOKEN,
            registry=registry,
        )
        self._each = Histogram(
            "hf_diffkv_time_per_output_token_seconds",
            "Mean time of a request's tokens after the first.",
            buckets=PER_TOKEN,
            registry=registry,
        )
        self._whole = Histogram(
            "hf_diffkv_request_duration_seconds",
            "From a request's arrival at the engine to its end.",
            buckets=WHOLE,
            registry=registry,
        )
        text, labels = "Answers by path and status.", ["path", "status"]
        self._http = Counter("hf_diffkv_http_requests", text, labels, registry=registry)
        text, labels = "Requests that left the engine, by reason.", ["finish_reason"]
        self._finished = Counter("hf_diffkv_requests_finished", text, labels, registry=registry)
        registry.register(_EngineCollector(engine, health))
        ProcessCollector(registry=registry)
        engine.records.ended = self.note_end

    def note_end(self, record: RequestRecord) -> None:
        """Counts a request that has left the engine."""
        self._finished.labels(record.finish_reason).inc()
        if record.ended is not None:
            self._whole.observe(record.ended - record.created)
        if record.first_token is not None and record.last_token is not None:
            self._first.observe(record.first_token - record.created)
            if record.generated_tokens > 1:
                self._each.observe((record.last_token - record.first_token) / (record.generated_tokens - 1))

    def note_answer(self, path: str, status: int) -> None:
        """Counts an answered HTTP request."""
        self._http.labels(path if path in PATHS else "other", str(status)).inc()

    def text(self, accept: str) -> tuple[bytes, str]:
        """Returns all metrics, in the format that the header `accept` asks for, and their content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _EngineCollector(Collector):
    """Queries the engine on each collection."""

    def __init__(self, engine: DiffKVBatchingManager, health: Health) -> None:
        self._engine, self._health = engine, health

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        failed, draining = self._health.failure is not None, self._health.draining_since is not None
        yield _gauge("engine_up", "1 while the engine runs, 0 when it failed.", float(not failed))
        yield _counter("engine_failures", "Failures that ended the engine.", float(failed))
        yield _gauge("draining", "1 while the server is stopping.", float(draining))
        found = self._engine.statistics()
        if found is None:
            return
        memory = found.memory
        yield _gauge("requests_waiting", "Requests that have no memory yet.", found.waiting)
        yield _gauge("requests_running", "Requests in flight, including prompts in progress.", memory.requests)
        yield _gauge("slots", "Slots for requests created so far.", memory.slots)
        yield _counter("prompt_tokens", "Tokens of prompts that were computed.", found.prompt_tokens)
        yield _counter("generated_tokens", "Tokens handed out.", found.generated_tokens)
        yield _gauge("pages_free_ratio", "Share of the budget's pages that are free.", memory.free_share)
        yield _gauge("pages_used_ratio", "Share of the budget's pages that requests hold.", 1 - memory.free_share)
        yield _gauge("cache_held_bytes", "Windows, tables, scratch, and the pages of requests.", memory.held_bytes)
        yield _gauge("cache_peak_bytes", "The most that the device held, including free pages.", memory.peak_bytes)
        yield _gauge("cache_max_bytes", "The budget.", memory.max_bytes)
        yield _counter("preemptions", "Times that a request lost its memory to others.", found.preemptions)
        if memory.until_full is not None:
            yield _gauge("tokens_precise_ratio", "Share of stored tokens that were not lowered.", memory.precise_share)
            yield _counter("tokens_lowered", "Tokens over layers and heads that were lowered.", memory.lowered)
            yield _gauge("room_tokens", "Tokens each request in flight can still get, all lowered.", memory.room)
        yield from self._prefixes()

    def _prefixes(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        if self._engine.prefixes is None:
            return
        stats = self._engine.prefixes.stats
        yield _gauge("prefixes", "Prefixes that are stored.", len(self._engine.prefixes))
        yield _counter("prefix_lookups", "Requests that looked for a prefix.", stats.lookups)
        hits = CounterMetricFamily(f"{PREFIX}prefix_hits", "Lookups that found one, by where it was.", labels=["tier"])
        for tier, count in stats.hits.items():
            hits.add_metric([tier], count)
        yield hits
        yield _counter("prefix_tokens_reused", "Tokens of prompts that came from prefixes.", stats.tokens_reused)
        yield _counter("prefix_disk_errors", "Files of prefixes that failed.", stats.disk_errors)


PREFIX = "hf_diffkv_"


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, value=value)
