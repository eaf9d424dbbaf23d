"""Prometheus metrics on vLLM's own ``/metrics``, read off the statistics page at each scrape.

vLLM serves ``/metrics`` from the API server, while SiPipe runs in EngineCore and its children.
Two ways, by vLLM's own choice of registry:

- one API server: a collector in the default registry finds the pages of this server (same
  ``SIPIPE_RUN``) and reads them when Prometheus asks.
- several (``PROMETHEUS_MULTIPROC_DIR`` is set): vLLM answers from files in that directory, and asks
  no collector. EngineCore, which owns the page, writes them once a second (:class:`Publisher`).

Names start with ``sipipe_`` because vLLM unregisters at start what it takes for its own.
prometheus_client comes with vLLM; this module imports it when it is used.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from sipipe._version import __version__
from sipipe.best_effort import BestEffort
from sipipe.observe.live import LivePage, Word, run_id, still_there
from sipipe.observe.phases import Role
from sipipe.observe.poll import Block, Poll

Labels = tuple[tuple[str, str], ...]
Values = Mapping[str, float]
"""Values of a metric for one process, by the value of the metric's own label."""

INTERVAL = 1.0
"""Seconds between two publications to files."""


class Metric(NamedTuple):
    """One metric of the processes of a role (None: of all)."""

    kind: Literal["gauge", "counter"]
    role: Role | None
    figure: Word | Callable[[Block], Values]
    help: str
    label: str = ""
    """Its own label, where it has several values."""

    def values(self, block: Block) -> Values:
        """The values now, times in seconds."""
        if not isinstance(self.figure, Word):
            return self.figure(block)
        return {"": float(block.words[self.figure])}


def _busy(block: Block) -> Values:
    return {"": block.busy_ns / 1e9}


_gauge = partial(Metric, "gauge")
_counter = partial(Metric, "counter")

METRICS: dict[str, Metric] = {
    "sipipe_info": _gauge("executor", lambda _: {"": 1.0}, "Versions, who draws, and why"),
    "sipipe_idle_seconds": _counter(
        "executor", lambda of: {"": of.idle_ns / 1e9}, "Time without any request"
    ),
    "sipipe_stage_busy_seconds": _counter(
        "stage", _busy, "Time in which the stage's device did the model's work"
    ),
    "sipipe_stage_microbatches": _counter("stage", Word.BATCHES, "Microbatches that the stage ran"),
    "sipipe_sampler_seconds": _counter("sampler", _busy, "Time in which the sampler drew tokens"),
    "sipipe_sampler_sequences": _counter(
        "sampler", Word.SEQUENCES, "Sequences for which the sampler drew a token"
    ),
    "sipipe_queue_depth": _gauge(
        None, lambda of: of.queues, "Items that wait in a queue of a process", "queue"
    ),
    "sipipe_microbatches_in_flight": _gauge(
        "executor", Word.INFLIGHT, "Microbatches dispatched and not yet gathered"
    ),
    "sipipe_requests_running": _gauge("executor", Word.RUNNING, "Requests that are being served"),
    "sipipe_tokens": _counter("executor", Word.TOKENS, "Tokens drawn, also behind an end"),
    "sipipe_draft_tokens": _counter("executor", Word.DRAFTS, "Draft tokens that were verified"),
    "sipipe_draft_tokens_accepted": _counter(
        "executor", Word.ACCEPTED, "Draft tokens that were drawn"
    ),
    "sipipe_stalled": _gauge(
        "executor", Word.STALLED, "1 while work is late and a stage does not answer"
    ),
    "sipipe_restarts": _counter(
        "executor", Word.RESTARTS, "Processes that died and were started again"
    ),
}
"""All metrics by name, to which ``_total`` is added when a counter is shown."""


def samples(poll: Poll) -> Iterator[tuple[str, Labels, float]]:
    """Name, labels and value of every figure of a page now."""
    header = poll.page.header
    for block in poll.blocks():
        for name, metric in METRICS.items():
            if metric.role not in (None, block.role):
                continue
            if name == "sipipe_info" and not header.path:
                continue  # the engine starts
            labels: Labels = (("engine", header.engine), *_labels(block, metric))
            if name == "sipipe_info":
                labels += (
                    ("version", __version__),
                    ("vllm", header.vllm),
                    ("path", header.path),
                    ("reason", header.reason),
                )
            for which, value in metric.values(block).items():
                yield name, (*labels, (metric.label, which)) if which else labels, value


def _labels(block: Block, metric: Metric) -> Labels:
    if metric.role is None:
        rank = f" rank {block.rank}" if block.rank else ""
        number = "" if block.role == "executor" else f" {block.index}{rank}"
        return (("process", block.role + number),)
    if block.role == "executor":
        return ()
    index = (block.role, str(block.index))
    if block.role == "stage":
        return (index, ("rank", str(block.rank)))
    return (index,)


class Collector:
    """The collector that prometheus_client asks at each scrape."""

    def __init__(self) -> None:
        self._collecting = BestEffort("reading SiPipe's figures for /metrics", bounded=False)
        self._polls: list[Poll] = []
        self._lock = threading.Lock()  # wait: held for moments; nobody waits under it

    def describe(self) -> list[Any]:
        """Nothing: so that registering does not look for pages."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metric families; none while no engine runs, nor where they cannot be read: vLLM's own
        are served all the same."""
        yield from self._collecting([], self._collect)

    def _collect(self) -> list[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        with self._lock:
            pages = [poll.page for poll in self._polls]
            if (found := still_there(pages)) is not pages:
                self._polls = list(map(Poll, found))
            for name, labels, value in (each for poll in self._polls for each in samples(poll)):
                if name not in families:
                    metric = METRICS[name]
                    make = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
                    families[name] = make(name, metric.help, labels=[label for label, _ in labels])
                families[name].add_metric([text for _, text in labels], value)
        return list(families.values())


_registered: Collector | None = None


def register() -> None:
    """Put the collector into prometheus_client's default registry, once per process: it costs only
    where ``/metrics`` is served. Processes started later share this server's identity."""
    global _registered
    run_id()
    if _registered is not None or "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return
    from prometheus_client import REGISTRY

    _registered = Collector()
    REGISTRY.register(_registered)


class Publisher:
    """Copies one page into prometheus_client's multi-process files, once a second; :meth:`start`
    does nothing where one API server answers. Its thread works about 0.1 ms a second."""

    def __init__(self, page: LivePage) -> None:
        self._poll = Poll(page)
        self._metrics: dict[str, Any] = {}
        self._seen: dict[tuple[str, Labels], float] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._publishing = BestEffort("writing SiPipe's figures for /metrics", bounded=False)

    def start(self) -> None:
        """Start publishing, unless the collector does the work."""
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            self._thread = threading.Thread(target=self._run, name="sipipe-metrics", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop. Idempotent; call it before the page is closed."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)

    def publish(self) -> None:
        """Copy once."""
        for name, labels, value in samples(self._poll):
            metric = self._metric(name, labels).labels(**dict(labels))
            if METRICS[name].kind == "gauge":
                metric.set(value)
            else:
                metric.inc(value - self._seen.get((name, labels), 0.0))
                self._seen[name, labels] = value

    def _metric(self, name: str, labels: Labels) -> Any:
        from prometheus_client import Counter, Gauge

        if name not in self._metrics:
            metric = METRICS[name]
            names = [label for label, _ in labels]
            gauge = partial(Gauge, multiprocess_mode="livemostrecent")
            make: Any = gauge if metric.kind == "gauge" else Counter
            self._metrics[name] = make(name, metric.help, names)
        return self._metrics[name]

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            self._publishing(None, self._publish)

    def _publish(self) -> None:
        try:
            self.publish()
        except ValueError:
            if not self._stop.is_set():  # else the page was closed under us: the end
                raise
