"""The output projection shared out: the projection thread, beside a real link and BIC-L.

Whole stages, and devices that are late: ``test_cuda_order.py``.
"""

from __future__ import annotations

import socket
import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from tests.worker.projection.test_rows import HIDDEN, VOCAB, Model, shards  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402

from sipipe.errors import StallError  # noqa: E402
from sipipe.ipc.errors import LinkClosedError  # noqa: E402
from sipipe.ipc.link.endpoint import open_receiver, open_sender  # noqa: E402
from sipipe.ipc.ring.logits import LogitsChannel, LogitsReader  # noqa: E402
from sipipe.messages.link import LinkEndpoint  # noqa: E402
from sipipe.messages.logits import LogitsShape  # noqa: E402
from sipipe.observe.phases import Phase  # noqa: E402
from sipipe.worker.device import HostDevice, Launched  # noqa: E402
from sipipe.worker.inputs.model_input import ModelInput  # noqa: E402
from sipipe.worker.projection.logits import LogitsHandover  # noqa: E402
from sipipe.worker.projection.projection import SharedProjection  # noqa: E402
from sipipe.worker.projection.thread import ProjectionThread  # noqa: E402

HAND_OVER = 60  # seconds; a bug in the test itself


def inputs_of(iteration, samples=2):
    row = 2 * iteration % 10
    where = {"slot": 0, "buffer_set": 0, "logits_row": row}
    return ModelInput(iteration=iteration, output=None, samples=samples, **where)


class Shard:
    """A stand-in: logit v of a row is its hidden state plus v."""

    def __init__(self, start, stop):
        self.columns = torch.arange(start, stop)

    def multiply(self, rows, into=None):
        return rows[:, :1] + self.columns


class Two:
    """A stage with a projection thread, and the last stage's end; one sampler."""

    def __init__(self, shard, bounds, *, bound=HAND_OVER):
        shape = LogitsShape(vocab=VOCAB, bounds=bounds)
        self.channel = LogitsChannel("t", shape, rows=10, entries=6, readers=["s"])
        self.phases, self.failed = [], []
        self.ended = threading.Event()
        self.ours, self.theirs = (LogitsHandover(self.channel.endpoint, rank) for rank in (0, 1))
        link = LinkEndpoint(kind="shm", buffer_tokens=16, depth=4, stall_timeout=bound)
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sender, receiver = open_sender(link, here), open_receiver(link, there)
        self.last = SharedProjection([sender], Shard(0, 0), lambda *_: None)
        self.thread = ProjectionThread(
            HostDevice(),
            receiver,
            shard,
            self.ours,
            lambda *phase: self.phases.append(phase),
            self.fail,
            bound,
        )
        self.reader = LogitsReader(self.channel.endpoint, "s")

    def fail(self, error):
        self.failed.append(error)
        self.ended.set()

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

    def failure(self):
        """What has ended the thread."""
        self.ended.wait(HAND_OVER)
        [error] = self.failed
        return error

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
            pair.finish(iteration, hidden, last.multiply(hidden))
            assert torch.equal(pair.read(iteration), model.compute_logits(hidden))
    assert [phase for phase, *_ in pair.phases] == [Phase.LOGITS] * 7
    assert all(began < ended for *_, began, ended in pair.phases)
    assert not pair.failed


def test_who_launches_waits_for_nothing_and_a_drain_says_what_is_late(two):
    pair = two(Shard(0, 400), (0, 400, VOCAB), bound=0.01)
    pair.put(7)
    with pytest.raises(StallError, match="iteration 7"):
        pair.thread.drain()


def test_rows_that_do_not_come_end_the_worker(two):
    pair = two(Shard(0, 400), (0, 400, VOCAB), bound=0.01)
    pair.put(0)
    assert "no hidden states of iteration 0" in str(pair.failure())
    with pytest.raises(StallError, match="iteration 0"):
        pair.put(1)


def test_the_end_of_the_last_stage_ends_the_wait(two):
    pair = two(Shard(0, 400), (0, 400, VOCAB))
    pair.put(0)
    pair.last.close()
    with pytest.raises(LinkClosedError):
        pair.thread.drain()
    assert isinstance(pair.failure(), LinkClosedError)


def test_a_close_ends_the_wait_and_is_no_failure(two):
    pair = two(Shard(0, 400), (0, 400, VOCAB))
    pair.put(0)
    pair.thread.close()
    assert "SiPipeProjection" not in {thread.name for thread in threading.enumerate()}
    assert not pair.failed
