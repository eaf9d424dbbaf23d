"""The slot policy's promises, over random histories and in the cases that motivated it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from benchmarks.simulator.rules import visit
from hypothesis import given, settings
from hypothesis import strategies as st

from sipipe.config import MicrobatchSettings
from sipipe.engine.scheduling.concurrency import ConcurrencyController
from sipipe.engine.scheduling.policy import Plan, Sequence, SlotPolicy
from sipipe.engine.scheduling.prefill import Allowance
from sipipe.engine.scheduling.times import Load, Prices, usual


def slot_policy(
    slots: int,
    max_tokens: int,
    first: Prices | None = None,
    *,
    stages: int | None = None,
    **options,
) -> SlotPolicy:
    """All slots open, as many as stages; nothing is measured."""
    controller = ConcurrencyController(stages=stages or slots, slots=slots, first=first)
    settings = MicrobatchSettings(**{"min_sequences": 1} | options)
    return SlotPolicy(slots=slots, max_tokens=max_tokens, controller=controller, settings=settings)


@dataclass
class Engine:
    """The obvious engine: m batches in flight, first in first out, one token per decode."""

    policy: SlotPolicy
    max_tokens: int
    ahead: bool = False
    """Whether the token that is to come is counted as if it were there."""
    waiting: list[list] = field(default_factory=list)  # [id, prompt tokens left, output length]
    started: list[list] = field(default_factory=list)
    running: dict[str, list] = field(default_factory=dict)  # id -> [context, tokens to go]
    inflight: list[set[str]] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    born: int = 0

    def submit(self, prompt: int, output: int, count: int = 1) -> None:
        for _ in range(count):
            self.waiting.append([f"r{self.born}", prompt, output])
            self.born += 1

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def leave(self, index: int, *, resume: bool) -> None:
        """Abort or preempt one running sequence."""
        if not self.running:
            return
        id = list(self.running)[index % len(self.running)]
        context, to_go = self.running.pop(id)
        if resume:
            self.waiting.insert(0, [id, context, to_go])
        else:
            self.finished.add(id)

    def step(self, kv_free: float = 1.0) -> Plan:
        if len(self.inflight) == self.policy.slots:
            for id in self.inflight.pop(0):
                if id in self.running:
                    self.running[id][0] += 1
                    self.running[id][1] -= 1
                    if self.running[id][1] <= 0:
                        del self.running[id]
                        self.finished.add(id)
        busy = set().union(*self.inflight)
        pending = self.started + self.waiting
        plan = visit(
            self.policy,
            [
                Sequence(id, state[0], self.ahead or id not in busy)
                for id, state in self.running.items()
            ],
            pending_prefill=sum(request[1] for request in pending),
            started_prefill=sum(request[1] for request in self.started),
            arriving=len(pending),
            kv_free=kv_free,
        )
        batch = ids(plan)
        assert not batch & busy, "a sequence in flight was scheduled again"
        budget = plan.prefill.tokens
        assert len(batch) + budget <= max(self.max_tokens, len(batch))
        while budget and (self.started or (self.waiting and (kv_free > 0.02 or not self.running))):
            if not self.started:
                self.started.append(self.waiting.pop(0))
            request = self.started[0]
            chunk = plan.prefill.chunk(0, request[1])
            if not chunk:
                break
            plan.prefill.take(request[0], 0, chunk, chunk == request[1])
            budget = plan.prefill.tokens
            request[1] -= chunk
            if request[1] == 0:
                id, _, to_go = self.started.pop(0)
                self.running[id] = [chunk, to_go]
                batch.add(id)
        self.inflight.append(batch)
        return plan


def ids(plan: Plan) -> set[str]:
    return {sequence.id for sequence in plan.decode}


def counts(policy: SlotPolicy) -> tuple[int, ...]:
    """Decoding sequences of each slot."""
    return tuple(list(policy.slot_of.values()).count(slot) for slot in range(policy.slots))


def spread(policy: SlotPolicy) -> int:
    return max(counts(policy)) - min(counts(policy))


def moved(before: dict[str, int], policy: SlotPolicy) -> int:
    """Sequences that have changed slots."""
    return sum(before.get(id, slot) != slot for id, slot in policy.slot_of.items())


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 900), st.integers(1, 40)),
        st.tuples(st.just("submit"), st.integers(900, 20_000), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 500), st.just(0)),
        st.tuples(st.just("preempt"), st.integers(0, 500), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 12), st.booleans()),
    ),
    max_size=120,
)


@settings(max_examples=60, deadline=None)
@given(
    events=EVENTS,
    slots=st.integers(1, 9),
    max_moves=st.integers(0, 6),
    min_sequences=st.integers(1, 4),
    pair=st.sampled_from([0.0, 1e-4, 1e-2]),
    ahead=st.booleans(),
)
def test_promises_over_random_histories(events, slots, max_moves, min_sequences, pair, ahead):
    first = usual()._replace(pair=pair)
    policy = slot_policy(slots, 512, first, max_moves=max_moves, min_sequences=min_sequences)
    engine = Engine(policy, 512, ahead)
    visits = itertools.count()

    def step(kv_free: float = 1.0) -> None:
        before, spread_before = dict(policy.slot_of), spread(policy)
        plan = engine.step(kv_free)
        after = policy.slot_of
        assert plan.slot == next(visits) % slots
        movers = [id for id in before.keys() & after.keys() if before[id] != after[id]]
        assert all(before[id] == plan.slot for id in movers), "a slot gave that was not visited"
        # A slot that opens or closes takes what it takes, for as many visits as it takes; that happens
        # only where it may. How long it goes on, the policy alone knows.
        assert len(movers) <= max_moves or (min_sequences > 1 and policy._resizing)  # noqa: SLF001
        if min_sequences == 1:
            changed = len(before.keys() ^ after.keys())
            assert spread(policy) <= max(1, spread_before + changed)

    for kind, first, second in events:
        if kind == "submit":
            engine.submit(first, second)
        elif kind == "step":
            for _ in range(first):
                step(0.0 if second else 1.0)
        else:
            engine.leave(first, resume=kind == "preempt")
    # Nobody starves: with nothing new, everybody finishes within a generous bound.
    to_go = sum(request[1] // 20 + request[2] + 2 for request in engine.started + engine.waiting)
    to_go += sum(state[1] + 2 for state in engine.running.values())
    for _ in range(slots * (to_go + slots + 4)):
        if len(engine.finished) == engine.born:
            break
        step()
    assert len(engine.finished) == engine.born


@pytest.mark.parametrize("slots", [2, 3, 4, 8])
@pytest.mark.parametrize("requests", [1, 5, 64, 256])
def test_requests_sent_at_once_end_within_one_sequence(slots, requests):
    policy = slot_policy(slots, 2048)
    engine = Engine(policy, 2048)
    engine.submit(6, 200)  # the engine wakes up for the first request, alone
    engine.step()
    engine.submit(6, 200, count=requests - 1)
    moves = 0
    for _ in range(8 * slots):
        before = dict(policy.slot_of)
        engine.step()
        moves += moved(before, policy)
    assert moves <= max(8, requests // 6)
    plans = []
    for _ in range(4 * slots):
        before = dict(policy.slot_of)
        plans.append(engine.step())
        assert policy.slot_of == before, "a steady slot changed its members"
    sizes = [len(plan.decode) for plan in plans]
    assert sum(sizes[:slots]) == requests
    assert max(sizes) - min(sizes) <= 1
    for early, late in zip(plans, plans[slots:], strict=False):
        assert ids(early) == ids(late), "a steady slot changed its members"


def test_drift_is_levelled_a_few_moves_at_a_time():
    policy = slot_policy(2, 2048, max_moves=3)
    engine = Engine(policy, 2048)
    engine.submit(1, 500, count=40)
    engine.steps(20)
    for id in [id for id in engine.running if policy.slot_of.get(id) == 0]:
        del engine.running[id]
    spreads = []
    for _ in range(16):
        before = dict(policy.slot_of)
        engine.step()
        assert moved(before, policy) <= 3
        spreads.append(spread(policy))
    assert spreads[-1] <= 1
    assert spreads == sorted(spreads, reverse=True)


def test_equal_counts_are_levelled_by_context():
    policy = slot_policy(2, 2048, usual()._replace(context=1 / 100))
    engine = Engine(policy, 2048)
    for prompt in (1000, 1, 1, 1, 1):
        engine.submit(prompt, 10_000)
    engine.steps(40)
    slots = [
        sum(state[0] for id, state in engine.running.items() if policy.slot_of.get(id) == slot)
        for slot in range(2)
    ]
    assert sorted(counts(policy)) == [2, 3]
    assert counts(policy)[slots.index(max(slots))] == 2, "the long sequence sits in the fuller slot"


def test_one_stage_gives_the_whole_budget():
    policy = slot_policy(1, 100)
    plan = visit(policy, [Sequence("a", 5, True)], pending_prefill=1000)
    plan = visit(policy, [Sequence("a", 6, True)], pending_prefill=1000)
    assert ids(plan) == {"a"}
    assert plan.prefill.tokens == 99


@pytest.mark.parametrize("slots", [2, 3])
def test_one_stage_computes_prompts_beside_those_that_decode(slots):
    """A microbatch of prompts alone would keep no other stage busy, and reads the weights once more."""
    policy = slot_policy(slots, 100, stages=1, min_sequences=100)
    engine = Engine(policy, 100)
    engine.submit(250, 50)
    for left in (150, 50, 0):
        engine.step()
        assert sum(request[1] for request in engine.started) == left, "nothing decodes yet"
    engine.submit(70, 50, count=8)
    for _ in range(8 * slots):
        left = sum(request[1] for request in engine.started + engine.waiting)
        plan = engine.step()
        computed = left - sum(request[1] for request in engine.started + engine.waiting)
        assert plan.slot == 0 or not computed
    assert not engine.started + engine.waiting


@pytest.mark.parametrize("slots", [2, 5])
@pytest.mark.parametrize("min_sequences", [1, 100])
def test_a_spread_over_one_microbatch_cuts_no_prompt(slots, min_sequences):
    """What a connector needs that stores the first chunk for the whole; also with one slot open."""
    policy = slot_policy(slots, 4000, prefill_spread=1, min_sequences=min_sequences)
    for decoding in ([], ready(3)):
        plan = visit(policy, decoding, pending_prefill=policy.prices.chunk(0, 3500), arriving=1)
        assert plan.prefill.chunk(0, 3500) == 3500


def test_short_prompts_fill_what_a_long_one_may_take():
    """A long prompt's later tokens attend to its earlier ones: that says nothing of short prompts."""
    prices = usual()._replace(pair=0.05)
    allowance = Allowance(
        prices, seconds=12 * prices.chunk(0, 16), room=2048, least=24, decodes=Load()
    )
    budget = allowance.tokens
    for number in range(13):
        chunk = allowance.chunk(0, min(16, budget))
        assert chunk == 16 * (number < 12), number
        allowance.take(str(number), 0, chunk, True)
        budget -= chunk


def test_the_first_of_a_burst_to_decode_make_its_chunks_no_larger():
    """With slots closed, prompts are spread over few microbatches for the sake of those that decode."""
    policy = slot_policy(3, 8192, min_sequences=30)
    engine = Engine(policy, 8192)
    engine.submit(128, 200, count=64)
    sizes = []
    while engine.started or engine.waiting:
        left = sum(request[1] for request in engine.started + engine.waiting)
        engine.step()
        sizes.append(left - sum(request[1] for request in engine.started + engine.waiting))
    assert 8 <= len(sizes) <= 16
    assert max(sizes) <= 1.1 * sizes[0], sizes


def test_decodes_have_their_time_whatever_prompts_are_pending():
    policy = slot_policy(3, 8192, tpot_target_ms=30.0)
    controller = policy.controller
    load = Load(1, 8, 0, 8 * 500)
    for i in range(60):
        chunk = Load(1, 0, 256, 0, 256 * (i % 8 * 256 + 128))
        for each in (load, chunk):
            seconds = 1e-3 + 1e-5 * (each.rows + each.tokens) + 1e-9 * each.pairs
            controller.times.add([each] * 3 + [Load()] * 7, [seconds] * 3 + [0.0] * 7)
    decoding = [Sequence(f"r{index}", 500, True) for index in range(24)]
    for _ in range(6):
        pending = policy.prices.chunk(0, 50_000)
        plan = visit(policy, decoding, pending_prefill=pending, arriving=1)
        assert controller.measured
        tokens = plan.prefill.chunk(20_000, 30_000)
        chunk = Load(0, 0, tokens, 0, tokens * (20_000 + tokens / 2))
        took = policy.prices.of(Load(1, 8, 0, 4000).plus(chunk))
        assert tokens >= 24
        assert took < 10.5e-3, "a third of the target: three microbatches go round"


def test_a_sequence_that_computes_its_prompt_again_leaves_its_slot():
    policy = slot_policy(2, 100)
    both = {id: Sequence(id, 5, True) for id in "ab"}
    visit(policy, both.values(), pending_prefill=0)
    (lost,) = (id for id, slot in policy.slot_of.items() if slot == 1)
    policy.follow(both)
    plan = policy.visit([], lambda id: None if id == lost else both[id], pending_prefill=0)
    assert plan.slot == 1
    assert not plan.decode
    assert lost not in policy.slot_of
    assert policy.follow(both) == [lost], "as one that has just come"
    policy.visit([both[lost]], both.get, pending_prefill=0)
    assert counts(policy) == (1, 1)


def test_no_new_prompt_starts_when_the_cache_is_nearly_full():
    policy = slot_policy(2, 100)
    visit(policy, [Sequence("a", 5, True)], pending_prefill=0)
    full = visit(policy, [Sequence("a", 5, True)], pending_prefill=90, kv_free=0.01)
    assert full.prefill.tokens == 0
    started = visit(
        policy, [Sequence("a", 5, True)], pending_prefill=90, started_prefill=5, kv_free=0.01
    )
    assert 1 <= started.prefill.tokens <= 32, "a least chunk"


def test_fewer_slots_for_few_sequences():
    policy = slot_policy(4, 512, min_sequences=4)
    engine = Engine(policy, 512)
    engine.submit(1, 1000, count=7)
    engine.steps(16)
    assert counts(policy) == (7, 0, 0, 0)
    engine.submit(1, 1000, count=9)
    engine.steps(32)
    assert counts(policy) == (4, 4, 4, 4)


def ready(count: int) -> list[Sequence]:
    return [Sequence(f"r{index}", 1, True) for index in range(count)]


def test_sequences_that_come_together_share_the_slots():
    """Those that fit go where their prompt was computed, the next one to the slot after it."""
    policy = slot_policy(4, 512, max_moves=0)
    visit(policy, ready(2), pending_prefill=0)
    assert policy.slot_of == {"r0": 3, "r1": 0}
    policy = slot_policy(2, 512, max_moves=0)
    visit(policy, ready(6), pending_prefill=0)
    assert counts(policy) == (3, 3)


def test_between_slots_of_equal_counts_a_sequence_joins_the_one_with_less_context():
    policy = slot_policy(3, 512, usual()._replace(context=1 / 100), max_moves=0)
    visit(policy, [], pending_prefill=0)
    contexts = {"c": 1, "d": 1, "long": 900, "short": 100}
    before = [Sequence(*one, True) for one in contexts.items()]
    for sequence, slot in zip(before, (0, 0, 1, 2), strict=True):
        # Where the new one's prompt ended, slot 0 is full. No history of visits is needed for that.
        policy._place(sequence, slot)  # noqa: SLF001
    visit(policy, [*before, Sequence("new", 1, True)], pending_prefill=0)
    assert policy.slot_of["new"] == 2


def test_a_slot_closes_below_three_quarters_of_its_sequences():
    policy = slot_policy(4, 512, min_sequences=4)
    visit(policy, ready(7), pending_prefill=0)
    assert counts(policy) == (7, 0, 0, 0)
    for count, expected in ((16, (4, 4, 4, 4)), (12, (3, 3, 3, 3)), (11, (6, 5, 0, 0))):
        for _ in range(8):
            visit(policy, ready(count), pending_prefill=0)
        assert tuple(sorted(counts(policy), reverse=True)) == expected


@settings(deadline=None)
@given(
    visits=st.lists(
        st.tuples(st.integers(0, 12), st.lists(st.integers(0, 50), max_size=8)),
        min_size=1,
        max_size=12,
    )
)
def test_a_sequence_that_leaves_leaves_no_mark(visits):
    """One that joins a slot out of turn sits out that slot's next visit. Were the mark kept after it
    has left, a later request of its id would sit out a visit instead."""
    policy = slot_policy(4, 64)
    running: dict[str, int] = {}
    born = 0
    for joining, leaving in visits:
        for index in leaving:
            if running:
                del running[list(running)[index % len(running)]]
        for _ in range(joining):
            running[f"r{born}"] = 10
            born += 1
        visit(
            policy,
            [Sequence(id, context, True) for id, context in running.items()],
            pending_prefill=0,
        )
        # What a mark does, a later request would show that has the same id, in one of many visits.
        assert policy._waits <= policy.slot_of.keys()  # noqa: SLF001


@given(
    st.lists(st.integers(1, 3000), min_size=2, max_size=6),
    st.lists(st.integers(1, 3000), min_size=2, max_size=6),
)
def test_the_sequence_that_moves_brings_two_slots_closest(here, there):
    """A move of equal counts, or one that only swaps them, has to pay in context."""
    policy = slot_policy(2, 512, usual()._replace(context=1 / 100), max_moves=1)
    visit(policy, [], pending_prefill=0)
    visit(policy, [], pending_prefill=0)  # the next is slot 0's
    sequences = {}
    for slot, contexts in enumerate((here, there)):
        for number, context in enumerate(contexts):
            sequence = Sequence(f"{slot}.{number}", context, True)
            sequences[sequence.id] = sequence
            policy._place(sequence, slot)  # noqa: SLF001
    before = dict(policy.slot_of)
    visit(policy, sequences.values(), pending_prefill=0)
    unit = policy.prices.sequence
    loads = [sum(unit + context for context in contexts) for contexts in (here, there)]
    gaps = [abs(loads[0] - loads[1] - 2 * (unit + context)) for context in here]
    surplus = len(here) - len(there)
    pays = surplus > 1 or (surplus == 1 and loads[0] - loads[1] - min(gaps) >= unit)
    changed = [id for id, slot in policy.slot_of.items() if before[id] != slot]
    assert len(changed) == pays
    for id in changed:
        assert before[id] == 0
        assert gaps[int(id.partition(".")[2])] == min(gaps)
