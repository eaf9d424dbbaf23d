"""Making links: what the executor makes, hands to two workers, and they open."""

import socket
from typing import Literal

from sipipe.errors import ConfigError, UnsupportedError
from sipipe.ipc.link.cuda_ipc import CudaIpcReceiving, CudaIpcSending
from sipipe.ipc.link.receiver import Receiver
from sipipe.ipc.link.sender import Sender
from sipipe.ipc.link.shm import ShmReceiving, ShmSending
from sipipe.ipc.link.zeromq import ZeromqReceiving, ZeromqSending
from sipipe.messages.link import LinkEndpoint, TransportKind


def create_link(
    kind: Literal["auto"] | TransportKind = "auto",
    *,
    max_tokens: int,
    depth: int = 3,
    name: str = "link",
    device: Literal["cpu", "cuda"] = "cpu",
    stall_timeout: float = 300.0,
    address: str = "",
    port: int = 0,
) -> LinkEndpoint:
    """Describe a link between two processes; cheap, opens nothing.

    Args: the fields of :class:`.LinkEndpoint`, and
        kind: ``"auto"``: ``"shm"``, or ``"cuda_ipc"`` where ``device`` is ``"cuda"``.
        depth: at least 2, so that one iteration is received while another is used.
        device: ``"cpu"``: the later stage works in host memory, in place. ``"cuda"``: on its
            current GPU; with ``shm`` and ``zeromq`` the tensors go by way of host memory.
        address: of the later stage's host, with ``port``, for ``"zeromq"``; else empty.

    Raises:
        ConfigError: a value is out of range.
        UnsupportedError: the transport is not available here.
    """
    if kind == "auto":
        kind = "cuda_ipc" if device == "cuda" else "shm"
    if kind not in ("shm", "cuda_ipc", "zeromq"):
        raise ConfigError(f"transport={kind!r}: choose auto, shm or cuda_ipc")
    if kind == "cuda_ipc" and device != "cuda":
        raise UnsupportedError(
            f"link {name}: transport={kind!r} joins stages on CUDA devices; use "
            "transport='auto' here"
        )
    if max_tokens < 1:
        raise ConfigError(f"max_tokens={max_tokens}: must be 1 or more")
    if depth < 2:
        raise ConfigError(f"depth={depth}: must be 2 or more")
    return LinkEndpoint(
        kind=kind,
        name=name,
        max_tokens=max_tokens,
        depth=depth,
        stall_timeout=stall_timeout,
        device=device,
        address=address,
        port=port,
    )


def open_sender(endpoint: LinkEndpoint, sock: socket.socket | None) -> Sender:
    """The sending end, in the process of the earlier stage; does not wait for the other.

    ``sock``: one of a connected pair of Unix packet sockets; from now on the sender's. None for a
    link between hosts.
    """
    if sock is None:
        return Sender(endpoint, ZeromqSending(endpoint))
    transport = ShmSending if endpoint.kind == "shm" else CudaIpcSending
    return Sender(endpoint, transport(endpoint, sock))


def open_receiver(endpoint: LinkEndpoint, sock: socket.socket | None) -> Receiver:
    """The receiving end, in the process of the later stage; see :func:`open_sender`."""
    if sock is None:
        return Receiver(endpoint, ZeromqReceiving(endpoint))
    transport = ShmReceiving if endpoint.kind == "shm" else CudaIpcReceiving
    return Receiver(endpoint, transport(endpoint, sock))
