"""Each thing that only saves time, or shows figures, fails: what it is for goes on."""

import queue
import struct
from types import SimpleNamespace

import numpy as np
import pytest

from sipipe.engine.iteration import telemetry
from sipipe.engine.iteration.balance import Balancer
from sipipe.engine.iteration.iterations import Iterations
from sipipe.engine.iteration.observed_scheduler import observed
from sipipe.engine.iteration.requests import RequestTracker
from sipipe.engine.scheduling.concurrency import ConcurrencyController
from sipipe.observe import metrics
from sipipe.observe.format import PACK, Header
from sipipe.observe.live import LivePage, PageHeader, Word
from sipipe.observe.metrics import Collector, Publisher
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import open_recorder
from sipipe.tools.report.reader import read_trace

TOO_LARGE = 1 << 70


def raising(*_, **__):
    raise np.linalg.LinAlgError("singular matrix")


def test_a_figure_that_is_too_large_is_left_out():
    page = LivePage.create(PageHeader(stages=1, samplers=1))
    live = page.writer("executor")
    live.set(Word.RUNNING, TOO_LARGE)
    live.add(Word.TTFT_NS, TOO_LARGE)
    live.phase(Phase.GATHER, 0, 0, TOO_LARGE, 1, 1)
    live.set(Word.WAITING, 3)
    assert page.block(("executor", 0, 0))[Word.WAITING] == 3


def test_a_record_that_cannot_be_packed_is_left_out(tmp_path):
    with pytest.raises(struct.error):
        PACK.pack(0, 1, 0, 1, 1, Phase.GATHER, -1, 0)
    recorder = open_recorder(tmp_path, Header(role="executor"))
    recorder.record(Phase.GATHER, 0, -1, 0, 1)
    recorder.record(Phase.GATHER, 0, 0, 0, 1)
    recorder.close()
    (process,) = read_trace(tmp_path).of("executor")
    assert process.records["slot"].tolist() == [0]


def test_metrics_that_cannot_be_read_are_left_out(monkeypatch):
    collector = Collector()
    monkeypatch.setattr(collector, "_collect", raising)
    assert list(collector.collect()) == []


def test_metrics_that_cannot_be_published_are_left_out(monkeypatch, caplog):
    """Those of the next second are published again."""
    tries = queue.SimpleQueue()

    def publish():
        tries.put(1)
        raise np.linalg.LinAlgError("singular matrix")  # a ValueError, as that of a closed page

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/nowhere")
    monkeypatch.setattr(metrics, "INTERVAL", 0.01)
    publisher = Publisher(LivePage.create(PageHeader(stages=1, samplers=1)))
    monkeypatch.setattr(publisher, "publish", publish)
    publisher.start()
    for _ in range(2):
        tries.get(timeout=60)
    publisher.close()
    assert "writing SiPipe's figures for /metrics failed" in caplog.text


def test_a_controller_whose_times_fail_chooses_as_before(monkeypatch):
    controller = ConcurrencyController(stages=2, slots=3)
    prices = controller.prices()
    controller.times.fits = 1
    monkeypatch.setattr(controller.times, "prices", raising)
    monkeypatch.setattr(controller, "_ready", raising)
    assert controller.prices() == prices
    assert [controller.microbatches(8) for _ in range(100)] == [3] * 100


def test_times_that_cannot_be_fitted_stop_no_iteration(monkeypatch):
    monkeypatch.setattr(telemetry.MeasuredTimes, "poll", raising)
    page = LivePage.create(PageHeader(stages=2, samplers=1))
    figures = SimpleNamespace(_page=page, _samplers=1, _compare_cuts=raising)
    telemetry.Telemetry.measured_times(figures, ConcurrencyController(stages=2, slots=3), 0)
    figures.poll()


def test_nobody_moves_where_the_balance_fails(monkeypatch):
    balancer = Balancer(2, vocab_size=10)
    monkeypatch.setattr(balancer, "move", raising)
    tracker = RequestTracker(engine_seed=1, balancer=balancer)
    cached = SimpleNamespace(
        req_ids=[], num_computed_tokens=[], num_output_tokens=[], new_token_ids=[]
    )
    output = SimpleNamespace(
        finished_req_ids=set(),
        preempted_req_ids=set(),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={},
        scheduled_spec_decode_tokens={},
        has_structured_output_requests=False,
    )
    assert tracker.advance(0, output).request_ids == []


def test_an_arrival_at_no_time_ends_nothing():
    """A client of AsyncLLM says when its request arrived."""

    class Scheduler:
        requests = {"a": SimpleNamespace(num_output_tokens=0, arrival_time=float("-inf"))}  # noqa: RUF012

        def get_request_counts(self):
            return 1, 0

        def schedule(self):
            new = SimpleNamespace(req_id="a", sampling_params=SimpleNamespace())
            return SimpleNamespace(total_num_scheduled_tokens=1, scheduled_new_reqs=[new])

        def update_from_output(self, *_):
            return {}

    words = []
    live = SimpleNamespace(set=lambda *_: None, add=lambda *word: words.append(word))
    figures = SimpleNamespace(live=live, record=lambda *_: None, idle=lambda *_: None)
    scheduler = observed(Scheduler, Iterations(2, 8), figures, None)()
    output = scheduler.schedule()
    drawn = SimpleNamespace(req_id_to_index={"a": 0}, sampled_token_ids=[[5]])
    assert scheduler.update_from_output(output, drawn) == {}
