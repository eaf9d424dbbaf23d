"""A link between two ends in this process, and the sizes of what travels."""

from __future__ import annotations

import socket

from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.messages.link import LinkEndpoint

VOCAB, HIDDEN, HAND_OVER = 1000, 32, 60


def link(bound=HAND_OVER, depth=4):
    endpoint = LinkEndpoint(kind="shm", buffer_tokens=16, depth=depth, stall_timeout=bound)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return open_sender(endpoint, ours), open_receiver(endpoint, theirs)
