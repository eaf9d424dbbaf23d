"""The core plan: who gets which cores, on machines from 1 to 64 cores."""

import errno
import math
import os
import platform
import re
import socket
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sipipe.config import CorePlacement
from sipipe.control_groups import control_groups
from sipipe.core_binding import bind_threads, claim, claimed, running_on
from sipipe.cores import (
    Core,
    cpus_of,
    degrees,
    equal_shares,
    format_cpus,
    plan_cores,
    quota,
    share_of,
    this_machine,
)
from sipipe.errors import ConfigError
from sipipe.ipc.ring.layout import READERS


def machine(cores, *, nodes=1, threads=1):
    """The cores of a machine, numbered as Linux does: second threads after all first ones."""
    per_node = -(-cores // nodes)
    return [
        Core(tuple(index + thread * cores for thread in range(threads)), index // per_node)
        for index in range(cores)
    ]


@pytest.mark.parametrize(
    ("cores", "threads", "stages", "tp", "workers", "samplers", "scheduler", "shared"),
    [
        (1, 1, 1, 1, "0", "0", "0", True),
        (1, 1, 2, 1, "0|0", "0", "0", True),
        (2, 1, 1, 1, "0-1", "0-1", "0-1", True),
        (2, 1, 2, 1, "0|1", "0-1", "0-1", True),
        (4, 1, 1, 1, "0-2", "3", "3", True),
        (4, 1, 2, 1, "0|1", "2", "3", False),
        (4, 1, 2, 2, "0|1|2|3", "0-3", "0-3", True),
        (5, 1, 2, 1, "0-1|2-3", "4", "4", True),
        (8, 1, 1, 1, "0-5", "6", "7", False),
        (8, 1, 2, 1, "0-2|3-5", "6", "7", False),
        (8, 1, 4, 1, "0|1|2|3", "4|5|6", "7", False),
        # Second threads are places of their own where cores are scarce, and first threads go to
        # workers: two of them on the threads of one core would each run at about half the speed
        # while samplers, which mostly wait, had the other cores.
        (2, 2, 1, 1, "0-1", "0-3", "0-3", True),
        (2, 2, 2, 1, "0|1", "2", "3", False),
        (2, 2, 1, 2, "0|1", "2", "3", False),
        (3, 2, 2, 1, "0|1", "2", "5", False),
        (4, 2, 2, 2, "0|1|2|3", "4|5|6", "7", False),
        (4, 2, 3, 1, "0|1|2", "3", "7", False),
        (4, 2, 4, 1, "0|1|2|3", "4|5|6", "7", False),
        (4, 2, 6, 1, "0|1|2|3|4|5", "6", "7", False),
        (8, 2, 6, 1, "0|1|2|3|4|5", "6,14", "7,15", False),
        (8, 2, 7, 1, "0|1|2|3|4|5|6", "7|8|9|10|11|12|13|14", "15", False),
        (8, 2, 8, 1, "0|1|2|3|4|5|6|7", "8|9|10|11|12|13|14", "15", False),
    ],
)
def test_plans_for_a_cpu_engine(cores, threads, stages, tp, workers, samplers, scheduler, shared):
    plan = plan_cores(machine(cores, threads=threads), stages=stages, tensor_parallel=tp)
    assert plan.omp_threads_bind() == workers
    assert "|".join(map(format_cpus, plan.samplers)) == samplers
    assert (format_cpus(plan.scheduler), plan.shared) == (scheduler, shared)


def test_a_large_machine_keeps_workers_on_one_node_and_off_second_threads():
    plan = plan_cores(machine(64, nodes=2, threads=2), stages=4)
    sizes = {len(cpus) for stage in plan.workers for cpus in stage}
    assert sizes == {13}
    for stage in plan.workers:
        assert len({cpu // 32 for cpu in stage[0]}) == 1
        assert max(stage[0]) < 64
    assert len(plan.samplers) == 11
    assert all(len(cpus) == 2 for cpus in plan.samplers)  # a core with both of its threads
    assert len(plan.scheduler) == 2
    assert not plan.shared


@pytest.mark.parametrize(("cores", "nodes"), [(96, 4), (128, 8), (512, 16)])
def test_a_ring_has_room_for_all_processes_of_a_large_machine(cores, nodes):
    plan = plan_cores(machine(cores, nodes=nodes), stages=8, device="cuda")
    assert 64 <= len(plan.samplers) <= READERS - 8


def test_on_gpus_the_samplers_get_most_cores():
    plan = plan_cores(machine(32), stages=2, device="cuda")
    assert [len(stage[0]) for stage in plan.workers] == [2, 2]
    assert len(plan.samplers) == 16
    assert plan.scheduler == (30, 31), "of many two"
    assert plan_cores(machine(11), stages=2, device="cuda").scheduler == (10,)
    asked = plan_cores(machine(12), stages=2, device="cuda", samplers=7)
    assert (len(set(asked.samplers)), asked.scheduler) == (7, (11,)), "a core for each"
    assert plan_cores(machine(4), stages=2, device="cuda").samplers == ((2,),)
    assert len(plan_cores(machine(96, nodes=2), stages=2, device="cuda").samplers) == 32


def test_a_sampler_of_several_cores_stays_on_one_node():
    where = machine(96, nodes=2)
    plan = plan_cores(where, stages=2, device="cuda", nodes=[0, 1])
    of = {cpu: core.node for core in where for cpu in core.cpus}
    assert {len(cpus) for cpus in plan.samplers} == {2, 3}
    assert sum(len({of[cpu] for cpu in cpus}) > 1 for cpus in plan.samplers) <= 1


def test_gpu_workers_get_cores_of_their_gpus_node():
    where = machine(16, nodes=2)
    plan = plan_cores(where, stages=3, device="cuda", nodes=[1, None, 0])
    of = {cpu: core.node for core in where for cpu in core.cpus}
    assert [{of[cpu] for cpu in stage[0]} for stage in plan.workers] == [{1}, {0}, {0}]
    few = plan_cores(where, stages=5, device="cuda", nodes=[1] * 5)
    assert [{of[cpu] for cpu in stage[0]} for stage in few.workers] == [{1}] * 4 + [{0}]


def test_no_samplers_leave_their_cores_to_the_workers():
    plan = plan_cores(machine(9), stages=2, samplers=0)
    assert plan.samplers == ()
    assert [len(stage[0]) for stage in plan.workers] == [4, 4]
    assert "drawn on the last stage" in plan.describe()[1]


@given(
    cores=st.integers(1, 96),
    nodes=st.integers(1, 4),
    threads=st.integers(1, 2),
    stages=st.integers(1, 8),
    tp=st.integers(1, 4),
    samplers=st.one_of(st.just("auto"), st.integers(0, 20)),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_any_plan_is_complete_and_overlaps_only_when_it_says_so(
    cores, nodes, threads, stages, tp, samplers, device
):
    where = machine(cores, nodes=nodes, threads=threads)
    plan = plan_cores(where, stages=stages, tensor_parallel=tp, samplers=samplers, device=device)
    assert [len(stage) for stage in plan.workers] == [tp] * stages
    ranks = [cpus for stage in plan.workers for cpus in stage]
    assert len({len(cpus) for cpus in ranks}) == 1  # equal shares
    groups = [*ranks, *plan.samplers, plan.scheduler]
    assert all(groups)
    assert set().union(*groups) <= set(cpus_of(where))
    if samplers == "auto":
        assert 1 <= len(plan.samplers) <= 16 * nodes
    else:
        assert len(plan.samplers) == samplers
    if not plan.shared:
        used = [cpu for cpus in [*ranks, *set(plan.samplers), plan.scheduler] for cpu in cpus]
        assert len(used) == len(set(used))
        assert plan.omp_threads_bind().count("|") == stages * tp - 1


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


@pytest.mark.parametrize(
    ("cores", "threads", "replicas", "shares"),
    [
        (8, 1, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (5, 1, 2, [(0, 1), (2, 3, 4)]),
        (1, 2, 2, [(0,), (1,)]),
        (1, 1, 2, [(0,), (0,)]),
        (2, 1, 1, [(0, 1)]),
    ],
)
def test_replicas_share_the_cores(cores, threads, replicas, shares):
    all_of_them = machine(cores, threads=threads)
    found = [share_of(all_of_them, number, replicas) for number in range(replicas)]
    assert [cpus_of(share) for share in found] == shares


def test_vllm_takes_a_replicas_own_cores():
    """It passes over as many as those before it have."""
    plan = plan_cores(machine(8)[4:], stages=2)
    assert plan.omp_threads_bind(before=2).split("|")[4:] == plan.omp_threads_bind().split("|")


def test_an_explicit_placement_is_taken_as_it_is():
    placement = CorePlacement(stages=((0, 1), (2, 3)), samplers=((4,), (5,)), scheduler=(6,))
    plan = plan_cores(machine(8), stages=2, tensor_parallel=2, placement=placement)
    assert plan.workers == (((0,), (1,)), ((2,), (3,)))
    assert plan.samplers == ((4,), (5,))
    assert plan.scheduler == (6,)
    assert plan.omp_threads_bind() == "0|1|2|3"
    assert not plan.shared
    one = plan_cores(
        machine(8), stages=1, tensor_parallel=2, placement=CorePlacement(stages=((5,),))
    )
    assert one.workers == (((5,), (5,)),)
    assert one.samplers == ((),)
    assert one.scheduler == ()
    placement = CorePlacement(samplers=((1,), (2,)))
    assert plan_cores(machine(4), stages=2, placement=placement).samplers == ((1,), (2,))
    assert plan_cores(machine(4), stages=2, placement=placement, samplers=0).samplers == ()


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (CorePlacement(stages=((0,), (9,))), ["CPU 9", "may use 0-3"]),
        (CorePlacement(stages=((0,),)), ["1 stages", "has 2"]),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(placement, words):
    with pytest.raises(ConfigError) as caught:
        plan_cores(machine(4), stages=2, placement=placement)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("cores", "workers", "bound"),
    [
        ([(0,), (1,)], 2, "0|1"),
        ([(0,), (1,)], 4, "0|1|0|1"),
        ([(0,), (1,)], 1, "0-1"),
        ([(0,), (1,)], 3, "0|1|0"),
        ([(0, 4), (1, 5)], 2, "0|1"),
        ([(0, 4), (1, 5)], 4, "0|1|4|5"),
        ([(0, 4), (1, 5)], 6, "0|1|4|5|0|1"),
        ([(cpu, cpu + 8) for cpu in range(8)], 4, "0-1|2-3|4-5|6-7"),
    ],
)
def test_stock_vllm_has_a_core_for_each_worker_in_turn_where_cores_are_few(cores, workers, bound):
    assert equal_shares([Core(cpus) for cpus in cores], workers) == bound


def test_off_binds_nothing():
    plan = plan_cores(machine(8), stages=2, placement="off")
    assert plan.omp_threads_bind() == "nobind"
    assert set(plan.samplers) == {()}
    assert "not bound" in plan.describe()[0]


def test_the_description_has_two_lines():
    first, second = plan_cores(machine(8), stages=2).describe()
    assert first == "core plan: stage 0: cores 0-2 · stage 1: cores 3-5"
    assert second == "           1 sampler: core 6 · scheduler: core 7"
    assert "shared" in plan_cores(machine(2), stages=2).describe()[1]


def test_cpu_lists_are_written_as_the_kernel_does():
    assert format_cpus([0, 1, 2, 3, 8, 10, 11]) == "0-3,8,10-11"
    assert format_cpus([5]) == "5"
    assert format_cpus([]) == ""


def test_this_machine_is_read_from_sys(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3, 5, 6, 7})
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        topology.joinpath("thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
        (tmp_path / f"cpu{cpu}/node{cpu % 2}").mkdir()
    found = this_machine(tmp_path)
    assert found == [Core((0,), 0), Core((2, 6), 0), Core((1, 5), 1), Core((3, 7), 1)]
    assert cpus_of(found) == (0, 1, 2, 3, 5, 6, 7)


def version_1(group, most, period):
    """Files of control groups of the first kind."""
    found = {"quota": most, "period": period}
    return {f"cpu,cpuacct/{group}cpu.cfs_{what}_us": us for what, us in found.items()}


@pytest.mark.parametrize(
    ("line", "files", "expected"),
    [
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/pod/box", {"pod/cpu.max": "400000 100000", "pod/box/cpu.max": "max 100000"}, 4.0),
        ("3:cpu,cpuacct:/box\n2:memory:/box", version_1("box/", "150000", "50000"), 3.0),
        ("3:cpu,cpuacct:/", version_1("", "-1", "100000"), math.inf),
    ],
)
def test_the_limit_of_a_container_is_read(tmp_path, line, files, expected):
    (tmp_path / "own").write_text(line + "\n")
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text + "\n")
    assert quota(tmp_path / "groups", tmp_path / "own") == expected
    assert quota(tmp_path, tmp_path / "none") == math.inf


@pytest.mark.parametrize(
    ("lines", "groups"),
    [
        ("0::/pod/box", ["pod/box", "pod", ""]),
        ("0::/", [""]),
        ("3:cpu,cpuacct:/box\n2:memory:/pod\n1:name=systemd:/pod", ["memory/pod", "memory"]),
    ],
)
def test_the_groups_that_may_limit_memory(tmp_path, lines, groups):
    (tmp_path / "own").write_text(f"{lines}\n")
    found = control_groups("memory", tmp_path, tmp_path / "own")
    assert list(found) == [tmp_path / group for group in groups]


@pytest.mark.parametrize(("limit", "count"), [(2.9, 2), (0.5, 1), (64.0, 7)])
def test_a_container_takes_as_many_cores_as_it_has_time_for(tmp_path, monkeypatch, limit, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(7)))
    starts = set()
    for name in "abcdefghij":
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        found = this_machine(tmp_path, most=limit)
        assert len(found) == count
        starts.add(found[0].cpus)
    assert len(starts) > 1 or count == 7


def test_a_thread_runs_elsewhere_for_a_while():
    before = os.sched_getaffinity(0)
    with running_on([min(before)]):
        assert os.sched_getaffinity(0) == {min(before)}
        with running_on([]):
            assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_cpus_that_the_container_has_no_more_end_nothing(monkeypatch):
    """A container's CPUs may change while a model loads."""

    def refuse(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with running_on([0]):
        pass
    bind_threads([0])


def test_without_sys_every_cpu_is_a_core(tmp_path):
    found = this_machine(tmp_path)
    assert cpus_of(found) == tuple(sorted(os.sched_getaffinity(0)))
    assert all(core.node == 0 and len(core.cpus) == 1 for core in found)
    assert cpus_of(this_machine()) == cpus_of(found)


def test_threads_that_are_there_and_later_ones_are_bound():
    program = (
        "import os, threading; from sipipe.core_binding import bind_threads\n"
        "go, seen = threading.Event(), []\n"
        "look = lambda: (go.wait(), seen.append(os.sched_getaffinity(0)))\n"
        "before = threading.Thread(target=look); before.start()\n"
        "one = {max(os.sched_getaffinity(0))}; bind_threads(one); go.set(); before.join()\n"
        "after = threading.Thread(target=look); after.start(); after.join()\n"
        "assert seen == [one, one], seen\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


LINUX = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))


@pytest.mark.skipif(LINUX < (6, 12) or platform.machine() != "x86_64", reason="of Linux 6.12 on")
def test_threads_that_are_there_and_later_ones_run_soon_and_keep_their_priority():
    program = (
        "import ctypes, os, struct, threading; from sipipe.core_binding import run_soon\n"
        "def look():\n"
        "    said = ctypes.create_string_buffer(48)\n"
        "    assert not ctypes.CDLL(None).syscall(315, 0, said, 48, 0)\n"
        "    _, policy, _, nice, _, slice_ns, _, _ = struct.unpack('=IIQiIQQQ', said)\n"
        "    return policy, nice, slice_ns\n"
        "mine = os.nice(3); go, seen = threading.Event(), []\n"
        "see = lambda: (go.wait(), seen.append(look()))\n"
        "before = threading.Thread(target=see); before.start()\n"
        "run_soon(); go.set(); before.join()\n"
        "after = threading.Thread(target=see); after.start(); after.join()\n"
        "assert [look(), *seen] == [(0, mine, 100_000)] * 3, seen\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_engines_of_a_host_tell_each_other_which_cpus_they_take():
    far = plan_cores([Core((cpu,)) for cpu in range(7000, 7004)], stages=2)
    assert far.cpus == {7000, 7001, 7002, 7003}
    assert not claimed() & far.cpus
    plans = [
        plan_cores([Core((cpu,)) for cpu in cpus], stages=2)
        for cpus in (range(300, 304), range(302, 308))
    ]
    with claim(plans[0]):
        assert claimed() & set(range(300, 400)) == {300, 301, 302, 303}
        assert plans[1].cpus & claimed() == {302, 303}
        with claim(plans[0]), claim(plan_cores(machine(2), stages=2, placement="off")):
            assert plans[0].cpus <= claimed(), (
                "two that differ in the process only, and one of none"
            )
        with claim(far):
            pass
    assert not claimed() & plans[0].cpus


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        (["m", "-pp", "2", "--tensor_parallel_size=4"], (2, 4, 1)),
        (["m", "-dp=2"], (1, 1, 2)),
        (["m", "-pp", "0"], None),
        (["m", "-pp", "two"], None),
        (["m", "-pp"], None),
        (["m", "-pp", "100", "-tp", "100"], (100, 100, 1)),
        (["m", "-pp", "1000", "-tp", "1000"], None),
        (["m", "-dp", "9" * 5000], None),
    ],
)
def test_degrees_are_those_of_a_command_line_that_some_host_may_run(words, counts):
    """A plan for a thousand million workers would take all memory."""
    assert degrees(words) == counts
