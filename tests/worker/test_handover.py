"""Logits into BIC-L: dtypes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from sipipe.ipc.ring.logits import LogitsChannel, LogitsReader, LogitsWriter  # noqa: E402
from sipipe.messages.logits import LogitsShape  # noqa: E402
from sipipe.worker.device import HostDevice  # noqa: E402
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
    with handover.entry(0, 4, 5.0) as target:
        target.copy_(logits)
    with reader.receive() as slot:
        found = slot.array
        expected = logits.view(torch.int16) if dtype == "bfloat16" else logits
        assert np.array_equal(found.view(expected.numpy().dtype)[:4], expected.numpy())
    for end in (handover, reader, channel):
        end.close()


def test_what_was_computed_in_its_place_is_not_copied():
    channel = LogitsChannel(
        "logits", LogitsShape(vocab=VOCAB), rows=BATCH, entries=3, readers=["a"]
    )
    reader = LogitsReader(channel.endpoint, "a")
    handover = LogitsHandover(LogitsWriter(channel.endpoint))
    for iteration in range(7):
        handover.expect(iteration, iteration % 3)
        place = handover.ahead(iteration, 3, torch.zeros(3, 1))
        place.copy_(torch.full((3, VOCAB), float(iteration)))
        with handover.entry(iteration, 3, 5.0) as target:
            assert target.data_ptr() == place.data_ptr()
            HostDevice().fetch(place, target, 0)
        with reader.receive() as slot:
            assert (slot.array == iteration).all()
            assert slot.array.size == 3 * VOCAB
    for end in (handover, reader, channel):
        end.close()
