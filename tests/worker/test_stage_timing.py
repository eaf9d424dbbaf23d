"""Phases by the host's clock, or by the device's events where it has some."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sipipe.observe.device import DeviceTimer  # noqa: E402
from sipipe.observe.phases import Phase  # noqa: E402
from sipipe.worker.inputs.model_input import ModelInput  # noqa: E402
from sipipe.worker.timing import StageTiming  # noqa: E402

INPUTS = ModelInput(iteration=7, slot=1, version=1, num_reqs=3, num_tokens=5)


class Stream:
    """A device whose work takes time after the host has launched it."""

    def __init__(self):
        self.now = 0
        """The host's clock, ns; the device's as well."""
        self.behind = 0
        """When what was launched so far will be done."""

    def launch(self, nanoseconds):
        self.behind = max(self.behind, self.now) + nanoseconds

    def event(self):
        stream = self

        class Event:
            def record(self):
                self.at = max(stream.behind, stream.now)

            def query(self):
                return stream.now >= self.at

            def synchronize(self):
                stream.now = max(stream.now, self.at)

            def elapsed_time(self, later):
                return (later.at - self.at) / 1e6

        return Event()


def keeping():
    kept = []

    def record(phase, iteration, slot, start, end, batch=0, tokens=0):
        kept.append((phase, iteration, slot, start, end, batch, tokens))

    return kept, SimpleNamespace(record=record)


def test_on_a_cpu_a_phase_ends_when_its_call_does():
    kept, recorder = keeping()
    timing = StageTiming(recorder)
    timing.watch(torch.device("cpu"))
    with timing.device(Phase.FORWARD, INPUTS):
        pass
    timing.close()
    ((phase, iteration, slot, start, end, batch, tokens),) = kept
    assert (phase, iteration, slot, batch, tokens) == (Phase.FORWARD, 7, 1, 3, 5)
    assert start <= end


def test_on_a_device_a_phase_is_the_work_not_the_launch():
    kept, recorder = keeping()
    stream = Stream()
    timing = StageTiming(recorder, DeviceTimer(recorder, stream.event, lambda: stream.now))
    for _ in range(2):
        with timing.device(Phase.FORWARD, INPUTS):
            stream.launch(20_000_000)
            stream.now += 1_000_000  # the host is back after 1 ms
    assert kept == [], "nothing waits for the device"
    timing.close()
    spans = [(start, end) for _, _, _, start, end, _, _ in kept]
    assert spans == [(0, 20_000_000), (20_000_000, 40_000_000)]


def test_a_device_that_has_failed_does_not_hold_up_the_end():
    _, recorder = keeping()
    stream = Stream()
    timing = StageTiming(recorder, DeviceTimer(recorder, stream.event, lambda: stream.now))
    with timing.device(Phase.FORWARD, INPUTS):
        stream.launch(1)

    def fail():
        raise RuntimeError("CUDA error: device-side assert triggered")

    timing._timer._open[-1][2].synchronize = fail
    timing.close()
