"""What this machine's cores reach: by the names that the planner takes, or nothing."""

import os

import pytest

from sipipe.cli import advice
from sipipe.cores import Core
from sipipe.tools.planner import this_cpu
from sipipe.tools.planner.hardware import Assumed, assumptions, device
from sipipe.tools.planner.models import load_model


@pytest.fixture(autouse=True)
def anew():
    this_cpu.measured.cache_clear()
    yield
    this_cpu.measured.cache_clear()


def test_a_share_of_each_core_is_measured_and_taken_as_it_is():
    found = this_cpu.measured()
    assert set(found) == {"device.cpu.memory_gbs", "device.cpu.bf16_tflops"} <= set(assumptions())
    assert all(0 < each < 1e4 for each in found.values())
    half = device("cpu", parts=2, assumed=Assumed(given=dict.fromkeys(found, 3.0)))
    all_cores = len(os.sched_getaffinity(0))
    assert half.memory_gbs == half.bf16_tflops == pytest.approx(3.0 * all_cores / 2)


@pytest.mark.parametrize("said", [None, "no numbers here"])
def test_what_cannot_be_measured_stays_assumed(monkeypatch, said):
    monkeypatch.setattr(this_cpu, "output", lambda *_: said)
    assert this_cpu.measured() == {}


def test_slow_memory_is_what_few_requests_wait_for(monkeypatch):
    """On CPUs alone: GPUs are computed by their data sheets."""
    model, cores = load_model("qwen3-0.6b"), [Core((0,)), Core((1,))]
    monkeypatch.setattr(advice.os, "sched_getaffinity", lambda _: {0, 1})

    def quickest(name, gbs):
        given = {"device.cpu.memory_gbs": gbs, "device.cpu.bf16_tflops": 0.1}
        monkeypatch.setattr(advice, "measured", lambda: given)
        return advice.on_host(model, name, 1, cores, 1)[0].throughput

    assert quickest("cpu", 20.0) > 1.5 * quickest("cpu", 10.0)
    assert quickest("h100", 20.0) == quickest("h100", 10.0)
