"""The core plan: which CPU cores the stage workers, the samplers and the scheduler run on.

On a CPU engine the workers get most cores, in equal shares, because the slowest stage sets the pace;
on GPUs a worker needs a core or two, and the samplers get the rest.
"""

import argparse
import dataclasses
import math
import os
import socket
import zlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Literal

from sipipe.config import CorePlacement
from sipipe.control_groups import control_groups
from sipipe.errors import ConfigError

SAMPLERS_PER_NODE = 16
MOST_SAMPLERS = 128
"""Most samplers that ``"auto"`` takes for each NUMA node, whose memory bus they share, and in all."""
MOST_PLANNED = 10_000
"""Workers of a host for which cores are planned at all: of a thousand million the plan alone would take
all memory."""
MANY = 8
"""Cores of a GPU host that no worker has, from which on the scheduler gets two."""
SAMPLER_SHARE = 8
"""On a CPU engine one core of this many goes to the samplers, and one to the scheduler. With fewer
cores they share one, and an only worker of two cores shares both with them: what they do for few
requests they do while the worker waits for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Core:
    """One physical core: its logical CPUs that this process may use, and its NUMA node."""

    cpus: tuple[int, ...]
    node: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CorePlan:
    """Logical CPUs of every process. An empty tuple means: not bound."""

    workers: tuple[tuple[tuple[int, ...], ...], ...]
    """``workers[stage][rank]``: CPUs of one tensor-parallel rank of a stage."""
    samplers: tuple[tuple[int, ...], ...]
    """CPUs of each sampler process; its length is the number of samplers, 0 or more."""
    scheduler: tuple[int, ...]
    """CPUs of the process that runs the scheduler and the executor."""
    shared: bool = False
    """True where some process shares a core with another, because there are too few."""

    @property
    def cpus(self) -> set[int]:
        """All that some process is bound to."""
        ranks = (cpus for stage in self.workers for cpus in stage)
        return {cpu for cpus in (*ranks, *self.samplers, self.scheduler) for cpu in cpus}

    def omp_threads_bind(self, before: int = 0) -> str:
        """The plan's workers as vLLM's ``VLLM_CPU_OMP_THREADS_BIND``, such as ``"0-3|4-7"``. Where
        replicas stand ``before`` this one, vLLM passes over as many workers of each."""
        ranks = [cpus for stage in self.workers for cpus in stage] * (before + 1)
        return "|".join(map(format_cpus, ranks)) if all(ranks) else "nobind"

    def describe(self, first: int = 0, elsewhere: bool = False) -> tuple[str, str]:
        """Two lines for a terminal. ``first``: this host's first stage; ``elsewhere``: the last
        stage, which the samplers are beside, is another host's."""
        stages = " · ".join(
            f"stage {index}: {' + '.join(map(_cpus_text, ranks))}"
            for index, ranks in enumerate(self.workers, first)
        )
        samplers = f"{len(self.samplers)} sampler{'s' if len(self.samplers) != 1 else ''}"
        if self.samplers:
            samplers += ": " + " · ".join(map(_cpus_text, sorted(set(self.samplers))))
        else:
            host = "'s host" if elsewhere else ""
            samplers += f" (tokens are drawn on the last stage{host})"
        note = " (shared: fewer cores than processes)" if self.shared else ""
        return (
            f"core plan: {stages}",
            f"           {samplers} · scheduler: {_cpus_text(self.scheduler)}{note}",
        )


def degrees(argv: Sequence[str]) -> tuple[int, int, int] | None:
    """Stages, ranks and replicas of a command line of vLLM's; None: no numbers from 1 on, or more workers
    than any host runs, which vLLM refuses when it knows the model."""
    argv = [word.replace("_", "-") if word.startswith("--") else word for word in argv]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, kind in (("-pp", "pipeline"), ("-tp", "tensor"), ("-dp", "data")):
        parser.add_argument(
            name, f"--{kind}-parallel-size", dest=name[1:], nargs="?", default="1", const=""
        )
    options, _ = parser.parse_known_args(argv)
    if not all(map(str.isdecimal, (options.pp, options.tp, options.dp))):
        return None
    counts = int(options.pp[:9]), int(options.tp[:9]), int(options.dp[:9])
    return counts if 0 < math.prod(counts) <= MOST_PLANNED else None


def share_of(cores: Sequence[Core], number: int, replicas: int) -> Sequence[Core]:
    """Replica ``number``'s equal share: neighbours, hardware threads where cores are fewer than
    replicas, and one in turn where those are too."""
    if len(cores) < replicas:
        cores = [Core((cpu,), core.node) for core in cores for cpu in core.cpus]
    first, last = (len(cores) * at // replicas for at in (number, number + 1))
    return cores[first:last] or [cores[number % len(cores)]]


def plan_cores(
    cores: Sequence[Core],
    *,
    stages: int,
    tensor_parallel: int = 1,
    samplers: int | Literal["auto"] = "auto",
    placement: CorePlacement | Literal["auto", "off"] = "auto",
    device: Literal["cpu", "cuda"] = "cpu",
    nodes: Sequence[int | None] = (),
) -> CorePlan:
    """Share ``cores`` out.

    Args:
        cores: those of a NUMA node together.
        stages: pipeline stages on this machine, 1 or more.
        tensor_parallel: ranks of each stage, 1 or more.
        samplers: number of processes, 0 for none, ``"auto"`` for as many as fit.
        placement: ``"off"``: nothing is bound.
        nodes: NUMA node of each worker's device, by rank, where it is known.

    Raises ConfigError: the placement names a CPU that is not there, or another number of stages.
    """
    workers = stages * tensor_parallel
    most = min(SAMPLERS_PER_NODE * max(1, len({core.node for core in cores})), MOST_SAMPLERS)
    if isinstance(placement, CorePlacement):
        count = 1 if samplers == "auto" else samplers
        return _placed(cpus_of(cores), placement, stages, tensor_parallel, count)
    # A core's second thread is a place of its own only where cores are scarce.
    scarce = len(cores) < workers + 2
    places = _threads(cores) if scarce else cores
    spare = len(places) - workers
    if placement == "off":
        count = max(1, min(most, spare - 1)) if samplers == "auto" else samplers
        return _placed((), CorePlacement(), stages, tensor_parallel, count)
    if device == "cpu" and alone(cores, workers):
        all_cores = tuple(core.cpus[0] for core in cores)
        return _beside_samplers(cores, [all_cores], tensor_parallel, samplers)
    if spare <= 0:
        turns = [places[index % len(places)].cpus for index in range(workers)]
        return _beside_samplers(cores, turns, tensor_parallel, samplers)

    # Workers compute all the time: where cores suffice, no two share one.
    units = places if len(cores) < workers else cores
    apart = math.inf  # on GPUs the samplers get all that is left
    if device == "cpu":
        wanted = max(1, len(units) // SAMPLER_SHARE) if samplers == "auto" else samplers
        apart = wanted + 1 if len(units) >= SAMPLER_SHARE else 1
        cores_each = max(1, (len(units) - apart) // workers)
    else:
        cores_each = max(1, min(2, spare // workers))
    shares, units = _shares_of_workers(units, 1 if scarce else cores_each, workers, nodes)
    if scarce:
        bound = [share[0].cpus[:cores_each] for share in shares]
        # The cores left over. Where these are too few, second threads too, and then beside every
        # worker, since the slowest stage sets the pace.
        taken = {cpu for cpus in bound for cpu in cpus}
        left = _threads(units if len(units) >= apart else cores)
        units = [place for place in left if place.cpus[0] not in taken]
    else:
        # One thread per physical core: matrix products gain nothing from the second.
        bound = [tuple(core.cpus[0] for core in share) for share in shares]
    # The last core that is left is the scheduler's; it shares an only one with the samplers. Of many
    # it has two: the engine's other threads pack answers and wake readers up beside it.
    two = device == "cuda" and len(units) >= MANY and not scarce
    scheduler_cores = 2 if two and (samplers == "auto" or samplers <= len(units) - 2) else 1
    sampler_units = units[:-scheduler_cores] or units
    count = min(len(sampler_units), most) if samplers == "auto" else samplers
    return CorePlan(
        workers=_by_stage(bound, tensor_parallel),
        samplers=_shares_of_samplers(sampler_units, count),
        scheduler=cpus_of(units[-scheduler_cores:] if samplers else units),
        shared=sampler_units == units and samplers != 0,
    )


def alone(cores: Sequence[Core], workers: int) -> bool:
    """Say if a CPU engine's only worker has all cores, with samplers and scheduler beside it."""
    return workers == 1 and len(cores) <= 2


def equal_shares(cores: Sequence[Core], workers: int) -> str:
    """Stock vLLM's own best on a CPU engine, as ``VLLM_CPU_OMP_THREADS_BIND``: all cores in equal
    shares, a CPU of each. Where workers are more, each gets a hardware thread, or one in turn."""
    places = [core.cpus[0] for core in cores]
    if len(places) < workers:
        places = [cpu for core in _threads(cores) for cpu in core.cpus]
    cores_each = len(places) // workers
    return "|".join(
        format_cpus(places[i * cores_each : (i + 1) * cores_each] or [places[i % len(places)]])
        for i in range(workers)
    )


def quota(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """CPUs whose time this process's control group may take; infinite without a limit. The
    least of its own limit and of the groups that it is in."""
    least = math.inf
    for group in control_groups("cpu", groups, own):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                time, period = " ".join((group / name).read_text() for name in names).split()
            except OSError:
                continue
            if time not in ("max", "-1"):
                least = min(least, int(time) / int(period))
    return least


def this_machine(
    root: Path = Path("/sys/devices/system/cpu"), most: float | None = None
) -> list[Core]:
    """The cores that this process may use, from its affinity mask and ``/sys``, by node and CPU.
    What ``/sys`` does not tell (some containers hide it) is taken as: one CPU a core, one node.
    Where the control group may take the time of fewer (``most``; None: :func:`quota`), it is so
    many of them, and by the host's name others for the next container."""
    siblings: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            core = (root / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            core = f"{cpu}"
        siblings.setdefault(core, []).append(cpu)
    cores = []
    for cpus in siblings.values():
        nodes = (root / f"cpu{cpus[0]}").glob("node[0-9]*")
        node = next((int(path.name.removeprefix("node")) for path in nodes), 0)
        cores.append(Core(tuple(cpus), node))
    cores.sort(key=lambda core: (core.node, core.cpus))
    most = quota() if most is None else most
    if most >= len(cores):
        return cores
    first = zlib.crc32(socket.gethostname().encode()) % len(cores)
    taken = {(first + number) % len(cores) for number in range(max(1, int(most)))}
    return [core for number, core in enumerate(cores) if number in taken]


def cpus_of(cores: Iterable[Core]) -> tuple[int, ...]:
    """All logical CPUs of ``cores``, sorted."""
    return tuple(sorted(cpu for core in cores for cpu in core.cpus))


def format_cpus(cpus: Iterable[int]) -> str:
    """CPU numbers as the kernel writes them: ``0-3,8``."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _beside_samplers(
    cores: Sequence[Core],
    workers: Sequence[tuple[int, ...]],
    tensor_parallel: int,
    samplers: int | Literal["auto"],
) -> CorePlan:
    """The plan where cores are too few: samplers and scheduler run on any, beside ``workers``."""
    everywhere = cpus_of(cores)
    return CorePlan(
        workers=_by_stage(workers, tensor_parallel),
        samplers=(everywhere,) * (1 if samplers == "auto" else samplers),
        scheduler=everywhere,
        shared=True,
    )


def _shares_of_workers(
    cores: Sequence[Core], cores_each: int, workers: int, nodes: Sequence[int | None]
) -> tuple[list[Sequence[Core]], Sequence[Core]]:
    """Cores of each worker, near its device where its NUMA node is known; and the cores left over."""
    shares = []
    for worker in range(workers):
        near = nodes[worker] if worker < len(nodes) else None
        share = _of_one_node(cores, cores_each, near)
        cores = [core for core in cores if core not in share]
        shares.append(share)
    return shares, cores


def _shares_of_samplers(cores: Sequence[Core], count: int) -> tuple[tuple[int, ...], ...]:
    """CPUs of each of ``count`` samplers: neighbours, so that a sampler stays on one NUMA node, with
    what it keeps of sequences. Where cores are fewer than samplers, one core in turn."""
    cuts = [index * len(cores) // max(count, 1) for index in range(count + 1)]
    return tuple(
        cpus_of(cores[first:last]) or cores[first % len(cores)].cpus
        for first, last in pairwise(cuts)
    )


def _threads(cores: Iterable[Core]) -> Sequence[Core]:
    """Each hardware thread as a place of its own: the first ones of all cores, then the second."""
    turns = [(turn, cpu, core.node) for core in cores for turn, cpu in enumerate(core.cpus)]
    return [Core((cpu,), node) for _, cpu, node in sorted(turns, key=itemgetter(0))]


def _of_one_node(cores: Sequence[Core], count: int, near: int | None = None) -> Sequence[Core]:
    """``count`` cores, of one NUMA node where one has enough of them left, best of ``near``."""
    for node in dict.fromkeys((near, *(core.node for core in cores))):
        of_node = [core for core in cores if core.node == node]
        if len(of_node) >= count:
            return of_node[:count]
    return cores[:count]


def _placed(
    usable: Sequence[int], placement: CorePlacement, stages: int, ranks: int, samplers: int
) -> CorePlan:
    """The user's placement; what it does not name is not bound."""
    groups = (*placement.stages, *placement.samplers, placement.scheduler)
    taken = [cpu for cpus in groups for cpu in cpus]
    if foreign := set(taken).difference(usable):
        raise ConfigError(
            f'sipipe config: "cores" names CPU {format_cpus(foreign)}, which this process may not '
            f"use (it may use {format_cpus(usable)})"
        )
    if placement.stages and len(placement.stages) != stages:
        raise ConfigError(
            f'sipipe config: "cores.stages" places {len(placement.stages)} stages, but the '
            f"pipeline has {stages} (--pipeline-parallel-size)"
        )
    workers: list[tuple[int, ...]] = []
    for cpus in placement.stages or ((),) * stages:
        share = len(cpus) // ranks
        for rank in range(ranks):
            workers.append(cpus[rank * share : (rank + 1) * share] if share else cpus)
    placed = placement.samplers if samplers else ()  # none where vLLM's sampler draws
    return CorePlan(
        workers=_by_stage(workers, ranks),
        samplers=placed or ((),) * samplers,
        scheduler=placement.scheduler,
        shared=len(taken) != len(set(taken)),
    )


def _by_stage(
    workers: Sequence[tuple[int, ...]], tensor_parallel: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    starts = range(0, len(workers), tensor_parallel)
    return tuple(tuple(workers[start : start + tensor_parallel]) for start in starts)


def _cpus_text(cpus: Sequence[int]) -> str:
    if not cpus:
        return "not bound"
    return f"core{'s' if len(cpus) != 1 else ''} {format_cpus(cpus)}"
