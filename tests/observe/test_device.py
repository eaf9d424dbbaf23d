"""Device phases from events, with a stand-in device whose clock drifts from the host's."""

from __future__ import annotations

import numpy as np
import pytest

from sipipe.observe.device import DeviceTimer
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import Recorder


class Keep(Recorder):
    def __init__(self):
        self.rows = []

    def record(self, *row):
        self.rows.append(row)


class Stream:
    """Events happen when the device has done what was asked before; its clock runs by ``rate``."""

    def __init__(self, rate=1.0):
        self.now, self.free, self.rate = 10**12, 10**12, rate

    def work(self, ns):
        start = max(self.free, self.now)
        self.free = start + ns
        return start, self.free

    def event(self):
        return Event(self)


class Event:
    def __init__(self, stream):
        self.stream, self.at = stream, None

    def record(self):
        self.at = max(self.stream.free, self.stream.now)

    def query(self):
        return self.at <= self.stream.now

    def synchronize(self):
        self.stream.now = max(self.stream.now, self.at)

    def elapsed_time(self, later):
        return float(np.float32((later.at - self.at) * self.stream.rate / 1e6))


@pytest.mark.parametrize("rate", [1.0, 1.00002, 0.99998])
def test_times_stay_true_for_an_hour(rate):
    stream, keep = Stream(rate), Keep()
    timer = DeviceTimer(keep, stream.event, lambda: stream.now)
    true = []
    for i in range(40_000):
        begun = timer.begin()
        true.append(stream.work(8_000_000))
        timer.end(begun, Phase.FORWARD, i, i % 2, batch=4, tokens=5)
        stream.now += 90_000_000  # the host is slower: the device idles in between
        timer.collect()
    timer.close()
    assert [row[1] for row in keep.rows] == list(range(40_000))
    starts = np.array([row[3] for row in keep.rows]) - np.array([t[0] for t in true])
    spans = np.array([row[4] - row[3] for row in keep.rows])
    assert abs(spans - 8_000_000).max() < 1000
    # A drift of 20 ppm makes 72 ms in an hour; the host's view bounds it.
    assert abs(starts).max() < (5_000 if rate == 1.0 else 90_000_000)
    assert keep.rows[0][:3] == (Phase.FORWARD, 0, 0)
    assert keep.rows[0][5:] == (4, 5)


def test_collect_does_not_wait():
    stream, keep = Stream(), Keep()
    timer = DeviceTimer(keep, stream.event, lambda: stream.now)
    begun = timer.begin()
    stream.work(5_000_000)
    timer.end(begun, Phase.LOGITS, 0, 0)
    assert timer.collect() == 1
    assert keep.rows == []
    timer.close()
    assert len(keep.rows) == 1
    assert keep.rows[0][4] - keep.rows[0][3] == pytest.approx(5_000_000, abs=500)


def test_events_are_reused():
    stream, keep = Stream(), Keep()
    made = []

    def make():
        made.append(stream.event())
        return made[-1]

    timer = DeviceTimer(keep, make, lambda: stream.now)
    for i in range(1000):
        begun = timer.begin()
        stream.work(1_000_000)
        timer.end(begun, Phase.FORWARD, i, 0)
        stream.now += 2_000_000
        timer.collect()
    assert len(made) <= 5


def test_work_never_starts_before_it_was_asked_for_nor_ends_after_it_was_seen():
    """A device clock that runs slow falls behind; the order with the host's records must hold."""
    stream, keep = Stream(0.9), Keep()
    timer = DeviceTimer(keep, stream.event, lambda: stream.now)
    asked, seen = [], []
    for i in range(200):
        asked.append(stream.now)
        begun = timer.begin()
        stream.work(3_000_000)
        timer.end(begun, Phase.FORWARD, i, 0)
        stream.now += 10_000_000
        timer.collect()
        seen.append(stream.now)
    assert all(row[3] >= a for row, a in zip(keep.rows, asked, strict=True))
    assert all(row[4] <= s for row, s in zip(keep.rows, seen, strict=True))
