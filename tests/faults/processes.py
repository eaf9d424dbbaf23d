"""Children of an engine, forked from a process that has imported everything.

A child of the real engine is ``python -m sipipe.worker`` or ``sipipe.sampler``, and importing is
all that it does for seconds. Here the engine forks a *nursery* before it opens anything; asked for
a child, it forks twice (the engine's own threads may hold locks at any moment), so that the child is the engine's own by ``PR_SET_CHILD_SUBREAPER``: its
process id, its exit status, its descriptors and its death are what they are in reality.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from functools import partial

from tests.engine.forked_children import fork
from tests.faults import plan
from tests.worker.watched_stage import watch

_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans():
    """Make this process the parent of its descendants whose parent ends."""
    assert _libc.prctl(_SUBREAPER, 1, 0, 0, 0) == 0


class Nursery:
    """Forked from the engine; ``report`` is the descriptor that faults are told on."""

    def __init__(self, planned, report):
        adopt_orphans()
        self._asking = threading.Lock()
        self._planned = {name: [*faults] for name, faults in planned.items()}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            ours.close()
            _serve(theirs, report)
        theirs.close()
        self._socket = ours

    def fork(self, name, command, descriptors, environment):
        """A child's process id; the faults of ``name`` that are left go to its first child."""
        module, arguments = command[command.index("-m") + 1], command[command.index("-m") + 2 :]
        asked = {"module": module, "arguments": arguments[len(descriptors) :]}
        asked |= {"environment": environment, "name": name}
        with self._asking:
            faults = self._planned.get(name)
            asked["faults"] = faults.pop(0) if faults else []
            socket.send_fds(self._socket, [json.dumps(asked).encode()], descriptors)
            return int(self._socket.recv(64))

    def close(self):
        self._socket.close()
        os.waitpid(self.pid, 0)


def _serve(requests, report):
    """The nursery's loop; ends with the engine."""
    status = 0
    try:
        kept = {0, 1, 2, requests.fileno(), report}
        for number in map(int, os.listdir("/proc/self/fd")):
            if number not in kept:
                with suppress(OSError):  # what lists them
                    os.close(number)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            data, given, _, _ = socket.recv_fds(requests, 1 << 20, 32)
            if not data:
                break
            asked = json.loads(data)
            between, reading = _fork_between(
                partial(_become, asked, given, report), asked, [*given, report]
            )
            for descriptor in given:
                os.close(descriptor)
            os.waitpid(between, 0)
            requests.send(os.read(reading, 64))
            os.close(reading)
    except BaseException:
        traceback.print_exc()
        status = 1
    os._exit(status)


def _fork_between(run, asked, descriptors):
    """A process that starts the child, says its number and ends; its number, and where it says."""
    reading, writing = os.pipe()
    if between := os.fork():
        os.close(writing)
        return between, reading
    child = fork(run, descriptors, asked["environment"])
    os.write(writing, str(child).encode())
    os._exit(0)


def _become(asked, descriptors, report):
    sys.argv = [asked["module"], *map(str, descriptors), *asked["arguments"]]
    plan.arrange(asked["name"], asked["faults"], report)
    if asked["module"] == "sipipe.worker":
        watch()
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)


class Forked(subprocess.Popen):
    """What ``subprocess.Popen`` is to :mod:`sipipe.engine.children.children`."""

    nursery: Nursery
    naming = threading.local()

    def __init__(self, command, *, pass_fds, env, **_):
        self.args, self.returncode = command, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock = True, threading.Lock()
        self._communication_started, self._input = False, None
        name = Forked.naming.name
        self.pid = Forked.nursery.fork(name, list(command), list(pass_fds), dict(env))
