"""Opening the ends of a link, each in its worker, by what the engine told it."""

import socket

from sipipe.ipc.link.cuda_ipc import CudaIpcReceiving, CudaIpcSending
from sipipe.ipc.link.nixl import NixlReceiving, NixlSending
from sipipe.ipc.link.receiver import Receiver
from sipipe.ipc.link.sender import Sender
from sipipe.ipc.link.shm import Lost, ShmReceiving, ShmSending
from sipipe.ipc.link.zeromq import ZeromqReceiving, ZeromqSending
from sipipe.messages.link import LinkEndpoint


def open_sender(
    endpoint: LinkEndpoint, sock: socket.socket | None, lost: Lost = lambda _: None
) -> Sender:
    """The sending end, in the process of the earlier stage. Between hosts it waits for the other.

    Args:
        sock: one of a connected pair of Unix packet sockets; from now on the sender's. None for a
            link between hosts.
        lost: told when the other host's stage is gone (of one of this host the engine hears itself),
            and of what fails in the sender's own thread.
    """
    if sock is None:
        between_hosts = NixlSending if endpoint.kind == "nixl" else ZeromqSending
        return Sender(endpoint, between_hosts(endpoint, lost), lost)
    transport = ShmSending if endpoint.kind == "shm" else CudaIpcSending
    return Sender(endpoint, transport(endpoint, sock), lost)


def open_receiver(
    endpoint: LinkEndpoint, sock: socket.socket | None, lost: Lost = lambda _: None
) -> Receiver:
    """The receiving end, in the process of the later stage; see :func:`open_sender`."""
    if sock is None:
        between_hosts = NixlReceiving if endpoint.kind == "nixl" else ZeromqReceiving
        return Receiver(endpoint, between_hosts(endpoint, lost))
    transport = ShmReceiving if endpoint.kind == "shm" else CudaIpcReceiving
    return Receiver(endpoint, transport(endpoint, sock))
