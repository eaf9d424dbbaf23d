"""Children of an engine, forked from a process that has imported everything.

A child of the real engine is ``python -m sipipe.worker`` or ``sipipe.sampler``, and importing is
all that it does for seconds. Here the engine forks a *nursery* before it opens anything; asked for
a child, that forks twice, so that the child is the engine's own by ``PR_SET_CHILD_SUBREAPER``: its
process id, its exit status, its descriptors and its death are what they are in reality.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback

from tests.faults import plan

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
        asked = {
            "module": module,
            "arguments": arguments[len(descriptors) :],
            "environment": environment,
            "name": name,
        }
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
        for number in os.listdir("/proc/self/fd"):
            if int(number) not in kept:
                try:
                    os.close(int(number))
                except OSError:
                    pass
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            data, given, _, _ = socket.recv_fds(requests, 1 << 20, 32)
            if not data:
                break
            reading, writing = os.pipe()
            between = os.fork()
            if not between:
                os.close(reading)
                child = os.fork()
                if child:
                    os.write(writing, str(child).encode())
                    os._exit(0)
                os.close(writing)
                requests.close()
                status = _become(json.loads(data), given, report)
                break
            os.close(writing)
            for descriptor in given:
                os.close(descriptor)
            os.waitpid(between, 0)
            requests.send(os.read(reading, 64))
            os.close(reading)
    except BaseException:
        traceback.print_exc()
        status = 1
    os._exit(status)


def _become(asked, descriptors, report):
    try:
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.argv = [asked["module"], *map(str, descriptors), *asked["arguments"]]
        plan.arrange(asked["name"], asked["faults"], report)
        if asked["module"] == "sipipe.sampler":
            from sipipe.sampler.main import main

            return main()
        from sipipe.worker.__main__ import main as worker

        worker()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


class Forked(subprocess.Popen):
    """What ``subprocess.Popen`` is to :mod:`sipipe.engine.children`."""

    nursery: Nursery
    names: list[str]

    def __init__(self, command, *, pass_fds, env, **_):
        self.args, self.returncode = command, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock = True, threading.Lock()
        self._communication_started, self._input = False, None
        name = Forked.naming.name
        self.pid = Forked.nursery.fork(name, list(command), list(pass_fds), dict(env))


Forked.naming = threading.local()
