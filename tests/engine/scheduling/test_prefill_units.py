"""Sizes of prompts' chunks when prices change from tokens to seconds."""

from hypothesis import given
from hypothesis import strategies as st

from sipipe.config import MicrobatchSettings
from sipipe.engine.scheduling.prefill import PrefillThrottle
from sipipe.engine.scheduling.times import Load, usual


def throttle() -> PrefillThrottle:
    return PrefillThrottle(slots=3, stages=2, max_tokens=512, settings=MicrobatchSettings())


def allowed(sizer: PrefillThrottle, pending: float, *, measured: bool) -> int:
    """Prompt tokens that may be scheduled at one visit."""
    allowance = sizer.allow(
        usual(),
        pending=pending,
        started=0.0,
        decodes=Load(1.0, 4, 0.0, 400.0, 0.0),
        running=12,
        arriving=2,
        kv_free=0.9,
        slots=3,
        measured=measured,
    )
    return allowance.tokens


@given(
    before=st.lists(st.floats(1e3, 1e6), min_size=1, max_size=6),
    after=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6),
)
def test_nothing_of_before_the_first_measurement_is_compared_with_seconds(before, after):
    """What other microbatches took is kept, to make the next one no smaller: in tokens before there
    are measured times, in seconds then. A fresh throttle, which knows seconds alone, is the twin."""
    sizer = throttle()
    for pending in before:
        allowed(sizer, pending, measured=False)
    twin = throttle()
    for pending in after:
        assert allowed(sizer, pending, measured=True) == allowed(twin, pending, measured=True)
