"""NIXL's port: nobody but the link's other end gets through."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace

import psutil
import pytest
from tests.ipc.link import nixl_stand_in
from tests.ipc.link.conftest import BOUND, endpoint_of, free_port, hidden

from sipipe.errors import ResourceError
from sipipe.ipc.connection import Connection
from sipipe.ipc.link import nixl_agent
from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.ipc.link.nixl_agent import NixlAgent
from sipipe.ipc.link.packets import HEADER_BYTES, Kind, unpack
from sipipe.ipc.tcp import admit_only

PATIENCE = 0.3  # seconds; a connection within loopback takes microseconds


@pytest.fixture(params=["nixl", "nixl, by a stand-in"])
def endpoint(request, monkeypatch):
    return endpoint_of(request.param, monkeypatch)


def listening_ports() -> set[int]:
    """TCP ports on which this process listens."""
    connections = psutil.Process().net_connections("tcp")
    return {entry.laddr.port for entry in connections if entry.status == psutil.CONN_LISTEN}


def comes_through(port: int, source: str) -> bool:
    with socket.socket() as stranger:
        stranger.settimeout(PATIENCE)
        stranger.bind((source, 0))
        try:
            stranger.connect(("127.0.0.1", port))
        except TimeoutError:
            return False
        return True


def test_a_stranger_reaches_its_port_at_no_time(endpoint):
    with closing(open_receiver(endpoint, None)) as receiver:
        assert not comes_through(endpoint.data_port, "127.0.0.1")
        ports = listening_ports()
        with closing(open_sender(endpoint, None)) as sender:
            [own] = listening_ports() - ports  # the sender's NIXL listens, too
            assert not comes_through(own, "127.0.0.1")
            for iteration in range(3):
                sender.send(iteration, 3, hidden(3, iteration))
                receiver.take(iteration, 3, BOUND)
                receiver.release(iteration)
                assert not comes_through(endpoint.data_port, "127.0.0.1")


def test_only_the_other_host_is_let_in_before_it_has_connected(endpoint):
    with closing(NixlAgent("a", "127.0.0.1", tcp=True, port=endpoint.data_port)) as agent:
        agent.admit("127.0.0.7")
        assert not comes_through(endpoint.data_port, "127.0.0.1")
        assert comes_through(endpoint.data_port, "127.0.0.7")
        agent.admit("")
        assert not comes_through(endpoint.data_port, "127.0.0.7")


@pytest.mark.parametrize("accepted", [True, False])
def test_who_came_before_the_port_was_shut_ends_the_trial(monkeypatch, accepted):
    """And not the engine: another transport takes its place."""
    port = free_port()
    knocks = (
        "import socket, sys\n"
        f"with socket.create_connection(('127.0.0.1', {port})):\n"
        "    print('in', flush=True)\n"
        "    sys.stdin.read()\n"
    )

    class Late(nixl_stand_in.Agent):
        def create_backend(self, backend, parameters):
            super().create_backend(backend, parameters)
            # Another process, since an agent's own one connects to its port as well.
            self.stranger = subprocess.Popen(
                [sys.executable, "-S", "-c", knocks],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert self.stranger.stdout.readline() == b"in\n"
            self.accepted = self.listener.accept()[0] if accepted else None

        def __del__(self):
            self.stranger.communicate()
            if self.accepted is not None:
                self.accepted.close()
            super().__del__()

    library = SimpleNamespace(**vars(nixl_stand_in.LIBRARY) | {"nixl_agent": Late})
    monkeypatch.setattr(nixl_agent, "_load", lambda: library)
    monkeypatch.setattr(nixl_agent, "_ACCEPT_SECONDS", 0.01)
    who = "127.0.0.1" if accepted else "somebody"
    with pytest.raises(ResourceError, match=f"{who} came to NIXL's port {port}"):
        NixlAgent("b", "127.0.0.1", tcp=True, port=port)


def test_one_packet_a_microbatch(endpoint, monkeypatch):
    sent: list[int] = []
    send = Connection.send

    def count(self, packet):
        kind = unpack(memoryview(packet)).kind
        if kind in (Kind.SCHEMA, Kind.DATA):  # the rest is the receiver's
            sent.append(len(packet))
        send(self, packet)

    monkeypatch.setattr(Connection, "send", count)
    with (
        closing(open_receiver(endpoint, None)) as receiver,
        closing(open_sender(endpoint, None)) as sender,
    ):
        for iteration in range(12):
            width = 24 if iteration < 6 else 6000
            sender.send(iteration, 1 + iteration, hidden(1 + iteration, iteration, width))
            receiver.take(iteration, 1 + iteration, BOUND)
            receiver.release(iteration)
            if iteration in (0, 6):  # described once
                assert len(sent) == 2
                assert max(sent) > HEADER_BYTES
            else:
                assert sent == [HEADER_BYTES]
            sent.clear()


def test_without_nixl_the_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(nixl_agent, "_packages", lambda: ("no_such_package",))
    assert nixl_agent.nixl_reach() == ""
    with pytest.raises(ResourceError, match=r'pip install "sipipe\[nixl\]"'):
        NixlAgent("c", "127.0.0.1", tcp=True, port=0)


def test_rdma_is_where_a_port_of_a_device_is_active(monkeypatch, tmp_path):
    monkeypatch.setattr(nixl_agent, "_packages", lambda: ("socket",))
    monkeypatch.setattr(nixl_agent, "_DEVICES", tmp_path)
    assert nixl_agent.nixl_reach() == "tcp"
    state = tmp_path / "mlx5_0" / "ports" / "1" / "state"
    state.parent.mkdir(parents=True)
    state.write_text("1: DOWN\n")
    assert nixl_agent.nixl_reach() == "tcp"
    state.write_text("4: ACTIVE\n")
    assert nixl_agent.nixl_reach() == "rdma"


@pytest.mark.parametrize(
    ("address", "source", "enters"),
    [
        ("127.0.0.7", "127.0.0.7", True),
        ("127.0.0.7", "127.0.0.8", False),
        ("", "127.0.0.1", False),
        ("::1", "::1", True),
        ("::2", "::1", False),
    ],
)
def test_a_port_that_admits_one_address(address, source, enters):
    family = socket.AF_INET6 if ":" in source else socket.AF_INET
    with socket.socket(family) as listener, socket.socket(family) as stranger:
        listener.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        listener.listen()
        admit_only(listener, address)
        stranger.settimeout(PATIENCE)
        stranger.bind((source, 0))
        if enters:
            stranger.connect(listener.getsockname())
        else:
            with pytest.raises(TimeoutError):
                stranger.connect(listener.getsockname())
