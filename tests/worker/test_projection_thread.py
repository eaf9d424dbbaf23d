"""The output projection shared out: the projection thread, beside a real link and BIC-L; what is
launched runs at once, or on a device that is late.

Whole stages, streams and events: ``test_cuda_order.py``.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from tests.worker.links import (  # noqa: E402
    HAND_OVER,
    HIDDEN,
    VOCAB,
    link,
)
from tests.worker.test_projection_rows import Model, shards  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402

from sipipe.errors import StallError  # noqa: E402
from sipipe.ipc.errors import LinkClosedError  # noqa: E402
from sipipe.ipc.ring.logits import LogitsChannel, LogitsReader  # noqa: E402
from sipipe.messages.logits import LogitsShape  # noqa: E402
from sipipe.observe.phases import Phase  # noqa: E402
from sipipe.worker.device import HostDevice, Launched  # noqa: E402
from sipipe.worker.inputs.model_input import ModelInput  # noqa: E402
from sipipe.worker.logits import LogitsHandover, SharedProjection  # noqa: E402
from sipipe.worker.projection_thread import ProjectionThread  # noqa: E402


class LateDevice:
    """One stream of work and one of copies, each a queue that :meth:`run` empties.

    Marks are places in the first queue. A copy reads its source when it runs, and not before what
    it comes after, so that a source that was written too early or a target that was read too early
    shows.
    """

    def __init__(self):
        self.lock = threading.Condition()
        self.launched = self.reached = 0
        self.copies = []

    def use(self):
        pass

    def beside(self):
        return self

    def mark(self):
        with self.lock:
            self.launched += 1
            return SimpleNamespace(at=self.launched, copied=None)

    def wait(self, mark):
        with self.lock:
            assert self.lock.wait_for(lambda: self._there(mark), 10), "the device never came"
        return time.monotonic_ns()

    def _there(self, mark):
        return mark.copied if mark.copied is not None else self.reached >= mark.at

    def nanoseconds(self, first, last):
        return (last.at - first.at) * 1000

    def fetch(self, source, target, after):
        mark = SimpleNamespace(at=after.at, copied=False)
        with self.lock:
            self.copies.append((source, target, after, mark))
            self._copy()
        return mark

    def run(self, mark):
        """The device reaches ``mark``, and makes the copies that come after it."""
        with self.lock:
            self.reached = mark.at
            self._copy()

    def _copy(self):
        for source, target, after, copied in self.copies:
            if not copied.copied and after.at <= self.reached:
                target.copy_(source)
                copied.copied = True
        self.lock.notify_all()

    def asked(self, copies):
        with self.lock:
            assert self.lock.wait_for(lambda: len(self.copies) >= copies, 10)


def inputs_of(iteration, samples=2):
    row = 2 * iteration % 10
    where = {"slot": 0, "buffer_set": 0, "logits_row": row}
    return ModelInput(iteration=iteration, output=None, samples=samples, **where)


class Shard:
    """A stand-in: logit v of a row is its hidden state plus v."""

    def __init__(self, start, stop, pause=lambda: None):
        self.columns, self.pause = torch.arange(start, stop), pause

    def whole(self, rows, into=None):
        self.pause()
        return rows[:, :1] + self.columns


class Two:
    """A stage with a projection thread, and the last stage's end; one sampler."""

    def __init__(self, shard, bounds, *, device=None, bound=HAND_OVER):
        shape = LogitsShape(vocab=VOCAB, bounds=bounds)
        self.channel = LogitsChannel("t", shape, rows=10, entries=6, readers=["s"])
        self.phases, self.failed = [], []
        self.ours, self.theirs = (LogitsHandover(self.channel.endpoint, rank) for rank in (0, 1))
        sender, receiver = link(bound)
        self.last = SharedProjection([sender], Shard(0, 0), lambda *_: None)
        self.thread = ProjectionThread(
            device or HostDevice(),
            receiver,
            shard,
            self.ours,
            lambda *phase: self.phases.append(phase),
            self.failed.append,
            bound,
        )
        self.reader = LogitsReader(self.channel.endpoint, "s")

    def put(self, iteration, samples=2):
        self.thread.put(Launched(inputs=inputs_of(iteration, samples)))

    def finish(self, iteration, rows, columns):
        """The last stage has made ``rows``, and its own ``columns`` for them."""
        inputs = inputs_of(iteration, len(rows))
        self.last.columns(inputs, rows, None)
        where = iteration, inputs.logits_row, len(rows)
        with self.theirs.entry(*where, HAND_OVER) as target:
            target.copy_(columns)

    def read(self, iteration):
        with self.reader.receive() as entry:
            assert entry.iteration == iteration
            return torch.from_numpy(entry.array.copy())

    def close(self):
        for end in (self.thread, self.last, self.ours, self.theirs, self.reader, self.channel):
            end.close()


@pytest.fixture
def two():
    made = []

    def make(*args, **kwargs):
        made.append(Two(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("cut", [0, 704])
@pytest.mark.parametrize("options", [{}, {"soft_cap": 3.0, "scale": 2.0}])
def test_logits_are_the_unshared_heads_bit_for_bit(two, options, cut):
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        model, bounds = Model(**options), (0, cut, VOCAB)
        packed = model.lm_head.cpu_linear
        first, last = shards(model, bounds, torch.float32)
        model.lm_head.cpu_linear = packed  # as it is where nothing is shared
        pair = two(first, bounds)
        for iteration in range(7):
            hidden = torch.randn(1 + iteration % 2, HIDDEN)
            pair.put(iteration, len(hidden))
            pair.finish(iteration, hidden, last.whole(hidden))
            assert torch.equal(pair.read(iteration), model.compute_logits(hidden))
    assert [phase for phase, *_ in pair.phases] == [Phase.LOGITS] * 7
    assert not pair.failed


def test_nothing_is_said_before_the_device_is_there(two):
    """Two iterations are launched and their rows are there before the device has run anything."""
    device, shard = LateDevice(), Shard(0, 400)
    made = []
    shard.whole = lambda rows, _: made.append(torch.zeros(len(rows), 400)) or made[-1]
    pair = two(shard, (0, 400, VOCAB), device=device)
    for iteration in range(2):
        pair.put(iteration)
        pair.finish(iteration, torch.zeros(2, HIDDEN), torch.ones(2, VOCAB - 400))
    for iteration in range(2):
        device.asked(copies=iteration + 1)
        assert len(pair.phases) == iteration
        with torch.inference_mode():
            made[iteration].fill_(1.0)  # what the device computes meanwhile
            device.run(SimpleNamespace(at=device.launched))
        assert (pair.read(iteration) == 1.0).all()
    pair.thread.drain()
    assert [end - began for _, _, began, end in pair.phases] == [1000, 1000]


def test_who_launches_waits_for_nothing_and_a_drain_says_what_is_late(two):
    pair = two(Shard(0, 400), (0, 400, VOCAB), bound=0.01)
    pair.put(7)
    with pytest.raises(StallError, match="iteration 7"):
        pair.thread.drain()


def test_rows_that_do_not_come_end_the_worker(two):
    pair = two(Shard(0, 400), (0, 400, VOCAB), bound=0.01)
    pair.put(0)
    pair.thread._thread.join(HAND_OVER)
    assert "no hidden states of iteration 0" in str(pair.failed[0])
    with pytest.raises(StallError, match="iteration 0"):
        pair.put(1)


def test_the_end_of_the_last_stage_ends_the_wait(two):
    pair = two(Shard(0, 400), (0, 400, VOCAB))
    pair.put(0)
    pair.last.close()
    with pytest.raises(LinkClosedError):
        pair.thread.drain()
    pair.thread._thread.join(HAND_OVER)
    assert len(pair.failed) == 1


def test_a_close_ends_the_wait_and_is_no_failure(two):
    pair = two(Shard(0, 400), (0, 400, VOCAB))
    pair.put(0)
    pair.thread.close()
    assert not pair.thread._thread.is_alive()
    assert not pair.failed
