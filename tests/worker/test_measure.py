"""What a stage measures for ``"cpu_sampling": "auto"``, on a device whose clock is a script.

What is measured, with vLLM's runner: tests/engine/test_second_runner.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from sipipe.worker import device as device_module
from sipipe.worker.device import seconds


class LateDevice:
    """Runs what is launched when it has run what was launched before; marks are times."""

    host = free = reached = 0.0

    def launch(self, host, work):
        self.host += host
        self.free = max(self.free, self.host) + work

    def occupy(self, seconds):
        self.launch(0, seconds)

    def mark(self):
        return int(self.free * 1e9)

    def wait(self, mark):
        self.reached = max(self.reached, mark)

    def nanoseconds(self, first, last):
        assert last <= self.reached, "asked for a time that the device has not reached"
        return last - first


@pytest.mark.parametrize(("host", "work"), [(0.4e-3, 0.1e-3), (0.1e-3, 0.4e-3)])
def test_a_slow_launch_is_not_the_devices_time(monkeypatch, host, work):
    late = LateDevice()
    monkeypatch.setattr(device_module, "time", SimpleNamespace(perf_counter=lambda: late.host))
    assert seconds(late, lambda: late.launch(host, work)) == pytest.approx(work, rel=1e-3)
