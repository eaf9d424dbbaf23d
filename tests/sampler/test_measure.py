"""What a sampler measures when the engine asks how long a microbatch takes to draw."""

import pytest

from sipipe.messages.measured import MIXES
from sipipe.sampler import warmup


@pytest.mark.parametrize("dtype", warmup.DTYPES)
def test_every_mix_is_drawn_and_timed(monkeypatch, dtype):
    drawn = []

    class Columns(warmup.SequenceColumns):
        def sample(self, handles, logits, **how):
            drawn.append(super().sample(handles, logits, **how))
            assert logits.shape == (11, 500)
            return drawn[-1]

    monkeypatch.setattr(warmup, "SequenceColumns", Columns)
    found = warmup.measure(11, 500, dtype)
    assert list(found) == list(MIXES)
    assert all(seconds > 0 for seconds in found.values())
    assert not any(result.errors for result in drawn)
    assert {len(result.token_ids) for result in drawn} == {11}
    assert len(drawn) == len(MIXES) * (1 + warmup.TIMES)
