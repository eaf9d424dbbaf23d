"""The model of a microbatch's time: what it finds through noise, and what it keeps."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sipipe.engine.scheduling.times import BatchTimes, Load, Prices, usual

TRUE = Prices(5e-3, 1.5e-4, 2e-4, 3e-8, 2e-8)


def decode(rows: float, context: float = 0.0) -> Load:
    return Load(1, rows, 0, rows * context)


def chunk(start: int, tokens: int) -> Load:
    return Load(1, 0, tokens, 0, tokens * (start + tokens / 2))


def fitted(seen, prices: Prices = TRUE, noise: float = 0.0, first: Prices | None = None):
    """What is found after ``seen`` loads, which take ``prices`` and up to ``noise`` more or less."""
    rng, times = random.Random(1), BatchTimes([first or usual()])
    for load in seen:
        times.add([load], [prices.of(load) * rng.uniform(1 - noise, 1 + noise)])
    return times


def test_prices_are_found_through_noise():
    rng = random.Random(2)
    seen = [decode(rng.randint(1, 64), rng.randint(100, 4000)) for _ in range(300)]
    seen += [chunk(rng.randint(0, 16) * 512, rng.choice((128, 512))) for _ in range(300)]
    rng.shuffle(seen)
    times = fitted(seen, noise=0.1)
    for load in (decode(1, 100), decode(64, 4000), chunk(0, 512), chunk(8192, 512)):
        assert times.prices(0).of(load) == pytest.approx(TRUE.of(load), rel=0.1)
    assert times.sure(0)


def test_prices_of_disturbed_batches_are_believed():
    """Chunks of a millisecond on busy cores; the first prices may be far worse."""
    for seed in range(20):
        rng, times = random.Random(seed), BatchTimes([usual()])
        for number in range(200):
            load = chunk(number % 16 * 512, rng.choice((256, 512)))
            times.add([load], [TRUE.of(load) * rng.choice((0.25, 0.5, 1, 2, 4))])
            assert times.sure(0) or number < 40, (seed, number)


def test_a_longer_prefix_is_foreseen_from_shorter_ones():
    times = fitted([chunk(i % 4 * 512, 512) for i in range(80)])
    there = chunk(15 * 512, 512)
    assert times.prices(0).of(there) == pytest.approx(TRUE.of(there), rel=0.1)


@pytest.mark.parametrize(
    ("seen", "load", "expected", "within"),
    [
        pytest.param(
            [(decode(16), 8e-3)] * 100 + [(decode(16), 5.0)] * 8, decode(16), 8e-3, 0.1,
            id="an interruption hardly counts",
        ),
        pytest.param(
            [(decode(1), 0.8)] * 3 + [(decode(20), 12e-3), (decode(60), 32e-3)] * 80,
            decode(40), 22e-3, 0.02, id="a cold start is forgotten",
        ),
        pytest.param(
            [(decode(20), 12e-3), (decode(60), 32e-3)] * 80 + [(decode(60), 32e-3)] * 3000,
            decode(20), 12e-3, 0.05, id="a slope outlives the sizes that gave it",
        ),
        pytest.param(
            [(decode(16), 8e-3)] * 500 + [(decode(16), 12e-3)] * 1000, decode(16), 12e-3, 0.05,
            id="times that change",
        ),
        pytest.param(
            [(decode(16), 8e-3)] * 100, decode(32), 8e-3 * 160 / 144, 0.05,
            id="one size keeps the ratios that were there",
        ),
    ],
)  # fmt: skip
def test_what_is_said_after(seen, load, expected, within):
    times = BatchTimes([usual()])
    for taken, seconds in seen:
        times.add([taken], [seconds])
    assert times.prices(0).of(load) == pytest.approx(expected, rel=within)


def test_short_prompts_say_nothing_of_long_ones():
    """What is short attends to hardly anything: the price of that keeps its ratio to a token's."""
    rng = random.Random(4)
    seen = [Load(1, n, 16 * n, 0, 128 * n) for n in (rng.randint(4, 20) for _ in range(100))]
    seen += [decode(rng.randint(16, 64), rng.randint(16, 80)) for _ in range(300)]
    found = fitted(seen, TRUE, noise=0.1).prices(0)
    assert found.token == pytest.approx(TRUE.token, rel=0.2)
    assert found.pair == pytest.approx(found.token * usual().pair, rel=0.5)


def test_times_without_a_rule_are_not_believed():
    rng, times = random.Random(3), BatchTimes([usual()])
    for _ in range(400):
        times.add([chunk(0, rng.randint(10, 1000))], [10 ** rng.uniform(-4, 0)])
    assert not times.sure(0)


prices = st.builds(Prices, *[st.floats(0, 1e3)] * 2, st.floats(1e-9, 1e3), *[st.floats(0, 1)] * 2)


@given(prices, st.integers(0, 1 << 20), st.integers(1, 1 << 20))
def test_what_fits_is_what_a_chunk_takes(prices, start, tokens):
    found = prices.fitting(prices.chunk(start, tokens), start)
    assert found == pytest.approx(tokens, rel=1e-3)
    assert prices.fitting(0.0, start) == 0
    assert prices.fitting(math.inf, start) == math.inf


loads = st.builds(Load, st.just(1.0), *[st.floats(0, 1e4)] * 4)


@given(st.lists(st.tuples(loads, st.floats(0, 10)), max_size=80))
def test_prices_are_finite_and_none_is_negative(seen):
    times = BatchTimes([usual(), usual()])
    for load, seconds in seen:
        times.add([load, Load()], [seconds, 0.0])
    for process in range(2):
        assert all(price >= 0 and math.isfinite(price) for price in times.prices(process))
    assert times.weight[1] == 0
