"""Sizes of prompts' chunks: when prices change from tokens to seconds, and beside sequences that decode."""

from hypothesis import given
from hypothesis import strategies as st

from sipipe.config import MicrobatchSettings
from sipipe.engine.scheduling.prefill import FINEST, SLOWDOWN, PrefillThrottle
from sipipe.engine.scheduling.times import Load, Prices, usual


def throttle(stages: int = 2) -> PrefillThrottle:
    return PrefillThrottle(slots=3, stages=stages, max_tokens=512, settings=MicrobatchSettings())


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


@given(
    period=st.floats(1e-3, 10.0),
    pending=st.floats(1e-3, 1e4),
    running=st.integers(1, 1000),
    arriving=st.integers(1, 1000),
    slots=st.integers(1, 3),
    rows=st.integers(0, 400),
    stages=st.integers(1, 2),
    is_open=st.booleans(),
)
def test_a_round_with_prompts_is_a_multiple_of_one_without(
    period, pending, running, arriving, slots, rows, stages, is_open
):
    """However much is pending, and whether the microbatch is an open slot's or not. With one stage, open
    slots' microbatches have the time of all."""
    prices = Prices(fixed=1e-3, row=1e-4, token=1e-5, context=0.0, pair=0.0)
    decodes = Load(batches=1.0, rows=rows)
    allowance = throttle(stages).allow(
        prices,
        pending=pending,
        started=0.0,
        decodes=decodes,
        running=running,
        arriving=arriving,
        kv_free=0.9,
        slots=slots,
        measured=True,
        period=period,
        is_open=is_open,
    )
    carriers = slots if stages == 1 else 3
    if stages == 1 and not is_open:
        assert allowance.chunk(0, 10**6) == 0
        return
    bound = period * (1 + SLOWDOWN * (running + arriving - 1) / running)
    most = bound / carriers - prices.of(decodes)
    # What is taken without regard to time: a least chunk, and the end of a prompt.
    chunk = allowance.chunk(0, 10**6)
    assert prices.chunk(0, chunk) <= max(most, prices.chunk(0, FINEST)) + prices.token


def test_a_target_that_is_set_takes_the_place_of_the_bound():
    settings = MicrobatchSettings(tpot_target_ms=1e6)
    sizer = PrefillThrottle(slots=3, stages=2, max_tokens=512, settings=settings)
    allowance = sizer.allow(
        Prices(fixed=1e-3, row=1e-4, token=1e-2, context=0.0, pair=0.0),
        pending=1e4,
        started=0.0,
        decodes=Load(batches=1.0, rows=4),
        running=12,
        arriving=1,
        kv_free=0.9,
        slots=3,
        measured=True,
        period=1e-2,
    )
    assert allowance.chunk(0, 10**6) == 508  # all the room beside four rows
