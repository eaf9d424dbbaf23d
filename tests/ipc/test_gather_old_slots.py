"""The gather ring's slots against an obvious twin: any order, duplicates, stale sub-slots."""

from hypothesis import given
from hypothesis import strategies as st

from sipipe.ipc.gather_old.slots import GatherSlots

SENDERS = ("a", "b", "c")
PUTS = st.lists(st.tuples(st.sampled_from(SENDERS), st.integers(0, 4)), max_size=40)


def replay(puts, expected):
    """Feed ``puts``, taking whatever is complete after each; what was taken, and what not."""
    slots = GatherSlots(SENDERS)
    if expected is not None:
        for iteration, names in sorted(expected.items()):
            slots.expect(iteration, frozenset(names))
    taken = []

    def take():
        while (gathered := slots.take()) is not None:
            taken.append((gathered.iteration, gathered.payloads))

    take()
    for number, (name, iteration) in enumerate(puts):
        slots.put(name, iteration, b"%d" % number)
        take()
    return slots, taken


@given(puts=PUTS)
def test_every_sender_for_every_iteration(puts):
    slots, taken = replay(puts, None)
    first = {}
    for number, put in enumerate(puts):
        first.setdefault(put, b"%d" % number)
    complete = 0
    while all((name, complete) in first for name in SENDERS):
        complete += 1
    assert taken == [(i, {name: first[name, i] for name in SENDERS}) for i in range(complete)]
    assert slots.taken == complete
    assert slots.dropped == len(puts) - len(first)  # each came a second time, taken or not
    missing = tuple(name for name in SENDERS if (name, complete) not in first)
    assert slots.late() == (complete, missing)


@given(
    puts=PUTS,
    expected=st.dictionaries(st.integers(0, 4), st.sets(st.sampled_from(SENDERS)), min_size=1),
)
def test_declared_senders(puts, expected):
    slots, taken = replay(puts, expected)
    assert [iteration for iteration, _ in taken] == sorted(expected)[: len(taken)]
    for iteration, payloads in taken:
        assert payloads.keys() == expected[iteration]
    if len(taken) < len(expected):
        turn = sorted(expected)[len(taken)]
        came = {name for name, iteration in puts if iteration == turn}
        assert slots.late() == (turn, tuple(sorted(expected[turn] - came)))
        assert not expected[turn] <= came
    held = sum(len(sub) for sub in slots._arrived.values())
    assert len(puts) == slots.dropped + held + sum(len(payloads) for _, payloads in taken)
