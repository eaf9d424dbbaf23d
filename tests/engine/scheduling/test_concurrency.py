"""How many microbatches, by measured stage times: the regressions, the choice, and what a policy does."""

from __future__ import annotations

import random

import pytest

from sipipe.engine.scheduling.concurrency import (
    COLD,
    ENOUGH,
    HOLD,
    ConcurrencyController,
    RunningRegression,
)
from sipipe.engine.scheduling.policy import Sequence, SlotPolicy


def test_a_line_is_found_through_noise():
    rng = random.Random(1)
    regression = RunningRegression()
    for _ in range(400):
        batch = rng.randint(1, 64)
        regression.add(batch, (5e-3 + 2e-4 * batch) * rng.uniform(0.9, 1.1))
    assert regression(0) == pytest.approx(5e-3, rel=0.1)
    assert regression(64) == pytest.approx(5e-3 + 64 * 2e-4, rel=0.05)


@pytest.mark.parametrize(
    ("seen", "batch", "expected", "within"),
    [
        pytest.param([(16, 8e-3)] * 50, 64, 8e-3, 1e-6, id="one size gives no slope"),
        pytest.param(
            [(16, 8e-3)] * 100 + [(16, 5.0)], 16, 8e-3, 0.06, id="an interruption hardly counts"
        ),
        pytest.param(
            [(1, 0.8)] * 3 + [(20, 12e-3)] * 40 + [(60, 32e-3)] * 40, 40, 22e-3, 0.02,
            id="a cold start is forgotten",
        ),
        pytest.param(
            [(20, 12e-3), (60, 32e-3)] * 50 + [(60, 32e-3)] * 3000, 20, 12e-3, 0.02,
            id="a slope outlives the sizes that gave it",
        ),
        pytest.param(
            [(16, 8e-3)] * 500 + [(16, 12e-3)] * 1000, 16, 12e-3, 0.05, id="times that change"
        ),
    ],
)  # fmt: skip
def test_what_a_regression_says_after(seen, batch, expected, within):
    regression = RunningRegression()
    for size, seconds in seen:
        regression.add(size, seconds)
    assert regression(batch) == pytest.approx(expected, rel=within)


def served(
    controller: ConcurrencyController, sequences: int, stages, visits: int = 3000
) -> list[int]:
    """Visits of an engine whose stages take what ``stages`` say; the choice at each."""
    chosen = []
    for _ in range(visits):
        k = controller.microbatches(sequences)
        batch = -(-sequences // k)
        for regression, (fixed, each) in zip(controller.stages, stages, strict=True):
            regression.add(batch, fixed + each * batch)
        controller.between.add(batch, 1e-3)
        chosen.append(k)
    return chosen


def best(sequences: int, stages, slots: int) -> int:
    def period(k):
        times = [fixed + each * -(-sequences // k) for fixed, each in stages]
        return max(sum(times) + 1e-3, k * max(times))

    return min(range(1, slots + 1), key=period)


@pytest.mark.parametrize(
    "stages",
    [
        [(10e-3, 1e-4), (10e-3, 1e-4)],  # even: as many as hide the rest
        [(1e-3, 5e-5), (10e-3, 1e-4)],  # the last stage alone: one
        [(1e-4, 1e-3), (1e-4, 1e-3)],  # all by the sequence
        [(5e-3, 1e-4)] * 4,
        [(2e-3, 1.5e-4), (12e-3, 4.5e-4)],  # one microbatch looks best until it has been tried
    ],
)
@pytest.mark.parametrize("sequences", [4, 32, 200])
def test_the_choice_is_within_reach_of_the_best(stages, sequences):
    controller = ConcurrencyController(stages=len(stages), slots=len(stages) + 1)
    found = served(controller, sequences, stages)[-1]
    ideal = best(sequences, stages, len(stages) + 1)
    assert controller.period(sequences, found) <= 1.1 * controller.period(sequences, ideal)


def test_it_does_not_waver():
    rng = random.Random(2)
    controller = ConcurrencyController(stages=2, slots=3)
    changes, last = 0, 3
    for _ in range(2000):
        k = controller.microbatches(32)
        changes += k != last
        last = k
        for regression in controller.stages:
            regression.add(32 / k, (6e-3 + 1e-4 * 32 / k) * rng.uniform(0.85, 1.15))
        controller.between.add(32 / k, 2e-3)
    assert changes <= 4


def test_what_the_last_of_a_burst_needed_does_not_hold_for_the_next_burst():
    stages = [(1e-3, 2e-4), (10e-3, 2e-4)]
    controller = ConcurrencyController(stages=2, slots=3)
    served(controller, 64, stages)
    many = best(64, stages, 3)
    assert controller.chosen == many
    for sequences in (*range(64, 2, -1), *[2] * HOLD):
        controller.microbatches(sequences)
    assert controller.chosen == best(2, stages, 3) != many
    assert controller.microbatches(64) == many


def test_a_burst_opens_its_slots_before_its_first_sequence_decodes():
    controller = ConcurrencyController(stages=2, slots=3)
    policy = SlotPolicy(slots=3, max_tokens=2048, controller=controller)
    controller.chosen = 2
    plan = policy.visit([], pending_prefill=1024, arriving=64)
    assert controller.formed == 2
    assert 0 < plan.prefill.tokens < 1024


def test_requests_that_do_not_fit_in_the_cache_open_no_slots():
    asked = []

    class Asked(ConcurrencyController):
        def microbatches(self, sequences):
            asked.append(sequences)
            return super().microbatches(sequences)

    policy = SlotPolicy(slots=3, max_tokens=2048, controller=Asked(stages=2, slots=3))
    decoding = [Sequence(str(i), 10, True) for i in range(20)]
    for kv_free in (0.01, 0.2, 0.99, 1.0):
        policy.visit(decoding, pending_prefill=900, arriving=30, kv_free=kv_free)
    assert asked == [20, 25, 50, 50]


def test_without_measurements_all_slots_are_open():
    controller = ConcurrencyController(stages=2, slots=3)
    assert [controller.microbatches(n) for n in (1, 2, 64)] == [1, 2, 3]
    controller.stages[0].add(8, 1e-3, COLD)
    controller.stages[0].add(8, 1e-3, int(ENOUGH))
    assert controller.microbatches(64) == 3, "the other stage has not been seen"


def counts(policy: SlotPolicy) -> tuple[int, ...]:
    return tuple(list(policy.slot_of.values()).count(slot) for slot in range(policy.slots))


def test_a_policy_closes_and_opens_slots_as_the_pace_says():
    controller = ConcurrencyController(stages=2, slots=3)
    policy = SlotPolicy(slots=3, max_tokens=2048, controller=controller)
    sequences = [Sequence(str(i), 10, True) for i in range(30)]

    def periods(count):
        return [policy.visit(sequences, pending_prefill=0) for _ in range(3 * count)]

    periods(4)
    assert counts(policy) == (10, 10, 10)
    for chosen in (1, 2, 3):
        controller.chosen = chosen
        plans = periods(HOLD // 8)
        sizes = counts(policy)
        assert sum(size > 0 for size in sizes) == chosen
        assert max(sizes) - min(sizes[:chosen]) <= 1
        seen = [id for plan in plans[-3:] for id in plan.decode]
        assert sorted(seen) == sorted(s.id for s in sequences), "once in a period, each"
