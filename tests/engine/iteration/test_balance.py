"""Work of samplers stays even, however sequences come, go and change microbatches."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sipipe.engine.iteration.balance import MOVABLE, PAYS, TOLERATED, Balancer
from sipipe.messages.params import SequenceParams

KINDS = [
    SequenceParams(temperature=0.0),
    SequenceParams(),
    SequenceParams(top_p=0.9),
    SequenceParams(top_k=50, top_p=0.95, repetition_penalty=1.1),
]


@dataclass
class Member:
    cost: float
    sampler: int = 0
    left: int = 0
    length: int = MOVABLE

    def __len__(self):
        return self.length


@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(0, 80))
def test_work_gets_even_within_one_sequence_and_then_nothing_moves(seed, samplers, count):
    rng = random.Random(seed)
    balancer = Balancer(samplers, vocab_size=128_256)
    costs = [balancer.cost(params) for params in KINDS]
    members = [Member(rng.choice(costs), rng.randrange(samplers)) for _ in range(count)]
    moves = 0
    while (index := balancer.move(members)) is not None:
        moves += 1
        assert 0 <= index < count
        assert moves <= 2 * count
    loads = balancer.loads(members)
    busiest = max(loads)
    theirs = [member.cost for member in members if member.sampler == loads.index(busiest)]
    lightest = min(theirs, default=0.0)
    assert busiest - min(loads) <= max(TOLERATED * busiest, lightest / PAYS) * (1 + 1e-9)


def test_a_long_sequence_stays_where_it_is():
    """Its tokens would fill BIC-I, for whose readers nobody that brings tokens may wait."""
    balancer = Balancer(2, vocab_size=128_256)
    members = [Member(1.0, length=MOVABLE + 1), Member(1.0, length=MOVABLE), Member(0.1)]
    assert balancer.move(members) == 1
    assert [member.sampler for member in members] == [0, 1, 0]


@pytest.mark.parametrize(("samplers", "most"), [(2, 1.03), (4, 1.07), (8, 1.16)])
def test_the_busiest_has_little_more_than_its_share_while_sequences_come_go_and_move(
    samplers, most
):
    """A hundred sequences in three microbatches; the scheduler moves some of them now and then,
    and forms fewer microbatches for a while."""
    rng = random.Random(0)
    balancer = Balancer(samplers, vocab_size=128_256)
    slots = [[], [], []]
    shares = []
    for visit in range(3000):
        formed = 2 if visit // 500 % 2 else 3
        members = slots[visit % 3]
        for other in range(3):  # what SlotPolicy does, without its reasons
            if members and rng.random() < 0.1:
                slots[other].append(members.pop(rng.randrange(len(members))))
        while visit % 3 >= formed and members:
            slots[rng.randrange(formed)].append(members.pop())
        members[:] = [one for one in members if one.left > 0]
        if visit % 3 < formed and sum(map(len, slots)) < 96 and len(members) < 96 / formed:
            beside = balancer.loads(members)
            for _ in range(min(4, 96 - sum(map(len, slots)))):
                cost = balancer.cost(rng.choice(KINDS))
                members.append(Member(cost, balancer.place(cost, beside), rng.randint(20, 120)))
        else:
            balancer.move(members)
        for one in members:
            one.left -= 1
        if len(members) > 20:
            loads = balancer.loads(members)
            shares.append(max(loads) * samplers / sum(loads))
    assert sum(shares) / len(shares) < most
