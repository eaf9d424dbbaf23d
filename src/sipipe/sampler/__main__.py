"""``python -m sipipe.sampler PIPE TOKENS DTYPE NAME``: what the engine starts as a sampler.

Descriptors of the control pipe and of BIC-O, and what to compile for while the workers load the
model. The name is its sampler's, or that of the spare.
"""

import os
import sys
import threading

from sipipe.ipc.exit_now import exit_now
from sipipe.ipc.parent import Parent
from sipipe.messages.start_records import SPARE

LOW = 19
"""Priority ("nice") with which a spare imports and compiles: its seconds come out of the first
requests where all cores are busy."""


def load(dtype: str) -> None:
    """At low priority, which is this thread's alone: nobody may raise one again."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW)
    from sipipe.sampler.warmup import warm_up

    warm_up([dtype])


# Numba imports scipy.linalg, where there is one, for matrix products that no kernel has: 15 MB and
# a fifth of a second. Nothing else runs in this process.
sys.modules["scipy.linalg"] = None  # type: ignore[assignment]


def run() -> int:
    """Be a sampler; returns the exit status."""
    # Before what takes a second to import: a snapshot that is longer than the pipe is read at once.
    parent = Parent(int(sys.argv[1]))
    try:
        if sys.argv[-1] == SPARE:
            ahead = threading.Thread(target=load, args=sys.argv[3:4], daemon=True)
            ahead.start()
            ahead.join()  # wait: none, nobody waits for a spare; its end, SIGTERM
        from sipipe.sampler.main import main

        return main(parent, *sys.argv[2:])
    except SystemExit:
        return 0  # told to end while it imports


if __name__ == "__main__":
    exit_now(run())
