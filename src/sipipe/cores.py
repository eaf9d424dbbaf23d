"""The core plan: which CPU cores the stage workers, the samplers and the scheduler run on.

:func:`plan_cores` is a pure function of what :func:`this_machine` finds, the pipeline's degrees
and the settings. On a CPU engine the workers get most cores, equal shares each, because the
slowest stage sets the pace; on GPUs a worker needs a core or two, and the samplers get the rest.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from sipipe.config import CorePlacement
from sipipe.errors import ConfigError

__all__ = ["Core", "CorePlan", "Machine", "format_cpus", "plan_cores", "this_machine"]

MAX_SAMPLERS = 16
"""Most samplers chosen by ``"auto"``: beyond it they share one memory bus for little gain."""

SAMPLER_SHARE = 8
"""On a CPU engine one core of this many goes to the samplers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Core:
    """One physical core: its logical CPUs that this process may use, and its NUMA node."""

    cpus: tuple[int, ...]
    node: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """The physical cores that this process may use, sorted by NUMA node, then CPU number."""

    cores: tuple[Core, ...]

    @property
    def cpus(self) -> tuple[int, ...]:
        """All usable logical CPUs, sorted."""
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def nodes(self) -> tuple[int, ...]:
        """The NUMA nodes of the usable cores, sorted."""
        return tuple(sorted({core.node for core in self.cores}))


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
    """Whether some process shares a core with another, because there are too few."""

    def omp_threads_bind(self) -> str:
        """The plan's workers as vLLM's ``VLLM_CPU_OMP_THREADS_BIND``, such as ``"0-3|4-7"``."""
        ranks = [cpus for stage in self.workers for cpus in stage]
        return "|".join(map(format_cpus, ranks)) if all(ranks) else "nobind"

    def describe(self) -> tuple[str, str]:
        """Two lines for a terminal."""
        stages = " · ".join(
            f"stage {index}: {' + '.join(map(_cpus_text, ranks))}"
            for index, ranks in enumerate(self.workers)
        )
        places = sorted(set(self.samplers))
        samplers = f"{len(self.samplers)} sampler{'s' if len(self.samplers) != 1 else ''}"
        if places:
            samplers += ": " + " · ".join(map(_cpus_text, places))
        else:
            samplers += " (tokens are drawn on the last stage)"
        note = " (shared: fewer cores than processes)" if self.shared else ""
        return (
            f"core plan: {stages}",
            f"           {samplers} · scheduler: {_cpus_text(self.scheduler)}{note}",
        )


def plan_cores(
    machine: Machine,
    *,
    stages: int,
    tensor_parallel: int = 1,
    samplers: int | Literal["auto"] = "auto",
    placement: CorePlacement | Literal["auto", "off"] = "auto",
    device: Literal["cpu", "cuda"] = "cpu",
) -> CorePlan:
    """Share the machine's cores out.

    Args:
        machine: the cores to share out.
        stages: pipeline stages on this machine, 1 or more.
        tensor_parallel: ranks of each stage, 1 or more.
        samplers: number of sampler processes, 0 for none, ``"auto"`` for as many as fit.
        placement: ``"auto"``, ``"off"`` (nothing is bound), or the user's own.
        device: what the stages compute on.

    Raises:
        ConfigError: the user's placement names a CPU that is not there, or another number of
            stages.
    """
    workers = stages * tensor_parallel
    if isinstance(placement, CorePlacement):
        return _placed(machine, placement, stages, tensor_parallel, samplers)
    # A core's second thread is a place of its own only where cores are scarce.
    units = list(machine.cores)
    if len(units) < workers + 2:
        units = [Core((cpu,), core.node) for core in machine.cores for cpu in core.cpus]
    spare = len(units) - workers
    if placement == "off":
        count = max(1, min(MAX_SAMPLERS, spare - 1)) if samplers == "auto" else samplers
        unbound: tuple[int, ...] = ()
        return CorePlan(
            workers=((unbound,) * tensor_parallel,) * stages,
            samplers=(unbound,) * count,
            scheduler=unbound,
        )
    if spare <= 0:
        return _all_share(machine, units, stages, tensor_parallel, samplers)

    wanted = _sampler_cores(len(units), spare, samplers, device)
    each = (len(units) - wanted - 1) // workers if device == "cpu" else min(2, spare // workers)
    each = max(1, each)
    taken = _take_by_node(units, workers, each)
    used = {unit for share in taken for unit in share}
    left = [unit for unit in units if unit not in used]
    # One thread per physical core for the workers: matrix products gain nothing from the second.
    bound = [tuple(unit.cpus[0] for unit in share) for share in taken]
    if samplers == 0:
        rest: list[Core] = []
        scheduler = _all_cpus(left)
    else:
        rest = left[:-1] or left
        scheduler = left[-1].cpus
    if samplers == "auto":
        count = min(len(rest), MAX_SAMPLERS)
        placed = [_all_cpus(rest[index::count]) for index in range(count)]
    else:
        placed = _deal(rest, samplers)
    return CorePlan(
        workers=_by_stage(bound, tensor_parallel),
        samplers=tuple(placed),
        scheduler=scheduler,
        shared=rest == left and samplers != 0,
    )


def this_machine(root: Path = Path("/sys/devices/system")) -> Machine:
    """The cores that this process may use, from its affinity mask and ``/sys``.

    What ``/sys`` does not tell (some containers hide it) is taken as: one CPU a core, one node.
    """
    allowed = sorted(os.sched_getaffinity(0))
    nodes: dict[int, int] = {}
    for path in root.glob("node/node[0-9]*/cpulist"):
        for cpu in _parse_cpus(_read(path)):
            nodes[cpu] = int(path.parent.name.removeprefix("node"))
    siblings: dict[tuple[int, ...], list[int]] = {}
    for cpu in allowed:
        text = _read(root / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.setdefault(tuple(_parse_cpus(text)) or (cpu,), []).append(cpu)
    cores = [Core(tuple(cpus), nodes.get(cpus[0], 0)) for cpus in siblings.values()]
    return Machine(tuple(sorted(cores, key=lambda core: (core.node, core.cpus))))


def format_cpus(cpus: Iterable[int]) -> str:
    """CPU numbers as the kernel writes them: ``0-3,8``."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _sampler_cores(cores: int, spare: int, samplers: int | str, device: str) -> int:
    """Cores to keep for samplers when one is kept for the scheduler, at least 1 of ``spare``."""
    if samplers == 0:
        return 0
    if isinstance(samplers, int):
        return max(1, min(samplers, spare - 1))
    if device == "cuda":
        return max(1, spare - 1)
    return max(1, min(cores // SAMPLER_SHARE, spare - 1))


def _take_by_node(units: Sequence[Core], workers: int, each: int) -> list[list[Core]]:
    """``each`` cores for every worker, of one NUMA node where it has enough of them left."""
    free = list(units)
    shares: list[list[Core]] = []
    for _ in range(workers):
        by_node: dict[int, list[Core]] = {}
        for unit in free:
            by_node.setdefault(unit.node, []).append(unit)
        whole = next((cores for cores in by_node.values() if len(cores) >= each), free)
        share = whole[:each]
        free = [unit for unit in free if unit not in share]
        shares.append(share)
    return shares


def _all_share(
    machine: Machine,
    units: Sequence[Core],
    stages: int,
    tensor_parallel: int,
    samplers: int | Literal["auto"],
) -> CorePlan:
    """No core to spare: workers in turn over the cores, samplers and scheduler on any."""
    bound = [units[index % len(units)].cpus for index in range(stages * tensor_parallel)]
    count = 1 if samplers == "auto" else samplers
    return CorePlan(
        workers=_by_stage(bound, tensor_parallel),
        samplers=(machine.cpus,) * count,
        scheduler=machine.cpus,
        shared=True,
    )


def _placed(
    machine: Machine,
    placement: CorePlacement,
    stages: int,
    tensor_parallel: int,
    samplers: int | Literal["auto"],
) -> CorePlan:
    usable = set(machine.cpus)
    groups = (*placement.stages, *placement.samplers, placement.scheduler)
    foreign = sorted({cpu for cpus in groups for cpu in cpus} - usable)
    if foreign:
        raise ConfigError(
            f'sipipe config: "cores" names CPU {format_cpus(foreign)}, which this process may not '
            f"use (it may use {format_cpus(usable)})"
        )
    if placement.stages and len(placement.stages) != stages:
        raise ConfigError(
            f'sipipe config: "cores.stages" places {len(placement.stages)} stages, but the '
            f"pipeline has {stages} (--pipeline-parallel-size)"
        )
    count = 1 if samplers == "auto" else samplers
    placed = placement.samplers if count else ()  # none on vLLM's own path
    workers: list[tuple[int, ...]] = []
    for cpus in placement.stages or ((),) * stages:
        share = len(cpus) // tensor_parallel
        for rank in range(tensor_parallel):
            workers.append(cpus[rank * share : (rank + 1) * share] if share else cpus)
    taken = [cpu for cpus in groups for cpu in cpus]
    return CorePlan(
        workers=_by_stage(workers, tensor_parallel),
        samplers=placed or ((),) * count,
        scheduler=placement.scheduler,
        shared=len(taken) != len(set(taken)),
    )


def _deal(cores: Sequence[Core], samplers: int) -> list[tuple[int, ...]]:
    """Cores for a given number of samplers: dealt out, or shared in turn where too few."""
    if len(cores) >= samplers:
        return [_all_cpus(cores[index::samplers]) for index in range(samplers)]
    return [cores[index % len(cores)].cpus for index in range(samplers)]


def _by_stage(
    workers: Sequence[tuple[int, ...]], tensor_parallel: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    starts = range(0, len(workers), tensor_parallel)
    return tuple(tuple(workers[start : start + tensor_parallel]) for start in starts)


def _all_cpus(cores: Iterable[Core]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core.cpus))


def _cpus_text(cpus: Sequence[int]) -> str:
    if not cpus:
        return "not bound"
    return f"core{'s' if len(cpus) != 1 else ''} {format_cpus(cpus)}"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _parse_cpus(text: str) -> list[int]:
    """CPU numbers from the kernel's ``0-3,8``; empty for an empty text."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return cpus
