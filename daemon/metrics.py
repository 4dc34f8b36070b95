"""``/metrics``: the daemon's own counts, and the engine's gauges and counters, as ``tierd_*``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dsv4_tierd.engine.messages import Done, Failed

if TYPE_CHECKING:
    from dsv4_tierd.daemon.service import Service

_NAME = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)(?:\{(.*)\})?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="([^"]*)"')
_OWN = frozenset({"requests", "requests_running"})  # the daemon's; the engine has them, too
_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Metrics:
    """Counters that this process keeps. One registry a daemon, never the global one."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "tierd_requests", "Ended requests by outcome", ["outcome"], registry=self.registry
        )
        self._tokens = Counter(
            "tierd_prompt_tokens",
            "Prompt tokens by where their rows came from",
            ["source"],
            registry=self.registry,
        )
        self._drawn = Counter("tierd_completion_tokens", "Tokens drawn", registry=self.registry)
        self._rejections = Counter(
            "tierd_admission_rejections",
            "Requests that found no room, by code",
            ["code"],
            registry=self.registry,
        )
        self._misses = Counter(
            "tierd_prefix_misses",
            "Prompts recomputed, by reason",
            ["reason"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "tierd_request_seconds", "Submit to end", buckets=_SECONDS, registry=self.registry
        )
        self._http = Counter(
            "tierd_http_responses", "HTTP responses by status", ["status"], registry=self.registry
        )

    def request_ended(self, end: Done | Failed, seconds: float) -> None:
        self._seconds.observe(seconds)
        if isinstance(end, Failed):
            self._requests.labels(outcome=end.code).inc()
            if end.retry_after_s is not None:
                self._rejections.labels(code=end.code).inc()
            return
        usage = end.usage
        self._requests.labels(outcome=end.finish_reason).inc()
        self._drawn.inc(usage.completion_tokens)
        for source in ("device", "host", "store", "computed"):
            self._tokens.labels(source=source).inc(getattr(usage, f"{source}_tokens"))
        if usage.miss_reason is not None:
            self._misses.labels(reason=usage.miss_reason).inc()

    def responded(self, status: int) -> None:
        self._http.labels(status=str(status)).inc()


class ServiceCollector(Collector):
    """Values that are read, not kept, at each scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        service = self._service
        worker = service.worker
        sessions = GaugeMetricFamily("tierd_sessions", "Sessions by state", labels=["state"])
        for state, count in service.sessions.by_state().items():
            sessions.add_metric([state], count)
        yield sessions
        yield GaugeMetricFamily("tierd_engine_up", "1: the engine answers", value=worker.is_up)
        yield GaugeMetricFamily(
            "tierd_requests_running", "Requests at the engine", value=len(service.running)
        )
        yield GaugeMetricFamily(
            "tierd_operations_running", "Long verbs under way", value=service.operations.running()
        )
        yield GaugeMetricFamily(
            "tierd_session_leases",
            "Sessions held among the daemons that share the store",
            value=service.shared.count,
        )
        yield GaugeMetricFamily(
            "tierd_journal_bytes", "Size of the journal", value=service.journal.size_bytes
        )
        restarts = CounterMetricFamily("tierd_engine_restarts", "Engine workers started again")
        restarts.add_metric([], worker.restarts)
        yield restarts
        yield from _families(worker.gauges(), GaugeMetricFamily)
        yield from _families(worker.counters(), CounterMetricFamily)


def _families(
    values: Mapping[str, float], kind: type[GaugeMetricFamily | CounterMetricFamily]
) -> Iterable[Metric]:
    """``pages{tier="host"}`` and the like, grouped by name; other names are left out."""
    families: dict[str, tuple[tuple[str, ...], Metric]] = {}
    for full, value in sorted(values.items()):
        found = _NAME.fullmatch(full)
        if found is None:
            continue
        name = found[1].removesuffix("_total")
        name = f"tierd_engine_{name}" if name in _OWN else f"tierd_{name}"
        labels = dict(_LABEL.findall(found[2] or ""))
        keys = tuple(labels)
        if name not in families:
            families[name] = (keys, kind(name, f"Engine: {found[1]}", labels=keys))
        known, family = families[name]
        if known == keys:
            family.add_metric(list(labels.values()), value)  # type: ignore[attr-defined]
    return [family for _, family in families.values()]


def render(service: Service) -> bytes:
    """The text exposition of everything."""
    return generate_latest(service.metrics.registry)
