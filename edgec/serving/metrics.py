"""What Prometheus reads at /metrics: the engine's counters, and times as clients see them. No prompt, no name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from edgec.serving.backend import Backend

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """One server's metrics, in a registry of its own."""

    def __init__(self, backend: Backend) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Engine(backend))
        self.requests = Counter(
            "edgec_http_requests", "HTTP requests, by route and status.", ("route", "status"), registry=self._registry
        )
        self.gone = Counter("edgec_clients_gone", "Clients that left before their answer.", registry=self._registry)
        self.first_token = Histogram(
            "edgec_time_to_first_token_seconds",
            "From submitting to the first token.",
            buckets=_TTFT,
            registry=self._registry,
        )
        self.between_tokens = Histogram(
            "edgec_time_between_tokens_seconds",
            "From one token of an answer to its next.",
            buckets=_BETWEEN,
            registry=self._registry,
        )
        self.answer = Histogram(
            "edgec_answer_seconds", "From submitting to the last token.", buckets=_WHOLE, registry=self._registry
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Engine(Collector):
    """The engine's own counters, read when they are asked for."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def collect(self) -> Iterator[Metric]:
        stats = self._backend.stats
        requests = GaugeMetricFamily("edgec_requests", "Requests in the engine.", labels=["state"])
        requests.add_metric(["waiting"], stats.waiting)
        requests.add_metric(["running"], stats.running)
        yield requests
        blocks = GaugeMetricFamily("edgec_kv_blocks", "Blocks of keys and values.", labels=["state"])
        for state in ("free", "cached", "owned"):
            blocks.add_metric([state], getattr(stats, f"blocks_{state}"))
        yield blocks
        yield GaugeMetricFamily(
            "edgec_batch_limit", "The largest batch within the step-time target.", stats.batch_limit
        )
        for name, text, value in (
            ("edgec_kv_utilisation", "Tokens held over slots owned, mean over steps.", stats.utilisation),
            ("edgec_step_occupancy", "Sequences in a step over those it could hold, mean.", stats.occupancy),
            ("edgec_scheduling_share", "Share of step time outside the model and the sampler.", stats.scheduling),
        ):
            if value is not None:
                yield GaugeMetricFamily(name, text, value)
        step = GaugeMetricFamily("edgec_step_seconds", "Time of a step, of the latest 256.", labels=["quantile"])
        step.add_metric(["0.5"], stats.step_p50_ms / 1e3)
        step.add_metric(["0.99"], stats.step_p99_ms / 1e3)
        yield step
        drafts = CounterMetricFamily("edgec_drafts", "Proposed tokens that passes verified.", labels=["outcome"])
        drafts.add_metric(["kept"], sum(stats.draft_kept))
        drafts.add_metric(["rejected"], stats.drafted_tokens - sum(stats.draft_kept))
        yield drafts
        for name in (
            *("steps", "retries", "failures", "preemptions", "requests_finished", "requests_cancelled"),
            *("prompt_tokens", "cached_tokens", "answer_tokens", "computed_tokens", "recomputed_tokens"),
        ):
            yield CounterMetricFamily(f"edgec_{name}", f"{name.replace('_', ' ').capitalize()}.", getattr(stats, name))
