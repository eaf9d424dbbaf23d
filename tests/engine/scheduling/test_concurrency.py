"""How many microbatches, by measured stage times: the choice, and what a policy does."""

from __future__ import annotations

import random

import pytest
from benchmarks.simulator.rules import visit
from tests.engine.scheduling.test_policy import counts

from sipipe.engine.scheduling.concurrency import HOLD, ConcurrencyController
from sipipe.engine.scheduling.policy import Sequence, SlotPolicy
from sipipe.engine.scheduling.times import Load


def taken(controller: ConcurrencyController, batch: float, stages, between: float) -> None:
    """A microbatch of decodes took so many seconds on each stage; None: not yet."""
    p, load = controller.stages, Load(1.0, batch)
    loads = [Load() if seconds is None else load for seconds in stages]
    seconds = [seconds or 0.0 for seconds in stages]
    controller.times.add([*loads, *loads, *[Load()] * p, load], [*seconds * 2, *[0.0] * p, between])


def served(
    controller: ConcurrencyController, sequences: int, stages, visits: int = 3000
) -> list[int]:
    """Visits of an engine whose stages take what ``stages`` say; the choice at each."""
    chosen = []
    for _ in range(visits):
        k = controller.microbatches(sequences)
        batch = -(-sequences // k)
        taken(controller, batch, [fixed + each * batch for fixed, each in stages], 1e-3)
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


def test_a_round_of_decodes_is_known_before_any_was_alone():
    """By batches of which each has a prompt's chunk too."""
    controller = ConcurrencyController(stages=2, slots=3)
    rng = random.Random(1)
    for _ in range(60):
        batch = rng.randint(1, 16)
        tokens = rng.randint(16, 512)
        load = Load(1.0, batch, tokens, 0.0, tokens * tokens / 2)
        seconds = [fixed + 1e-4 * batch + 2e-5 * tokens for fixed in (4e-3, 8e-3)]
        assert controller.alone(12) == 0.0 or controller.measured
        controller.times.add([load, load, *[Load()] * 5], [*seconds, *[0.0] * 5])
        controller.prices()
    assert controller.alone(0) == 0.0
    assert controller.alone(12) == pytest.approx(3 * (8e-3 + 4e-4), rel=0.1)


def told(stages, *, slots=3, formed=1, between=(0.0, 0.0)):
    """A controller that knows its stages' lines."""
    controller = ConcurrencyController(stages=len(stages), slots=slots)
    for batch in [2, 6] * 40:
        times = [fixed + each * batch for fixed, each in stages]
        taken(controller, batch, times, between[0] + between[1] * batch)
    controller.formed = formed
    return controller


def test_a_row_costs_its_share_of_the_period():
    alone = told([(8e-3, 1e-3), (8e-3, 1e-3)], between=(4e-3, 0.0))
    assert alone.price(1) == pytest.approx(2 / 22, rel=0.05)
    assert told([(8e-3, 1e-3)] * 2, between=(4e-3, 1e-3)).price(1) == pytest.approx(
        3 / 23, rel=0.05
    )
    slowest = told([(1e-3, 0.0), (8e-3, 1e-3)], formed=3)
    assert slowest.price(4) == pytest.approx(1 / 12, rel=0.05), "all wait for one stage"
    alone.rows = 3.0
    assert alone.price(1) == pytest.approx(2 / 26, rel=0.05), "of a pass that has drafts already"
    assert ConcurrencyController(stages=2, slots=3).price(1) is None


def test_prices_follow_after_any_number_of_batches():
    controller = ConcurrencyController(stages=1, slots=2)
    for i in range(9000):  # one a poll, after which the weight of all is the same at each fit
        taken(controller, 1 + i % 8, [5e-3 + 1e-3 * (i % 8)], 1e-3)
        controller.prices()
    for i in range(1200):
        taken(controller, 1 + i % 8, [10e-3 + 2e-3 * (i % 8)], 1e-3)
        found = controller.prices()
    assert found.row == pytest.approx(2e-3, rel=0.05)


def test_rows_within_a_time():
    controller = told([(8e-3, 1e-3), (8e-3, 1e-3)])
    assert controller.within(21e-3, 50) == 2
    assert controller.within(1.0, 50) == 50
    assert controller.within(1e-3, 50) == 0
    assert ConcurrencyController(stages=2, slots=3).within(1e-3, 50) == 50, "nothing is known"


def test_drafts_make_batches_larger():
    controller = told([(8e-3, 1e-3), (8e-3, 1e-3)])
    thin = controller.period(8, 2)
    controller.rows = 2.0
    assert controller.period(8, 2) > thin
    assert controller.period(8, 2) == pytest.approx(2 * (8e-3 + 8e-3), rel=0.05)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_one_microbatch_is_not_tried_before_a_row_has_a_price(stages):
    """All rows at once would idle every other stage, for a whole period each time."""
    controller = ConcurrencyController(stages=stages, slots=stages + 1)
    found = served(controller, 64, [(1e-3, 1e-3)] * stages, visits=400)
    assert min(found) >= stages - 1
    assert found[-1] >= stages, "by the row no microbatch is cheaper for being larger"


@pytest.mark.parametrize("sequences", [1, 8, 64])
def test_one_stage_begins_with_one_microbatch(sequences):
    stages = [(30e-3, 2e-4)]
    controller = ConcurrencyController(stages=1, slots=2)
    assert set(served(controller, sequences, stages, visits=200)) == {1}


def test_one_stage_finds_that_two_microbatches_hide_its_way():
    """Where drawing and scheduling take about as long as a pass, once requests have come and gone."""
    controller = ConcurrencyController(stages=1, slots=2)
    for sequences in [*range(32, 65)] * 4 + [64] * 50:
        k = controller.microbatches(sequences)
        batch = sequences / k
        taken(controller, batch, [1e-3 + 1e-4 * batch], 1e-3 + 1e-4 * batch)
    assert k == 2


def test_it_does_not_waver():
    rng = random.Random(2)
    controller = ConcurrencyController(stages=2, slots=3)
    changes, last = 0, 3
    for _ in range(2000):
        k = controller.microbatches(32)
        changes += k != last
        last = k
        usual = 6e-3 + 1e-4 * 32 / k
        taken(controller, 32 / k, [usual * rng.uniform(0.85, 1.15) for _ in range(2)], 2e-3)
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
    plan = visit(policy, [], pending_prefill=1024, arriving=64)
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
        visit(policy, decoding, pending_prefill=900, arriving=30, kv_free=kv_free)
    assert asked == [20, 25, 50, 50]


def test_without_measurements_all_slots_are_open():
    controller = ConcurrencyController(stages=2, slots=3)
    assert [controller.microbatches(n) for n in (1, 2, 64)] == [1, 2, 3]
    for _ in range(60):
        taken(controller, 8, [1e-3, None], 1e-4)
    assert controller.microbatches(64) == 3, "the other stage has not been seen"
    for _ in range(60):
        taken(controller, 8, [1e-3, 1e-3], 1e-4)
    assert controller.microbatches(64) == 2, "batches of one size speak for no more than stages"
    assert controller.price(32) is None
    for batch in [8, 16, 32] * 20:
        taken(controller, batch, [2e-4 + 1e-4 * batch] * 2, 1e-4)
    assert controller.price(32) == pytest.approx(1e-4 / 3.4e-3, rel=0.02)


def test_a_policy_closes_and_opens_slots_as_the_pace_says():
    controller = ConcurrencyController(stages=2, slots=3)
    policy = SlotPolicy(slots=3, max_tokens=2048, controller=controller)
    sequences = [Sequence(str(i), 10, True) for i in range(30)]

    def periods(count):
        return [visit(policy, sequences, pending_prefill=0) for _ in range(3 * count)]

    periods(4)
    assert counts(policy) == (10, 10, 10)
    for chosen in (1, 2, 3):
        controller.chosen = chosen
        plans = periods(HOLD // 8)
        sizes = counts(policy)
        assert sum(size > 0 for size in sizes) == chosen
        assert max(sizes) - min(sizes[:chosen]) <= 1
        seen = [one.id for plan in plans[-3:] for one in plan.decode]
        assert sorted(seen) == sorted(s.id for s in sequences), "once in a period, each"
