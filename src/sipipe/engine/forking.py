"""Processes of an engine that go on from one that has imported vLLM, on CPUs, under ``sipipe serve``.

Importing vLLM takes a core ten seconds, and the server, the engine's process and each worker did it
one after the other. Forked from one another, they share it. OpenMP reads how many threads there
are, where and how they wait when it is loaded, once. So the server loads it as workers need it, by
the plan of cores that its command line gives (:func:`importing`). A worker that needs it otherwise
(:func:`may_fork`) is a new interpreter, as all are on GPUs, under ``vllm serve`` and in Python.

Who runs here: the main threads of the server and of the engine, which compute nothing before they
fork, since OpenMP's threads do not come along.
"""

import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module, reload
from multiprocessing import spawn, util
from typing import Any

from sipipe.config import SiPipeConfig
from sipipe.cores import CorePlan, bind_threads, degrees, plan_cores, share_of, this_machine
from sipipe.errors import SiPipeError
from sipipe.ipc.child import fork
from sipipe.ipc.parent import STARTER
from sipipe.versions import installed_vllm

SPINS = "10000"
"""About 0.1 ms: longer than from one operator to the next."""
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""Whoever sets it wants no forks of ours."""

_loaded: dict[str, str] | None = None
"""What OpenMP and the loader read in this process; None: not for workers."""


def waiting(*, shared: bool) -> dict[str, str]:
    """How threads of a worker wait for the next parallel region: spinning, but on ``shared`` cores
    not for the milliseconds that are usual, in which a sampler or the scheduler has work."""
    said = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    return {"GOMP_SPINCOUNT": SPINS} if shared and not said else {}


@contextmanager
def importing(argv: Sequence[str], settings: Mapping[str, Any], node: int) -> Iterator[None]:
    """vLLM is imported meanwhile; from then on this process forks what vLLM spawns, if workers of
    this command line can be forked too."""
    global _loaded
    vllm, preloads = installed_vllm(), os.environ.get("LD_PRELOAD", "")
    others = node or "hosts" in settings or any(word.endswith("ray") for word in argv)
    others = others or "torch" in sys.modules or "omp" in preloads or METHOD in os.environ
    needed = {} if others or not vllm or vllm.device != "cpu" else _needed(argv, settings)
    before, mask = {name: os.environ.get(name) for name in needed}, os.sched_getaffinity(0)
    with suppress(ImportError):  # which finds the place of the title now; the environment moves
        titles = import_module("setproctitle")
        name = titles.getthreadtitle()  # what `ps` and `ss` say, which it changes
        titles.getproctitle()
        titles.setthreadtitle(name)
    os.environ.update(needed)
    loaded = _read(os.environ) | {"LD_PRELOAD": preloads}
    yield
    for name, said in before.items():
        del os.environ[name]
        os.environ.update({} if said is None else {name: said})
    if needed:
        bind_threads(mask)  # libgomp has bound this one as a worker's first
        _compute_with(1)
        _loaded, util.spawnv_passfds = loaded, spawn_by_fork


def _needed(argv: Sequence[str], settings: Mapping[str, Any]) -> dict[str, str]:
    """What all workers of an engine read; empty where it differs, or is not known."""
    if (asked := degrees(argv)) is None:
        return {}
    stages, ranks, replicas = asked
    with suppress(SiPipeError):  # which is said later, by who checks it
        config = SiPipeConfig.from_dict(settings)
        more: Any = {"samplers": config.samplers, "placement": config.cores}
        cores = share_of(this_machine(most=config.most_cores), 0, replicas)
        return _openmp(plan_cores(cores, stages=stages, tensor_parallel=ranks, **more))
    return {}


def _openmp(plan: CorePlan) -> dict[str, str]:
    ranks = [cpus for stage in plan.workers for cpus in stage]
    if all(len(cpus) == 1 for cpus in ranks):
        return {"OMP_NUM_THREADS": "1"}
    if len(ranks) > 1 or not ranks[0]:
        return {}
    places = " ".join(map(str, ranks[0]))
    read = {"OMP_NUM_THREADS": str(len(ranks[0])), "GOMP_CPU_AFFINITY": places}
    return read | waiting(shared=plan.shared)


def _read(environment: Mapping[str, str]) -> dict[str, str]:
    """What OpenMP reads of an environment; of that for one thread, where that is."""
    said = {k: v for k, v in environment.items() if k.startswith(("OMP_", "GOMP_", "KMP_"))}
    one = {"OMP_NUM_THREADS": "1"}
    return one if said.items() >= one.items() else said


def may_fork(environment: Mapping[str, str]) -> bool:
    """Whether a worker with this environment can be forked from here."""
    threads = {thread.name for thread in threading.enumerate()}
    if _loaded is None or threads - {threading.main_thread().name, STARTER}:
        return False
    # vLLM's worker looks at all that has been imported, and stumbles over Numba's (LMCache's imports).
    if "llvmlite.binding.ffi" in sys.modules:
        return False
    # vLLM preloads the library that torch brings, which is loaded here.
    preloads = environment.get("LD_PRELOAD", "").split(":")
    others = ":".join(name for name in preloads if "libgomp" not in name)
    return _read(environment) | {"LD_PRELOAD": others} == _loaded


def begin_worker(threads: int, cpus: Sequence[int]) -> None:
    """What a forked worker does first: what OpenMP does where it is loaded."""
    os.sched_setaffinity(0, cpus[:1])
    _compute_with(threads)
    # vLLM looks at all that has been imported, here more than in a new interpreter.
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op`", FutureWarning)


def _compute_with(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


_anew: Any = util.spawnv_passfds


def spawn_by_fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """``multiprocessing.util.spawnv_passfds``: the process is told what a new interpreter is."""
    command = " ".join(map(str, args))
    if not (main := re.search(r"spawn_main\((.*?)\)", command)):  # the resource tracker
        return int(_anew(path, args, passfds))
    numbers = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", main[1])}

    def run() -> None:
        util.spawnv_passfds = _anew
        # Imported before vLLM made the directory through which several API servers count.
        if (counts := sys.modules.get("prometheus_client.values")) is not None:
            reload(counts)
        sys.argv = ["-c", "--multiprocessing-fork"]
        spawn.spawn_main(**numbers)

    return fork(run, passfds, os.environ)
