"""Engines of tests start their processes by fork: vLLM's core and SiPipe's workers begin with vLLM
imported, as the process that starts them has it already (:mod:`.fork_server`).

A new interpreter for each is what vLLM has on CPUs, and SiPipe in Python; importing
vLLM then takes a core 7 to 10 seconds in each process, which is most of a tiny engine's start.
Everything else is as a user has it: the same main functions, arguments, descriptors, environment;
but that the workers' stages are watched for unsafe uses of their input buffers.
So does the process in which vLLM looks at a model's class, where its cache has not what it looks for.
Started anew like a user's: samplers, and all processes of commands, of the server's tests but those
of ``serve_run.py``, of hosts' agents and of stages in Triton's interpreter (``engine_run.py``).

vLLM forks at the same two places on GPUs.
"""

import multiprocessing.util
import os
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # where nobody has put it yet

from sipipe.engine.children.forking import look_by_fork, spawn_by_fork
from sipipe.ipc.child import fork

MODULES = ("sipipe.worker", "sipipe.engine.start.server")


def start_by_fork() -> None:
    """From now on, in this process and those that it starts."""
    from vllm.model_executor.models import registry

    multiprocessing.util.spawnv_passfds = spawn_by_fork
    subprocess.Popen = _Popen
    # As SiPipe's server does (:mod:`sipipe.engine.children.forking`).
    registry._run_in_subprocess = partial(look_by_fork, registry._run_in_subprocess)  # noqa: SLF001


class _Popen(subprocess.Popen):
    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        if not (named := [word for word in args if word in MODULES]):
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others
            )
            return

        (module,) = named
        group = others[-1]

        def run() -> None:
            if group >= 0:
                os.setpgid(0, group)
            if preexec_fn:
                preexec_fn()
            if module == "sipipe.worker":
                _watch_stage()
            sys.argv = [module, *args[args.index(module) + 1 :]]
            runpy.run_module(module, run_name="__main__", alter_sys=True)

        self.pid = fork(run, pass_fds, os.environ if env is None else env)
        self._child_created = True


def _watch_stage() -> None:
    """The stage that this worker opens is watched. Its modules are imported when vLLM's worker is
    there, not before: vLLM puts kernels of its own into what has been imported."""
    from sipipe.worker.main import Main

    load = Main.load

    def loaded(main: Main):
        loop = load(main)
        from tests.worker.watched_stage import watch

        watch()
        return loop

    Main.load = loaded
