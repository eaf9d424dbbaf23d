"""The small interface behind which hidden states travel.

A transport moves frames: it does not know tokens, checks or credit, which :mod:`.sender` and
:mod:`.receiver` do once for all transports. Its two ends are made in two processes, in any order;
neither constructor waits for the other side.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

from sipipe.errors import UnsupportedError
from sipipe.ipc.link.arena import Arena
from sipipe.ipc.link.records import Record
from sipipe.ipc.link.structure import Structure

if TYPE_CHECKING:
    import torch

    from sipipe.ipc.link.endpoint import LinkEndpoint
    from sipipe.ipc.link.frames import RowKind

__all__ = ["Arrival", "HostSending", "ReceivingTransport", "SendingTransport"]


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """A frame in its slot; complete when :meth:`ReceivingTransport.complete` says so."""

    record: Record
    structure: Structure
    arena: Arena


class SendingTransport(Protocol):
    """The sender's end. ``connect``, ``announce``, ``transmit`` and ``flush`` are called by one thread
    at a time; ``collect_releases`` by another, at the same time; ``interrupt`` by any."""

    inline_bytes: int
    """Up to this many bytes a frame is quick enough for the caller's own thread."""
    inline_rows: bool
    """Whether such a frame may be run as a row; if not, :meth:`transmit` without ``wait`` is."""
    on_device: bool
    """Whether a device does the copies: :meth:`transmit` only queues them, behind ``after``."""

    @property
    def row_kind(self) -> RowKind | None:
        """How contiguous host tensors travel without Python; None: by :meth:`transmit` alone."""

    def check(self, key: str, tensor: torch.Tensor) -> None:
        """Refuse a tensor that this transport cannot carry.

        Raises:
            UnsupportedError: names the tensor and its device.
        """

    def connect(self, timeout: float) -> None:
        """Reach the receiver, which may start later; at most ``timeout`` seconds."""

    def announce(self, number: int, structure: Structure) -> None:
        """Describe structure ``number`` to the receiver and make room for it."""

    def places(self, structure: Structure, slot: int, num_tokens: int) -> tuple[int, ...]:
        """The unchanging part of a row (see :meth:`.Row.write`), until the next announcement."""

    def failure(self, error: int) -> Exception:
        """What to raise for a row that ended with errno ``error``."""

    def transmit(
        self,
        record: Record,
        structure: Structure,
        parts: list[torch.Tensor],
        *,
        after: Any,
        wait: bool,
    ) -> bool:
        """Send one frame; on True ``parts`` may be overwritten, by work that the device does later
        if ``on_device``.

        ``record.slot`` is free: the sender has seen its release. ``after`` is None, or the event
        that the data wait for. False, only without ``wait``: a part did not leave, and
        :meth:`flush` comes next.
        """

    def flush(self) -> None:
        """Send, however long it takes, what the last :meth:`transmit` left."""

    def settle(self) -> None:
        """Put what the caller's device does from now on behind the copies transmitted so far."""

    def collect_releases(self, timeout: float) -> list[int]:
        """Slots given back since the last call; waits up to ``timeout`` seconds for the first."""

    def interrupt(self, *, farewell: bool) -> None:
        """End the connection, with a ``farewell`` if no frame is on its way; waiting calls raise."""

    def close(self) -> None:
        """Give everything back; no other call is running or follows."""


class HostSending:
    """What transports without a device have in common."""

    on_device = False

    def __init__(self, endpoint: LinkEndpoint) -> None:
        self._endpoint = endpoint

    def check(self, key: str, tensor: torch.Tensor) -> None:
        if tensor.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"{self._endpoint.describe()} carries CPU and CUDA tensors and {key!r} is on "
                f"{tensor.device}"
            )

    def settle(self) -> None:
        """Nothing: a frame's bytes have been read when it is complete."""


class ReceivingTransport(Protocol):
    """The receiver's end. One thread at a time calls ``receive`` and ``complete``; any the rest."""

    def receive(self, timeout: float, expected: Arrival | None) -> Arrival | None:
        """The next frame, or None when ``timeout`` seconds passed. Its data may still be coming.

        Args:
            expected: what the next frame is if all goes on as it did; returned as it is where
                the transport can tell so at a glance.
        """

    def complete(self, arrival: Arrival, timeout: float) -> None:
        """Return when the data of ``arrival``, the last one received, can be used.

        Raises:
            StallError: not within ``timeout`` seconds.
        """

    def release(self, slot: int) -> None:
        """Give a slot back to the sender."""

    def interrupt(self) -> None:
        """End the connection, in good order if it can; a ``receive`` that waits raises."""

    def close(self) -> None:
        """Give everything back; at most ``release`` is running or follows, and does nothing."""

    @property
    def metadata_messages(self) -> int:
        """Descriptions of structures that came in."""
