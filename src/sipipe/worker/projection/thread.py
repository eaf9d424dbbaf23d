"""The share of the output projection of a stage of vLLM's second runner that is not the last.

The last stage's final hidden states, of the rows that sample, come on a link of their own. A thread
multiplies them by this stage's rows of the matrix (:mod:`sipipe.worker.projection.logits`) on a
stream of its own. So rows that come late hold up no forward pass, which the launching thread puts
into the stage's own stream. The last stage multiplies in that stream, behind its layers, and its
publisher hands its columns over as it does without sharing.

Who runs here
    The launching thread puts each iteration that samples into the queue when it has launched it,
    and goes on. The *projection thread* takes them in order. BIC-I says how many rows an iteration
    has, so nobody need ask the last stage.
Why no cycle of waits can form
    Order what is to be done by iteration, within one the forward passes by stage, then all
    products, then the draws. Everything waits only for what is smaller. A projection thread waits for the
    last stage's pass of its iteration, the device, and its own place in BIC-L, which is free when
    an iteration long before was drawn; its products come in the order of the iterations. A launching
    thread never waits for a projection thread: it puts without a bound, and on the last stage a link takes
    m iterations' rows, of which the one m before was drawn, and so multiplied, before this one was
    published. On the device the thread's stream waits for the rows' copy alone, and the stage's own
    stream for nothing of it. On a host, whose kernels two threads may not run at once, a pass and a
    product take turns: a product that has the turn waits for nothing, and a pass gives it up while it
    waits for the stage before, or for tokens. So the smallest thing that is not done can always be
    done. A product calls no collective: tensor-parallel ranks need not do theirs at the same time.
Guarantees
    The link's buffer is given back when the product that reads it is in the stream, and nothing is
    published of the logits before they have left the device.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from sipipe.ipc.link.receiver import Receiver
from sipipe.observe.phases import Phase
from sipipe.worker.device import Device, DeviceThread, HostDevice, Launched
from sipipe.worker.projection.logits import LogitsHandover
from sipipe.worker.projection.projection import KEY, Projection, Record
from sipipe.worker.projection.rows import ProjectionShard

Turn = AbstractContextManager[Any]


class ProjectionThread(DeviceThread, Projection):
    """Multiplies this stage's share of every iteration's product, on a stream of its own.

    Args:
        device: the stage's device.
        receiver: link of final hidden states.
        shard: this rank's rows of the matrix.
        logits: this rank's writer of BIC-L.
        record: records phases.
        fail: called with an error of the thread.
        bound: seconds of a wait.
    """

    def __init__(
        self,
        device: Device,
        receiver: Receiver,
        shard: ProjectionShard,
        logits: LogitsHandover,
        record: Record,
        fail: Callable[[Exception], None],
        bound: float,
    ) -> None:
        self._receiver = receiver
        self._shard = shard
        self._logits = logits
        self._record = record
        # On a host a pass and a product take turns, because kernels of vLLM's share memory there (a
        # scratchpad of oneDNN's). Devices order their kernels by streams.
        # wait: held for a product, or what a pass computes between two waits; who computes
        self._turn: Turn = threading.Lock() if isinstance(device, HostDevice) else nullcontext()
        super().__init__(device.beside(), "SiPipeProjection", fail=fail, stall_timeout=bound)

    @torch.inference_mode()
    def _do(self, launched: Launched) -> None:
        device = self._device
        inputs = launched.inputs
        iteration = inputs.iteration
        row = inputs.logits_row
        count = inputs.samples
        self._doing = f"waits for the final hidden states of iteration {iteration}"
        rows = self._receiver.take(iteration, count)[KEY]
        with self._turn:
            first = device.mark()
            logits = self._shard.multiply(rows, self._logits.place_for(row, rows))
        last = device.mark()
        self._receiver.release(iteration)
        self._doing = f"waits for a free place for its columns of iteration {iteration}"
        with self._logits.entry(iteration, row, count, self._stall_timeout) as target:
            copied = device.fetch(logits, target, last)
            self._doing = f"computes its columns of iteration {iteration} on the device"
            # One sleep for both, as in the publisher. The copy is no phase of the stage, so its time is
            # taken off.
            ran = device.wait(copied) - device.nanoseconds(last, copied)
            self._record(Phase.LOGITS, inputs, ran - device.nanoseconds(first, last), ran)

    def passing(self) -> Turn:
        return self._turn

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Give the turn up, so that a product can be computed, and take it again at the end."""
        self._turn.__exit__(None, None, None)
        try:
            yield
        finally:
            self._turn.__enter__()

    def put(self, launched: Launched) -> None:
        if launched.inputs.samples:
            super().put(launched)

    def close(self) -> None:
        """End the thread, whatever it waits for, and the link."""
        self._closing = True
        self._receiver.close()
        super().close()
