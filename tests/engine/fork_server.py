"""A process that has imported vLLM, and forks one that goes on from there whenever it is asked.

Importing vLLM takes a core 7 to 10 seconds, most of the start of a tiny engine; the tests' front
ends (``engine_run.py``) and one-process engines begin where that is done (:mod:`.forks`), and so
do the processes that they start (:mod:`.forked_children`), a worker's or a stage's process without
an engine (``ending_worker.py``, ``dying_stage.py``), and programs that are to have vLLM imported.

Each request on the socket is JSON with ``file``, ``arguments``, ``environment`` and ``host`` (a
process in whose namespaces to run, or null), and brings the new process's standard input, its
output, and descriptors whose numbers become its first arguments; the answer is its number. Ends
with the socket.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import sys
from contextlib import suppress

IMPORTED = (
    *("vllm.v1.engine.core_client", "vllm.v1.engine.core", "vllm.transformers_utils"),
    # A worker's, two seconds: not the CPU one's, which puts other things into torch and, as it does
    # in a worker, its kernels into whatever has been imported by then.
    *("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner"),
    *("vllm.model_executor.models.llama", "vllm.model_executor.model_loader"),
)


def main() -> None:
    """Import vLLM, then fork a process for each request, until the socket ends."""
    gc.disable()
    import setproctitle
    import vllm

    setproctitle.getproctitle()  # it finds the place of the title now; environments change later

    vllm.LLM  # noqa: B018, which imports the rest
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        while True:
            data, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 16)
            if not data:
                return
            with suppress(ChildProcessError):  # reap the processes that have ended since
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            pid = os.fork()
            if not pid:
                break
            for descriptor in descriptors:
                os.close(descriptor)
            requests.send(str(pid).encode())
    become(json.loads(data), *descriptors)


def become(request, stdin: int, stdout: int, *ends: int) -> None:
    """Go on in this process, which was forked, as the program of ``request``."""
    os.setsid()
    for descriptor, number in ((stdin, 0), (stdout, 1), (stdout, 2)):
        os.dup2(descriptor, number)
    os.close(stdin)
    os.close(stdout)
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["host"] is not None:
        enter(request["host"])
    sys.argv = [request["file"], *map(str, ends), *request["arguments"]]
    # The first variable was read when vLLM was imported here, too early for this program. The second one
    # has every process start anew.
    if {"VLLM_GPU_SYNC_CHECK", "SIPIPE_TESTS_START_ANEW"} & os.environ.keys():
        for end in ends:
            os.set_inheritable(end, True)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    runpy.run_path(request["file"], run_name="__main__")


def enter(host: int) -> None:
    """Go on in the namespaces of process ``host``; this process only waits for the one that does."""
    spaces = [
        os.open(f"/proc/{host}/ns/{kind}", os.O_RDONLY) for kind in ("net", "pid", "uts", "mnt")
    ]
    directory = os.getcwd()
    libc = ctypes.CDLL(None, use_errno=True)
    for space in spaces:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)
    os.chdir(directory)
    # Only a child has a process id of that host.
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 255)


if __name__ == "__main__":
    main()
