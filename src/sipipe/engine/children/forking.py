"""Forks of a process that has imported vLLM, in place of new interpreters, on CPUs.

Importing vLLM takes a core ten seconds, and the server, the engine's process and each worker did it
one after the other. Forked from one another, they share it.

OpenMP reads once, when it is loaded, how many threads there are, where they run and how they wait.
One thread needs none of it. For more threads the server of ``sipipe serve`` loads it as workers
need it, by the plan of cores that its command line gives (:func:`importing`). A worker that needs
it otherwise (:func:`may_fork`) is a new interpreter. So are all on GPUs. In Python the engine's
process is a new interpreter too, since what would be forked is the user's process, with all that
may run in it; the engine's process is vLLM's own, and forks its workers (:func:`fork_of_engines`).

Who runs here
    The main threads of the server and of the engine, which compute nothing before they fork, since
    OpenMP's threads are not in a fork.
Rejected
    ``VLLM_WORKER_MULTIPROC_METHOD=fork``, by which the engine would keep the server's sockets. A
    process that forks all others: its children would not be the server's, as vLLM wants them.
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

from sipipe import layer_names
from sipipe.config import SiPipeConfig
from sipipe.core_binding import bind_threads
from sipipe.cores import CorePlan, degrees, plan_cores, share_of, this_machine
from sipipe.engine.engine_process import is_engine_process
from sipipe.errors import SiPipeError
from sipipe.ipc.child import fork
from sipipe.ipc.starter import STARTER
from sipipe.versions import installed_vllm

SPINS = "10000"
"""Rounds that a thread of OpenMP busy-waits on shared cores. They take about 0.1 ms, which is longer
than from one operator to the next."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""Variable of vLLM's that names how workers start. A user who sets it gets vLLM's way."""

_loaded: dict[str, str] | None = None
"""Variables that OpenMP and the loader read in this process, by which a worker can be told to fit. None
in a process that forks no workers."""


def waiting(*, shared: bool) -> dict[str, str]:
    """Variables for how a worker's threads wait for the next parallel region. They busy-wait. On
    ``shared`` cores they stop after 0.1 ms and not after the usual milliseconds, in which a sampler
    or the scheduler has work. What the user has set stands."""
    set_by_user = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    return {"GOMP_SPINCOUNT": SPINS} if shared and not set_by_user else {}


@contextmanager
def importing(argv: Sequence[str], settings: Mapping[str, Any], node: int) -> Iterator[None]:
    """Import vLLM in the body: OpenMP is then loaded as workers need it, and from the end of the body
    on this process forks what vLLM spawns.

    Args:
        argv: the command line of ``sipipe serve`` behind the command.
        settings: SiPipe's settings, not checked yet.
        node: this host's number; hosts but the first have no command line of their own.
    """
    has_hosts = node or "hosts" in settings or any(word.endswith("ray") for word in argv)
    forks = not has_hosts and "torch" not in sys.modules and _may_begin(os.environ)
    parallel = degrees(argv) if forks else None
    needed = _needed(parallel, settings) if parallel is not None else {}
    before = {name: os.environ.get(name) for name in needed}
    affinity = os.sched_getaffinity(0)
    _find_title()
    if parallel is not None:
        # They stay: vLLM in the workers reads them again.
        os.environ.update(layer_names.variables(parallel[0]) | os.environ)
    os.environ.update(needed)
    loaded = _read_when_loaded()
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    if needed:
        # libgomp has bound the thread that loads it, as if that were a worker's first.
        bind_threads(affinity)
    if forks:
        _fork_from_here(loaded)


def fork_of_vllms() -> None:
    """Have the main process of ``vllm serve`` fork what vLLM spawns, once it has imported vLLM, and
    before it has done anything else."""
    # The environment in which the process started: vLLM's command sets the method where the user has
    # not.
    _begin(_environment_of("self"), _read_when_loaded())


def fork_of_engines(stages: int) -> None:
    """Have an engine's process that vLLM has spawned, as ``LLM(...)`` does, fork its workers; called
    before it starts any.

    A worker of one stage imports vLLM with variables of its own (:mod:`sipipe.layer_names`), which saves
    more later than a fork does now.
    """
    if not is_engine_process() or layer_names.variables(stages):
        return
    try:
        # Of this process's own vLLM has set the method, and what is to be preloaded.
        environment = _environment_of(str(os.getppid()))
    except OSError:  # the user's process has ended, or is not to be read
        return
    # Workers with one thread alone: the user's main module, which is run anew here, may have computed
    # with several, and those of OpenMP are not in a fork.
    _begin(environment, ONE_THREAD | {"LD_PRELOAD": _preloads(os.environ)})


def _begin(environment: Mapping[str, str], loaded: dict[str, str]) -> None:
    """Fork from now on what fits ``loaded``, unless this process does so already, another thread may hold
    a lock, or the user's ``environment`` says otherwise."""
    if _loaded is None and _has_no_other_threads() and _may_begin(environment):
        # The collector would write to each object that it visits, and so copy pages of the forks.
        gc.freeze()
        _find_title()
        _fork_from_here(loaded)


def _environment_of(process: str) -> dict[str, str]:
    """The variables with which a process started. Raises OSError: it cannot be read."""
    words = Path(f"/proc/{process}/environ").read_text(errors="replace").split("\0")
    return dict(word.partition("=")[::2] for word in words if word)


def _may_begin(environment: Mapping[str, str]) -> bool:
    """True if this process may load OpenMP for workers: vLLM computes on CPUs, and in the user's
    ``environment`` no method is named, and no other OpenMP preloaded."""
    vllm = installed_vllm()
    chosen = METHOD in environment or "omp" in environment.get("LD_PRELOAD", "")
    return not chosen and vllm is not None and vllm.device == "cpu"


def _read_when_loaded() -> dict[str, str]:
    """Variables that OpenMP reads if it is loaded now, and libraries that are loaded already."""
    return _read(os.environ) | {"LD_PRELOAD": _preloads(os.environ)}


def _preloads(environment: Mapping[str, str]) -> str:
    """Libraries that a process with ``environment`` preloads, but for the libgomp that torch brings: vLLM
    has its processes preload it, and where torch is loaded it is loaded already."""
    names = environment.get("LD_PRELOAD", "").split(":")
    return ":".join(name for name in names if "libgomp" not in name)


def _fork_from_here(loaded: dict[str, str]) -> None:
    """Put forks in the place of ``multiprocessing``'s new interpreters and of vLLM's subprocess that
    looks at a model's class."""
    global _loaded
    from vllm.model_executor.models import registry

    _compute_with(1)
    _loaded = loaded
    util.spawnv_passfds = spawn_by_fork
    registry._run_in_subprocess = partial(look_by_fork, registry._run_in_subprocess)


def _find_title() -> None:
    """Have setproctitle find where the process's title is now, since a fork's environment, by which
    it looks, is elsewhere."""
    with suppress(ImportError):
        titles = import_module("setproctitle")
        name = titles.getthreadtitle()  # the name in `ps` and `ss`, which the next call changes
        titles.getproctitle()
        titles.setthreadtitle(name)


def _needed(parallel: tuple[int, int, int], settings: Mapping[str, Any]) -> dict[str, str]:
    """Variables that OpenMP has to read for every worker of the engine; empty where workers differ.

    Args:
        parallel: stages, ranks and replicas, as the command line has them.
        settings: SiPipe's settings, not checked yet.
    """
    stages, ranks, replicas = parallel
    # Faults of the settings are reported by whoever checks them, later and once.
    with suppress(SiPipeError):
        config = SiPipeConfig.from_dict(settings)
        plan = plan_cores(
            share_of(this_machine(most=config.most_cores), 0, replicas),
            stages=stages,
            tensor_parallel=ranks,
            samplers=config.samplers,
            placement=config.cores,
        )
        return _openmp(plan)
    return {}


def _openmp(plan: CorePlan) -> dict[str, str]:
    """Variables that OpenMP has to read for every worker of ``plan``; empty where workers differ."""
    ranks = [cpus for stage in plan.workers for cpus in stage]
    if all(len(cpus) == 1 for cpus in ranks):
        return ONE_THREAD
    if len(ranks) > 1 or not ranks[0]:
        return {}
    cpus = ranks[0]
    variables = {"OMP_NUM_THREADS": str(len(cpus)), "GOMP_CPU_AFFINITY": " ".join(map(str, cpus))}
    return variables | waiting(shared=plan.shared)


def _read(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of ``environment`` that OpenMP reads. With one thread the others make no difference,
    so they are left out."""
    variables = {
        name: value
        for name, value in environment.items()
        if name.startswith(("OMP_", "GOMP_", "KMP_"))
    }
    return ONE_THREAD if variables.items() >= ONE_THREAD.items() else variables


def may_fork(environment: Mapping[str, str]) -> bool:
    """True if a worker with this environment can be forked from this process: OpenMP has read the
    same here, and no other thread may hold a lock."""
    if _loaded is None or not _has_no_other_threads():
        return False
    # vLLM's worker looks at every module that has been imported, and fails at one of Numba's, which
    # LMCache imports.
    if "llvmlite.binding.ffi" in sys.modules:
        return False
    variables = _read(environment)
    if variables == ONE_THREAD:  # a worker with one thread fits whatever OpenMP has read
        variables = _read(_loaded)
    return variables | {"LD_PRELOAD": _preloads(environment)} == _loaded


def _has_no_other_threads() -> bool:
    """True if no other thread can hold a lock, which would stay locked in a fork. The starter's thread
    holds none."""
    names = {thread.name for thread in threading.enumerate()}
    return names <= {threading.main_thread().name, STARTER}


def begin_worker(threads: int, cpus: Sequence[int]) -> None:
    """Do in a forked worker, first, what OpenMP does where it is loaded: bind the main thread to the
    first of ``cpus``, and set the number of threads."""
    with suppress(OSError):  # the container has other CPUs by now
        os.sched_setaffinity(0, cpus[:1])
    _compute_with(threads)
    # vLLM looks at every module that has been imported, and a fork has more than a new interpreter.
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op`", FutureWarning)


def _compute_with(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


_spawn: Any = util.spawnv_passfds
"""Python's own function, which starts a new interpreter."""


def spawn_by_fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Fork where ``multiprocessing.util.spawnv_passfds`` starts an interpreter; returns the process id.
    The fork does what the command line ``args`` has a new interpreter do."""
    command = " ".join(map(str, args))
    main = re.search(r"spawn_main\((.*?)\)", command)
    if main is None:  # the resource tracker, which is another program
        return int(_spawn(path, args, passfds))
    numbers = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", main[1])}

    def run() -> None:
        util.spawnv_passfds = _spawn
        # It was imported before vLLM named the directory through which several API servers count.
        if (counts := sys.modules.get("prometheus_client.values")) is not None:
            reload(counts)
        sys.argv = ["-c", "--multiprocessing-fork"]
        spawn.spawn_main(**numbers)

    return fork(run, passfds, os.environ)


def look_by_fork(in_interpreter: Callable[..., Any], look: Callable[[], Any]) -> Any:
    """Return what ``look`` finds of a model's class, in a fork that ends then. It stands in the place of
    vLLM's ``registry._run_in_subprocess``, which is ``in_interpreter``, and which a process with other
    threads still uses, such as a worker. vLLM has the answers in a file but for a class that it sees
    for the first time. Raises RuntimeError: the process ended without an answer."""
    if not _has_no_other_threads():
        return in_interpreter(look)
    context = get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    # wait: none: it is read; its reader
    child = context.Process(target=lambda: writer.send(look()))
    child.start()
    writer.close()
    try:
        return reader.recv()  # wait: none, as vLLM's; the child's answer or end
    except EOFError:
        raise RuntimeError("a model's class cannot be imported: its error is above") from None
    finally:
        child.join()  # wait: none: it has answered, or ended; its end
