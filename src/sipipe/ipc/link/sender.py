"""The sending end of a link, the same for every transport.

Who runs here: the thread that calls :meth:`Sender.send` (one at a time), one that calls
:meth:`Sender.post` at the same time, and one of ours that connects and transmits. Guarantees:
frames leave in the order of the calls; ``send`` returns before a large frame is copied, and that
copy does not wait for the GIL (:mod:`.frames`); at most ``depth`` iterations are between ``send``
and the receiver's release, and only then ``send`` waits, in the kernel, for at most its bound; an
error of the thread is raised by the next call. Relies on: the GIL for plain reads of the counters
(each has one writer); the transport for memory order.
Rejected: queueing without bound (memory), and copying every frame in the caller's thread (16 MB
take longer than the 50 µs that a forward may lose), or every frame in ours (a hand-over to a
thread costs more than copying a small decode step).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sipipe.errors import StallError
from sipipe.ipc.link.credit import Credit
from sipipe.ipc.link.errors import LinkClosedError
from sipipe.ipc.link.frames import FrameQueue, Row
from sipipe.ipc.link.plans import MAX_STRUCTURES, FramePlan, KnownStructures
from sipipe.ipc.link.records import Kind, Record, RecordCodec
from sipipe.ipc.link.statistics import SenderStatistics
from sipipe.ipc.link.structure import Structure
from sipipe.ipc.link.transport import SendingTransport

if TYPE_CHECKING:
    import torch

    from sipipe.ipc.link.endpoint import LinkEndpoint

__all__ = ["Sender"]

_GLANCE_SECONDS = 0.01


class _Job(NamedTuple):
    record: Record
    structure: Structure
    parts: list[torch.Tensor]
    after: Any
    """For tensors on a GPU, the event after the kernels that make them; else None."""


class _Row(NamedTuple):
    nbytes: int
    tensors: list[torch.Tensor]
    """Kept alive until the row has run."""


class _Prepared(NamedTuple):
    """A frame whose row lacks the tensors' addresses alone."""

    iteration: int
    num_tokens: int
    plan: FramePlan
    slot: int
    row: Row
    job: _Row


class Sender:
    """Sends one stage's hidden states to the next stage. Made by :func:`.open_sender`."""

    def __init__(self, endpoint: LinkEndpoint, transport: SendingTransport) -> None:
        self._endpoint = endpoint
        self._transport = transport
        self._credit = Credit(endpoint, transport, self._check)
        self._max_tokens = endpoint.max_tokens
        self._codec = RecordCodec(endpoint.secret)
        self._row_kind = -1 if transport.row_kind is None else int(transport.row_kind)
        self._structures = KnownStructures(endpoint, transport)
        self._last_iteration = -1
        # The next frames in order, each with a slot; under _sending. A send that is not the first
        # of them takes all back.
        self._prepared: deque[_Prepared] = deque()
        self._unprepared = -1  # the last iteration posted in vain; written by post()
        self._submitted = 0  # written by the thread that calls send()
        self._completed = 0  # written by whoever transmits
        self._left_to_python = 0  # jobs that are no rows; written by the thread that calls send()
        self._handled = 0  # of them; written by our thread
        self._waiting = False  # under _progress
        self._announced: set[int] = set()
        self._counts = {"metadata": 0, "bytes": 0, "inline": 0}
        self._sent_prepared = 0
        self._error: BaseException | None = None
        self._closed = False
        self._sending = threading.Lock()
        self._lags = False  # whether a send() waits for a slot; it has _sending then
        self._progress = threading.Condition()
        self._partial: _Job | None = None  # left half-way by send(), for our thread to finish
        self._frames = FrameQueue(endpoint.depth)
        self._jobs: deque[_Row | _Job | None] = deque()  # one for each row of _frames
        self._thread = threading.Thread(
            target=self._run, name=f"sipipe-send-{endpoint.name}", daemon=True
        )
        self._thread.start()

    def post(self, iteration: int, num_tokens: int) -> None:
        """Say that ``iteration`` will be sent with ``num_tokens`` tokens; never waits.

        Nothing depends on it, but a ``send`` of which all but the tensors is prepared blocks its
        caller half as long. To be called when the scheduling output is known, by a thread that has
        time; several iterations may be posted ahead. It does nothing when the receiver lags, for
        the first frame of a structure, and for frames as small as ``inline_bytes``.
        """
        if self._unprepared <= self._last_iteration and self._sending.acquire(blocking=False):
            try:
                if self._prepare(iteration, num_tokens):
                    return
            finally:
                self._sending.release()
        self._unprepared = iteration  # those behind it must wait: frames have numbers

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
            if self._closed or self._error is not None:
                self._check()
            if self._prepared:
                if self._send_prepared(iteration, num_tokens, tensors):
                    return
                self._take_back()
            if iteration <= self._last_iteration or not 0 <= num_tokens <= self._max_tokens:
                self._refuse(iteration, num_tokens)
            # A row that comes behind a frame for Python may find that one's larger memory.
            steady = self._left_to_python == self._handled
            plan = self._structures.plans.get(num_tokens) if steady else None
            addresses = plan.addresses(tensors) if plan is not None else None
            if addresses is None:
                number = self._structures.recognize(tensors, num_tokens)
                if steady and self._row_kind >= 0 and number in self._announced:
                    plan = self._structures.plan(num_tokens)
                    addresses = plan.addresses(tensors) if plan is not None else None
            idle = steady and self._submitted == self._completed
            inline = idle and plan is not None and plan.nbytes <= self._transport.inline_bytes
            parts = None
            if plan is None or addresses is None or (inline and not self._transport.inline_rows):
                parts = self._parts(tensors, num_tokens)
            if not self._credit.free:
                self._lags = True
                try:
                    self._credit.wait(iteration, timeout)
                finally:
                    self._lags = False
                self._check()
            slot = self._credit.free.popleft()
            self._last_iteration = iteration
            if plan is None or addresses is None or parts is not None:
                assert parts is not None
                self._submitted += 1
                self._send_parts(slot, iteration, num_tokens, parts, idle=idle)
                return
            row = self._frames.own if inline else self._frames.row()
            self._fill(row, plan, slot, 0, iteration, num_tokens, addresses)
            self._submitted += 1
            if not inline:
                self._jobs.append(_Row(plan.nbytes, list(tensors.values())))
                self._frames.ring()
                return
            if error := row.run():
                self._fail(self._transport.failure(error))
                self._check()
            self._counts["inline"] += 1
            self._complete(plan.nbytes)

    def _prepare(self, iteration: int, num_tokens: int) -> bool:
        """Fill the row of a frame that will come; whether that is possible."""
        prepared = self._prepared
        if (
            self._closed
            or self._error is not None
            or self._row_kind < 0
            or self._left_to_python != self._handled
            or self._structures.current not in self._announced
            or not 0 <= num_tokens <= self._max_tokens
            or iteration <= (prepared[-1].iteration if prepared else self._last_iteration)
        ):
            return False
        plan = self._structures.plan(num_tokens)
        if plan is None or plan.nbytes <= self._transport.inline_bytes:
            return False
        free = self._credit.free
        if not free:
            free.extend(self._transport.collect_releases(0.0))
            if not free:
                return False
        ahead, slot = len(prepared), free.popleft()
        row = self._frames.row(ahead)
        self._fill(row, plan, slot, ahead, iteration, num_tokens, [0] * plan.parts)
        job = _Row(plan.nbytes, [])
        prepared.append(_Prepared(iteration, num_tokens, plan, slot, row, job))
        return True

    def _send_prepared(
        self, iteration: int, num_tokens: int, tensors: Mapping[str, torch.Tensor]
    ) -> bool:
        """Send the first prepared frame if it is this one."""
        frame = self._prepared[0]
        if frame.iteration != iteration or frame.num_tokens != num_tokens:
            return False
        addresses = frame.plan.addresses(tensors)
        if addresses is None:
            return False
        del self._prepared[0]
        self._last_iteration = iteration
        self._submitted += 1
        self._sent_prepared += 1
        frame.row.place(addresses)
        frame.job.tensors.extend(tensors.values())
        self._jobs.append(frame.job)
        self._frames.ring()
        return True

    def _take_back(self) -> None:
        """Prepare nothing any more: another frame comes than was posted."""
        while self._prepared:
            self._credit.free.appendleft(self._prepared.pop().slot)

    def _fill(
        self,
        row: Row,
        plan: FramePlan,
        slot: int,
        ahead: int,
        iteration: int,
        num_tokens: int,
        addresses: list[int],
    ) -> None:
        """Write the row of the frame that comes ``ahead`` frames after the next one."""
        sequence = self._submitted + ahead
        record = self._codec.fields(
            slot, plan.number, sequence, iteration, num_tokens, plan.fingerprint
        )
        seal = sequence ^ plan.fingerprint
        row.write(self._row_kind, seal, addresses, plan.places(slot), record)

    def _send_parts(
        self,
        slot: int,
        iteration: int,
        num_tokens: int,
        parts: list[torch.Tensor],
        *,
        idle: bool,
    ) -> None:
        """Send what is no row: by our thread, or at once if the transport can."""
        number, structure = self._structures.current, self._structures.structure
        record = Record(
            Kind.DATA,
            slot,
            number,
            self._submitted - 1,
            iteration,
            num_tokens,
            structure.fingerprint,
        )
        after = _event_after(parts)
        job = _Job(record, structure, parts, after)
        transport = self._transport
        small = structure.nbytes(num_tokens) <= transport.inline_bytes
        if idle and small and number in self._announced and (after is None or transport.on_device):
            try:
                if self._transmit(job, wait=False):
                    self._counts["inline"] += 1
                    return
            except Exception as error:
                self._fail(error)
                raise
        if number not in self._announced:
            # Announcing it may bring other memory. Until that is done no plan is made.
            self._structures.forget_plans()
        self._hand_over(job)

    def _hand_over(self, job: _Job | None) -> None:
        """Give our thread something to do that is no row; with _sending, or see :meth:`close`."""
        self._left_to_python += 1
        self._frames.row().leave_to_python()
        self._jobs.append(job)
        self._frames.ring()

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
        self._transport.settle()

    def statistics(self) -> SenderStatistics:
        """Counts so far."""
        return SenderStatistics(
            data_messages=self._completed,
            metadata_messages=self._counts["metadata"],
            bytes_sent=self._counts["bytes"],
            inline_messages=self._counts["inline"],
            prepared_messages=self._sent_prepared,
            waits=self._credit.waits,
            waited_seconds=self._credit.waited,
            in_flight=self._credit.in_flight - len(self._prepared),
        )

    def close(self, timeout: float = 1.0) -> None:
        """Send what is queued, for at most ``timeout`` seconds, then end the link. Idempotent."""
        if self._closed:
            return
        self._closed = True
        # A send() or post() that has the lock leaves it soon; or the send() waits for a slot, and
        # then writes nothing more. Invariant: it looks at _closed after it has reset _lags, and
        # here _lags is read after _closed has been set, so it cannot miss both.
        while not (alone := self._sending.acquire(timeout=_GLANCE_SECONDS)) and not self._lags:
            pass
        self._hand_over(None)
        if alone:
            self._sending.release()
        if self._submitted != self._completed and self._error is None:
            self._thread.join(timeout)
        self._transport.interrupt(farewell=self._submitted == self._completed)
        self._thread.join()  # whatever it waits for has been interrupted
        with self._sending:
            self._transport.close()
            self._frames.close()

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

    def _refuse(self, iteration: int, num_tokens: int) -> None:
        if iteration <= self._last_iteration:
            raise ValueError(
                f"{self._endpoint.describe()}: iteration {iteration} after {self._last_iteration}"
            )
        raise ValueError(
            f"{self._endpoint.describe()}: {num_tokens} tokens, but the link was made with "
            f"max_tokens={self._max_tokens}"
        )

    def _parts(self, tensors: Mapping[str, torch.Tensor], num_tokens: int) -> list[torch.Tensor]:
        """What of ``tensors``, which are of the current structure, travels here."""
        structure, parts = self._structures.structure, []
        for spec, extent in zip(structure.specs, structure.extents(num_tokens), strict=True):
            tensor = tensors[spec.key]
            self._transport.check(spec.key, tensor)
            if spec.shards > 1:
                start = self._endpoint.shard * extent.elements
                tensor = tensor.reshape(-1).narrow(0, start, extent.elements)
            if self._transport.on_device:  # here, so that the event comes after it
                tensor = tensor.contiguous()
            parts.append(tensor)
        return parts

    # -- our thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._transport.connect(self._endpoint.start_timeout)
            while True:
                error = self._frames.step()
                job = self._jobs.popleft()
                if error is None:
                    if job is None:
                        return
                    assert isinstance(job, _Job)
                    if job is self._partial:
                        self._transport.flush()
                        self._partial = None
                        self._complete(job.structure.nbytes(job.record.num_tokens))
                    else:
                        self._transmit(job, wait=True)
                    self._handled += 1
                elif error == 0:
                    assert isinstance(job, _Row)
                    self._complete(job.nbytes)
                else:
                    raise self._transport.failure(error)
                del job  # its tensors, before the next wait
        except Exception as error:
            self._fail(error)

    def _transmit(self, job: _Job, *, wait: bool) -> bool:
        number = job.record.structure
        if number not in self._announced:
            self._transport.announce(number, job.structure)
            self._announced.add(number)
            self._announced.discard(number - 2 * MAX_STRUCTURES)
            self._counts["metadata"] += 1
        if self._transport.transmit(
            job.record, job.structure, job.parts, after=job.after, wait=wait
        ):
            self._complete(job.structure.nbytes(job.record.num_tokens))
            return True
        self._partial = job
        return False

    def _complete(self, nbytes: int) -> None:
        self._counts["bytes"] += nbytes
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
    """An event behind what the parts' GPU has been given so far; waiting for it does not spin."""
    device = next((part.device for part in parts if not part.is_cpu), None)
    if device is None:
        return None
    import torch

    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event
