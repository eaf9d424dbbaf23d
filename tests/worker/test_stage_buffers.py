"""Input versions on a device whose streams run whenever they like, and on a real one.

The made-up device has streams as queues: copies and kernels run in any order that streams and
events allow, chosen at random, long after the host has launched them. What a kernel reads must be
its own iteration's inputs, whatever the order; and each wait is needed: without it, some order
goes wrong.
"""

import random
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sipipe.worker.inputs import buffers as stage_buffers  # noqa: E402
from sipipe.worker.inputs.buffers import InputVersion  # noqa: E402
from sipipe.worker.machine import Event, Role, Status, fire, may  # noqa: E402

TOKENS, ROWS = 8, 4


class MadeUpDevice:
    """Enough of ``torch`` and ``torch.cuda`` for :mod:`sipipe.worker.inputs.buffers`."""

    type = "cuda"

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.streams = []
        self.main = self.current = self._stream()
        self.cuda = SimpleNamespace(
            Stream=lambda _device: self._stream(),
            Event=lambda blocking=False: _Event(self),
            current_stream=lambda _device: self.current,
            stream=self._as_current,
        )

    def __getattr__(self, name):  # dtypes
        return getattr(torch, name)

    def zeros(self, shape, *, dtype, pin_memory=False, device=None):
        tensor = torch.zeros(shape, dtype=dtype)
        return tensor if device is None else _DeviceTensor(self, tensor)

    def launch(self, operation):
        self.current.queue.append(operation)

    def run(self, steps):
        """Some of what has been launched, in an order that streams allow."""
        for _ in range(steps):
            ready = [s for s in self.streams if s.queue and s.queue[0](look=True)]
            if not ready:
                return False
            self.random.choice(ready).queue.pop(0)()
        return True

    def run_until(self, done):
        while not done():
            assert self.run(1), "the host waits for what will never happen"

    def _stream(self):
        stream = SimpleNamespace(queue=[])
        stream.wait_event = lambda event: stream.queue.append(event.barrier())
        stream.wait_stream = lambda other: self.run_until(lambda: not other.queue)
        self.streams.append(stream)
        return stream

    @contextmanager
    def _as_current(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class _Event:
    def __init__(self, device):
        self.device, self.records, self.done = device, 0, 0

    def record(self, stream):
        self.records += 1
        number = self.records

        def mark(look=False):
            if not look:
                self.done = max(self.done, number)
            return True

        stream.queue.append(mark)

    def barrier(self):
        number = self.records
        return lambda look=False: self.done >= number

    def synchronize(self):
        number = self.records
        self.device.run_until(lambda: self.done >= number)


class _DeviceTensor:
    def __init__(self, device, tensor):
        self.device, self.tensor = device, tensor

    def __getitem__(self, rows):
        return _DeviceTensor(self.device, self.tensor[rows])

    def copy_(self, host, *, non_blocking):
        assert non_blocking

        def copy(look=False):
            if not look:
                self.tensor.copy_(host)
            return True

        self.device.launch(copy)


def write(version, number):
    """Fill every host array with the iteration's number."""
    for dual in (version.input_ids, version.positions, version.seq_lens, version.last_tokens):
        dual.np[:] = number
    for dual in (*version.tables, *version.slots, version.query_start):
        dual.np[:] = number
    version.upload(TOKENS, ROWS)


def read(device, version, number, wrong):
    """A forward pass: kernels that find, when they run, what is in the device's tensors."""

    def kernel(look=False):
        if not look:
            duals = (version.input_ids, version.seq_lens, version.query_start, *version.tables)
            if any((dual.device.tensor != number).any() for dual in duals):
                wrong.append(number)
        return True

    version.wait_until_ready()
    device.launch(kernel)
    device.launch(kernel)
    version.release()


def go(seed, monkeypatch, versions=2, iterations=30):
    """Both executors on one thread, in an order that the state machine allows; wrong iterations."""
    device = MadeUpDevice(seed)
    monkeypatch.setattr(stage_buffers, "torch", device)
    buffers = [InputVersion(TOKENS, ROWS, [3], device) for _ in range(versions)]
    status, wrong = Status(versions), []
    while status.gi < iterations - 1:
        role = device.random.choice([r for r in Role if may(status, r, Event.START)])
        status = fire(status, role, Event.START)
        device.run(device.random.randrange(4))
        if role is Role.CPU:
            buffer = buffers[status.version(status.ci + 1)]
            buffer.wait_until_free()
            write(buffer, status.ci + 1)
        else:
            read(device, buffers[status.version(status.gi)], status.gi, wrong)
        status = fire(status, role, Event.FINISH)
        device.run(device.random.randrange(4))
    device.run_until(lambda: not any(stream.queue for stream in device.streams))
    return wrong


@pytest.mark.parametrize("versions", [1, 2, 3])
def test_every_kernel_reads_its_own_iteration(monkeypatch, versions):
    for seed in range(40):
        assert go(seed, monkeypatch, versions) == []


@pytest.mark.parametrize("missing", ["wait_until_free", "wait_until_ready", "release"])
def test_no_wait_can_be_left_out(monkeypatch, missing):
    monkeypatch.setattr(InputVersion, missing, lambda self: None)
    assert any(go(seed, monkeypatch) for seed in range(40))


@pytest.mark.gpu
def test_copies_and_kernels_of_a_real_device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda:0")
    buffers = [InputVersion(1 << 20, ROWS, [3], device) for _ in range(2)]
    seen = []
    for number in range(20):
        buffer = buffers[number % 2]
        buffer.wait_until_free()
        buffer.input_ids.np[:] = number
        buffer.upload(1 << 20, ROWS)
        buffer.wait_until_ready()
        torch.cuda._sleep(2_000_000)
        seen.append(torch.stack([buffer.input_ids.device.min(), buffer.input_ids.device.max()]))
        buffer.release()
    assert torch.stack(seen).tolist() == np.repeat(np.arange(20), 2).reshape(20, 2).tolist()
