"""The end of a process: what was registered is done, what Python adds to it is not."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading
from multiprocessing.util import Finalize
from sipipe.ipc.exit_now import exit_now

class Last:
    def __del__(self):
        print("taken down", flush=True)

sys.last = Last()
atexit.register(print, "atexit")
Finalize(None, print, args=("finalizer",), exitpriority=1)
threading.Thread(target=threading.Event().wait).start()
print("not flushed", end=" ")
exit_now(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_what_is_done_at_the_end(status):
    command = [sys.executable, "-c", PROGRAM, str(status)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status
    assert sorted(done.stdout.split()) == ["atexit", "finalizer", "flushed", "not"]
    assert done.stderr == ""


CLOSED = """
import os
from sipipe.ipc.exit_now import exit_now

print("to nobody", end="")
os.close(1)
exit_now(3)
"""


def test_an_output_that_is_closed():
    done = subprocess.run([sys.executable, "-c", CLOSED], timeout=60, check=False)
    assert done.returncode == 3
