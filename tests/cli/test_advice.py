"""Which degrees are said to be quicker on a machine's CPUs, before anything has run."""

from types import SimpleNamespace

import pytest

from sipipe.cli import advice
from sipipe.cores import Core
from sipipe.tools.planner.models import load_model


@pytest.fixture
def machine(monkeypatch):
    def of(cores, nodes=1):
        found = [Core((index,), node=index * nodes // cores) for index in range(cores)]
        monkeypatch.setattr(advice, "this_machine", lambda: found)
        monkeypatch.setattr(advice.os, "sched_getaffinity", lambda _: set(range(cores)))
        return found

    return of


def test_one_request_is_quicker_where_both_cores_compute_than_in_stages_that_wait(machine):
    machine(2)
    told = advice.quicker_on_cpus(load_model("qwen3-0.6b"), 2, 1)
    first = told.split("; ")[0]
    assert first.startswith("1 at once by --pp 1 --tp ")
    assert float(first.split()[-2]) >= advice.CLEARLY
    assert "\n" not in told


def test_one_stage_is_told_of_two_where_they_are_quicker(machine, monkeypatch):
    """By the parts as they are measured it never is: stages of one node share cores and memory."""
    machine(2)
    facts = load_model("qwen3-0.6b")
    assert advice.quicker_on_cpus(facts, 1, 1) == ""
    ways = {1: [SimpleNamespace(p=1, t=1, throughput=10.0)]}
    ways[2] = [SimpleNamespace(p=p, t=2 // p, throughput=12.0 * p) for p in (1, 2)]
    monkeypatch.setattr(advice, "on_host", lambda _, name, count, cores, load: ways[count])
    told = advice.quicker_on_cpus(facts, 1, 1)
    assert told.startswith("1 at once by --pp 2 --tp 1, about 2.4 x; 16 at")


def test_nothing_is_said_of_a_machine_with_far_memory(machine):
    machine(2, nodes=2)
    assert advice.quicker_on_cpus(load_model("qwen3-0.6b"), 2, 1) == ""


@pytest.mark.parametrize(("stages", "ranks"), [(10**9, 1), (1, 10**9)])
def test_nothing_is_computed_for_more_workers_than_a_model_can_have(machine, stages, ranks):
    """A list of a thousand million workers takes all memory before vLLM refuses them."""
    machine(2)
    assert advice.quicker_on_cpus(load_model("qwen3-0.6b"), stages, ranks) == ""


def test_a_gpus_number_has_digits_of_one_kind(monkeypatch):
    monkeypatch.setattr(advice, "output", lambda *_: "H100, 81559 MiB, 1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "²")
    assert advice.gpus_here() == []


def test_a_cpus_workers_have_the_cores_of_the_plan(machine):
    """One worker has three of four cores, and both of two, which it shares with the others."""
    facts = load_model("qwen3-0.6b")
    of_four = max(c.throughput for c in advice.on_host(facts, "cpu", 1, machine(4), 1))
    of_two = max(c.throughput for c in advice.on_host(facts, "cpu", 1, machine(2), 1))
    assert of_four / of_two == pytest.approx(3 / 2, rel=0.1)


@pytest.mark.parametrize("threads", [1, 2])
def test_two_stages_of_one_core_have_no_more_of_it_than_one(monkeypatch, threads):
    core = [Core(tuple(range(threads)))]
    monkeypatch.setattr(advice.os, "sched_getaffinity", lambda _: set(range(threads)))
    facts = load_model("qwen3-0.6b")
    one, two = (
        max(c.throughput for c in advice.on_host(facts, "cpu", devices, core, 16))
        for devices in (1, 2)
    )
    assert one >= two
