"""The sending end of a link, the same for every transport.

Who runs here: the thread that calls :meth:`Sender.send` (one at a time), and one of ours that
announces schemas and transmits what is not quick. A microbatch with more tokens than a buffer has
leaves in pieces, a frame each, which our thread sends as buffers come back.

Guarantees: frames leave in the order of the calls; ``send`` returns before a large frame is copied;
at most ``depth`` iterations are between ``send`` and the receiver's release, and only then ``send``
waits, for at most its bound; an error of the thread is raised by the next call. No circle of waits:
our thread waits for buffers, which the receiver gives back as it takes pieces in, and a receiver
that takes waits for this sender alone; between two takes it runs layers, and waits for nobody but
the stage behind it, so that the last stage, which waits for none, comes first. Relies on: a
receiver that holds nothing when it takes a microbatch of several pieces (:mod:`.receiver`); the GIL
for plain reads of the counters; the transport for memory order.

Rejected: memory for ``depth`` microbatches of the largest size, which only prompts need (1.3 GB of
a GPU, with 5 in flight, 16,384 tokens, hidden 4,096); copying every frame in one of the threads.
"""

import queue
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from sipipe.errors import SiPipeError, StallError
from sipipe.ipc.errors import LinkClosedError, PeerDiedError
from sipipe.ipc.link.packets import Header, Kind
from sipipe.ipc.link.schema import TensorSchema
from sipipe.ipc.link.shm import Lost, ShmSending
from sipipe.messages.link import LinkEndpoint

_SCHEMAS_REMEMBERED = 32
"""Schemas that a sender remembers."""


class _Job(NamedTuple):
    """A frame that the sender's own thread sends."""

    header: Header
    schema: TensorSchema
    parts: list[torch.Tensor]
    """Tensors, which the job keeps alive until they are copied."""
    after: Any
    """Event after the kernels that make the tensors, for tensors on a device; else None."""
    announce: bool
    """True if the schema is new to the receiver."""


class Sender:
    """Sends one stage's hidden states to the next stage. Made by :func:`.open_sender`."""

    def __init__(self, endpoint: LinkEndpoint, transport: ShmSending, lost: Lost) -> None:
        self._endpoint = endpoint
        self._lost = lost
        self._transport = transport
        self._schemas: dict[int, TensorSchema] = {}
        """Schemas that are announced or about to be, oldest first, by fingerprint."""
        self._schema: TensorSchema | None = None
        """Schema of the last iteration."""
        self._last_iteration = -1
        self._depth = endpoint.depth
        self._tokens = endpoint.buffer_tokens
        self._on_gpu = endpoint.device == "cuda"
        self._given_back = [0] * endpoint.depth
        """Times that the receiver has released each buffer."""
        self._reading = False
        """True while a thread reads releases. Written under ``_progress``."""
        self._ends: deque[int] = deque(maxlen=endpoint.depth)
        """Last frames of the last iterations, in order."""
        # Invariant: _completed <= _submitted, but for the moment between their increments in send().
        # While they are equal, the sender's own thread has nothing to do, and every schema in
        # _schemas is announced.
        self._submitted = 0
        """Frames so far. Only the thread that calls ``send`` writes it."""
        self._completed = 0
        """Frames that have left. ``send`` writes it while both are equal, else the own thread."""
        self._error: Exception | None = None
        self._closed = False
        # wait: held while a buffer is awaited; `close`, the other one who takes it, has ended that
        self._sending = threading.Lock()
        self._progress = threading.Condition()  # wait: held for moments; nobody waits under it
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        name = f"sipipe-send-{endpoint.name}"
        self._gpu = torch.cuda.current_device() if endpoint.by_host else None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(
        self,
        iteration: int,
        num_tokens: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        timeout: float | None = None,
    ) -> None:
        """Send ``tensors`` of ``iteration``; returns before they left.

        Unless a frame is quick to copy, a thread does it: tensors on a host are kept alive, and must
        not be overwritten before :meth:`wait_sent` says so; of those on a GPU the thread gets clones.

        Args:
            iteration: larger than the last one sent; iterations without tokens are left out.
            num_tokens: padding included; the receiver must expect the same number.
            tensors: [num_tokens, ...] or of a fixed shape, any dtype; on a GPU, where the kernels that
                make them are in the calling thread's current stream.
            timeout: seconds to wait if the receiver is ``depth`` behind; None: ``stall_timeout``.

        Raises StallError: the receiver released nothing for ``timeout`` seconds. PeerDiedError: the
        receiver's process ended. LinkClosedError: this end or the receiver's was closed.
        """
        with self._sending:
            if self._closed or self._error is not None:
                self._check()
            assert iteration > self._last_iteration, (iteration, self._last_iteration)
            schema = self._schema
            parts = None
            new = False
            if schema is not None:
                parts = schema.parts(tensors, num_tokens)
            if schema is None or parts is None:
                schema, parts = self._other_schema(tensors, num_tokens)
                new = schema.fingerprint not in self._schemas
            bound = self._endpoint.stall_timeout if timeout is None else timeout
            if len(self._ends) == self._depth and not self._released(self._ends[0], bound):
                raise self._behind(iteration, bound)
            frame = self._submitted
            nbytes = schema.at(num_tokens).nbytes
            quick = (
                frame == self._completed
                and not new
                and num_tokens <= self._tokens
                and self._transport.is_quick(nbytes)
                and self._released(frame - self._depth, 0.0)  # pieces may be in all buffers
            )
            if self._on_gpu and not quick:
                # A graph's next replay overwrites its output. Rejected: that the caller waits until the
                # own thread has sent it, which waits for the device, or for buffers.
                parts = [part.clone() for part in parts]
            jobs = [
                _Job(
                    Header(Kind.DATA, frame + k, iteration, count, schema.fingerprint),
                    schema,
                    piece,
                    self._transport.prepare(schema, piece),
                    announce=new and not k,
                )
                for k, (count, piece) in enumerate(schema.pieces(parts, num_tokens, self._tokens))
            ]
            if quick:
                try:
                    self._transport.transmit(jobs[0].header, schema, jobs[0].parts, jobs[0].after)
                except Exception as error:
                    self._fail(error)
                    self._check()
                self._completed += 1  # first, so that wait_sent() never waits for this frame
            self._last_iteration = iteration
            self._schema = schema
            self._submitted += len(jobs)
            self._ends.append(self._submitted - 1)
            if quick:
                return
            if new:
                self._schemas[schema.fingerprint] = schema
                if len(self._schemas) > _SCHEMAS_REMEMBERED:
                    del self._schemas[next(iter(self._schemas))]
            for job in jobs:
                self._jobs.put(job)

    def wait_sent(self, timeout: float | None = None) -> None:
        """Return when every tensor given to :meth:`send` may be overwritten: on a host when it has
        left, on a GPU at once, by work that is put into the current stream from now on. Raises
        StallError: not within ``timeout`` seconds (None: the link's ``stall_timeout``)."""
        if self._on_gpu:
            self._check()
        else:
            self.flush(timeout)
        self._transport.order_after_copies()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything given to :meth:`send` has left. Raises as :meth:`wait_sent`."""
        frames = self._submitted
        if self._completed < frames:
            bound = self._endpoint.stall_timeout if timeout is None else timeout
            with self._progress:
                # wait: the link's `stall_timeout`; the copying thread, its error, `close`
                done = self._progress.wait_for(
                    lambda: self._completed >= frames or self._error is not None or self._closed,
                    bound,
                )
            if not done:
                raise StallError(
                    f"{self._endpoint.describe()}: iteration {self._last_iteration} did not leave "
                    f"within {bound:g} s; look at the next stage's log"
                )
        self._check()

    def wait_released(self, timeout: float | None = None) -> None:
        """Wait until the receiver has released everything given to :meth:`send`. The next iteration
        may have any number. Raises as :meth:`send`."""
        bound = self._endpoint.stall_timeout if timeout is None else timeout
        with self._sending:
            if self._ends and not self._released(self._ends[-1], bound):
                raise self._behind(self._last_iteration, bound)
            self._last_iteration = -1

    def close(self, timeout: float = 1.0) -> None:
        """Send what is queued, for at most ``timeout`` seconds, then end the link. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        if self._submitted != self._completed and self._error is None:
            self._thread.join(timeout)  # wait: the caller's, 1 s; the copying thread
        # A send() that waits for a buffer and our thread, whatever it waits for, end now.
        self._transport.interrupt()
        with self._progress:
            self._progress.notify_all()
        self._thread.join()  # wait: none; the copying thread, which `interrupt` has let go
        with self._sending:
            self._transport.close()

    # -- the caller's thread ---------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise LinkClosedError(f"{self._endpoint.describe()}: this sender was closed")
        if self._error is not None:
            raise self._error

    def _other_schema(
        self, tensors: Mapping[str, torch.Tensor], num_tokens: int
    ) -> tuple[TensorSchema, list[torch.Tensor]]:
        for schema in self._schemas.values():
            if (parts := schema.parts(tensors, num_tokens)) is not None:
                return schema, parts
        return TensorSchema.capture(tensors, num_tokens), list(tensors.values())

    # -- either thread ---------------------------------------------------------------------------

    def _released(self, frame: int, bound: float) -> bool:
        """Wait until the receiver has released ``frame``; False if it releases nothing for ``bound``
        seconds. A negative ``frame`` is none, and released. One thread at a time reads releases, and
        wakes the other."""
        buffer = frame % self._depth
        lap = frame // self._depth
        if self._given_back[buffer] > lap:
            return True
        with self._progress:
            while self._given_back[buffer] <= lap:
                self._check()
                if self._reading:
                    # wait: the link's `stall_timeout`; the thread that reads releases, `close`
                    heard = self._progress.wait(bound)
                else:
                    heard = self._read_release(bound)
                if not heard:
                    return False
        return True

    def _behind(self, iteration: int, bound: float) -> StallError:
        return StallError(
            f"{self._endpoint.describe()}: iteration {iteration} waited {bound:g} s for the next "
            f"stage, which is {self._depth} iterations behind and releases none; look at its log"
        )

    def _read_release(self, bound: float) -> bool:
        """Wait for a release, with ``_progress`` held but for the wait; False: none came."""
        self._reading = True
        released = None
        self._progress.release()
        try:
            released = self._transport.next_release(bound)
        except SiPipeError as error:
            self._fail(error)  # the caller raises the first error
            return True
        finally:
            self._progress.acquire()  # wait: held for moments
            self._reading = False
            if released is not None:
                self._given_back[released % self._depth] += 1
            self._progress.notify_all()
        return released is not None

    def _fail(self, error: Exception) -> None:
        with self._progress:
            if self._error is None:
                self._error = error
            self._progress.notify_all()

    # -- our thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._gpu is not None:
                # A new thread's is GPU 0: locking a buffer's memory would make a context there.
                torch.cuda.set_device(self._gpu)
            while self._transmit_next():
                with self._progress:
                    self._completed += 1
                    self._progress.notify_all()
        except Exception as error:
            self._fail(error)
            if not isinstance(error, LinkClosedError | PeerDiedError):
                self._lost(error)  # else nobody may hear of it, but that this end has left
            self._transport.interrupt()  # a send() that waits for a buffer ends now

    def _transmit_next(self) -> bool:
        """Send the next frame; False at the end. It is a function of its own, so that a frame's tensors
        are freed when it is sent."""
        job = self._jobs.get()  # wait: none, between frames; `send`, `close`
        if job is None:
            return False
        self._transmit(job)
        return True

    def _transmit(self, job: _Job) -> None:
        if job.announce:
            self._transport.announce(job.schema)
        bound = self._endpoint.stall_timeout
        if not self._released(job.header.frame - self._depth, bound):
            raise self._behind(job.header.iteration, bound)
        self._transport.transmit(job.header, job.schema, job.parts, job.after)
