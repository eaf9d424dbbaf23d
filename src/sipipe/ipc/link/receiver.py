"""The receiving end of a link, the same for every transport.

Who runs here: threads of the stage worker. ``post`` is called when a scheduling output is known,
``take`` by the thread that runs the device (one at a time), ``release`` when the device has
consumed the data. Guarantees: frames are taken in the order they were posted; what ``take``
returns has the posted number of tokens and the announced structure, or an error is raised; the
views stay untouched until ``release``. Relies on: the sender's credit (a slot is written again
only after its release). Rejected: a thread of ours between the transport and ``take`` for shared
memory, where the data need nobody to move them: it doubled the wake-ups on the critical path.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from sipipe.errors import StallError
from sipipe.ipc.link.errors import LinkClosedError, TransferMismatchError
from sipipe.ipc.link.records import Kind, Record
from sipipe.ipc.link.statistics import ReceiverStatistics
from sipipe.ipc.link.transport import Arrival, ReceivingTransport

if TYPE_CHECKING:
    import torch

    from sipipe.ipc.link.endpoint import LinkEndpoint

__all__ = ["AllGather", "Receiver"]

AllGather = Callable[["torch.Tensor"], "torch.Tensor"]


class _Ahead(NamedTuple):
    arrival: Arrival
    tensors: dict[str, torch.Tensor]


class Receiver:
    """Receives one stage's hidden states. Made by :func:`.open_receiver`."""

    def __init__(
        self,
        endpoint: LinkEndpoint,
        transport: ReceivingTransport,
        all_gather: AllGather | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._transport = transport
        self._all_gather = all_gather
        self._posted: OrderedDict[int, int] = OrderedDict()  # iteration -> tokens, under _state
        self._held: dict[int, int] = {}  # iteration -> slot, under _state
        self._state = threading.Lock()
        self._taking = threading.Lock()
        self._last: Arrival | None = None
        self._to_device = endpoint.device == "cuda" and endpoint.kind in ("shm", "socket")
        # Whether the views in the slot are all that is wanted.
        self._in_place = endpoint.shards == 1 and not self._to_device
        self._last_posted = -1
        self._taken = 0
        self._bytes = 0
        self._waited = 0.0
        self._error: Exception | None = None
        self._closed = False

    def post(self, iteration: int, num_tokens: int) -> None:
        """Announce that ``iteration`` will bring ``num_tokens`` tokens; never waits.

        Any number of iterations may be posted ahead; the transport receives ``depth`` of them
        without being asked.

        Raises:
            ValueError: too many tokens, or an iteration out of order.
        """
        with self._state:
            if iteration <= self._last_posted:
                raise ValueError(
                    f"{self._endpoint.describe()}: iteration {iteration} posted after "
                    f"{self._last_posted}"
                )
            if not 0 <= num_tokens <= self._endpoint.max_tokens:
                raise ValueError(
                    f"{self._endpoint.describe()}: {num_tokens} tokens posted, but the link was "
                    f"made with max_tokens={self._endpoint.max_tokens}"
                )
            self._last_posted = iteration
            self._posted[iteration] = num_tokens

    def take(self, iteration: int, timeout: float | None = None) -> dict[str, torch.Tensor]:
        """The hidden states of ``iteration``, in place (or on the GPU, if the link says so).

        Waits in the kernel until they are there. The tensors may be written to; they are valid
        until :meth:`release`, after which the sender overwrites them.

        Args:
            iteration: the oldest one posted and not taken.
            timeout: seconds to wait; None: the link's ``stall_timeout``.

        Returns:
            Each key's tensor, [num_tokens, ...], in the sender's order.

        Raises:
            StallError: nothing came within ``timeout`` seconds: the iteration stays posted. Or what
                had begun to come was not complete that long after: the link is broken.
            PeerDiedError: the sender's process ended.
            TransferMismatchError: something else came than was posted; the link is broken.
            LinkClosedError: this end or the sender's was closed.
            ValueError: ``iteration`` was not posted, or not in order.
        """
        with self._taking:
            num_tokens = self._expected(iteration)
            ahead = self._prepare(iteration, num_tokens)
            arrival = self._wait(iteration, timeout, ahead)
            if ahead is None or arrival is not ahead.arrival:
                try:
                    self._verify(arrival, iteration, num_tokens)
                except TransferMismatchError as error:
                    self._error = error
                    raise
                ahead = self._look(arrival, num_tokens)
            with self._state:
                del self._posted[iteration]
                self._held[iteration] = arrival.record.slot
            self._last = arrival
            self._taken += 1
            self._bytes += arrival.structure.nbytes(num_tokens)
            # Last, since the data may still be on their way while all this is done.
            self._complete(arrival, timeout)
            if self._in_place:
                return ahead.tensors
            return self._elsewhere(ahead, num_tokens)

    def release(self, iteration: int) -> None:
        """Give the buffer of ``iteration`` back; its tensors must not be used any more.

        Raises:
            ValueError: ``iteration`` is not held.
        """
        with self._state:
            if iteration not in self._held:
                raise ValueError(f"{self._endpoint.describe()}: iteration {iteration} is not held")
            slot = self._held.pop(iteration)
        if not self._closed:
            self._transport.release(slot)

    def statistics(self) -> ReceiverStatistics:
        """Counts so far."""
        with self._state:
            return ReceiverStatistics(
                data_messages=self._taken,
                metadata_messages=self._transport.metadata_messages,
                bytes_received=self._bytes,
                waited_seconds=self._waited,
                posted=len(self._posted),
                held=len(self._held),
            )

    def close(self) -> None:
        """End the link; a ``take`` that waits raises :class:`LinkClosedError`. Idempotent."""
        if not self._closed:
            self._closed = True
            self._transport.interrupt()
            with self._taking:
                self._transport.close()
                self._last = None

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _expected(self, iteration: int) -> int:
        if self._closed:
            raise LinkClosedError(f"{self._endpoint.describe()}: this receiver was closed")
        if self._error is not None:
            raise self._error
        with self._state:
            if iteration not in self._posted:
                raise ValueError(
                    f"{self._endpoint.describe()}: iteration {iteration} was not posted"
                )
            oldest = next(iter(self._posted))
            if iteration != oldest:
                raise ValueError(
                    f"{self._endpoint.describe()}: iteration {iteration} taken before {oldest}"
                )
            return self._posted[iteration]

    def _wait(self, iteration: int, timeout: float | None, ahead: _Ahead | None) -> Arrival:
        bound = self._endpoint.stall_timeout if timeout is None else timeout
        began = time.monotonic()
        try:
            arrival = self._transport.receive(bound, ahead.arrival if ahead else None)
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._waited += time.monotonic() - began
        if arrival is None:
            raise StallError(
                f"{self._endpoint.describe()}: no hidden states of iteration {iteration} within "
                f"{bound:g} s; look at the previous stage's log"
            )
        return arrival

    def _complete(self, arrival: Arrival, timeout: float | None) -> None:
        bound = self._endpoint.stall_timeout if timeout is None else timeout
        began = time.monotonic()
        try:
            self._transport.complete(arrival, bound)
        except Exception as error:
            with self._state:
                del self._held[arrival.record.iteration]
            self._fail(error)
            raise
        finally:
            self._waited += time.monotonic() - began

    def _fail(self, error: Exception) -> None:
        """Keep ``error`` for later calls; raises in its place if it comes from closing this end."""
        if self._closed:
            raise LinkClosedError(
                f"{self._endpoint.describe()}: this receiver was closed"
            ) from None
        self._error = error

    def _verify(self, arrival: Arrival, iteration: int, num_tokens: int) -> None:
        record = arrival.record
        if (record.iteration, record.num_tokens) != (iteration, num_tokens):
            raise TransferMismatchError(
                f"{self._endpoint.describe()}: expected iteration {iteration} with {num_tokens} "
                f"tokens, iteration {record.iteration} with {record.num_tokens} tokens came; "
                "both stages must run the same scheduling outputs"
            )
        if record.sequence != self._taken or record.value != arrival.structure.fingerprint:
            raise TransferMismatchError(
                f"{self._endpoint.describe()}: iteration {iteration} is frame "
                f"{record.sequence} of an unknown structure, expected frame {self._taken}"
            )

    def _prepare(self, iteration: int, num_tokens: int) -> _Ahead | None:
        """What the next frame will most likely be, while it is on its way.

        Slots come in turn as long as they are released in turn, and structures seldom change: then
        all that is left to do when the frame is there is to see that it is this one.
        """
        last = self._last
        if last is None:
            return None
        record = Record(
            Kind.DATA,
            (last.record.slot + 1) % self._endpoint.depth,
            last.record.structure,
            self._taken,
            iteration,
            num_tokens,
            last.structure.fingerprint,
        )
        return self._look(Arrival(record, last.structure, last.arena), num_tokens)

    def _look(self, arrival: Arrival, num_tokens: int) -> _Ahead:
        structure = arrival.structure
        views = arrival.arena.views(structure, arrival.record.slot, num_tokens)
        return _Ahead(arrival, dict(zip(structure.keys, views, strict=True)))

    def _elsewhere(self, ahead: _Ahead, num_tokens: int) -> dict[str, torch.Tensor]:
        """The tensors whole, and on the device where they are wanted."""
        structure = ahead.arrival.structure
        result = {}
        for spec, extent in zip(structure.specs, structure.extents(num_tokens), strict=True):
            view = ahead.tensors[spec.key]
            if self._to_device:
                # From pageable memory: the copy is complete on return.
                view = view.to("cuda")
            if spec.shards == 1:
                result[spec.key] = view
                continue
            if self._all_gather is None:
                raise TransferMismatchError(
                    f"{self._endpoint.describe()}: {spec.key!r} comes in {spec.shards} shards; "
                    "open_receiver needs all_gather="
                )
            result[spec.key] = self._all_gather(view).view(extent.shape)
        return result
