"""NIXL without NIXL, between two agents of one process: what it orders, and nothing more.

A write is done only after both ends have looked at it, as over TCP, and its notification comes behind
its bytes. Memory that was not registered cannot be written, nor read.
"""

from __future__ import annotations

import ctypes
import itertools
import socket
from types import SimpleNamespace
from typing import ClassVar
from weakref import WeakValueDictionary

BindingError = type("nixlRemoteDisconnectError", (Exception,), {})


class Agent:
    """As NIXL's ``nixl_agent``."""

    all: ClassVar[WeakValueDictionary[str, Agent]] = WeakValueDictionary()

    def __init__(self, name, settings):
        assert not settings.enable_prog_thread
        self.name = name
        self.registered = []
        self.writes = []
        self.notified = []
        self.listener = None
        self.all[name] = self

    def create_backend(self, backend, parameters):
        assert backend == "UCX"
        config = dict(entry.split("=") for entry in parameters["engine_config"].split(","))
        self.listener = socket.socket()
        self.listener.setblocking(False)
        self.listener.bind(("127.0.0.1", int(config["TCP_PORT_RANGE"].partition("-")[0])))
        self.listener.listen()

    def __del__(self):
        if self.listener is not None:
            self.listener.close()

    def register_memory(self, places, kind):
        ((start, nbytes, _, _),) = places
        assert kind == "DRAM"
        self.registered.append((start, start + nbytes))
        return self.registered[-1]

    def deregister_memory(self, place):
        self.registered.remove(place)

    def get_agent_metadata(self):
        return self.name.encode()

    def add_remote_agent(self, metadata):
        assert metadata.decode() in self.all
        return metadata

    def get_xfer_descs(self, places, kind):
        assert kind == "DRAM"
        return places

    def initialize_xfer(self, operation, sources, targets, other, notification):
        assert operation == "WRITE"
        state = {"posted": False, "seen": False, "done": False}
        handle = SimpleNamespace(**state, moves=[*zip(sources, targets, strict=True)])
        handle.notification = notification
        handle.other = other
        handle.release = lambda: None
        return handle

    def transfer(self, handle):
        handle.posted = True
        if handle.other not in self.all:
            raise BindingError("NIXL_ERR_REMOTE_DISCONNECT")
        self.all[handle.other].writes.append((self, handle))

    def check_xfer_state(self, handle):
        assert handle.posted
        return "DONE" if handle.done else "PROC"

    def get_new_notifs(self):
        for sender, handle in self.writes:
            for (source, nbytes, _), (target, target_nbytes, _) in handle.moves:
                assert nbytes == target_nbytes
                sender.check(source, nbytes)
                self.check(target, nbytes)
                ctypes.memmove(target, source, nbytes)
            self.notified.append((sender.name, handle.notification))
            handle.done = True
        self.writes.clear()
        came = {}
        for name, entries in itertools.groupby(self.notified, lambda entry: entry[0]):
            came[name] = [notification for _, notification in entries]
        self.notified.clear()
        return came

    def check(self, start, nbytes):
        assert any(first <= start and start + nbytes <= end for first, end in self.registered)


LIBRARY = SimpleNamespace(
    nixl_agent=Agent,
    nixl_agent_config=lambda enable_prog_thread, backends: SimpleNamespace(
        enable_prog_thread=enable_prog_thread, backends=backends
    ),
)
