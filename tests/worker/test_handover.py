"""Logits into BIC-L: in place, in every dtype."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from sipipe.ipc.ring.logits import LogitsChannel, LogitsReader, LogitsWriter  # noqa: E402
from sipipe.messages.logits import LogitsShape  # noqa: E402
from sipipe.worker.logits import LogitsHandover  # noqa: E402

VOCAB, BATCH = 37, 5


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_readers_see_the_logits(dtype):
    channel = LogitsChannel(
        "logits",
        LogitsShape(vocab=VOCAB, dtype=dtype),
        rows=BATCH,
        entries=3,
        readers=["a"],
    )
    reader = LogitsReader(channel.endpoint, "a")
    writer = LogitsWriter(channel.endpoint, rank=0)
    handover = LogitsHandover(writer)
    logits = torch.randn(4, VOCAB, dtype=getattr(torch, dtype))
    handover.expect(0, 1)
    handover.store(0, logits, 5.0)
    with reader.receive() as slot:
        expected = logits.view(torch.int16) if dtype == "bfloat16" else logits
        assert np.array_equal(slot.array.view(expected.numpy().dtype)[:4], expected.numpy())
    for end in (handover, reader, channel):
        end.close()


def test_what_was_computed_in_the_slot_is_not_copied():
    channel = LogitsChannel(
        "logits", LogitsShape(vocab=VOCAB), rows=BATCH, entries=3, readers=["a"]
    )
    reader = LogitsReader(channel.endpoint, "a")
    handover = LogitsHandover(LogitsWriter(channel.endpoint))
    for iteration in range(7):
        handover.expect(iteration, iteration % 3)
        place = handover.ahead(iteration, 3)
        place.copy_(torch.full((3, VOCAB), float(iteration)))
        handover.store(iteration, place, 5.0)
        with reader.receive() as slot:
            assert (slot.array == iteration).all()
            assert slot.array.size == 3 * VOCAB
    for end in (handover, reader, channel):
        end.close()
