"""Logits into BIC-L: layouts and dtypes, and the page lock with a stand-in for CUDA's runtime."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.vllm")

from sipipe.ipc.ring.logits import LogitsChannel, LogitsReader, LogitsWriter  # noqa: E402
from sipipe.worker import handover as stage_handover  # noqa: E402
from sipipe.worker.handover import LogitsHandover, page_lock  # noqa: E402

VOCAB, BATCH = 37, 5


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_readers_see_the_logits(layout, dtype):
    channel = LogitsChannel.create(
        "logits", entries=3, vocab=VOCAB, batch=BATCH, dtype=dtype, layout=layout, readers=["a"]
    )
    reader = LogitsReader.open(channel.endpoint, "a")
    writer = LogitsWriter.open(channel.endpoint, rank=0)
    handover = LogitsHandover(writer, layout, torch.device("cpu"))
    logits = torch.randn(4, VOCAB, dtype=getattr(torch, dtype))
    handover.store(0, logits, 5.0)
    with reader.receive() as slot:
        found = slot.array if layout == "rows" else slot.array.T
        expected = logits.view(torch.int16) if dtype == "bfloat16" else logits
        assert np.array_equal(found.view(expected.numpy().dtype)[:4], expected.numpy())
    for end in (handover, reader, channel):
        end.close()


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_what_was_computed_in_the_slot_is_not_copied(layout):
    channel = LogitsChannel.create(
        "logits", entries=3, vocab=VOCAB, batch=BATCH, layout=layout, readers=["a"]
    )
    reader = LogitsReader.open(channel.endpoint, "a")
    handover = LogitsHandover(LogitsWriter.open(channel.endpoint), layout, torch.device("cpu"))
    for iteration in range(7):
        place = handover.ahead(3)
        place.copy_(torch.full((3, VOCAB), float(iteration)))
        handover.store(iteration, place, 5.0)
        with reader.receive() as slot:
            assert (slot.array == iteration).all()
            assert slot.array.size == 3 * VOCAB
    for end in (handover, reader, channel):
        end.close()


class Runtime:
    """What of ``torch.cuda.cudart()`` is used."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        if not self.error:
            self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_the_whole_buffer_is_locked_and_let_go():
    memory, runtime = mmap.mmap(-1, 8192), Runtime()
    unlock = page_lock(memoryview(memory), runtime)
    assert list(runtime.locked.values()) == [8192]
    assert unlock is not None
    unlock()
    assert not runtime.locked


def test_a_refusal_is_a_warning(monkeypatch):
    said = []
    monkeypatch.setattr(
        stage_handover.logger, "warning", lambda text, *args: said.append(text % args)
    )
    assert page_lock(memoryview(mmap.mmap(-1, 4096)), Runtime(error=2)) is None
    assert len(said) == 1
    assert "could not be page-locked (CUDA error 2)" in said[0]
