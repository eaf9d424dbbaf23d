"""Locks of a process that forks: the child holds none of them, whatever becomes of the owner.

An open file description is shared with a forked child, and its locks live as long as any process has
it. So a child that kept it would keep its parent's locks, and readers asleep, after the parent's death.
"""

import os
import signal
import subprocess
import sys

import pytest

from sipipe.ipc.ring.ring import EXCLUSIVE, Locks

OWNER = """
import os, sys
from sipipe.ipc.ring.ring import EXCLUSIVE, Locks
locks = Locks(sys.argv[1])
assert locks.try_lock(EXCLUSIVE, 0)
if os.fork() == 0:
    os.write(1, b"f")  # forked
    sys.stdin.read()  # until the test is done
    os._exit(0)
if sys.argv[2] == "closes":
    os.close(locks.fd)  # as the kernel does for a process that ends
    os.write(1, b"c")  # closed
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["killed", "closes"])
def test_a_forked_child_holds_no_lock_of_its_parent(tmp_path, end):
    path = tmp_path / "ring"
    path.write_bytes(bytes(64))
    command = [sys.executable, "-c", OWNER, str(path), end]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        other = Locks(str(path))
        try:
            if end == "killed":
                assert owner.stdout.read(1) == b"f"
                assert not other.try_lock(EXCLUSIVE, 0), "the owner lives and has it"
                os.kill(owner.pid, signal.SIGKILL)
                owner.wait(30)
            else:
                assert set(owner.stdout.read(2)) == set(b"fc")
            assert other.try_lock(EXCLUSIVE, 0), "the child still lives, and has it"
        finally:
            other.close()
            owner.stdin.close()  # the child reads its end


def test_the_end_of_a_forked_child_frees_nothing_of_its_parents(tmp_path):
    path = tmp_path / "ring"
    path.write_bytes(bytes(64))
    locks = Locks(str(path))
    other = Locks(str(path))
    assert locks.try_lock(EXCLUSIVE, 0)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert not other.try_lock(EXCLUSIVE, 0)
    other.close()
    locks.close()
