"""Results handed on when the device has them: on the host, and on a device that is late."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from sipipe.ipc.ring.logits import LogitsChannel, LogitsReader, LogitsWriter  # noqa: E402
from sipipe.messages.logits import LogitsShape  # noqa: E402
from sipipe.worker.device import HostDevice  # noqa: E402
from sipipe.worker.device_thread import Launched  # noqa: E402
from sipipe.worker.logits import LogitsHandover  # noqa: E402
from sipipe.worker.publisher import Publisher  # noqa: E402

VOCAB, BATCH, ENTRIES = 37, 5, 4


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


class Rig:
    def __init__(self, device, rank=0, ranks=1, channel=None):
        self.channel = channel or LogitsChannel(
            "logits",
            LogitsShape(
                vocab=VOCAB,
                bounds=tuple(min(VOCAB, rank * -(-VOCAB // ranks)) for rank in range(ranks + 1)),
            ),
            rows=ENTRIES * BATCH,
            entries=ENTRIES,
            readers=["a"],
        )
        self.reader = LogitsReader(self.channel.endpoint, "a") if channel is None else None
        self.said, self.phases, self.failed = [], [], []
        handover = LogitsHandover(LogitsWriter(self.channel.endpoint, rank))
        for iteration in range(9):
            handover.expect(iteration, iteration % ENTRIES * BATCH)
        self.ends = [handover]
        self.publisher = Publisher(
            device,
            handover,
            report=lambda *what: self.said.append(what),
            record=lambda phase, launched, began, ended: self.phases.append(
                (phase.name, launched.iteration, ended - began)
            ),
            fail=self.failed.append,
            stall_timeout=10,
        )

    def close(self):
        self.publisher.close()
        for end in (*self.ends, self.reader, self.channel):
            if end is not None:
                end.close()


def launched(device, iteration, logits=None, **more):
    return Launched(
        iteration=iteration,
        slot=0,
        num_reqs=2,
        num_tokens=2,
        first=device.mark(),
        last=device.mark(),
        logits=logits,
        **more,
    )


def test_readers_get_every_iteration_in_order():
    device = HostDevice()
    rig = Rig(device)
    for iteration in range(9):
        rig.publisher.put(launched(device, iteration, torch.full((3, VOCAB), float(iteration))))
        with rig.reader.receive() as slot:
            assert slot.iteration == iteration
            assert (slot.array == iteration).all()
    rig.publisher.drain()
    assert [(phase, iteration) for phase, iteration, _ in rig.phases] == [
        ("FORWARD", iteration) for iteration in range(9)
    ]
    rig.close()


def test_the_launching_thread_does_not_wait_and_nothing_is_said_too_early():
    """Three iterations are launched before the device has run one; each is heard of at its turn."""
    device = LateDevice()
    rig = Rig(device)
    first = launched(device, 0, torch.zeros(2, VOCAB))
    said = output({"asked": "scores", "not": None}, [[5], [9]])
    silent = launched(device, 1, reports=True, draws=True, output=said)
    last = launched(device, 2, torch.zeros(2, VOCAB))
    for one in (first, silent, last):
        rig.publisher.put(one)
    device.asked(copies=1)
    assert "iteration 0" in rig.publisher.doing()
    assert not rig.said
    assert not rig.phases
    first.logits.fill_(1.0)  # what the device computes meanwhile
    device.run(first.last)
    with rig.reader.receive() as slot:
        assert (slot.iteration, slot.array.min()) == (0, 1.0)
    assert not rig.said, "iteration 1 has not run"
    last.logits.fill_(2.0)
    device.run(last.last)
    with rig.reader.receive() as slot:
        assert (slot.iteration, slot.array.min()) == (2, 2.0)
    rig.publisher.drain()
    assert rig.said == [(1, {"asked": "scores"}, [5, 9], {"named": 7.0})]
    assert [iteration for phase, iteration, _ in rig.phases if phase == "FORWARD"] == [0, 1, 2]
    assert all(took == 1000 for phase, _, took in rig.phases if phase == "FORWARD")
    rig.close()


def output(prompt_logprobs, tokens):
    return SimpleNamespace(
        get_output=lambda: SimpleNamespace(
            prompt_logprobs_dict=prompt_logprobs, prompt_token_id_logprobs_dict={"named": 7.0}
        ),
        sampled_token_ids=np.array(tokens),
    )


def test_a_product_that_is_shared_out_has_its_own_time():
    device = LateDevice()
    rig = Rig(device)
    one = launched(device, 0)
    one.made, one.last = device.mark(), device.mark()
    rig.publisher.put(one)
    device.run(one.last)
    rig.publisher.drain()
    assert rig.phases == [("FORWARD", 0, 2000), ("LOGITS", 0, 1000)]
    rig.close()


def test_ranks_write_their_columns():
    device = HostDevice()
    rigs = [Rig(device, ranks=2)]
    rigs.append(Rig(device, rank=1, ranks=2, channel=rigs[0].channel))
    whole = torch.randn(4, VOCAB)
    cut = -(-VOCAB // 2)
    for rig, part in zip(rigs, (whole[:, :cut], whole[:, cut:]), strict=True):
        rig.publisher.put(launched(device, 0, part))
    with rigs[0].reader.receive() as slot:
        assert np.array_equal(slot.array, whole.numpy())
    rigs[1].publisher.close()
    rigs[1].ends[0].close()
    rigs[0].close()


def test_an_error_ends_it_and_is_said():
    device = HostDevice()
    rig = Rig(device)
    rig.publisher.put(launched(device, 0, torch.zeros(ENTRIES * BATCH + 1, VOCAB)))
    with pytest.raises(Exception, match="21, LogitsShape"):
        rig.publisher.drain()
    with pytest.raises(Exception, match="21, LogitsShape"):
        rig.publisher.put(launched(device, 1))
    rig.publisher.close()
    assert len(rig.failed) == 1
    rig.close()
