"""Processes of a server's engine that go on from one that has imported vLLM, on CPUs.

Importing vLLM takes a core ten seconds, and the server, the engine's process and each worker did it
one after the other. Forked from one another, they share it. OpenMP reads how many threads there
are, where and how they wait when it is loaded, once. One thread needs none of it; for more, the
server of ``sipipe serve`` loads it as workers need it, by the plan of cores that its command line
gives (:func:`importing`). A worker that needs it otherwise (:func:`may_fork`) is a new interpreter,
as all are on GPUs and in Python, where the process that would fork is the user's.

Who runs here: the main threads of the server and of the engine, which compute nothing before they
fork, since OpenMP's threads do not come along.
"""

import gc
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module, reload
from multiprocessing import get_context, spawn, util
from pathlib import Path
from typing import Any

from sipipe.config import SiPipeConfig
from sipipe.cores import CorePlan, bind_threads, degrees, plan_cores, share_of, this_machine
from sipipe.errors import SiPipeError
from sipipe.ipc.child import fork
from sipipe.ipc.starter import STARTER
from sipipe.versions import installed_vllm

SPINS = "10000"
"""About 0.1 ms: longer than from one operator to the next."""
ONE = {"OMP_NUM_THREADS": "1"}
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
    """vLLM is imported meanwhile; from then on this process forks what vLLM spawns."""
    others = node or "hosts" in settings or any(word.endswith("ray") for word in argv)
    forks = not others and "torch" not in sys.modules and _may_begin(METHOD in os.environ)
    needed = _needed(argv, settings) if forks else {}
    before, mask = {name: os.environ.get(name) for name in needed}, os.sched_getaffinity(0)
    _find_title()
    os.environ.update(needed)
    loaded = _loads()
    yield
    for name, said in before.items():
        del os.environ[name]
        os.environ.update({} if said is None else {name: said})
    if needed:
        bind_threads(mask)  # libgomp has bound this one as a worker's first
    if forks:
        _fork_from_here(loaded)


def fork_of_vllms() -> None:
    """The same in the main process of ``vllm serve``, once it has imported vLLM, and done no more."""
    # vLLM's command names a method where the user has not.
    named = METHOD in Path("/proc/self/environ").read_text(errors="replace")
    if _loaded is None and _alone() and _may_begin(named):
        gc.freeze()  # shared with what is forked
        _find_title()
        _fork_from_here(_loads())


def _may_begin(named: bool) -> bool:
    vllm = installed_vllm()
    preloads = os.environ.get("LD_PRELOAD", "")
    return not named and vllm is not None and vllm.device == "cpu" and "omp" not in preloads


def _loads() -> dict[str, str]:
    return _read(os.environ) | {"LD_PRELOAD": os.environ.get("LD_PRELOAD", "")}


def _fork_from_here(loaded: dict[str, str]) -> None:
    global _loaded
    from vllm.model_executor.models import registry

    _compute_with(1)
    _loaded, util.spawnv_passfds = loaded, spawn_by_fork
    registry._run_in_subprocess = partial(look_by_fork, registry._run_in_subprocess)


def _find_title() -> None:
    """Have setproctitle find its place now: a fork's environment is elsewhere."""
    with suppress(ImportError):
        titles = import_module("setproctitle")
        name = titles.getthreadtitle()  # what `ps` and `ss` say, which it changes
        titles.getproctitle()
        titles.setthreadtitle(name)


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
        return ONE
    if len(ranks) > 1 or not ranks[0]:
        return {}
    places = " ".join(map(str, ranks[0]))
    read = {"OMP_NUM_THREADS": str(len(ranks[0])), "GOMP_CPU_AFFINITY": places}
    return read | waiting(shared=plan.shared)


def _read(environment: Mapping[str, str]) -> dict[str, str]:
    """What OpenMP reads of an environment; of that for one thread, where that is."""
    said = {k: v for k, v in environment.items() if k.startswith(("OMP_", "GOMP_", "KMP_"))}
    return ONE if said.items() >= ONE.items() else said


def may_fork(environment: Mapping[str, str]) -> bool:
    """Whether a worker with this environment can be forked from here."""
    if _loaded is None or not _alone():
        return False
    # vLLM's worker looks at all that has been imported, and stumbles over Numba's (LMCache's imports).
    if "llvmlite.binding.ffi" in sys.modules:
        return False
    # vLLM preloads the library that torch brings, which is loaded here.
    preloads = environment.get("LD_PRELOAD", "").split(":")
    others = ":".join(name for name in preloads if "libgomp" not in name)
    read = _read(environment)
    read = _read(_loaded) if read == ONE else read
    return read | {"LD_PRELOAD": others} == _loaded


def _alone() -> bool:
    """Whether no thread may hold a lock, which would stay held in a fork."""
    return {it.name for it in threading.enumerate()} <= {threading.main_thread().name, STARTER}


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


def look_by_fork(anew: Callable[..., Any], look: Callable[[], Any]) -> Any:
    """``registry._run_in_subprocess``: what ``look`` finds of a model's class, in a process that ends;
    vLLM has its answers in a file, but for a class that it sees for the first time. ``anew``: its own
    way, which a process with other threads goes, such as a worker."""
    if not _alone():
        return anew(look)
    context = get_context("fork")
    answer, told = context.Pipe(duplex=False)
    child = context.Process(target=lambda: told.send(look()))  # wait: none: it is read; its reader
    child.start()
    told.close()
    try:
        return answer.recv()  # wait: none, as vLLM's; the child's answer or end
    except EOFError:
        raise RuntimeError("a model's class cannot be imported: its error is above") from None
    finally:
        child.join()  # wait: none: it has answered, or ended; its end
