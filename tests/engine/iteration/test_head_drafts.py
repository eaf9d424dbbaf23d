"""Requests for drafts of a head, and what comes of them; no engine is started."""

import threading
from types import SimpleNamespace

import pytest

from sipipe.engine.iteration import head_drafts
from sipipe.engine.iteration.head_drafts import HeadDrafts
from sipipe.messages.drafts import LEFT_OUT, URGENT, Drafted, decode_request
from sipipe.messages.step import int32_bytes, int32_view


class Tracker:
    """All requests have their blocks but ``gone``."""

    def __init__(self, *gone):
        self.gone = set(gone)

    def with_blocks(self, number, request_ids):
        return set(request_ids) - self.gone


def iteration(number, *rows, asks=2):
    """One whose rows of logits are those of the requests ``rows``."""
    work = SimpleNamespace(sampled=list(rows))
    return SimpleNamespace(number=number, work=work, scheduled=SimpleNamespace(asks=asks))


def made(*gone):
    sent = []
    return HeadDrafts(Tracker(*gone), sent.append), sent


def answer(drafts, number, *rows, steps=2):
    flat = [token for row in rows for token in row]
    drafts.came(Drafted(iteration=number, steps=steps, drafts=int32_bytes(flat)))


def read(message):
    return decode_request(message.removeprefix(URGENT))


def test_a_request_says_what_was_drawn_in_the_order_of_rows():
    drafts, sent = made("gone")
    tokens = [("a", [1, 2]), ("amid its prompt", []), ("gone", [9]), ("fails", []), ("b", [7])]
    drafts.ask(iteration(5, "b", "b", "gone", "fails", "a", "a", "a"), tokens)
    request = read(sent[0])
    assert (request.number, request.iteration, request.steps) == (1, 5, 2)
    assert int32_view(request.drawn).tolist() == [1, LEFT_OUT, LEFT_OUT, 2]
    assert int32_view(request.last).tolist() == [7, 0, 0, 2]
    answer(drafts, 5, [3, 4], [0, 0], [0, 0], [5, 6])
    assert drafts.take([5]) == {5: {"b": [3, 4], "gone": [0, 0], "fails": [0, 0], "a": [5, 6]}}, (
        "of those that are not there any more the scheduler takes none"
    )


def test_nothing_is_asked_where_nobody_has_a_token():
    drafts, sent = made("a")
    drafts.ask(iteration(0), [("a", [])])
    drafts.ask(iteration(1, "a"), [("a", [3])])
    assert not sent
    assert drafts.sent() == 0
    assert drafts.take([0, 1]) == {}


def test_drafts_that_are_worth_nothing_are_not_asked_for():
    drafts, sent = made()
    drafts.ask(iteration(3, "a", asks=0), [("a", [3])])
    assert not sent
    assert drafts.take([3]) == {}


@pytest.mark.parametrize("steps", [0, 2, 3])
def test_no_answer_ends_the_engine(steps):
    """Also none that is not what was asked for."""
    drafts, _ = made()
    drafts.ask(iteration(3, "a"), [("a", [3])])
    flat = int32_bytes([1, 2])
    drafts.came(Drafted(iteration=3, steps=steps, drafts=flat, seconds=0.1))
    assert drafts.take([3]) == {3: {"a": [1, 2]} if steps == 2 else {}}


def test_what_a_pass_of_the_head_takes_is_learnt():
    drafts, _ = made()
    for number, seconds in enumerate([0.02, 0.0, 0.04]):
        drafts.came(Drafted(iteration=number, steps=2, drafts=b"", seconds=seconds))
    assert 0.01 < drafts.pass_seconds < 0.011


def test_late_drafts_are_none_whenever_they_come(monkeypatch):
    monkeypatch.setattr(head_drafts, "SECONDS", 0.0)
    drafts, _ = made()
    drafts.ask(iteration(3, "a"), [("a", [3])])
    assert drafts.take([3]) == {3: {}}
    answer(drafts, 3, [1, 1])
    assert drafts.take([3]) == {}


def test_a_head_that_failed_has_none():
    drafts, _ = made()
    drafts.ask(iteration(3, "a"), [("a", [3])])
    answer(drafts, 3)
    assert drafts.take([3]) == {3: {}}


def test_a_failure_of_the_engine_ends_the_wait():
    drafts, _ = made()
    drafts.ask(iteration(3, "a"), [("a", [3])])
    found = []
    waiting = threading.Thread(target=lambda: found.append(drafts.take([3])))
    waiting.start()
    drafts.fail(RuntimeError("ends"))
    waiting.join()
    assert found == [{3: {}}]


def test_asking_that_fails_ends_no_engine():
    def send(_):
        raise OSError("no such host")

    drafts = HeadDrafts(Tracker(), send)
    drafts.ask(iteration(3, "a"), [("a", [3])])
    assert drafts.sent() == 0, "nobody waits for a request that was not sent"
    assert drafts.take([3]) == {}


@pytest.mark.parametrize("gone", [(), ("a",)])
def test_what_is_published_behind_says_how_many_came_before(gone):
    drafts, sent = made(*gone)
    for number in range(3):
        drafts.ask(iteration(number, "a"), [("a", [3])])
        assert drafts.sent() == len(sent)
