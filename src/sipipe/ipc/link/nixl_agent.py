"""NIXL's agent of one end of a link: registered memory, one-sided writes and their notifications.

NIXL is NVIDIA's library of transfers (``pip install "sipipe[nixl]"``); it brings UCX, which writes by
RDMA where the machine has it, else over TCP. It has moved data over TCP only, **never by RDMA**.

Guarantees: nothing that a stranger sends is acted upon. UCX over TCP writes to whatever address a
connected peer names, so its listening port drops all but the other end's host before anything is read
from it: an agent reads only in
:meth:`NixlAgent.is_written` and :meth:`NixlAgent.notifications`.
Relies on: NIXL, which sends a write's notification behind its bytes.

Rejected: NIXL's progress thread (it reads from the port at once, takes 0.1 to 0.3 of a core while
nothing comes, and made 2 MB over TCP take 4 to 20 ms in place of 0.9); its listener thread, by which
agents find each other (a port without any authentication); ``UCX_…`` variables, which would also be
those of vLLM's own connectors.
"""

import importlib
import importlib.util
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch

from sipipe.errors import ResourceError
from sipipe.ipc.tcp import admit_only, waiting_connections
from sipipe.messages.link import NixlReach

_DEVICES = Path("/sys/class/infiniband")
"""Directory of the machine's RDMA devices: those of InfiniBand, RoCE and EFA."""
_ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "ERROR",
    # UCX would take SIGSEGV and its like from Python's own faulthandler.
    "UCX_HANDLE_ERRORS": "none",
}
_ACCEPT_SECONDS = 1.0
"""Seconds in which UCX takes in the connection that it makes to itself."""
_importing = threading.Lock()  # wait: an import's time; nobody waits under it


def nixl_reach() -> NixlReach:
    """Way by which NIXL reaches other hosts from this one: ``"rdma"``, ``"tcp"``, or empty if it is not
    installed. Imports nothing."""
    if not any(importlib.util.find_spec(name) for name in _packages()):
        return ""
    for state in _DEVICES.glob("*/ports/*/state"):
        with suppress(OSError):  # the device has just gone
            if "ACTIVE" in state.read_text():
                return "rdma"
    return "tcp"


class NixlAgent:
    """One end's agent.

    Args:
        name: the agent's name, which the other end's must not have.
        address: this host's address in the network of the other end.
        tcp: has it write over TCP; else by RDMA.
        port: the port to listen on over TCP; 0: one that is free.

    Raises ResourceError: NIXL is not installed or cannot begin, or a stranger was at its port.
    """

    def __init__(self, name: str, address: str, *, tcp: bool, port: int = 0) -> None:
        self._listeners: list[socket.socket] = []
        self._memory: Any = None
        """NIXL's descriptor of the registered memory, and the memory."""
        library = _load()
        config = "TLS=^tcp"
        if tcp:
            device, address = _interface_of(address)
            port = port or _free_port(address)
            config = f"TLS=tcp,NET_DEVICES={device},TCP_PORT_RANGE={port}-{port}"
        try:
            settings = library.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent: Any = library.nixl_agent(name, settings)
            self._agent.create_backend("UCX", {"engine_config": config})
        except Exception as error:
            raise ResourceError(f"NIXL cannot begin: {error}") from None
        if tcp:
            try:
                self._shut_out_strangers(address, port)
            except BaseException:
                self.close()
                raise

    def _shut_out_strangers(self, address: str, port: int) -> None:
        """Have the kernel drop whatever comes to ``port``. NIXL has read nothing from it so far."""
        for sock in _tcp_sockets():
            with sock:
                listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and sock.getsockname()[:2] == (address, port):
                    # Not `sock.dup()`, which would have UCX's own calls wait for strangers.
                    self._listeners.append(socket.socket(fileno=os.dup(sock.fileno())))
        if not self._listeners:
            raise ResourceError(f"NIXL does not listen on port {port} of {address}")
        self.admit("")
        # UCX has connected to itself. Nobody else may have, in the moment before the filter.
        deadline = time.monotonic() + _ACCEPT_SECONDS
        while any(map(waiting_connections, self._listeners)) and time.monotonic() < deadline:
            # wait: 1 s (`_ACCEPT_SECONDS`), in steps of 1 ms; UCX's own thread, which accepts
            time.sleep(0.001)
        local = set()
        peers = []
        for sock in _tcp_sockets():
            with sock, suppress(OSError):  # it has no peer any more
                bound = sock.getsockname()[:2]
                local.add(bound)
                if bound == (address, port):
                    peers.append(sock.getpeername()[:2])
        strangers = [host for host, from_port in peers if (host, from_port) not in local]
        if strangers or any(map(waiting_connections, self._listeners)):
            who = strangers[0] if strangers else "somebody"
            raise ResourceError(f"{who} came to NIXL's port {port} before its peer")

    def admit(self, address: str) -> None:
        """Let the other end, whose host has ``address``, connect over TCP; empty: nobody any more."""
        for listener in self._listeners:
            admit_only(listener, address)

    def register(self, memory: torch.Tensor) -> None:
        """Let NIXL read from and write to ``memory``, in the place of what it had before, and keep it
        until :meth:`close`."""
        place = (memory.data_ptr(), memory.nbytes, 0, "")
        earlier = self._memory
        self._memory = self._agent.register_memory([place], "DRAM"), memory
        if earlier is not None:
            self._agent.deregister_memory(earlier[0])

    def metadata(self) -> bytes:
        """Description by which another end writes into this one's registered memory."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def learn(self, metadata: bytes) -> str:
        """Take in another end's :meth:`metadata`; returns its name."""
        name: bytes = self._agent.add_remote_agent(metadata)
        return name.decode()

    def write(
        self,
        other: str,
        sources: Sequence[torch.Tensor],
        targets: Sequence[int],
        notification: bytes,
    ) -> Any:
        """Begin to write tensors of registered memory to addresses of the end ``other``, which then gets
        ``notification``. Returns a handle for :meth:`is_written`. Raises as that."""
        read = [(source.data_ptr(), source.nbytes, 0) for source in sources]
        written = [
            (target, source.nbytes, 0) for target, source in zip(targets, sources, strict=True)
        ]
        with _errors_named():
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(read, "DRAM"),
                self._agent.get_xfer_descs(written, "DRAM"),
                other,
                notification,
            )
            self._agent.transfer(handle)
            return handle

    def is_written(self, handle: Any) -> bool:
        """True when what :meth:`write` began has arrived; drives it. Raises ConnectionError: the other
        end is gone. ResourceError: it failed otherwise."""
        with _errors_named():
            state = self._agent.check_xfer_state(handle)
            if state == "DONE":
                handle.release()
                return True
        if state != "PROC":
            raise ResourceError(f"NIXL could not write to the other host ({state})")
        return False

    def give_up(self, handle: Any) -> None:
        """End a write that has not arrived. Its memory is kept until :meth:`close`."""
        with suppress(Exception):  # NIXL says so of one that is under way
            handle.release()

    def notifications(self) -> Iterator[bytes]:
        """Notifications of the other end's writes that have arrived since the last call; drives them."""
        for messages in self._agent.get_new_notifs().values():
            yield from messages

    def close(self) -> None:
        """End the agent; nothing is written to this end's memory any more when this returns."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self._agent = None  # its end closes UCX's connections and its port
        self._memory = None


@contextmanager
def _errors_named() -> Iterator[None]:
    """Raise NIXL's errors as Python's."""
    try:
        yield
    except Exception as error:
        if "DISCONNECT" in str(error):
            raise ConnectionResetError(str(error)) from None
        raise ResourceError(f"NIXL could not write to the other host: {error}") from None


def _packages() -> tuple[str, ...]:
    """NIXL's packages, the one that was built for torch's CUDA first."""
    packages = ("nixl_cu12", "nixl_cu13")
    return packages[::-1] if (torch.version.cuda or "").startswith("13") else packages


def _load() -> ModuleType:
    """NIXL's module. Raises ResourceError: it is not installed."""
    with _importing:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        for package in _packages():
            with suppress(ModuleNotFoundError):
                return importlib.import_module(package)
    raise ResourceError('NIXL is not installed: pip install "sipipe[nixl]"')


def _interface_of(address: str) -> tuple[str, str]:
    """Network device with this host's ``address``, and the address on which UCX listens there. Raises
    ResourceError: there is none."""
    loopback = ipaddress.ip_address(address).is_loopback
    for device, addresses in psutil.net_if_addrs().items():
        own_addresses = [entry.address for entry in addresses if entry.family == socket.AF_INET]
        if own_addresses and (
            address in own_addresses
            or (loopback and ipaddress.ip_address(own_addresses[0]).is_loopback)
        ):
            return device, own_addresses[0]
    raise ResourceError(f"NIXL over TCP needs an IPv4 network, and {address} is in none here")


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def _tcp_sockets() -> Iterator[socket.socket]:
    """Copies of this process's TCP sockets; the caller closes them."""
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed, or is no socket
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            sock = socket.socket(fileno=os.dup(int(entry)))
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock
            else:
                sock.close()
