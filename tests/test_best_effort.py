"""What only saves time ends and slows nothing."""

import logging

import pytest

from sipipe import best_effort
from sipipe.best_effort import BRIEF, SHARE, BestEffort


@pytest.fixture
def clocks(monkeypatch):
    """The two clocks, which move where a test moves them."""

    class Clocks:
        wall = cpu = 0.0

        def spend(self, seconds, result=None):
            self.wall += seconds
            self.cpu += seconds
            return result

    clocks = Clocks()
    monkeypatch.setattr(best_effort.time, "monotonic", lambda: clocks.wall)
    monkeypatch.setattr(best_effort.time, "thread_time", lambda: clocks.cpu)
    return clocks


def test_what_raises_gives_the_other_answer_and_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(best_effort, "logger", logging.getLogger("best effort"))
    work = BestEffort("finding a shorter way", bounded=False)
    assert work(7, int, "seven") == 7
    assert work(8, int, "eight") == 8
    assert work(0, int, "9") == 9
    (record,) = caplog.records
    assert record.getMessage().startswith("finding a shorter way failed (ValueError: ")
    assert record.exc_info


def test_a_keyboard_interrupt_is_no_failure_of_the_work():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        BestEffort("waiting")(None, interrupted)


def test_work_that_took_long_is_left_out_until_it_is_its_share(clocks):
    work = BestEffort("walking")
    assert work("no", clocks.spend, 4 * BRIEF, "yes") == "yes"
    assert work("no", clocks.spend, 0.0, "yes") == "no"
    clocks.wall += 4 * BRIEF / SHARE
    assert work("no", clocks.spend, BRIEF / 2, "yes") == "yes"
    assert work("no", clocks.spend, 0.0, "yes") == "yes", "it was brief"


def test_time_of_others_counts_for_nothing(clocks):
    work = BestEffort("walking")

    def preempted():
        clocks.wall += 1.0

    work(None, preempted)
    assert work("no", lambda: "yes") == "yes"


def test_what_has_to_add_up_is_never_left_out(clocks):
    work = BestEffort("counting", bounded=False)
    for _ in range(3):
        assert work("no", clocks.spend, 1.0, "yes") == "yes"
