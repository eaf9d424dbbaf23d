"""A control call in a worker: whatever is wrong with it is an error of that call only."""

import pickle
import threading
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from sipipe.worker.main import Main

METHODS = {
    "good": lambda: "fine",
    "unpicklable": threading.Lock,
    "raises": lambda: {}["missing"],
}


@pytest.fixture
def run():
    """Run one call on a worker that is its calls only; returns what it says of it."""
    main = object.__new__(Main)
    said = []
    main._boot = SimpleNamespace(place=SimpleNamespace(rank=0, name="stage0.0"))
    main._wrapper = SimpleNamespace(**METHODS)
    main._parent = SimpleNamespace(say=said.append)

    def run(content):
        said.clear()
        main._run_call(SimpleNamespace(drain=lambda: None), 7, content)
        return said

    return run


def call(method, only=None):
    return partial(pickle.loads, pickle.dumps((method, (), {}, only)))


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_call(run):
    (reply,) = run(call("unpicklable"))
    assert (reply.call, reply.value) == (7, b"")
    assert "pickle" in reply.error
    (reply,) = run(call("good"))
    assert pickle.loads(reply.value) == "fine"
    assert reply.error is None


@pytest.mark.parametrize(
    ("content", "said"),
    [(call("raises"), "missing"), (call("absent"), "absent"), (lambda: pickle.loads(b"x"), "")],
)
def test_so_is_what_a_call_raises_and_a_call_that_cannot_be_read(run, content, said):
    (reply,) = run(content)
    assert said in reply.error


def test_a_rank_that_is_not_asked_says_nothing(run):
    assert run(call("good", only=1)) == []
    assert run(call("unpicklable", only=1)) == []
