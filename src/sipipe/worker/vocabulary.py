"""The output projection shared out over all stages: each multiplies by its columns.

The last stage's final hidden states, of the rows that sample, go to every other stage on a link of
their own. There they are multiplied by that stage's rows of the matrix, whose logits go into the
same place of BIC-L as everybody's: samplers draw when the last writer is done. The rows come from
the last stage's loaded model, whatever its checkpoint looks like, and the product is vLLM's.

Who runs here: the device thread, alone, but for :meth:`SharedHead.drain` and ``close``. Products
are done oldest first. Of a product and a forward pass of decodes, what is left of the shorter one
goes first: the pass, where all that it needs is there, between two pieces of the product, because
the next stage may be waiting for it; the product between two layers of the pass, because every
sampler waits for it. (What has come also goes before and into a pass with prompts, which is long.)
Of several iterations whose rows have come, one product reads the matrix once, where that delays the
older ones by less than it saves (:meth:`HeadShard.joins`); nothing is ever waited for to make it so.

Why no cycle of waits can form
    Order what is to be done by iteration, within one by stage, forward passes first, then all
    products, then the draws. Everything waits only for what is smaller: a forward pass for the
    stage before, a product for the last stage's pass, a draw for the products; buffers of links and
    of BIC-L for what an iteration m before has left, which was resolved before this one was
    published (and the pieces of a long prompt for the next stage to take those before). A stage's
    device thread never waits for one thing while it could do another: it sleeps until the next
    inputs, or the hidden states of its next pass, *or* the oldest product's rows are there
    (:meth:`SharedHead.serve`). So the smallest thing that is not done can always be done. What a
    thread has begun ends by itself: a pass that goes before the rest of a product waits for
    nothing more, nor does a product between two layers or one of several iterations, which hold
    what has come. No product is put off for ever, because m iterations are in flight and the next
    one is published when one of them is resolved. Tensor-parallel ranks may do the products of a
    stage at different places, between its passes and in them, and join others: a product calls no
    collective, so that a rank that waits for another in a pass waits for something that ends by
    itself.
"""

from __future__ import annotations

import math
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from sipipe.errors import StallError
from sipipe.ipc.link.receiver import Receiver
from sipipe.ipc.link.sender import Sender
from sipipe.observe.phases import Phase
from sipipe.worker.device_thread import Launched
from sipipe.worker.head import HeadShard
from sipipe.worker.inputs.model_input import ModelInput
from sipipe.worker.logits import LogitsHandover

Record = Callable[[Phase, ModelInput | Launched, int, int], None]
"""Takes a phase, its iteration, when it began and when it ended."""
KEY = "hidden_states"
"""Of final hidden states on their links."""


class _Product:
    """What is multiplied at once: final hidden states of some iterations, of ``counts`` rows each."""

    def __init__(self, iterations: list[ModelInput], rows: list[torch.Tensor]) -> None:
        self.iterations = iterations
        self.counts = [len(each) for each in rows]
        self.rows = rows[0] if len(rows) == 1 else torch.cat(rows)
        self.piece = 0


class SharedHead:
    """A stage's part of every iteration's product.

    Args:
        senders: the last stage's, one to each other stage.
        receiver: another stage's, of final hidden states.
        shard: this rank's rows of the matrix.
        logits: where their logits go.
        record: takes the phases.
        bound: seconds of a wait.
    """

    def __init__(
        self,
        senders: Sequence[Sender],
        receiver: Receiver | None,
        shard: HeadShard,
        logits: LogitsHandover,
        record: Record,
        bound: float,
    ) -> None:
        self._senders = senders
        self._receiver = receiver
        self.shard = shard
        self._logits = logits
        self._record = record
        self._bound = bound
        self._due: deque[ModelInput] = deque()
        """Iterations whose forward pass has run here, and whose product has not ended."""
        self._product: _Product | None = None
        """The one that has begun: of the first of ``_due``, or of the last stage's pass."""
        self._began = self._computing = 0
        """Of what was done of it since something else ran: when it began, ns that it computed."""
        self.passing = 0.0
        """Seconds of the stage's last forward pass of decodes, without products in it."""
        self._pass = 0
        """When the pass that is running began, and has products behind it in the record."""
        self._idle = threading.Event()
        self._idle.set()

    def spread(self, inputs: ModelInput | Launched, rows: torch.Tensor) -> None:
        """Last stage: final hidden states [n, H] of the rows that sample, to all other stages."""
        began = time.monotonic_ns()
        for sender in self._senders:
            # wait: stall_timeout; a stage that is m products behind, or its end
            sender.send(inputs.iteration, len(rows), {KEY: rows})
        self._record(Phase.SEND, inputs, began, time.monotonic_ns())

    def multiply(self, inputs: ModelInput, rows: torch.Tensor) -> None:
        """Last stage: its columns for the same rows."""
        self._product = _Product([inputs], [rows])
        while self._product:
            self._step()

    def expect(self, inputs: ModelInput) -> None:
        """Another stage: the iteration's forward pass has run here; its product is to come."""
        if len(inputs.sampled):
            self._idle.clear()
            self._due.append(inputs)

    def serve(self, until: Sequence[int]) -> None:
        """Do what is due as it comes, until a descriptor of ``until`` is readable, and a pass
        shorter than the rest of the product, or nothing is due.

        Raises:
            StallError: nothing came within the bound. Otherwise as :meth:`Receiver.take`.
        """
        while self._due:
            ready = self._readable(until, 0 if self._product else self._bound)
            waits = not ready.isdisjoint(until)
            if self._product is None and not self._take():
                if not waits and not ready:
                    raise StallError(f"waited {self._bound:g} s, and {self.doing()}")
                if waits:
                    return
            elif waits and self.passing < self._rest():
                self._note()
                return
            else:
                self._step()

    def catch_up(self) -> None:
        """Do what has begun or come, and wait for nothing."""
        while self._due and (self._product is not None or self._take()):
            self._step()

    def begin_pass(self, began: int, decodes: bool) -> Callable[[float], None]:
        """What is called between the layers of a forward pass that begins, with the share of them
        that is left."""
        self._pass = began
        return partial(self._between_layers, self.passing if decodes else math.inf)

    def _between_layers(self, passing: float, left: float) -> None:
        if not self._due or not (self._product or (self._readable((), 0) and self._take())):
            return
        if self._rest() <= left * passing:
            self.catch_up()

    def end_pass(self, decodes: bool) -> int:
        """When the pass would have begun, had all products in it gone before it."""
        began, self._pass = self._pass, 0
        if decodes:
            self.passing = (time.monotonic_ns() - began) / 1e9
        return began

    def _readable(self, until: Sequence[int], timeout: float) -> set[int]:
        """Which of the link's descriptors, and of ``until``, have something to say."""
        assert self._receiver is not None, "the last stage never waits for itself"
        poll = select.poll()
        for descriptor in (*self._receiver.descriptors, *until):
            poll.register(descriptor, select.POLLIN)
        # wait: stall_timeout; the last stage's rows, its end, or what the caller waits for
        return {descriptor for descriptor, _ in poll.poll(timeout * 1e3)}

    def _rest(self) -> float:
        """Seconds that are left of the product, as its rows were measured."""
        product, shard = self._product, self.shard
        assert product is not None
        whole = shard.fixed + shard.per_row * len(product.rows)
        return whole * (1 - product.piece / max(1, len(shard.pieces)))

    def _take(self) -> bool:
        """Begin a product of the oldest rows, if they have come, and of others that have."""
        iterations: list[ModelInput] = []
        rows: list[torch.Tensor] = []
        assert self._receiver is not None
        with suppress(StallError):
            for inputs in self._due:
                count = len(inputs.sampled)
                if rows and not self.shard.joins(count):
                    break
                rows.append(self._receiver.take(inputs.iteration, count, timeout=0)[KEY])
                iterations.append(inputs)
        if rows:
            self._product = _Product(iterations, rows)
        return bool(rows)

    @torch.inference_mode()
    def _step(self) -> None:
        """Multiply by a piece of the columns."""
        product, shard = self._product, self.shard
        assert product is not None
        if product.piece < len(shard.pieces):
            columns = shard.pieces[product.piece]
            places = [
                self._logits.place(inputs.iteration, count)[:, columns]
                for inputs, count in zip(product.iterations, product.counts, strict=True)
            ]
            into = places[0]
            if len(places) > 1 or not into.is_contiguous():
                into = self._logits.apart(len(product.rows), into)
            began = time.monotonic_ns()
            self._began = self._began or began
            logits = shard.compute(product.rows, product.piece, into)
            self._computing += time.monotonic_ns() - began
            if logits.data_ptr() != places[0].data_ptr():
                for place, part in zip(places, logits.split(product.counts), strict=True):
                    place.copy_(part)
            product.piece += 1
        if product.piece >= len(shard.pieces):
            self._finish(product)

    def _finish(self, product: _Product) -> None:
        for inputs, count in zip(product.iterations, product.counts, strict=True):
            self._logits.publish(inputs.iteration, count, self._bound)
            if self._receiver is not None:
                self._receiver.release(inputs.iteration)
                self._due.popleft()
        self._note()
        self._product = None
        if not self._due:
            self._idle.set()

    def _note(self) -> None:
        """Record what was done of the product without a break: all that it computed, then all that
        it copied; each iteration has as much of either as it has rows."""
        product, began = self._product, self._began
        if product is None or not began:
            return
        ended = time.monotonic_ns()
        if self._pass:
            # Nothing in a trace lies within a forward pass: as if this had gone before the pass.
            began, ended = self._pass, self._pass + ended - began
            self._pass = ended
        computed = began + self._computing
        for phase, start, stop in (
            (Phase.LOGITS, began, computed),
            (Phase.HANDOVER, computed, ended),
        ):
            below, rows = 0, len(product.rows)
            for inputs, count in zip(product.iterations, product.counts, strict=True):
                first = start + (stop - start) * below // rows
                below += count
                self._record(phase, inputs, first, start + (stop - start) * below // rows)
        self._began = self._computing = 0

    def drain(self) -> None:
        """Return when nothing is due; no iteration is in the worker.

        Raises:
            StallError: not within the bound.
        """
        # wait: stall_timeout; the device thread, when nothing is due, or `close`
        if not self._idle.wait(self._bound):
            raise StallError(f"waited {self._bound:g} s for {self.doing()}")

    def doing(self) -> str:
        """What is due, for the report of a stall."""
        due = list(self._due)
        return f"its columns of the logits of iteration {due[0].iteration} are due" if due else ""

    def close(self) -> None:
        """End the links, and whatever waits for them."""
        for end in (*self._senders, self._receiver):
            if end is not None:
                end.close()
        self._idle.set()
