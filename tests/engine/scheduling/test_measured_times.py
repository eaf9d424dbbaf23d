"""Stage times from the processes that take them to the concurrency controller."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from sipipe.engine.iteration.iteration import NOT_BEGUN, Iteration, Scheduled
from sipipe.engine.scheduling.concurrency import ConcurrencyController, MeasuredTimes
from sipipe.engine.scheduling.times import COLD, Load
from sipipe.observe.live import LivePage, PageHeader
from sipipe.observe.phases import Phase

MS = 1_000_000


class Processes:
    """Two stages, two samplers and the executor, each with its end of the shared memory."""

    def __init__(self, slots: int = 3) -> None:
        self.page = LivePage.create(PageHeader(stages=2, samplers=2))
        controller = ConcurrencyController(stages=2, slots=slots)
        self.times = MeasuredTimes(controller, self.page, samplers=2)
        self.controller, self.poll = self.times.controller, self.times.poll
        self.stages = [self.page.writer("stage", i) for i in range(2)]
        self.samplers = [self.page.writer("sampler", i) for i in range(2)]
        self.executor = self.page.writer("executor")

    def seconds(self, process, rows):
        """Of two stages' decodes, of their output projections, between the last stage and the first."""
        return self.controller.times.seconds(Load(1, rows))[2 + process]

    def went(self, number, batch, forward):
        """An iteration took so many nanoseconds on each stage, and is drawn."""
        for stage, taken in zip(self.stages, forward, strict=True):
            stage.phase(Phase.FORWARD, number, 0, int(taken), batch, batch)
        self.executor.phase(Phase.UPDATE, number, 0, 1 * MS, batch, batch)
        self.executor.phase(Phase.GATHER, number, 0, 0, batch, batch)

    def expect(self, number, batch, pairs=0.0):
        """An iteration of ``batch`` decoding sequences, or of as many prompt tokens, is dispatched."""
        load = Load(1, 0, batch, 0, pairs) if pairs else Load(1, batch)
        begun = replace(NOT_BEGUN, number=number)
        self.times.expect(Iteration(Scheduled(output=None, load=load), begun))


@pytest.fixture
def engine():
    made = Processes()
    yield made
    made.page.close()


def test_batches_of_decodes_become_points_of_the_regressions(engine):
    first, last = engine.stages
    for i, batch in enumerate([4, 8, 16, 32] * 20):
        first.phase(Phase.FORWARD, i, 0, (2 + batch) * MS, batch, batch)
        first.phase(Phase.SEND, i, 0, 1 * MS, batch, batch)
        last.phase(Phase.FORWARD, i, 0, 5 * MS, batch, batch)
        last.phase(Phase.LOGITS, i, 0, 2 * batch * MS, batch, batch)
        engine.poll()
    assert engine.seconds(0, 0) == pytest.approx(3e-3, rel=0.02)
    assert engine.seconds(0, 20) == pytest.approx(23e-3, rel=0.02)
    # The records of one batch may straddle a poll: these come with the next one.
    assert engine.seconds(1, 20) == pytest.approx(45e-3, rel=0.1)


def test_prompts_count_by_what_they_attend_to(engine):
    for i in range(160):
        start, chunk = i % 8 * 100, 100
        pairs = chunk * (start + chunk / 2)
        engine.expect(i, chunk, pairs)
        for stage in engine.stages:
            stage.phase(Phase.FORWARD, i, 0, int((5 + 0.1 * chunk + 1e-4 * pairs) * MS), 4, chunk)
        engine.poll()
    prices = engine.controller.prices()
    assert engine.controller.measured
    assert prices.chunk(700, 100) == pytest.approx(10e-3 + 7.5e-3, rel=0.3)
    assert prices.chunk(700, 100) - prices.chunk(0, 100) == pytest.approx(7e-3, rel=0.02)


def test_an_iteration_that_is_not_through_yet_does_not_count(engine, monkeypatch):
    counted = []
    monkeypatch.setattr(engine.controller.times, "add", lambda loads, _: counted.append(loads[:2]))
    for i in range(3):
        engine.expect(i, 8 << i)
    engine.stages[0].phase(Phase.FORWARD, 0, 0, 8 * MS, 8, 8)
    engine.poll()
    for stage in engine.stages:
        stage.phase(Phase.FORWARD, 1, 0, 8 * MS, 16, 16)
    engine.poll()
    first, second = counted
    assert first == [Load(1, 8), Load()]
    assert second == [Load(1, 16), Load(1, 8)], "the other stage says it of the one before"


@pytest.mark.parametrize("number", [5, -1])
def test_an_iteration_that_a_stage_has_not_been_through_is_not_taken_for_another(
    engine, monkeypatch, number
):
    """The stage counts a batch that nobody expects; the one that is expected is later, or not begun."""
    counted = []
    monkeypatch.setattr(engine.controller.times, "add", lambda loads, _: counted.append(loads[0]))
    engine.poll()  # the first only begins to count
    engine.expect(number, 7)
    for batch in (2, 3):
        engine.stages[0].phase(Phase.FORWARD, batch, 0, MS, 1, 1)
        engine.poll()
    assert [load.rows for load in counted] == [0] * len(counted)
    assert counted


def test_prompts_do_not_count_for_k(engine):
    stage = engine.stages[0]
    for i in range(60):
        stage.phase(Phase.FORWARD, i, 0, 500 * MS, 4, 400)
        engine.poll()
    assert engine.controller.times.weight[2] == 0


def test_several_batches_between_two_polls(engine):
    stage = engine.stages[0]
    for i in range(72):
        stage.phase(Phase.FORWARD, i, 0, 8 * MS, 16, 16)
        if i % 3 == 2:
            engine.poll()
    assert engine.seconds(0, 16) == pytest.approx(8e-3)
    assert engine.controller.times.weight[2] == pytest.approx(72 - COLD, rel=0.15)


def test_samplers_work_side_by_side_and_the_executor_before_and_after(engine):
    for i in range(60):
        engine.samplers[0].phase(Phase.SAMPLE, i, 0, 1 * MS, 8, 8)
        engine.samplers[1].phase(Phase.SAMPLE, i, 0, 3 * MS, 8, 8)
        for phase in (Phase.SCHEDULE, Phase.DISPATCH, Phase.UPDATE, Phase.GATHER):
            engine.executor.phase(phase, i, 0, 1 * MS, 16, 16)
        engine.poll()
    assert engine.seconds(4, 16) == pytest.approx(6e-3, rel=0.05)


@pytest.mark.parametrize("formed", [1, 2, 3])
@pytest.mark.parametrize("pauses", [False, True])
def test_what_no_phase_has_is_seen(engine, formed, pauses):
    """With one microbatch alone, and with more that leave the slowest stage room; in pauses not."""
    engine.controller.formed, now = formed, time.monotonic()
    for i in range(150):
        engine.went(i, 8, [10 * MS] * 2)
        if i % formed == 0:  # they come back one behind the other, then there is nothing to do
            now += 45e-3
        if pauses and i % 10 == 0:
            now += 3600
            engine.times.pause()
        engine.poll(now=now)
        engine.poll(now=now + 1e-4)  # a visit of a closed slot, nothing new
    assert engine.controller.unseen == pytest.approx(24e-3, rel=0.02)


def test_parts_of_a_shared_projection_are_side_by_side(engine):
    """Both stages multiply at once: a microbatch of all reads the matrix once."""
    for i, batch in enumerate([16, 32, 64] * 40):
        engine.controller.formed = 1 if i else 3  # the first poll only begins to count
        for index in range(2):
            engine.stages[index].phase(Phase.LOGITS, i, 0, (9 + 3 * index) * MS, batch, batch)
        engine.went(i, batch, [4 * MS] * 2)
        engine.poll(now=i * 21e-3)
    found = engine.controller
    assert engine.seconds(3, 32) == pytest.approx(12e-3, rel=0.05)
    assert found.unseen == pytest.approx(0, abs=1e-3), "4 + 4 + 12 and the executor's"
    assert found.period(64, 1) == pytest.approx(21e-3, rel=0.05)
    assert found.period(64, 2) == pytest.approx(32e-3, rel=0.05)
    assert found.microbatches(64) == 1


def paced(engine, sequences, stages, unseen, batches):
    """Batches of an engine whose stages take what ``stages`` say, with ``unseen`` seconds between
    them; how many microbatches were formed at each."""
    formed = []
    for i in range(batches):
        k = engine.controller.microbatches(sequences)
        batch = -(-sequences // k)
        taken = [fixed + each * batch for fixed, each in stages]
        engine.went(i, batch, [seconds * 1e9 for seconds in taken])
        engine.now += max(sum(taken) + unseen + 1e-3, k * max(taken)) / k
        engine.poll(now=engine.now)
        formed.append(k)
    return formed


def test_what_is_unseen_is_not_believed_for_ever(engine):
    """A network, or a client's pauses between single requests, made it long; then many come."""
    engine.now, stages = time.monotonic(), [(4e-3, 5e-5), (19e-3, 5e-5)]
    paced(engine, 1, stages, 40e-3, 90)
    assert engine.controller.unseen > 35e-3
    formed = paced(engine, 32, stages, 2e-3, 150)
    assert formed[0] == 3
    assert set(formed[100:]) == {1}, formed
    assert engine.controller.unseen < 10e-3


@pytest.mark.parametrize("slots", [3, 5])
def test_microbatches_that_pay_are_kept_however_long_the_way(slots):
    engine = Processes(slots)
    engine.now, stages = time.monotonic(), [(5e-3, 3e-4), (5e-3, 3e-4)]
    paced(engine, 1, stages, 40e-3, 90)
    assert set(paced(engine, 32, stages, 40e-3, 600)) == {slots}
    assert engine.controller.unseen == pytest.approx(40e-3, rel=0.05)
    engine.page.close()
