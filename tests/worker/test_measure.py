"""What a stage measures for ``"cpu_sampling": "auto"``, on a device whose clock is a script.

What is measured, with vLLM's runner: tests/engine/test_second_runner.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from sipipe.worker import device as device_module
from sipipe.worker import measure as measure_module
from sipipe.worker.device import HostDevice, seconds


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


def test_rows_that_pad_a_graph_are_not_drawn(monkeypatch):
    """vLLM's kernel would look for their requests beyond the end of the list of them."""
    sizes = set()
    batch = SimpleNamespace(
        idx_mapping=torch.arange(5), positions=torch.arange(5), logits_indices=torch.arange(5)
    )
    sampler = SimpleNamespace(draw=lambda rows, *_: sizes.add(len(rows)))
    monkeypatch.setattr(measure_module, "_requests", lambda *_: nullcontext(batch))
    monkeypatch.setattr(measure_module, "DeviceSampler", lambda _: sampler)
    runner = SimpleNamespace(
        _dummy_run=lambda *_, **__: (None, torch.zeros(8, 4)),
        lora_config=None,
        sample=lambda hidden, *_: sizes.add(len(hidden)),
    )
    logits = SimpleNamespace(compute=lambda hidden: hidden, gather_rows=lambda columns: columns)
    measured = measure_module.measure_stage(runner, HostDevice(), 5, logits, None)
    assert sizes == {5}
    assert set(measured.plain) == {"greedy", "temperature"}
    assert measured.head is None


@pytest.mark.parametrize("fails", [False, True])
def test_a_head_that_cannot_be_measured_ends_nothing(monkeypatch, fails):
    batch = SimpleNamespace(
        idx_mapping=torch.arange(5), positions=torch.arange(5), logits_indices=torch.arange(5)
    )
    monkeypatch.setattr(measure_module, "_requests", lambda *_: nullcontext(batch))
    sampler = SimpleNamespace(draw=lambda *_: None)
    monkeypatch.setattr(measure_module, "DeviceSampler", lambda _: sampler)

    def dummy_run(*_, **__):
        if runner.speculator is not None and fails:
            raise RuntimeError("no memory")
        proposed.append(runner.speculator)
        return None, torch.zeros(8, 4)

    proposed = []
    runner = SimpleNamespace(
        lora_config=None, sample=lambda *_: None, speculator=None, _dummy_run=dummy_run
    )
    logits = SimpleNamespace(compute=lambda hidden: hidden, gather_rows=lambda columns: columns)
    measured = measure_module.measure_stage(
        runner, HostDevice(), 5, logits, None, speculator="head"
    )
    assert (measured.head is None) is fails
    assert ("head" in proposed) is not fails
    assert runner.speculator is None
    assert measured.device
