"""Room is checked before the start; locks and forks behave."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from sipipe.errors import ResourceError
from sipipe.ipc import memory
from sipipe.ipc.errors import ChannelError, PeerDiedError
from sipipe.ipc.memory import Endpoint, SharedMemory, check_room
from sipipe.ipc.ring.dispatch import DispatchProducer
from sipipe.ipc.ring.ring import EXCLUSIVE, SHARED, Locks


def test_too_little_room_is_said_before_the_start():
    with pytest.raises(
        ResourceError, match=r"memory has .* MiB free, too little for bic-l: .*--inflight"
    ):
        check_room(1 << 40, "bic-l")
    check_room(1 << 20, "bic-l")


def test_a_reused_process_id_is_recognised():
    with closing(DispatchProducer("test", readers=["a"])) as producer:
        old = producer.endpoint.memory
        wrong = Endpoint(old.channel, old.path, "00" * 16, old.size)
        with pytest.raises(PeerDiedError, match="is gone"):
            SharedMemory.attach(wrong)


def test_too_many_readers():
    with pytest.raises(ChannelError, match="no room for a reader beyond 256"):
        DispatchProducer("test", readers=[f"r{i}" for i in range(257)])


def test_memory_that_cannot_be_had_leaves_nothing_open(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceError, match=r"cannot get .* of shared memory"):
        SharedMemory.create("test", 1)
    assert os.listdir("/proc/self/fd") == before


@pytest.fixture
def file():
    fd = os.memfd_create("test")
    yield f"/proc/self/fd/{fd}"
    os.close(fd)


def test_locks_exclude_each_other_within_a_process(file):
    first, second = Locks(file), Locks(file)
    assert first.try_lock(SHARED, 0, 2)
    assert second.try_lock(SHARED, 1, 2)
    assert not second.try_lock(EXCLUSIVE, 1)
    first.close()
    first.close()
    assert second.try_lock(EXCLUSIVE, 1)
    second.close()


def test_a_forked_child_does_not_keep_its_parents_locks():
    code = """
import os, sys
from sipipe.ipc.errors import PeerDiedError
from sipipe.ipc.ring.dispatch import DispatchProducer, DispatchReader
producer = DispatchProducer("test", readers=["a"])
reader = DispatchReader(producer.endpoint, "a")
read, write = os.pipe()
if os.fork() == 0:
    os.close(write)
    os.read(read, 1)  # lives until the parent is done
    os._exit(0)
producer._ring.close()  # what the kernel does to a process that dies
try:
    reader.receive()
except PeerDiedError:
    print("noticed")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "noticed\n", done.stderr


V2 = ("memory.max", "memory.current", "")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


@pytest.mark.parametrize(("most", "taken", "total"), [V2, V1])
def test_a_containers_limit_counts_without_the_files_that_it_has_cached(
    monkeypatch, most, taken, total
):
    found = {
        ("/proc/meminfo", "MemAvailable:"): 64 << 20,  # KiB: 64 GiB
        (f"/group/{most}", ""): 16 << 30,
        (f"/group/{taken}", ""): 15 << 30,
        ("/group/memory.stat", f"{total}inactive_file "): 9 << 30,
        ("/group/memory.stat", f"{total}active_file "): 2 << 30,
    }
    monkeypatch.setattr(memory, "_read_number", lambda path, key="": found.get((path, key), 0))
    groups = Path("/group/box"), Path("/group")
    monkeypatch.setattr(memory, "control_groups", lambda _: groups)
    assert memory.free_bytes() == (16 - 4) << 30
    assert (memory.group_limit(), memory.group_used()) == (16 << 30, 4 << 30)
    # A group of less, which has more room: both limits hold.
    found |= {(f"/group/box/{most}", ""): 14 << 30, (f"/group/box/{taken}", ""): 1 << 30}
    assert memory.free_bytes() == (16 - 4) << 30
    assert (memory.group_limit(), memory.group_used()) == (14 << 30, 2 << 30)
    del found[f"/group/box/{most}", ""]
    found[f"/group/{most}", ""] = (1 << 63) - 4096  # as version 1 says that there is none
    assert memory.free_bytes() == 64 << 30
    assert memory.group_limit() is memory.group_used() is None
