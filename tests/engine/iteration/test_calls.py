"""Calls over a stream that is only written down: who answers, who fails, and who goes on."""

import pickle
import threading
from concurrent.futures import Future

import pytest

from sipipe.engine.iteration.calls import Calls, result_of
from sipipe.errors import StallError
from sipipe.messages.calls import Describe
from sipipe.messages.replies import Reply

RANKS = ["stage0.0", "stage1.0"]


class Stream:
    def __init__(self):
        self.published = []

    def publish(self, kind, number, parts, *, slot=0):
        self.published.append((number, parts))


@pytest.fixture
def stream():
    return Stream()


@pytest.fixture
def calls(stream):
    return Calls(stream, RANKS)


def answer(calls, rank, number, value):
    calls.reply(RANKS[rank], Reply(call=number, value=pickle.dumps(value)))


def test_who_is_late_while_the_engine_starts_is_named(calls):
    called = calls.call(Describe())
    answer(calls, 1, 0, "b")
    late = r'not ready in time: a call of Describe waits for stage0\.0 for 0 s.*"start_timeout"'
    with pytest.raises(StallError, match=late):
        result_of(called, calls.oldest, 0)


def test_another_host_says_itself_who_is_late():
    future = Future()
    future.set_exception(StallError("not ready in time: stage1.0"))
    with pytest.raises(StallError, match=r"^not ready in time: stage1\.0$"):
        result_of(future, lambda: "WaitLoaded waits for host 1", 600)


def test_results_are_those_of_all_ranks_in_order_or_of_one(calls):
    everybody, one = calls.call("f"), calls.call("g", only=1)
    answer(calls, 1, 0, "b")
    assert not everybody.done()
    answer(calls, 0, 0, "a")
    assert everybody.result(0) == ["a", "b"]
    answer(calls, 0, 1, "not asked")
    answer(calls, 1, 1, "asked")
    assert one.result(0) == "asked"


def test_the_first_error_of_a_rank_is_the_calls(calls):
    future = calls.call("load_it")
    calls.reply("stage1.0", Reply(call=0, error="no such file"))
    answer(calls, 0, 0, "late")
    with pytest.raises(RuntimeError, match=r"Worker stage1\.0 failed in load_it.*no such file"):
        future.result(0)


def test_a_result_that_cannot_be_read_fails_its_call_only(calls):
    broken, good = calls.call("broken", only=0), calls.call("good", only=0)
    calls.reply("stage0.0", Reply(call=0, value=b"no pickle"))
    with pytest.raises(RuntimeError, match="cannot be read"):
        broken.result(0)
    answer(calls, 0, 1, "good")
    assert good.result(0) == "good"


def test_arguments_that_cannot_be_pickled_are_the_callers_error(calls, stream):
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        calls.call("f", args=(threading.Lock(),))
    assert not stream.published
    future = calls.call("apply_model", args=(lambda: "by value",), only=0)
    _, (function,), _, _ = pickle.loads(stream.published[-1][1][1])
    assert function() == "by value"
    answer(calls, 0, 0, "goes on")
    assert future.result(0) == "goes on"


def test_what_stops_the_engine_resolves_all_calls(calls):
    future = calls.call("f")
    calls.fail(RuntimeError("stage1.0 died"))
    with pytest.raises(RuntimeError, match=r"call to f failed: stage1\.0 died"):
        future.result(0)
    with pytest.raises(RuntimeError, match="has failed"):
        calls.call("g")
