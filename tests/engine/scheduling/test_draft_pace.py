"""What drafts cost, by periods with them and without; time is made up."""

import pytest

from sipipe.engine.scheduling.draft_pace import AGAIN, ALIKE, OLD, STRETCH, SURE, DraftPace

SLOTS = 3
SETTLED = SLOTS + 1 + STRETCH
"""Microbatches after a change of the way until a period is known."""


class Pipeline:
    """Microbatches that come back one after the other, of a request each unless said."""

    def __init__(self):
        self.now = 0.0
        self.pace = DraftPace(SLOTS, lambda: self.now)

    def run(self, drafting, seconds, microbatches=SETTLED, *, sequences=1, passes=1, prompts=False):
        for _ in range(microbatches):
            self.now += seconds
            self.pace.took(drafting, passes, sequences, prompts=prompts)


def both(without=0.010, drafting=0.015, sequences=1):
    pipeline = Pipeline()
    pipeline.run(False, without, sequences=sequences)
    pipeline.run(True, drafting, sequences=sequences)
    return pipeline


def test_a_slowdown_is_the_ratio_of_the_periods():
    assert both().pace.slowdown(1) == pytest.approx(1.5)
    assert both(drafting=0.009).pace.slowdown(1) == 1.0, "drafts make no pass shorter"
    pipeline = both(sequences=12)
    assert pipeline.pace.slowdown(12) == pytest.approx(1.5)
    assert pipeline.pace.slowdown(int(12 * ALIKE)) == pytest.approx(1.5)
    assert pipeline.pace.slowdown(14) is None
    assert pipeline.pace.slowdown(10) is None


def test_a_period_is_that_of_all_requests_however_many_a_microbatch_has():
    pipeline = Pipeline()
    pipeline.run(False, 0.010, sequences=8, passes=8)
    pipeline.run(True, 0.005, 2 * SETTLED, sequences=8, passes=2)
    assert pipeline.pace.slowdown(8) == pytest.approx(2.0)


def test_only_microbatches_of_one_way_that_decode_are_measured():
    pipeline = Pipeline()
    pipeline.run(False, 0.010)
    for _ in range(5):
        pipeline.run(True, 0.015, SETTLED - 2)
        pipeline.run(True, 1.0, 1, prompts=True)
    assert pipeline.pace.slowdown(1) is None
    for _ in range(5):
        pipeline.run(True, 0.015, SETTLED - 2)
        pipeline.run(False, 0.010, 1)
    assert pipeline.pace.slowdown(1) is None
    for sequences in [4, 8] * SETTLED:
        pipeline.run(True, 0.015, 1, sequences=sequences)
    assert pipeline.pace.slowdown(4) is None
    pipeline.run(True, 0.015)
    assert pipeline.pace.slowdown(1) == pytest.approx(1.5)


def test_what_is_old_is_not_known():
    pipeline = both()
    pipeline.run(True, 0.015, OLD)
    assert pipeline.pace.slowdown(1) is None
    assert pipeline.pace.tries(1, 1.1), "so it is tried again"


def test_a_clock_that_stands_tells_nothing():
    assert both(without=0.0).pace.slowdown(1) is None


def test_drafts_are_left_out_once_to_know_what_a_period_is_without():
    pipeline = Pipeline()
    assert not pipeline.pace.tries(1, 1.1), "of those with drafts nothing is known either"
    pipeline.run(True, 0.015)
    assert not pipeline.pace.tries(1, SURE), "they pay for certain"
    assert pipeline.pace.tries(1, 1.1)
    assert pipeline.pace.tries(1, 1.1), "until it is known"
    pipeline.run(False, 0.010)
    assert not pipeline.pace.tries(1, 1.1)
    assert pipeline.pace.slowdown(1) == pytest.approx(1.5)


def test_tries_end_and_are_seldom():
    """Requests come all the time, so nothing can be measured without drafts."""
    pipeline = Pipeline()
    tried = 0
    for _ in range(4 * AGAIN):
        pipeline.run(True, 0.015, sequences=4, microbatches=1)
        if pipeline.pace.tries(4, 1.1):
            tried += 1
            pipeline.run(False, 1.0, 1, prompts=True)
    assert 0 < tried <= 5 * 4 * (STRETCH + SLOTS)
