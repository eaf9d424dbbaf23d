"""What Pythons that were built for an older Linux lack, and what never lets another thread go on."""

import ctypes
import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import threading

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


def test_what_a_socket_has():
    ours, theirs = socket.socketpair()
    buffer = ctypes.create_string_buffer(4)
    with pytest.raises(BlockingIOError):
        linux.receive_now(ours.fileno(), buffer)
    theirs.sendall(b"abcdef")
    assert linux.receive_now(ours.fileno(), buffer) == 4
    assert buffer.raw == b"abcd"
    assert linux.receive_now(ours.fileno(), buffer) == 2
    theirs.close()
    assert linux.receive_now(ours.fileno(), buffer) == 0
    number = ours.fileno()
    ours.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        linux.receive_now(number, buffer)


def test_the_interpreter_is_kept(tmp_path):
    """Another thread that computes goes no further meanwhile, as beside Python's own calls."""
    ours, theirs = socket.socketpair()
    theirs.sendall(b"x" * 999)
    ours.setblocking(False)
    buffer, steps, go_on = ctypes.create_string_buffer(1), [0], [True]
    file = (tmp_path / "locked").open("w")
    unlock = struct.pack("hhqqi4x", fcntl.F_UNLCK, 0, 0, 0, 0)

    def compute():
        while go_on[0]:
            steps[0] += 1

    def gone_on(call) -> bool:
        before = steps[0]
        for _ in range(99):
            call()
        return steps[0] != before

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=compute)
    sys.setswitchinterval(0.5)  # only who lets it go loses it
    thread.start()
    try:
        kept = [
            gone_on(lambda: linux.receive_now(ours.fileno(), buffer)),
            gone_on(lambda: linux.set_lock(file.fileno(), fcntl.F_SETLK, unlock)),
        ]
    finally:
        sys.setswitchinterval(interval)
        go_on[0] = False
        thread.join()
        for end in (ours, theirs, file):
            end.close()
    assert kept == [False, False]
