"""The check raises at the first overlap, whichever side makes it."""

import pytest
from tests.worker.token_safety import TokenSafety, TokenSafetyError


def prepared(safety, iteration, buffer_set):
    safety.begin_write(buffer_set, iteration)
    safety.end_write(buffer_set, iteration)


def test_alternating_sets_are_fine():
    safety = TokenSafety(2)
    prepared(safety, 0, 0)
    for iteration in range(10):
        safety.begin_read(iteration % 2, iteration)
        prepared(safety, iteration + 1, (iteration + 1) % 2)
        safety.end_read(iteration % 2, iteration)


def test_a_write_under_a_reader():
    safety = TokenSafety(1)
    prepared(safety, 4, 0)
    safety.begin_read(0, 4)
    with pytest.raises(
        TokenSafetyError,
        match=r"iteration 5 would overwrite input buffer set 0, .* iteration 4, being read",
    ):
        safety.begin_write(0, 5)


def test_a_read_under_a_writer():
    safety = TokenSafety(1)
    safety.begin_write(0, 1)
    with pytest.raises(TokenSafetyError, match="holds iteration 1, being written"):
        safety.begin_read(0, 0)


def test_two_writers():
    safety = TokenSafety(1)
    safety.begin_write(0, 1)
    with pytest.raises(
        TokenSafetyError,
        match="overwrite input buffer set 0, which holds iteration 1, being written",
    ):
        safety.begin_write(0, 2)


def test_inputs_that_nobody_has_read():
    safety = TokenSafety(2)
    prepared(safety, 0, 0)
    with pytest.raises(TokenSafetyError, match=r"which holds iteration 0$"):
        safety.begin_write(0, 1)


def test_reading_another_iterations_inputs():
    safety = TokenSafety(2)
    with pytest.raises(TokenSafetyError, match="holds nothing new"):
        safety.begin_read(0, 0)
    prepared(safety, 3, 1)
    with pytest.raises(
        TokenSafetyError, match="iteration 1 from input buffer set 1, which holds iteration 3"
    ):
        safety.begin_read(1, 1)
