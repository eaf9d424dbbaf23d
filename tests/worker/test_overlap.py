"""How long a steady iteration takes, on a clock of the test's own.

Both threads are real; time is virtual. Every call takes its time by waiting on a clock that
moves only when all threads wait, to the earliest moment that one waits for.
"""

import itertools
import threading

import pytest

from .fake_device import HAND_OVER, FakeStage, TwoThreads


class VirtualClock:
    def __init__(self):
        self.now = 0.0
        self._condition = threading.Condition()
        self._waits = {}

    def sleep(self, seconds):
        """Take ``seconds`` of virtual time."""
        me = threading.get_ident()
        with self._condition:
            self._waits[me] = until = self.now + seconds
            self._condition.notify_all()
            assert self._condition.wait_for(lambda: self.now >= until, HAND_OVER)
            del self._waits[me]

    def advance(self):
        """Move to the earliest moment waited for; the test calls it when nothing else moves."""
        with self._condition:
            if self._waits:
                self.now = max(self.now, min(self._waits.values()))
                self._condition.notify_all()


class TimedStage(FakeStage):
    def __init__(self, clock, prepare, forward, **options):
        super().__init__(**options)
        self.clock, self.takes = clock, {"prepare": prepare, "forward": forward}
        self.ends = []

    def _step(self, name, iteration):
        super()._step(name, iteration)
        if name in self.takes:
            self.clock.sleep(self.takes[name])
        if name == "send":
            self.ends.append(self.clock.now)


def steady_iteration(prepare, forward, sets, iterations=12):
    """Virtual seconds between the ends of two iterations once the pipeline is full."""
    clock = VirtualClock()
    stage = TimedStage(clock, prepare, forward, sets=sets)
    done = threading.Event()
    with TwoThreads(stage, sets=sets) as running:

        def feed():
            for iteration in range(iterations):
                running.submit(iteration)
            running.drain()
            done.set()

        feeder = threading.Thread(target=feed)
        feeder.start()
        quiet, before = 0, None
        while not done.is_set():
            # The clock moves only after nothing has happened for a while: all that can go on at
            # this moment has. (A thread that is late makes the test slower, and could only make
            # the virtual iteration longer than it is.)
            state = (running.buffer.doing(), len(stage.log), len(clock._waits))
            quiet = quiet + 1 if state == before else 0
            before = state
            if quiet >= 5:
                clock.advance()
                quiet = 0
            done.wait(0.0005)
        feeder.join(HAND_OVER)
    gaps = [b - a for a, b in itertools.pairwise(stage.ends)]
    assert stage.intact()
    return sorted(gaps[2:])[len(gaps[2:]) // 2]


@pytest.mark.parametrize(
    ("prepare", "forward", "sets", "expected"),
    [
        (0.003, 0.020, 2, 0.020),  # preparation hides behind the device
        (0.003, 0.020, 1, 0.023),  # in turn, it does not
        (0.030, 0.020, 2, 0.030),  # a slow preparation is the pace
    ],
)
def test_a_steady_iteration_takes_the_longer_of_both(prepare, forward, sets, expected):
    assert steady_iteration(prepare, forward, sets) == pytest.approx(expected, rel=1e-6)
