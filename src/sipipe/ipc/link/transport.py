"""The small interface behind which hidden states travel.

A transport moves frames: which iteration is due, how many frames may be on their way and what an
error means to later calls is decided by :mod:`.sender` and :mod:`.receiver`, once for all
transports. Its two ends are made in two processes, in any order; neither constructor waits for the
other. A frame is handed out only when all of it has come.
"""

from typing import Any, Protocol

import torch

from sipipe.ipc.link.header import Header
from sipipe.ipc.link.schema import TensorSchema


class SendingTransport(Protocol):
    """The sender's end. ``announce`` and ``transmit`` are called by one thread at a time,
    ``next_release`` by another at the same time, ``interrupt`` by any."""

    def prepare(self, schema: TensorSchema, parts: list[torch.Tensor]) -> Any:
        """What :meth:`transmit` has to wait for: an event, or None for nothing.

        ``parts`` are the schema's tensors, which it may replace by contiguous ones.

        Raises:
            UnsupportedError: a tensor is on a device that this transport cannot carry from.
        """

    def is_quick(self, nbytes: int, after: Any) -> bool:
        """Whether a frame of ``nbytes`` bytes is quick enough for the caller's own thread."""

    def announce(self, schema: TensorSchema) -> None:
        """Describe a schema to the receiver and make room for it; may wait for the receiver."""

    def transmit(
        self, header: Header, schema: TensorSchema, parts: list[torch.Tensor], after: Any
    ) -> None:
        """Send one frame, after ``after``; the schema has been announced.

        The frame's buffer is free: the sender has seen the release. On return ``parts`` may be
        overwritten, on a device by work that is queued behind :meth:`order_after_copies`.
        """

    def order_after_copies(self) -> None:
        """Put what the caller's device does from now on behind the copies transmitted so far."""

    def next_release(self, timeout: float) -> int | None:
        """A frame whose buffer came back, or None when ``timeout`` seconds passed."""

    def interrupt(self) -> None:
        """Say goodbye and end the connection; calls that wait raise."""

    def close(self) -> None:
        """Give everything back; no other call is running or follows."""


class ReceivingTransport(Protocol):
    """The receiver's end. One thread at a time calls ``receive`` and ``tensors``; any the rest."""

    def receive(self, timeout: float) -> Header | None:
        """The header of the next frame, or None when ``timeout`` seconds passed.

        Raises:
            PeerDiedError, LinkClosedError: there will be none.
            TransferMismatchError: what came is damaged.
        """

    def tensors(self, header: Header) -> dict[str, torch.Tensor]:
        """The frame's tensors, complete and in place; the dictionary is not to be changed.

        Raises:
            TransferMismatchError: its schema was never announced.
        """

    def release(self, frame: int) -> None:
        """Give a frame's buffer back to the sender; does nothing if that is gone."""

    def interrupt(self) -> None:
        """Say goodbye and end the connection; a ``receive`` that waits raises."""

    def close(self) -> None:
        """Give everything back; no other call is running or follows."""
