"""Prometheus metrics on vLLM's own ``/metrics``, read off the statistics page at each scrape.

vLLM serves ``/metrics`` from the API server, while SiPipe runs in EngineCore and its children.
Two ways, by vLLM's own choice of registry:

- one API server: a collector in the default registry finds the pages of this server (same
  ``SIPIPE_RUN``) and reads them when Prometheus asks. Nothing runs in between.
- several API servers (``PROMETHEUS_MULTIPROC_DIR`` is set): vLLM answers from files that processes
  leave in that directory, and a collector is never asked. There EngineCore, the one process that
  owns the page, keeps such files up to date once a second (:class:`Publisher`).

Names start with ``sipipe_`` because vLLM unregisters at start what it takes for its own.
prometheus_client comes with vLLM; this module imports it when it is used.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sipipe.observe.live import LivePage, Word, find, run_id
from sipipe.observe.online import BUBBLES
from sipipe.observe.phases import Phase
from sipipe.observe.queues import queues

Kind = Literal["gauge", "counter"]
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One value with its labels."""

    name: str
    kind: Kind
    labels: Labels
    value: float


HELP: dict[str, str] = {
    "sipipe_stage_busy_ratio": "Share of the time since the last look in which the device of the "
    "stage did the model's work",
    "sipipe_stage_busy_seconds": "Time in which the device of the stage did the model's work",
    "sipipe_bubble_seconds": "Time in which the device of the stage stood idle, by kind of bubble",
    "sipipe_stage_microbatches": "Microbatches that the stage ran",
    "sipipe_sampler_seconds": "Time in which the sampler drew tokens",
    "sipipe_sampler_sequences": "Sequences for which the sampler drew a token",
    "sipipe_sampler_seconds_per_sequence": "Sampler time per sequence since the last look",
    "sipipe_queue_depth": "Items that wait in a queue of a process",
    "sipipe_microbatches_in_flight": "Microbatches dispatched and not yet gathered",
    "sipipe_tokens": "Tokens drawn",
    "sipipe_fallbacks": "Batches that took vLLM's own path",
    "sipipe_restarts": "Processes of the engine that died and were started again",
}
"""Metric name (counters get ``_total`` when shown) and its help text."""


class Reader:
    """Turns pages into samples; keeps the last look at each block for the ratios."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], tuple[int, int, int, int]] = {}
        self._values: dict[tuple[int, int], tuple[float, float]] = {}

    def samples(self, pages: Iterable[LivePage]) -> Iterator[Sample]:
        """All samples of all pages."""
        for page in pages:
            for role, index, rank, first in page.blocks():
                words = page.read(role, index, rank)
                labels: Labels = (("engine", page.header.engine), (role, str(index)))
                if role == "stage":
                    labels = (*labels, ("rank", str(rank)))
                yield from self._block(page, role, words, labels, first)
                where = "executor" if role == "executor" else f"{role} {index}"
                own = (labels[0], ("process", where))
                for queue, depth in queues(page, role, index, rank, words).items():
                    yield Sample(
                        "sipipe_queue_depth", "gauge", (*own, ("queue", queue)), float(depth)
                    )

    def _block(
        self,
        page: LivePage,
        role: str,
        words: list[int],
        labels: Labels,
        first: int,
    ) -> Iterator[Sample]:
        sampled = words[Word.PHASE_NS + Phase.SAMPLE]
        ratio, per_sequence = self._since(page, first, words, sampled)
        if role == "executor":
            labels = labels[:1]
            yield Sample(
                "sipipe_microbatches_in_flight", "gauge", labels, float(words[Word.INFLIGHT])
            )
            yield Sample("sipipe_tokens", "counter", labels, float(words[Word.TOKENS]))
            yield Sample("sipipe_restarts", "counter", labels, float(words[Word.RESTARTS]))
            yield Sample("sipipe_fallbacks", "counter", labels, float(words[Word.FALLBACKS]))
        elif role == "stage":
            yield Sample("sipipe_stage_busy_ratio", "gauge", labels, ratio)
            yield Sample("sipipe_stage_busy_seconds", "counter", labels, words[Word.BUSY_NS] / 1e9)
            yield Sample("sipipe_stage_microbatches", "counter", labels, float(words[Word.BATCHES]))
            for number, kind in enumerate(BUBBLES):
                spent = words[Word.IMBALANCE_NS + number] / 1e9
                yield Sample("sipipe_bubble_seconds", "counter", (*labels, ("kind", kind)), spent)
        else:
            yield Sample("sipipe_sampler_seconds", "counter", labels, sampled / 1e9)
            drawn = float(words[Word.SEQUENCES])
            yield Sample("sipipe_sampler_sequences", "counter", labels, drawn)
            yield Sample("sipipe_sampler_seconds_per_sequence", "gauge", labels, per_sequence)

    def _since(
        self, page: LivePage, first: int, words: list[int], sampled: int
    ) -> tuple[float, float]:
        """Busy share and seconds per sequence since the last look (of half a second ago or more)."""
        key, now = (page.header.created_ns, first), time.monotonic_ns()
        busy, drawn = words[Word.BUSY_NS], words[Word.SEQUENCES]
        then, was_busy, was_sampled, was_drawn = self._last.get(
            key, (page.header.created_ns, 0, 0, 0)
        )
        if now - then < 500_000_000 and key in self._values:
            return self._values[key]
        ratio = min(1.0, (busy - was_busy) / max(1, now - then))
        before = self._values.get(key, (0.0, 0.0))[1]
        each = (sampled - was_sampled) / 1e9 / (drawn - was_drawn) if drawn > was_drawn else before
        self._last[key] = (now, busy, sampled, drawn)
        self._values[key] = (ratio, each)
        return self._values[key]


class Collector:
    """What prometheus_client asks at each scrape."""

    def __init__(self, run: str | None = None) -> None:
        """Collect the pages of one server, by default of this process's."""
        self._run = run
        self._reader = Reader()
        self._pages: list[LivePage] = []
        self._lock = threading.Lock()

    def describe(self) -> list[Any]:
        """Nothing: so that registering does not look for pages."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metric families; none while no engine runs."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            found = list(self._reader.samples(self._look()))
        families: dict[str, Any] = {}
        for sample in found:
            if sample.name not in families:
                make = GaugeMetricFamily if sample.kind == "gauge" else CounterMetricFamily
                families[sample.name] = make(
                    sample.name, HELP[sample.name], labels=[name for name, _ in sample.labels]
                )
            families[sample.name].add_metric([value for _, value in sample.labels], sample.value)
        yield from families.values()

    def _look(self) -> list[LivePage]:
        """The pages; looked for again when one has gone or there is none."""
        if not self._pages or not all(page.alive() for page in self._pages):
            for page in self._pages:
                page.close()
            self._pages = find(self._run or run_id())
        return self._pages


_registered: Collector | None = None


def register() -> None:
    """Put the collector into prometheus_client's default registry, once per process.

    Called by SiPipe's vLLM plugin, in every process: only where ``/metrics`` is served does it cost
    anything. Fixes this server's identity, so that processes started later share it.
    """
    global _registered
    run_id()
    if _registered is not None or "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return
    from prometheus_client import REGISTRY

    _registered = Collector()
    REGISTRY.register(_registered)


class Publisher:
    """Copies one page into prometheus_client's multi-process files, once a second.

    For EngineCore when several API servers answer ``/metrics``; :meth:`start` does nothing
    otherwise. The thread is a daemon that sleeps but for about 0.1 ms a second.
    """

    def __init__(self, page: LivePage, interval: float = 1.0) -> None:
        """Publish ``page``; call :meth:`start`."""
        self._page, self._interval = page, interval
        self._reader = Reader()
        self._metrics: dict[str, Any] = {}
        self._seen: dict[tuple[str, Labels], float] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> bool:
        """Start publishing; False where the collector does the work instead."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return False
        self._thread = threading.Thread(target=self._run, name="sipipe-metrics", daemon=True)
        self._thread.start()
        return True

    def close(self) -> None:
        """Stop. Idempotent; call it before the page is closed."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)

    def publish(self) -> None:
        """Copy once."""
        for sample in self._reader.samples([self._page]):
            metric = self._metric(sample)
            names = dict(sample.labels)
            if sample.kind == "gauge":
                metric.labels(**names).set(sample.value)
            else:
                key = (sample.name, sample.labels)
                grown = sample.value - self._seen.get(key, 0.0)
                if key not in self._seen or grown > 0:
                    metric.labels(**names).inc(max(0.0, grown))
                    self._seen[key] = sample.value

    def _metric(self, sample: Sample) -> Any:
        from prometheus_client import Counter, Gauge

        if sample.name not in self._metrics:
            labels = [name for name, _ in sample.labels]
            if sample.kind == "gauge":
                made: Any = Gauge(
                    sample.name, HELP[sample.name], labels, multiprocess_mode="livemostrecent"
                )
            else:
                made = Counter(sample.name, HELP[sample.name], labels)
            self._metrics[sample.name] = made
        return self._metrics[sample.name]

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            with contextlib.suppress(ValueError):  # the page was closed under us: the end
                self.publish()
