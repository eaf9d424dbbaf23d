"""Handing on from a real device: page-locked memory, copies behind the head, no waits.

docs/gpu.md says what ran on one. :func:`hand_over` also runs on the emulated device, in
``test_cuda_order.py``.
"""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from sipipe.ipc.ring.logits import LogitsChannel, LogitsReader  # noqa: E402
from sipipe.messages.logits import LogitsShape  # noqa: E402
from sipipe.worker.device import CudaStageDevice, Launched  # noqa: E402
from sipipe.worker.inputs.model_input import ModelInput  # noqa: E402
from sipipe.worker.projection.logits import LogitsHandover  # noqa: E402
from sipipe.worker.publisher import Publisher  # noqa: E402

VOCAB, BATCH = 4097, 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch's, of the check itself
@pytest.mark.parametrize("ranks", [1, 2])
def test_logits_come_from_the_device_while_it_goes_on(ranks):
    hand_over(ranks, work=4096)


def hand_over(ranks, work):
    """Three iterations; ``work``: the size of what keeps the device busy."""
    shard = -(-VOCAB // ranks)
    channel = LogitsChannel(
        "logits",
        LogitsShape(
            vocab=VOCAB,
            dtype="float16",
            bounds=tuple(min(rank * shard, VOCAB) for rank in range(ranks + 1)),
        ),
        rows=3 * BATCH,
        entries=4,
        readers=["a"],
    )
    reader = LogitsReader(channel.endpoint, "a")
    device = CudaStageDevice(torch.device("cuda:0"))
    publishers, handovers, phases = [], [], []
    for rank in range(ranks):
        handovers.append(handover := LogitsHandover(channel.endpoint, rank))
        device.lock_pages(handover.buffer)
        publishers.append(
            Publisher(
                device,
                handover,
                report=lambda *_: None,
                record=lambda phase, inputs, began, ended: phases.append((phase, ended - began)),
                fail=pytest.fail,
                stall_timeout=60,
            )
        )
    big = torch.randn(work, work, device="cuda:0")
    big = big @ big / 64  # cuBLAS sets itself up
    expected = []
    for iteration in range(3):
        logits = torch.randn(BATCH, VOCAB, device="cuda:0", dtype=torch.float16)
        torch.cuda.set_sync_debug_mode("error")  # torch's own word on what waits
        first = device.mark()
        for _ in range(20):
            big = big @ big / 64
        logits += 1
        last = device.mark()
        inputs = ModelInput(
            iteration=iteration, slot=0, buffer_set=0, output=None, logits_row=iteration * BATCH
        )
        for rank, publisher in enumerate(publishers):
            columns = logits[:, rank * shard : (rank + 1) * shard]
            publisher.put(Launched(inputs=inputs, first=first, last=last, logits=columns))
        torch.cuda.set_sync_debug_mode("default")
        expected.append(logits)
    for iteration, logits in enumerate(expected):
        with reader.receive() as slot:
            assert slot.iteration == iteration
            found = torch.from_numpy(slot.array.copy())
            assert torch.equal(found, logits.cpu())
    for publisher, handover in zip(publishers, handovers, strict=True):
        publisher.drain()
        device.unlock_pages(handover.buffer)  # else the next mapping there is locked already
        publisher.close()
    assert all(took > 0 for _, took in phases)
    reader.close()
    channel.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pages_are_unlocked_where_the_device_draws():
    """So that the memory can be given back, and locked again."""
    memory = memoryview(mmap.mmap(-1, 1 << 20))
    device = CudaStageDevice(torch.device("cuda:0"))
    for _ in range(2):
        device.lock_pages(memory)
        device.unlock_pages(memory)


ON_GPU_1 = """
import torch
from sipipe.worker.device import CudaStageDevice
from sipipe.worker.device import Launched
from sipipe.worker.inputs.model_input import ModelInput
from sipipe.worker.publisher import Publisher
torch.cuda.set_device(1)
device, ran = CudaStageDevice(torch.device("cuda:1")), []
publisher = Publisher(
    device, None, report=print, record=lambda *what: ran.append(what), fail=print, stall_timeout=60
)
first = device.mark()
last = device.mark()
inputs = ModelInput(iteration=0, slot=0, buffer_set=0, output=None)
publisher.put(Launched(inputs=inputs, first=first, last=last))
publisher.drain()
publisher.close()
assert ran
assert not torch._C._cuda_hasPrimaryContext(0)
"""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_publishers_thread_makes_no_context_on_another_gpu():
    subprocess.run([sys.executable, "-c", ON_GPU_1], check=True)
