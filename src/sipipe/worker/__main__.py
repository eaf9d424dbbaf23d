"""``python -m sipipe.worker FD...``: what the engine starts as a stage worker.

The descriptors: its control pipe, the pipe to ``multiprocessing``'s resource tracker, then the
sockets of its links. The tracker is the engine's, as it is for every process that
``multiprocessing`` starts: one of the worker's own would be killed with it, and what it was to
remove would stay.
"""

import gc
import os
import socket
import sys
from multiprocessing import current_process, resource_tracker, spawn
from typing import Any

from sipipe.ipc.parent import Parent


def main() -> None:
    """Become what ``multiprocessing`` makes of a spawned process, then a worker. The engine's
    ``sys.path``, arguments and directory are taken over, and where it was spawned itself the user's
    main module is imported again, so that what it registers and defines is here when the boot
    record is unpickled. vLLM is imported with that record, not before."""
    parent = Parent(int(sys.argv[1]))
    sockets = [socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[3:]]
    for descriptor in sys.argv[2:]:
        os.set_inheritable(int(descriptor), False)
    resource_tracker._resource_tracker._fd = int(sys.argv[2])  # type: ignore[attr-defined]
    process: Any = current_process()
    gc.disable()  # until iterations can run: imports are a quarter quicker, compiling an eighth
    process._inheriting = True  # a main module without a guard must not start another engine here
    spawn.prepare(parent.receive())
    boot = parent.receive()
    del process._inheriting
    from sipipe.worker.main import worker_main

    worker_main(boot, parent, sockets)


if __name__ == "__main__":
    main()
