"""The check raises at the first overlap, whichever side makes it."""

import pytest
from tests.worker.token_safety import TokenSafety, TokenSafetyError


def after(*steps, sets=2):
    """A check that has seen ``steps``: names, sets and iterations."""
    safety = TokenSafety(sets)
    for name, buffer_set, iteration in steps:
        getattr(safety, name)(buffer_set, iteration)
    return safety


def prepared(iteration, buffer_set):
    return ("begin_write", buffer_set, iteration), ("end_write", buffer_set, iteration)


def test_alternating_sets_are_fine():
    steps = [*prepared(0, 0)]
    for iteration in range(10):
        steps += [("begin_read", iteration % 2, iteration)]
        steps += prepared(iteration + 1, (iteration + 1) % 2)
        steps += [("end_read", iteration % 2, iteration)]
    after(*steps)


@pytest.mark.parametrize(
    ("steps", "wrong", "words"),
    [
        (
            (*prepared(4, 0), ("begin_read", 0, 4)),
            ("begin_write", 0, 5),
            "iteration 5 would overwrite input buffer set 0, .* iteration 4, being read",
        ),
        ([("begin_write", 0, 1)], ("begin_read", 0, 0), "holds iteration 1, being written"),
        (
            [("begin_write", 0, 1)],
            ("begin_write", 0, 2),
            "overwrite input buffer set 0, which holds iteration 1, being written",
        ),
        (prepared(0, 0), ("begin_write", 0, 1), "which holds iteration 0$"),
        ((), ("begin_read", 0, 0), "holds nothing new"),
        (
            prepared(3, 1),
            ("begin_read", 1, 1),
            "iteration 1 from input buffer set 1, which holds iteration 3",
        ),
    ],
    ids=["under a reader", "under a writer", "two writers", "unread", "nothing", "another's"],
)
def test_an_overlap_is_refused(steps, wrong, words):
    safety = after(*steps)
    with pytest.raises(TokenSafetyError, match=words):
        getattr(safety, wrong[0])(*wrong[1:])
