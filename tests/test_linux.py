"""What Pythons that were built for an older Linux lack."""

import os
import select
import subprocess
import sys

import pytest

from sipipe import linux


@pytest.fixture(params=["Python's", "the system's"], autouse=True)
def _whose(request, monkeypatch):
    if request.param == "the system's":
        monkeypatch.delattr(os, "memfd_create", raising=False)
        monkeypatch.delattr(os, "pidfd_open", raising=False)


def test_memory_without_a_name():
    descriptor = linux.memfd_create("test")
    os.ftruncate(descriptor, 4)
    os.pwrite(descriptor, b"abcd", 0)
    assert os.pread(descriptor, 4, 0) == b"abcd"
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:test")
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_the_end_of_a_process():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = linux.pidfd_open(child.pid)
    assert select.select([descriptor], [], [], 0)[0] == []
    child.communicate(b"\n")
    assert select.select([descriptor], [], [], 10)[0] == [descriptor]
    os.close(descriptor)
    with pytest.raises(ProcessLookupError):
        linux.pidfd_open(child.pid)
