"""The core plan on cores of several hardware threads: workers have cores of their own."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sipipe.cores import Core, cpus_of, format_cpus, plan_cores
from tests.test_cores import machine


@pytest.mark.parametrize(
    ("cores", "stages", "tp", "workers", "samplers", "scheduler"),
    [
        (2, 2, 1, "0|1", "2", "3"),
        (2, 1, 2, "0|1", "2", "3"),
        (3, 2, 1, "0|1", "2", "5"),
        (4, 2, 2, "0|1|2|3", "4|5|6", "7"),
        (4, 3, 1, "0|1|2", "3", "7"),
        (4, 4, 1, "0|1|2|3", "4|5|6", "7"),
        (4, 6, 1, "0|1|2|3|4|5", "6", "7"),
        (8, 6, 1, "0|1|2|3|4|5", "6,14", "7,15"),
        (8, 7, 1, "0|1|2|3|4|5|6", "7|8|9|10|11|12|13|14", "15"),
        (8, 8, 1, "0|1|2|3|4|5|6|7", "8|9|10|11|12|13|14", "15"),
    ],
)
def test_second_threads_are_places_of_their_own_where_cores_are_scarce(
    cores, stages, tp, workers, samplers, scheduler
):
    """First threads go to workers. Two workers on the threads of one core would each run at about
    half the speed while samplers, which mostly wait, had the other cores."""
    plan = plan_cores(machine(cores, threads=2), stages=stages, tensor_parallel=tp)
    assert plan.omp_threads_bind() == workers
    assert "|".join(map(format_cpus, plan.samplers)) == samplers
    assert format_cpus(plan.scheduler) == scheduler
    assert not plan.shared


def test_an_only_worker_of_two_cores_has_a_thread_of_each_and_the_others_any():
    plan = plan_cores(machine(2, threads=2), stages=1)
    assert plan.workers == (((0, 1),),)
    assert plan.samplers == ((0, 1, 2, 3),)
    assert plan.shared


def test_more_workers_than_threads_load_all_cores_alike():
    plan = plan_cores(machine(2, threads=2), stages=6)
    assert Counter(cpu % 2 for stage in plan.workers for cpu in stage[0]) == {0: 3, 1: 3}


def test_a_gpu_worker_has_the_threads_of_its_core_that_no_one_else_needs():
    for cores, stages, workers in ((2, 1, "0,2"), (3, 2, "0,3|1,4"), (2, 2, "0|1")):
        plan = plan_cores(machine(cores, threads=2), stages=stages, device="cuda")
        assert plan.omp_threads_bind() == workers


def test_a_core_of_its_own_comes_before_the_gpus_node():
    where = machine(4, nodes=2, threads=2)
    plan = plan_cores(where, stages=4, device="cuda", nodes=[1] * 4)
    assert plan.omp_threads_bind() == "2|3|0|1"


def test_a_container_may_have_one_thread_only_of_some_cores():
    where = [Core((0, 4)), Core((1,)), Core((2, 6)), Core((3,))]
    plan = plan_cores(where, stages=4)
    assert plan.omp_threads_bind() == "0|1|2|3"
    assert (plan.samplers, plan.scheduler) == (((4,),), (6,))


@given(
    cores=st.integers(1, 40),
    nodes=st.integers(1, 4),
    threads=st.integers(1, 4),
    neighbours=st.booleans(),
    stages=st.integers(1, 10),
    tp=st.integers(1, 4),
    samplers=st.one_of(st.just("auto"), st.integers(0, 20)),
    device=st.sampled_from(["cpu", "cuda"]),
    near=st.lists(st.integers(0, 3) | st.none()),
)
def test_workers_have_cores_of_their_own_and_the_others_spread(
    cores, nodes, threads, neighbours, stages, tp, samplers, device, near
):
    where = machine(cores, nodes=nodes, threads=threads)
    if neighbours:  # as some machines number them: the threads of a core one after the other
        where = [
            Core(tuple(range(index * threads, (index + 1) * threads)), core.node)
            for index, core in enumerate(where)
        ]
    plan = plan_cores(
        where, stages=stages, tensor_parallel=tp, samplers=samplers, device=device, nodes=near
    )
    home = {cpu: index for index, core in enumerate(where) for cpu in core.cpus}
    workers = [cpus for stage in plan.workers for cpus in stage]
    others = [*plan.samplers, plan.scheduler]
    assert all(workers), "every worker runs somewhere"
    assert all(others), "so does everyone else"
    assert plan.cpus <= set(cpus_of(where))
    if cores < len(workers):
        return
    taken = Counter(core for cpus in workers for core in {home[cpu] for cpu in cpus})
    assert max(taken.values()) == 1, "no two workers on a core"
    if device == "cpu":
        assert len(taken) == sum(map(len, workers)), "one thread a core"
    beside = Counter(core for cpus in others for core in {home[cpu] for cpu in cpus})
    counts = {beside[core] for core in taken}
    assert 0 not in counts or max(counts) <= 1, "twice beside one worker, not at all beside another"
    if samplers == "auto" and not plan.shared:
        loads = Counter(home[cpu] for cpus in others for cpu in cpus)
        assert len({loads[core] for core in taken}) == 1, "all workers are slowed alike"
    free = {cpu for cpu in home if home[cpu] not in taken}
    assert free <= {cpu for cpus in others for cpu in cpus}, "no core is idle"
