"""Links, their ends, and hidden states to send."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from tests.ipc.link import nixl_stand_in, stand_in

from sipipe.ipc.link import cuda_ipc, nixl_agent
from sipipe.ipc.link.cuda_ipc import CudaIpcSending
from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.ipc.link.nixl import NixlSending
from sipipe.ipc.link.nixl_agent import nixl_reach
from sipipe.ipc.link.receiver import Receiver
from sipipe.ipc.link.sender import Sender
from sipipe.ipc.link.shm import ShmSending
from sipipe.ipc.link.zeromq import ZeromqSending
from sipipe.messages.link import LinkEndpoint

BOUND = 60.0  # seconds; of a machine at its worst
WIDTH = 24
HERE = f"127.{1 + os.getpid() // 2**14 % 200}.{os.getpid() // 2**7 % 2**7}.{1 + os.getpid() % 2**7}"
"""An address of loopback that is this process's own. A port that was free a moment ago may be
another's by now; on one address two test processes, which have the same secret, would meet."""


KINDS = ("shm", "cuda_ipc", "zeromq", "zeromq, not encrypted", "nixl", "nixl, by a stand-in")
BETWEEN_HOSTS = ("zeromq", "nixl")
SENDING: dict[str, type[ShmSending]] = {
    "shm": ShmSending,
    "cuda_ipc": CudaIpcSending,
    "zeromq": ZeromqSending,
    "nixl": NixlSending,
}
"""The sender's transport of each kind of link, for a test that watches it or has it fail."""


@pytest.fixture(params=KINDS)
def endpoint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LinkEndpoint:
    """One link of each kind; the one between GPUs with a stand-in for the device."""
    return endpoint_of(request.param, monkeypatch)


def endpoint_of(named: str, monkeypatch: pytest.MonkeyPatch) -> LinkEndpoint:
    kind, _, how = named.partition(", ")
    on_gpu = kind == "cuda_ipc"
    monkeypatch.setenv("SIPIPE_SECRET", "a secret of the tests")
    if how == "by a stand-in":
        monkeypatch.setattr(nixl_agent, "_load", lambda: nixl_stand_in.LIBRARY)
    elif kind == "nixl" and not nixl_reach():
        pytest.skip('NIXL is not installed (pip install "sipipe[nixl]")')
    if on_gpu:
        monkeypatch.setattr(cuda_ipc, "CudaDevice", stand_in.StandInDevice)
    return LinkEndpoint(
        kind=kind,
        buffer_tokens=64,
        depth=3,
        name="stage0-1.r0",
        device="cuda" if on_gpu else "cpu",
        stall_timeout=BOUND,
        address=HERE if kind in BETWEEN_HOSTS else "",
        port=free_port(HERE) if kind in BETWEEN_HOSTS else 0,
        data_port=free_port() if kind == "nixl" else 0,
        token="a token" if how == "not encrypted" else "",
    )


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as sock:
        sock.bind((address, 0))
        return sock.getsockname()[1]


@pytest.fixture
def pair(request) -> Iterator[tuple[socket.socket | None, socket.socket | None]]:
    """The sender's and the receiver's socket, for a test that opens the ends itself."""
    named = "endpoint" in request.fixturenames
    if named and request.getfixturevalue("endpoint").kind in BETWEEN_HOSTS:
        yield None, None
        return
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def link(endpoint: LinkEndpoint, pair) -> Iterator[tuple[Sender, Receiver]]:
    """Both ends of ``endpoint`` in this process."""
    with (
        closing(open_receiver(endpoint, pair[1])) as receiver,
        closing(open_sender(endpoint, pair[0])) as sender,
    ):
        yield sender, receiver


@pytest.fixture
def sender(link) -> Sender:
    return link[0]


@pytest.fixture
def receiver(link) -> Receiver:
    return link[1]


def hidden(num_tokens: int, seed: int = 0, width: int = WIDTH) -> dict[str, torch.Tensor]:
    """The hidden states of a Llama: [num_tokens, width] twice, reproducibly."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(num_tokens, width, generator=generator).to(torch.bfloat16)
        for key in ("hidden_states", "residual")
    }
