"""Prometheus metrics: from the page through prometheus_client, in both of vLLM's registries."""

from __future__ import annotations

import subprocess
import sys
import time
from unittest.mock import Mock

import pytest

from sipipe._version import __version__
from sipipe.observe.live import LivePage, PageHeader, Word
from sipipe.observe.metrics import METRICS, Collector, register, samples
from sipipe.observe.phases import Phase
from sipipe.observe.poll import Poll

prometheus_client = pytest.importorskip("prometheus_client", reason="comes with vLLM")


@pytest.fixture
def page():
    made = LivePage.create(PageHeader(stages=2, samplers=1, inflight=3))
    stage = made.writer("stage", 1)
    stage.phase(Phase.FORWARD, 0, 0, 1_000_000_000, 4, 4)
    stage.phase(Phase.PREPARE, 1, 1_000_000_000, 1_500_000_000, 4, 4)
    stage.phase(Phase.FORWARD, 1, 1_500_000_000, 2_500_000_000, 4, 4)
    stage.phase(Phase.PREPARE, 2, 2_500_000_000, 2_600_000_000, 4, 4)
    stage.phase(Phase.PREPARE, 3, 2_600_000_000, 2_700_000_000, 4, 4)
    made.writer("sampler", 0).phase(Phase.SAMPLE, 0, 0, 4_000_000, 4, 4)
    executor = made.writer("executor")
    executor.add(Word.RESTARTS, 2)
    made.ready("device", "pooling", "0.32.0")
    yield made
    made.close()


@pytest.fixture
def registry():
    made = prometheus_client.CollectorRegistry()
    made.register(Collector())
    return made


def scrape(registry) -> dict[str, float]:
    """Values by name, then label values by alphabet of the labels."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            values = [value for _, value in sorted(sample.labels.items())]
            found[" ".join([sample.name, *values])] = sample.value
    prometheus_client.generate_latest(registry)
    return found


def test_scrape(page, registry):
    found = scrape(registry)
    # engine, rank, stage
    assert found["sipipe_stage_busy_seconds_total 0 0 1"] == 2
    assert found["sipipe_queue_depth 0 stage 1 inputs"] == 2
    assert found["sipipe_restarts_total 0"] == 2
    assert found[f"sipipe_info 0 device pooling {__version__} 0.32.0"] == 1
    names = {name.split(" ")[0].removesuffix("_total") for name in found}
    assert names == set(METRICS)


def test_without_an_engine_there_are_no_metrics(registry, monkeypatch):
    monkeypatch.setenv("SIPIPE_RUN", "no such run")
    assert scrape(registry) == {}


def test_a_new_engine_is_found_when_the_old_one_has_gone(registry):
    for restarts in (1, 2):
        page = LivePage.create(PageHeader(stages=1, samplers=0))
        page.writer("executor").add(Word.RESTARTS, restarts)
        assert scrape(registry)["sipipe_restarts_total 0"] == restarts
        page.close()


def test_registering_twice_is_harmless(monkeypatch):
    """prometheus_client would refuse the second collector, or show all figures twice."""
    from sipipe.observe import metrics

    registry = Mock()
    monkeypatch.setattr(metrics, "_registered", None)
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    register()
    register()
    [call] = registry.register.call_args_list
    assert isinstance(call.args[0], Collector)


def test_several_api_servers(tmp_path):
    """The engine's process publishes files; another process collects them, as vLLM's do."""
    engine = (
        "from sipipe.observe.phases import Phase\n"
        "from sipipe.observe.live import LivePage, PageHeader\n"
        "from sipipe.observe.metrics import Publisher\n"
        "page = LivePage.create(PageHeader(stages=1, samplers=0))\n"
        "publisher = Publisher(page)\n"
        "writer = page.writer('stage', 0)\n"
        "writer.phase(Phase.FORWARD, 0, 0, 10**9, 1, 1); publisher.publish()\n"
        "writer.phase(Phase.FORWARD, 1, 10**9, 3 * 10**9, 1, 1); publisher.publish()\n"
        "publisher.publish()\n"
        "import prometheus_client\n"
        "from prometheus_client import multiprocess\n"
        "registry = prometheus_client.CollectorRegistry()\n"
        "multiprocess.MultiProcessCollector(registry)\n"
        "print(prometheus_client.generate_latest(registry).decode())\n"
        "publisher.start(); publisher.close(); page.close()\n"
    )
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", engine],
        env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PATH": ""},
        check=True, capture_output=True, text=True, timeout=120,
    ).stdout  # fmt: skip
    assert 'sipipe_stage_busy_seconds_total{engine="0",rank="0",stage="0"} 3.0' in shown


def test_time_without_requests_grows_while_it_lasts(page):
    poll, executor = Poll(page), page.writer("executor")

    def idle():
        return {name: value for name, _, value in samples(poll)}["sipipe_idle_seconds"]

    began = time.monotonic_ns() - 5 * 10**9
    executor.set(Word.IDLE_FROM, began)
    assert 5 <= idle() <= (last := idle())
    ended = time.monotonic_ns()
    executor.set(Word.IDLE_TO, ended)
    assert idle() == last, "between its two words"
    executor.add(Word.IDLE_NS, ended - began)
    assert last <= idle() == (ended - began) / 1e9


def test_ranks_of_a_stage_have_queues_of_their_own():
    page = LivePage.create(PageHeader(stages=2, samplers=1, ranks=2))
    seen = [(name, labels) for name, labels, _ in samples(Poll(page))]
    page.close()
    assert len(seen) == len(set(seen))
    assert any(("process", "stage 1 rank 1") in labels for _, labels in seen)
