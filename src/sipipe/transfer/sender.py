"""The sending end of a link, the same for every transport.

Who runs here: the thread that calls :meth:`Sender.send` (one at a time), and one thread of ours
that connects and transmits. Guarantees: frames leave in the order of the calls; ``send`` returns
before a large frame is copied; at most ``depth`` iterations are between ``send`` and the
receiver's release, and only then ``send`` waits, in the kernel, for at most its bound; an error
of the thread is raised by the next call. Relies on: the GIL for plain reads of the counters
(each has one writer); the transport for memory order. Rejected: queueing without bound (memory),
and copying every frame in the caller's thread (16 MB take longer than the 50 µs that a forward
may lose), or every frame in ours (a hand-over to a thread costs more than copying a decode step).
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sipipe.errors import StallError
from sipipe.transfer.errors import LinkClosedError
from sipipe.transfer.records import Kind, Record
from sipipe.transfer.structure import Structure
from sipipe.transfer.transport import SendingTransport

if TYPE_CHECKING:
    import torch

    from sipipe.transfer.endpoint import LinkEndpoint

__all__ = ["Sender", "SenderStatistics"]

_MAX_STRUCTURES = 32


@dataclasses.dataclass(frozen=True, slots=True)
class SenderStatistics:
    """What a sender has done so far."""

    data_messages: int
    """Microbatches sent, one message each."""
    metadata_messages: int
    """Descriptions sent: one per structure, the first iteration's included."""
    bytes_sent: int
    """Bytes of hidden states."""
    inline_messages: int
    """Microbatches small enough to be sent by the caller's own thread."""
    waits: int
    """Calls of ``send`` that found the receiver ``depth`` iterations behind."""
    waited_seconds: float
    """Seconds spent in these."""
    in_flight: int
    """Iterations sent and not yet released."""


class _Job(NamedTuple):
    record: Record
    structure: Structure
    parts: list[torch.Tensor]
    ready: Any
    """For tensors on a GPU, the event after the kernels that make them; else None."""


class Sender:
    """Sends one stage's hidden states to the next stage. Made by :func:`.open_sender`."""

    def __init__(self, endpoint: LinkEndpoint, transport: SendingTransport) -> None:
        self._endpoint = endpoint
        self._transport = transport
        self._free = deque(range(endpoint.depth))
        # Invariant: len(_free) + in flight == depth; written by the thread that calls send().
        self._known: dict[int, Structure] = {}
        self._current = 0
        self._last_number = 0
        self._last_iteration = -1
        self._submitted = 0  # written by the thread that calls send()
        self._completed = 0  # written by whoever transmits
        self._waiting = False  # under _progress
        self._announced: set[int] = set()
        self._counts = {"metadata": 0, "bytes": 0, "inline": 0, "waits": 0}
        self._waited = 0.0
        self._error: BaseException | None = None
        self._closed = False
        self._sending = threading.Lock()
        self._progress = threading.Condition()
        self._connected = False
        self._partial: _Job | None = None  # left half-way by send(), for our thread to finish
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"sipipe-send-{endpoint.name}", daemon=True
        )
        self._thread.start()

    def send(
        self,
        iteration: int,
        num_tokens: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        timeout: float | None = None,
    ) -> None:
        """Send ``tensors`` of ``iteration`` (section 4.3 of the paper); returns before they left.

        A frame up to the transport's ``inline_bytes`` has been copied on return. A larger one is
        copied by a thread: its tensors are kept alive, and must not be overwritten before
        :meth:`wait_sent` says so.

        Args:
            iteration: larger than the last one sent; iterations without tokens are left out.
            num_tokens: tokens of the microbatch, padding included, 0 to ``max_tokens``; the
                receiver must have posted the same number.
            tensors: [num_tokens, ...] or of a fixed shape, any dtype. Tensors on a GPU are copied
                to host memory by our thread when the kernels queued so far are done.
            timeout: seconds to wait when the receiver is ``depth`` iterations behind; None: the
                link's ``stall_timeout``.

        Raises:
            StallError: the receiver released nothing for ``timeout`` seconds.
            PeerDiedError: the receiver's process ended.
            LinkClosedError: this end or the receiver's was closed.
            ValueError: too many tokens, or an iteration out of order.
        """
        with self._sending:
            self._check()
            self._validate(iteration, num_tokens)
            number = self._number_of(tensors, num_tokens)
            structure = self._known[number]
            parts = self._parts(structure, tensors, num_tokens)
            ready = None if all(part.is_cpu for part in parts) else _event_after(parts)
            if not self._free:
                self._wait_for_slot(iteration, timeout)
            record = Record(
                Kind.DATA,
                self._free.popleft(),
                number,
                self._submitted,
                iteration,
                num_tokens,
                structure.fingerprint,
            )
            job = _Job(record, structure, parts, ready)
            self._last_iteration = iteration
            small = structure.nbytes(num_tokens) <= self._transport.inline_bytes
            idle = self._submitted == self._completed and self._connected
            self._submitted += 1
            if small and idle and ready is None and number in self._announced:
                try:
                    if self._transmit(job, wait=False):
                        self._counts["inline"] += 1
                    else:
                        self._jobs.put(job)
                except Exception as error:
                    self._fail(error)
                    raise
            else:
                self._jobs.put(job)

    def wait_sent(self, timeout: float | None = None) -> None:
        """Wait until every tensor given to :meth:`send` may be overwritten.

        Raises:
            StallError: not within ``timeout`` seconds (None: the link's ``stall_timeout``).
        """
        bound = self._endpoint.stall_timeout if timeout is None else timeout
        with self._progress:
            self._waiting = True
            done = self._progress.wait_for(
                lambda: self._completed == self._submitted or self._error is not None, bound
            )
            self._waiting = False
        self._check()
        if not done:
            raise StallError(
                f"{self._endpoint.describe()}: iteration {self._last_iteration} did not leave "
                f"within {bound:g} s; look at the next stage's log"
            )

    def statistics(self) -> SenderStatistics:
        """Counts so far."""
        return SenderStatistics(
            data_messages=self._completed,
            metadata_messages=self._counts["metadata"],
            bytes_sent=self._counts["bytes"],
            inline_messages=self._counts["inline"],
            waits=self._counts["waits"],
            waited_seconds=self._waited,
            in_flight=self._endpoint.depth - len(self._free),
        )

    def close(self, timeout: float = 1.0) -> None:
        """Send what is queued, for at most ``timeout`` seconds, then end the link. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        if self._submitted != self._completed and self._error is None:
            self._thread.join(timeout)
        self._transport.interrupt()
        self._thread.join()  # whatever it waits for has been interrupted
        with self._sending:
            self._transport.close()

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the caller's thread ---------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise LinkClosedError(f"{self._endpoint.describe()}: this sender was closed")
        if self._error is not None:
            raise self._error

    def _validate(self, iteration: int, num_tokens: int) -> None:
        if iteration <= self._last_iteration:
            raise ValueError(
                f"{self._endpoint.describe()}: iteration {iteration} after {self._last_iteration}"
            )
        if not 0 <= num_tokens <= self._endpoint.max_tokens:
            raise ValueError(
                f"{self._endpoint.describe()}: {num_tokens} tokens, but the link was made with "
                f"max_tokens={self._endpoint.max_tokens}"
            )

    def _number_of(self, tensors: Mapping[str, torch.Tensor], num_tokens: int) -> int:
        current = self._known.get(self._current)
        if current is not None and current.matches(tensors, num_tokens):
            return self._current
        for number, structure in self._known.items():
            if structure.matches(tensors, num_tokens):
                self._current = number
                return number
        structure = Structure.capture(
            tensors,
            num_tokens,
            shards=self._endpoint.shards,
            whole=self._endpoint.whole,
        )
        if len(self._known) == _MAX_STRUCTURES:
            del self._known[next(iter(self._known))]
        self._last_number += 1
        self._known[self._last_number] = structure
        self._current = self._last_number
        return self._current

    def _parts(
        self, structure: Structure, tensors: Mapping[str, torch.Tensor], num_tokens: int
    ) -> list[torch.Tensor]:
        parts = []
        for spec, extent in zip(structure.specs, structure.extents(num_tokens), strict=True):
            tensor = tensors[spec.key]
            if not tensor.is_cpu:
                self._endpoint.check_device(spec.key, tensor)
            if spec.shards > 1:
                start = self._endpoint.shard * extent.elements
                tensor = tensor.reshape(-1).narrow(0, start, extent.elements)
            parts.append(tensor)
        return parts

    def _wait_for_slot(self, iteration: int, timeout: float | None) -> None:
        self._free.extend(self._transport.collect_releases(0.0))
        if self._free:
            return
        bound = self._endpoint.stall_timeout if timeout is None else timeout
        began = time.monotonic()
        self._counts["waits"] += 1
        try:
            while not self._free:
                self._check()
                left = began + bound - time.monotonic()
                if left <= 0:
                    raise StallError(
                        f"{self._endpoint.describe()}: iteration {iteration} waited {bound:g} s "
                        f"for the next stage, which is {self._endpoint.depth} iterations behind "
                        "and releases none; look at its log"
                    )
                self._free.extend(self._transport.collect_releases(min(left, 1.0)))
        except Exception:
            self._check()  # closed meanwhile, or our thread knows better what went wrong
            raise
        finally:
            self._waited += time.monotonic() - began

    # -- our thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._transport.connect(self._endpoint.start_timeout)
            self._connected = True
            # No bound: an idle engine sends nothing for hours; close() puts the None.
            while (job := self._jobs.get()) is not None:
                if job is self._partial:
                    self._transport.flush()
                    self._complete(job)
                else:
                    self._transmit(job, wait=True)
        except Exception as error:
            self._fail(error)

    def _transmit(self, job: _Job, *, wait: bool) -> bool:
        number = job.record.structure
        if number not in self._announced:
            self._transport.announce(number, job.structure)
            self._announced.add(number)
            self._announced.discard(number - 2 * _MAX_STRUCTURES)
            self._counts["metadata"] += 1
        if job.ready is not None:
            job.ready.synchronize()
        if self._transport.transmit(job.record, job.structure, job.parts, wait=wait):
            self._complete(job)
            return True
        self._partial = job
        return False

    def _complete(self, job: _Job) -> None:
        self._partial = None
        self._counts["bytes"] += job.structure.nbytes(job.record.num_tokens)
        self._completed += 1
        # Whoever waits has set _waiting before it looked at _completed, so one of us sees the
        # other; steady iterations spare themselves the condition.
        if self._waiting:
            with self._progress:
                self._progress.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._progress:
            if self._error is None:
                self._error = error
            self._progress.notify_all()


def _event_after(parts: list[torch.Tensor]) -> Any:
    """An event behind what the GPU has been given so far; waiting for it does not spin."""
    import torch

    device = next(part.device for part in parts if not part.is_cpu)
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event
