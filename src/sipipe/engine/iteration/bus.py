"""BIC-I as the engine sees it: one ordered stream of iterations and calls to all children.

Who runs here
    Any thread publishes; ``order`` makes them take turns. The events thread and the thread that
    replaces a sampler drop dead readers, without ``order``.
Guarantees
    Every reader that lives sees the same messages in the same order. Publishing waits for late
    readers, at most the stall bound, and never for a dead one.
    Invariant: what must be true of the state at one point of the stream (a snapshot for a new
    reader, a scheduling output and the state change that it stands for) happens under ``order``.
"""

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from sipipe.ipc.errors import ChannelClosed
from sipipe.messages.calls import Request
from sipipe.messages.header import Kind, encode_header
from sipipe.messages.step import Snapshot

T = TypeVar("T")

ENTRY_BYTES = 64 * 1024
"""Bytes of an entry: a decode step of some hundred sequences; a longer message is cut."""


def ring_entries(slots: int) -> int:
    """Entries of a host's ring, each of ``ENTRY_BYTES``. Bitmasks and images travel on it too, and a
    sampler reads on only when its logits have come. There is room for more than ``slots`` messages,
    so that whoever publishes for later microbatches does not wait."""
    return max(256, 64 * slots)


class Host(Protocol):
    """One host of the engine, this one or another, as the pipeline sees it. What takes long raises
    StallError after the start timeout, and what :meth:`fail` was called with."""

    def start(self) -> list[socket.socket]:
        """Start all processes; returns the receiving ends of BIC-O."""

    def do(self, request: Request[T]) -> T:
        """One step of the start."""

    def publish(self, message: Sequence[Any]) -> None:
        """One message of BIC-I, in its order."""

    def draft(self, message: bytes) -> None:
        """Hand a request for drafts to the workers of the last stage, which is this host's, at once."""

    def admit(self, index: int, snapshot: Snapshot) -> None:
        """Let the successor of sampler ``index`` begin behind the last message of BIC-I."""

    def ask(self) -> None:
        """Ask the workers what they do; the answers are heard."""

    def fail(self, error: BaseException) -> None:
        """Whoever waits for the host gets ``error``."""

    def expect_end(self) -> None:
        """From now on no end is reported, of a child or of the host."""

    def say_end(self, reason: str) -> None:
        """Let its processes end, while other hosts' do; the first reason counts."""

    def close(self) -> None:
        """End all processes and remove every channel; also amid :meth:`start`."""


class Bus:
    """BIC-I of an engine: the same messages on every one of its ``hosts``."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        # wait: held for a publish, at most `stall_timeout` for each host; its end
        self.order = threading.RLock()
        self._hosts = hosts

    def publish(
        self,
        kind: Kind,
        number: int,
        parts: Sequence[Any],
        *,
        slot: int = 0,
        logits: tuple[int, int] = (-1, 0),
    ) -> None:
        """Publish one message; ``number`` is that of the iteration or call, ``logits`` the first of
        the iteration's rows of BIC-L and how many it has. Raises StallError: a reader did not
        free an entry of its ring in time; names it. Of an engine that ends nobody gets it."""
        message = [encode_header(kind, slot, number, *logits), *parts]
        with self.order, suppress(ChannelClosed):
            for host in self._hosts:
                host.publish(message)
