"""``python -m sipipe.worker FD...``: the program of a stage worker.

The descriptors are its control pipe, the pipe to ``multiprocessing``'s resource tracker, then the
sockets of its links. The tracker is the engine's, as for every process that ``multiprocessing``
starts. One of the worker's own would be killed with it, and what it was to remove would stay.
"""

import gc
import os
import socket
import sys
from multiprocessing import current_process, resource_tracker, spawn
from typing import Any

from sipipe.ipc.parent import Parent


def main() -> None:
    """Set this process up as ``multiprocessing`` sets up one that it spawns, then be a worker.

    It takes over the engine's ``sys.path``, arguments and directory. Where the engine was spawned
    itself, the user's main module is imported again, so that what it registers and defines is there
    when the start record is unpickled. vLLM is imported with that record, not before."""
    parent = Parent(int(sys.argv[1]))
    sockets = [socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[3:]]
    for descriptor in sys.argv[2:]:
        os.set_inheritable(int(descriptor), False)
    resource_tracker._resource_tracker._fd = int(sys.argv[2])  # type: ignore[attr-defined]
    process: Any = current_process()
    # Until iterations can run: imports are a quarter quicker without it, compiling an eighth.
    gc.disable()
    # A main module without a guard must not start another engine in this process.
    process._inheriting = True
    spawn.prepare(parent.receive())
    boot = parent.receive()
    del process._inheriting
    from sipipe.worker.main import worker_main

    worker_main(boot, parent, sockets)


if __name__ == "__main__":
    main()
