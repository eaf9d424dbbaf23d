"""Stage times from the statistics page to the scheduler's pace."""

from __future__ import annotations

import pytest

from sipipe.observe.live import LivePage
from sipipe.observe.phases import Phase

pytest.importorskip("vllm", reason="the module belongs to sipipe.vllm")

from sipipe.engine.scheduling.live_pace import LivePace
from sipipe.engine.scheduling.pace import COLD

MS = 1_000_000


@pytest.fixture
def page():
    made = LivePage.create(stages=2, samplers=2, inflight=3)
    yield made
    made.close()


def test_batches_of_decodes_become_points_of_the_lines(page):
    live = LivePace(page, slots=3)
    first, last = page.writer("stage", 0), page.writer("stage", 1)
    for i, batch in enumerate([4, 8, 16, 32] * 20):
        first.phase(Phase.FORWARD, i, 0, (2 + batch) * MS, batch, batch)
        first.phase(Phase.SEND, i, 0, 1 * MS, batch, batch)
        last.phase(Phase.FORWARD, i, 0, 5 * MS, batch, batch)
        last.phase(Phase.LOGITS, i, 0, 2 * batch * MS, batch, batch)
        live.look()
    stages = live.pace.stages
    assert stages[0](0) == pytest.approx(3e-3, rel=0.02)
    assert stages[0](20) == pytest.approx(23e-3, rel=0.02)
    # The records of one batch may straddle a look: these come with the next one.
    assert stages[1](20) == pytest.approx(45e-3, rel=0.1)


def test_prompts_do_not_count(page):
    live = LivePace(page, slots=3)
    stage = page.writer("stage", 0)
    for i in range(60):
        stage.phase(Phase.FORWARD, i, 0, 500 * MS, 4, 400)
        live.look()
    assert live.pace.stages[0].weight == 0


def test_several_batches_between_two_looks(page):
    live = LivePace(page, slots=3)
    stage = page.writer("stage", 0)
    for i in range(60):
        stage.phase(Phase.FORWARD, i, 0, 8 * MS, 16, 16)
        if i % 3 == 2:
            live.look()
    assert live.pace.stages[0](16) == pytest.approx(8e-3)
    assert live.pace.stages[0].weight == pytest.approx(60 - COLD, rel=0.15)


def test_samplers_work_side_by_side_and_the_executor_before_and_after(page):
    live = LivePace(page, slots=3)
    executor = page.writer("executor")
    for i in range(60):
        page.writer("sampler", 0).phase(Phase.SAMPLE, i, 0, 1 * MS, 8, 8)
        page.writer("sampler", 1).phase(Phase.SAMPLE, i, 0, 3 * MS, 8, 8)
        for phase in (Phase.SCHEDULE, Phase.DISPATCH, Phase.UPDATE, Phase.GATHER):
            executor.phase(phase, i, 0, 1 * MS, 16, 16)
        live.look()
    assert live.pace.between(16) == pytest.approx(6e-3, rel=0.05)


def test_what_no_phase_has_is_seen_with_one_microbatch_alone(page):
    live = LivePace(page, slots=3)
    executor = page.writer("executor")
    for formed, expected in ((3, 0.0), (1, 4e-3), (2, 4e-3)):
        live.pace.formed = formed
        for i in range(100):
            for index in range(2):
                page.writer("stage", index).phase(Phase.FORWARD, i, 0, 10 * MS, 8, 8)
            executor.phase(Phase.UPDATE, i, 0, 1 * MS, 8, 8)
            executor.phase(Phase.GATHER, i, 0, 0, 8, 8)
            live.look(now=i * 25e-3)
            live.look(now=i * 25e-3 + 1e-3)  # a visit of a closed slot, nothing new
        assert live.pace.unseen == pytest.approx(expected, abs=2e-4)
